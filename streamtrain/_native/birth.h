// First values of rows, and the random bits of stochastic rounding: pure functions of what a row is.
//
// A row's first value depends on (seed, key) alone, so arrival order, retries, restarts and the number of shards
// cannot change it, and serving computes it for keys that it has never seen. `seed` already combines the model's seed
// and the table's name. With 16-bit storage the first value is rounded to nearest, so that a key reads the same
// before and after its insertion.
//
//   base       = mix64(key ^ seed)
//   element j  : x = mix64(base + (j + 1) * kGolden);  u = (x >> 40) * 2^-24;  value = (2u - 1) * scale
//   noise word : mix64(mix64(base + kNoise * (count + 1)) + (j / 4 + 1) * kGolden);
//                element j takes its (j % 4)-th 16 bits;
//                `count` is the row's count before the update, so a replay draws the same bits
//
// Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bits.h"
#include "half.h"

namespace streamtrain {

inline constexpr size_t kMaxDim = 4096;
inline constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
inline constexpr uint64_t kNoise = 0xD1B54A32D192ED03ULL;

enum class InitKind : uint8_t { kUniform, kConstant };

struct Init {
  InitKind kind = InitKind::kUniform;
  float scale = 0.01f;  // uniform: values lie in [-scale, scale); constant: the value
  uint64_t seed = 0;
};

// The first value of `key`, as reading it from `storage` gives it.
inline void birth(const Init& init, Storage storage, uint64_t key, float* out, size_t dim) {
  if (init.kind == InitKind::kConstant) {
    for (size_t j = 0; j < dim; ++j) out[j] = init.scale;
  } else {
    uint64_t x = mix64(key ^ init.seed);
    for (size_t j = 0; j < dim; ++j) {
      x += kGolden;
      const float u = static_cast<float>(static_cast<int32_t>(mix64(x) >> 40)) * 0x1p-24f;
      out[j] = (2.0f * u - 1.0f) * init.scale;
    }
  }
  if (storage == Storage::kFloat32) return;
  for (size_t j = 0; j < dim; ++j)
    out[j] = storage == Storage::kBfloat16 ? Bfloat16::widen(Bfloat16::nearest(out[j]))
                                           : Float16::widen(Float16::nearest(out[j]));
}

// 16 random bits for each of `dim` elements. REQUIRES: room for kMaxDim elements.
inline void rounding_noise(uint64_t seed, uint64_t key, uint32_t count, uint16_t* out, size_t dim) {
  uint64_t x = mix64(mix64(key ^ seed) + kNoise * (uint64_t{count} + 1));
  for (size_t j = 0; j < dim; j += 4) {
    x += kGolden;
    const uint64_t word = mix64(x);
    std::memcpy(out + j, &word, sizeof word);
  }
}

}  // namespace streamtrain
