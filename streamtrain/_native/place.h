// Where a key goes in the hash tables of this process, which cannot be foreseen from outside.
//
// Keys are a published function of ids, so anybody can make ids whose keys agree in any bits (hash.h). Were these bits
// to choose slots, a few thousand such ids would make every look-up a walk through all of them. So slots are chosen by
// the place of a key: a bijection under a secret, drawn when the process starts. Its upper bits are the best: for any
// two keys, the upper b bits of their places are equal with probability 2^(1-b) at most, over the secrets (multiply-
// shift: Dietzfelbinger et al., A reliable randomized algorithm for the closest-pair problem, 1997).
// No result depends on places: neither an order nor what is written.
//
// Thread safety: pure functions, and KeySlots that is used by one thread at a time.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace streamtrain {

class Placement {
 public:
  // Draws a secret.
  Placement() {
    std::random_device device;  // of the operating system
    const auto draw = [&] { return uint64_t{device()} << 32 | device(); };
    add_ = draw();
    first_ = draw() | 1;
    second_ = draw() | 1;
  }

  // Bytes are swapped between the two products, as bits of a product depend on those below them only.
  uint64_t of(uint64_t key) const { return __builtin_bswap64((key ^ add_) * first_) * second_; }

  // The key at a place.
  uint64_t key_at(uint64_t place) const {
    return __builtin_bswap64(place * inverse(second_)) * inverse(first_) ^ add_;
  }

 private:
  static uint64_t inverse(uint64_t odd) {  // modulo 2^64, by Newton's iteration: each step doubles the bits that are right
    uint64_t x = odd;
    for (int i = 0; i < 5; ++i) x *= 2 - odd * x;
    return x;
  }

  uint64_t add_, first_, second_;
};

inline const Placement kPlacement;

inline uint64_t place_of(uint64_t key) { return kPlacement.of(key); }

// Finds keys in an array of different ones that grows: by open addressing over their indices.
class KeySlots {
 public:
  // Begins anew, with room for `most` keys.
  void reset(size_t most) {
    const size_t size = std::bit_ceil(2 * most + 2);
    slots_.assign(size, 0);
    shift_ = 64 - std::countr_zero(size);
  }

  // Where the index of `key` in `keys`, and one more, stands; 0: it is not there, and may be put there.
  uint32_t& find(uint64_t key, const uint64_t* keys) {
    size_t at = place_of(key) >> shift_;
    while (slots_[at] && keys[slots_[at] - 1] != key) at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }

 private:
  std::vector<uint32_t> slots_;
  int shift_ = 63;
};

}  // namespace streamtrain
