// Sixteen-bit floats on the wire: as half.h stores them, but what is not finite stays so.
//
// Values go to the nearest (even) one; finite ones that are too large become the largest finite one. Infinity stays
// infinite, and NaN stays NaN with its sign but not its payload: the receiver of gradients counts both.
//
// Thread safety: pure functions.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "half.h"

namespace streamtrain {

inline constexpr uint32_t kFloatInfinity = 0x7F800000;  // its bits; those of a NaN are greater

// Format is Bfloat16 or Float16, kInfinity its bits of infinity and kQuiet the one that makes a NaN of it.
template <typename Format, uint32_t kInfinity, uint32_t kQuiet>
void narrow_all(const float* __restrict from, uint16_t* __restrict to, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(from[i]), magnitude = bits & 0x7FFFFFFF;
    const uint32_t special = kInfinity | (magnitude > kFloatInfinity ? kQuiet : 0) | (bits & 0x80000000) >> 16;
    const uint32_t nearest = Format::nearest(from[i]);
    to[i] = static_cast<uint16_t>(magnitude < kFloatInfinity ? nearest : special);
  }
}

// REQUIRES: a 16-bit format; from and to do not overlap.
inline void narrow_for_wire(Storage format, const float* __restrict from, uint16_t* __restrict to, size_t n) {
  if (format == Storage::kBfloat16) narrow_all<Bfloat16, 0x7F80, 0x40>(from, to, n);
  else narrow_all<Float16, 0x7C00, 0x200>(from, to, n);
}

// REQUIRES: a 16-bit format; from and to do not overlap.
inline void widen_from_wire(Storage format, const uint16_t* __restrict from, float* __restrict to, size_t n) {
  if (format == Storage::kBfloat16) {
    for (size_t i = 0; i < n; ++i) to[i] = Bfloat16::widen(from[i]);
    return;
  }
  for (size_t i = 0; i < n; ++i) {
    // The bits of infinities and NaNs only lack the longer exponent.
    const uint32_t lacking = (from[i] & 0x7C00) == 0x7C00 ? kFloatInfinity : 0;
    to[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(Float16::widen(from[i])) | lacking);
  }
}

}  // namespace streamtrain
