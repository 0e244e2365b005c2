// What the harnesses share: values out of a fuzzer's bytes, and the check that ends a run and so keeps its input.
//
// Thread safety: none; an Input is scratch space of its owner.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

// Ends the run unless it holds, whatever the build.
#define CHECK(holds)                                                       \
  do {                                                                     \
    if (!(holds)) {                                                        \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #holds); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

namespace streamtrain::fuzz {

// Takes values off the front of the bytes; zeroes once they are used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  bool done() const { return at_ == end_; }
  size_t left() const { return static_cast<size_t>(end_ - at_); }

  template <typename T>
  T take() {
    T value{};
    const size_t size = std::min(sizeof(T), left());
    if (size) std::memcpy(&value, at_, size);
    at_ += size;
    return value;
  }

  // A number below `limit`.
  uint32_t below(uint32_t limit) { return take<uint8_t>() % limit; }

  // A key: mostly one of a few, which then meet each other, else any.
  uint64_t key() {
    const auto chosen = take<uint8_t>();
    return chosen == 0xFF ? take<uint64_t>() : (chosen & 31) * 0x9E3779B97F4A7C15ULL;
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

// Whether two floats are the same, NaN among them whatever its payload.
inline bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (a != a && b != b);
}

}  // namespace streamtrain::fuzz
