// Sixteen-bit storage of embeddings: bfloat16 and IEEE float16, to nearest (even) and with stochastic rounding.
//
// Stochastic rounding adds `noise`, 16 uniform random bits, below the last kept bit and cuts: on average it changes
// nothing, so that updates smaller than half a step are not lost. Results are always finite: what is too large
// becomes the largest finite value. Only integer arithmetic and exact float steps that do not depend on how the
// processor treats subnormals (other libraries in the process may have changed that).
//
// Thread safety: pure functions. REQUIRES: finite inputs.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bits.h"

namespace streamtrain {

enum class Storage : uint8_t { kFloat32, kBfloat16, kFloat16 };

inline size_t element_size(Storage storage) { return storage == Storage::kFloat32 ? 4 : 2; }

struct Bfloat16 {
  static constexpr uint32_t kLargest = 0x7F7F;

  static float widen(uint16_t h) { return std::bit_cast<float>(uint32_t{h} << 16); }

  static uint16_t stochastic(float value, uint32_t noise) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7FFFFFFF;
    return static_cast<uint16_t>(std::min((magnitude + noise) >> 16, kLargest) | (bits & 0x80000000) >> 16);
  }

  static uint16_t nearest(float value) {
    return stochastic(value, 0x7FFF + (std::bit_cast<uint32_t>(value) >> 16 & 1));
  }
};

struct Float16 {
  static constexpr uint32_t kLargest = 0x7BFF;
  static constexpr uint32_t kSmallestNormal = 0x38800000;  // 2^-14 as a float
  static constexpr uint32_t kRebias = (127 - 15) << 10;

  static float widen(uint16_t h) {
    const uint32_t normal = (uint32_t{h} & 0x7FFF) << 13, sign = (uint32_t{h} & 0x8000) << 16;
    const float tiny = static_cast<float>(static_cast<int32_t>(h & 0x3FF)) * 0x1p-24f;
    const uint32_t bits = (h & 0x7C00) ? normal + (kRebias << 13) : std::bit_cast<uint32_t>(tiny);
    return std::bit_cast<float>(bits | sign);
  }

  static uint16_t stochastic(float value, uint32_t noise) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7FFFFFFF;
    const uint32_t normal = ((magnitude + (noise >> 3)) >> 13) - kRebias;
    // Below the smallest normal value all steps are 2^-24: fixed point with 16 bits of fraction.
    const auto fixed = static_cast<int32_t>(tiny_part(value) * 0x1p40f);
    const uint32_t tiny = (static_cast<uint32_t>(fixed) + noise) >> 16;
    return pack(magnitude >= kSmallestNormal ? normal : tiny, bits);
  }

  static uint16_t nearest(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7FFFFFFF;
    const uint32_t normal = ((magnitude + 0xFFF + (magnitude >> 13 & 1)) >> 13) - kRebias;
    // Adding 2^23 leaves no bits for a fraction, so the sum is rounded to the nearest integer.
    const float sum = tiny_part(value) * 0x1p24f + 0x1p23f;
    const uint32_t tiny = std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(0x1p23f);
    return pack(magnitude >= kSmallestNormal ? normal : tiny, bits);
  }

 private:
  static float tiny_part(float value) { return std::min(std::fabs(value), 0x1p-14f); }
  static uint16_t pack(uint32_t magnitude, uint32_t bits) {
    return static_cast<uint16_t>(std::min(magnitude, kLargest) | (bits & 0x80000000) >> 16);
  }
};

// `dim` stored elements as floats.
inline void widen(Storage storage, const std::byte* from, float* to, size_t dim) {
  const auto* halves = reinterpret_cast<const uint16_t*>(from);
  switch (storage) {
    case Storage::kFloat32: copy_floats(from, to, dim); break;
    case Storage::kBfloat16: for (size_t j = 0; j < dim; ++j) to[j] = Bfloat16::widen(halves[j]); break;
    case Storage::kFloat16: for (size_t j = 0; j < dim; ++j) to[j] = Float16::widen(halves[j]); break;
  }
}

// Stores `dim` floats, each as the nearest value that the storage has.
inline void narrow(Storage storage, const float* from, std::byte* to, size_t dim) {
  auto* halves = reinterpret_cast<uint16_t*>(to);
  switch (storage) {
    case Storage::kFloat32: std::memcpy(to, from, dim * sizeof(float)); break;
    case Storage::kBfloat16: for (size_t j = 0; j < dim; ++j) halves[j] = Bfloat16::nearest(from[j]); break;
    case Storage::kFloat16: for (size_t j = 0; j < dim; ++j) halves[j] = Float16::nearest(from[j]); break;
  }
}

// Stores `dim` floats with stochastic rounding by `noise[dim]`. REQUIRES: a 16-bit storage.
inline void narrow(Storage storage, const float* from, const uint16_t* noise, std::byte* to, size_t dim) {
  auto* halves = reinterpret_cast<uint16_t*>(to);
  if (storage == Storage::kBfloat16) {
    for (size_t j = 0; j < dim; ++j) halves[j] = Bfloat16::stochastic(from[j], noise[j]);
  } else {
    for (size_t j = 0; j < dim; ++j) halves[j] = Float16::stochastic(from[j], noise[j]);
  }
}

}  // namespace streamtrain
