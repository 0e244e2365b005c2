// Cells: the intervals, of several sizes, in which a number lies, as keys.
//
// The cell of b bits is all numbers that, as float32, have the same sign, exponent and first b bits of the mantissa:
// from one power of two to the next there are 2^b cells of equal size. So cells are as fine as a number is precise, on
// any scale; they need no knowledge of a stream, and never move.
// The id of a cell is these bits below a leading 1; its key is XXH64 over the id's 8 bytes, little-endian.
//
// Thread safety: pure functions.
#pragma once

#include <bit>
#include <cstdint>

#include "hash.h"

namespace streamtrain {

inline constexpr int kMaxCellBits = 23;
inline constexpr uint64_t kNoCell = 1;  // the id where the number is missing

// REQUIRES: 0 <= bits <= kMaxCellBits.
inline uint64_t cell_id(float value, int bits) {
  const uint32_t raw = std::bit_cast<uint32_t>(value + 0.0f);  // -0 is 0
  return (uint64_t{1} << (9 + bits)) | (raw >> (kMaxCellBits - bits));
}

inline uint64_t cell_key(uint64_t id) { return hash_cross(&id, 1); }

}  // namespace streamtrain
