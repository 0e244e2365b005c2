// Small functions on words and bytes that several parts have in common.
//
// Thread safety: pure functions.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace streamtrain {

static_assert(std::endian::native == std::endian::little, "keys and messages are defined over little-endian words");

inline uint64_t load64(const char* p) { uint64_t v; std::memcpy(&v, p, 8); return v; }
inline uint32_t load32(const char* p) { uint32_t v; std::memcpy(&v, p, 4); return v; }

// The finaliser of splitmix64: a bijection in which every input bit changes every output bit with probability 1/2.
inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

// A copy of `dim` floats in place, as rows are too short to be worth a call of memcpy.
inline void copy_floats(const std::byte* from, float* to, size_t dim) {
  constexpr size_t kStep = 8;
  size_t j = 0;
  for (; j + kStep <= dim; j += kStep) std::memcpy(to + j, from + j * sizeof(float), kStep * sizeof(float));
  for (; j < dim; ++j) std::memcpy(to + j, from + j * sizeof(float), sizeof(float));
}

}  // namespace streamtrain
