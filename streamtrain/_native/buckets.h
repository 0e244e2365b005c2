// What the segments of an index are made of: buckets of one cache line, and the memory they live in.
//
// Thread safety: external synchronisation; const functions may run together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "pages.h"

namespace streamtrain {

// 12 slots of a one-byte tag and a row id.
struct alignas(64) Bucket {
  static constexpr uint32_t kSlots = 12;
  static constexpr uint32_t kAll = (1u << kSlots) - 1;

  uint8_t tags[kSlots];  // 0: the slot is empty
  uint16_t passed;       // filter of the keys that found the bucket full and are in a later one: one bit for each
  uint16_t strays;       // bit j: slot j is used by a key that belongs in an earlier bucket
  uint32_t rows[kSlots];

  // Bit j is set if slot j has this tag; all tags are compared at once.
  uint32_t matches(uint8_t tag) const {
#if defined(__SSE2__)
    const __m128i head = _mm_load_si128(reinterpret_cast<const __m128i*>(this));
    const __m128i equal = _mm_cmpeq_epi8(head, _mm_set1_epi8(static_cast<char>(tag)));
    return static_cast<uint32_t>(_mm_movemask_epi8(equal)) & kAll;
#else
    uint32_t mask = 0;
    for (uint32_t j = 0; j < kSlots; ++j) mask |= uint32_t{tags[j] == tag} << j;
    return mask;
#endif
  }

  uint32_t empty() const { return matches(0); }
  uint32_t used() const { return empty() ^ kAll; }

  void put(uint32_t slot, uint8_t tag, uint32_t row, bool stray) {
    tags[slot] = tag;
    rows[slot] = row;
    strays = static_cast<uint16_t>((strays & ~(1u << slot)) | uint32_t{stray} << slot);
  }
  void clear(uint32_t slot) {
    tags[slot] = 0;
    strays = static_cast<uint16_t>(strays & ~(1u << slot));
  }
};
static_assert(sizeof(Bucket) == 64);

// An array of buckets in parts of 4 KiB, which are used again whatever the sizes of the arrays are: arrays that grow
// leave no holes. A bucket is a cache line, and empty if it is all zeroes.
template <typename B>
class BucketArray {
 public:
  static constexpr uint32_t kPart = 64;  // buckets

  uint32_t size() const { return size_; }

  // Also of the first bucket of no buckets, which is empty, so that lookups need no special case.
  B& operator[](uint32_t b) const { return parts_[b / kPart][b % kPart]; }

 private:
  template <typename>
  friend class BucketMemory;

  static B** no_parts() {
    static B none{};  // never written
    static B* part = &none;
    return &part;
  }

  B** parts_ = no_parts();
  uint32_t size_ = 0;
};

// Memory of arrays of buckets. Parts are cut from huge pages and go back to a list of free ones; arrays of less
// than three, just as long as they have to be, and the lists of parts are on the heap.
template <typename B>
class BucketMemory {
 public:
  using Buckets = BucketArray<B>;

  // `size` zeroed buckets; size > 0.
  Buckets allocate(uint32_t size) {
    const uint32_t parts = parts_of(size);
    auto list = std::make_unique<B*[]>(parts);
    if (size < kSmall) {
      auto* const buckets = static_cast<B*>(::operator new(size * sizeof(B), kAlign));
      std::memset(static_cast<void*>(buckets), 0, size * sizeof(B));
      for (uint32_t i = 0; i < parts; ++i) list[i] = buckets + i * Buckets::kPart;
    } else {
      reserve(parts);
      for (uint32_t i = 0; i < parts; ++i) std::memset(static_cast<void*>(list[i] = take()), 0, kPartBytes);
    }
    heap_bytes_ += heap_bytes(size);
    Buckets buckets;
    buckets.parts_ = list.release();
    buckets.size_ = size;
    return buckets;
  }

  void release(Buckets& buckets) noexcept {
    const uint32_t size = buckets.size_;
    if (!size) return;
    if (size < kSmall) ::operator delete(buckets.parts_[0], kAlign);
    else for (uint32_t i = 0; i < parts_of(size); ++i) give(buckets.parts_[i]);
    delete[] buckets.parts_;
    heap_bytes_ -= heap_bytes(size);
    buckets = Buckets();
  }

  size_t bytes() const { return chunks_.size() * kHugePage + heap_bytes_; }

 private:
  static constexpr uint32_t kSmall = 3 * Buckets::kPart;
  static constexpr size_t kPartBytes = Buckets::kPart * sizeof(B);
  static constexpr std::align_val_t kAlign{alignof(B)};
  struct Free {
    Free* next;
  };

  static uint32_t parts_of(uint32_t size) { return (size + Buckets::kPart - 1) / Buckets::kPart; }
  static size_t heap_bytes(uint32_t size) {
    return parts_of(size) * sizeof(B*) + (size < kSmall ? size * sizeof(B) : 0);
  }

  B* take() noexcept {
    --free_parts_;
    return reinterpret_cast<B*>(std::exchange(free_, free_->next));
  }
  void give(void* part) noexcept {
    free_ = new (part) Free{free_};
    ++free_parts_;
  }
  void reserve(uint32_t parts) {
    while (free_parts_ < parts) {
      std::byte* const chunk = chunks_.emplace_back(kHugePage).data();
      for (size_t at = kHugePage; at; at -= kPartBytes) give(chunk + at - kPartBytes);
    }
  }

  std::vector<Pages> chunks_;
  Free* free_ = nullptr;
  size_t free_parts_ = 0, heap_bytes_ = 0;
};

// The next size after `size` on the ladder 1.1^(phase + k), in buckets; phases are spread evenly over a step, from 0 to 1.
inline uint32_t larger_size(uint32_t size, double phase) {
  double next = std::pow(1.1, phase);
  while (static_cast<uint32_t>(next) <= size) next *= 1.1;
  return static_cast<uint32_t>(next);
}

}  // namespace streamtrain
