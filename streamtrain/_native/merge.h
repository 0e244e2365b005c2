// One batch of row gradients from several: the union of their keys, with the weighted sum of the gradients of each.
//
// Keys are found in a table that fits all parts (KeySlots of place.h), and keep the order in which they
// first occur. A gradient is, in float32, scale * g of the first part that has the key, plus that of the next one, and
// so on: the result is a function of the parts and their order. Counts add up and stop at the largest uint32; the
// latest time counts.
//
// Thread safety: a pure function.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <vector>

#include "place.h"

namespace streamtrain {

// Gradients [n, dim] of n keys, with their counts and times. Keys are unique.
struct GradientPart {
  std::span<const uint64_t> keys;
  const float* gradients;
  const uint32_t* counts;
  const uint32_t* times;
  float scale;
};

struct MergedGradients {
  std::vector<uint64_t> keys;
  std::vector<float> gradients;  // [n, dim]
  std::vector<uint32_t> counts, times;
};

inline MergedGradients merge_rows(std::span<const GradientPart> parts, size_t dim) {
  constexpr uint32_t kMax = std::numeric_limits<uint32_t>::max();
  size_t total = 0;
  for (const auto& part : parts) total += part.keys.size();
  if (total >= kMax) throw std::invalid_argument("the parts must have fewer than 2^32 - 1 keys in all");
  MergedGradients out;
  out.keys.reserve(total);
  out.gradients.reserve(total * dim);
  out.counts.reserve(total);
  out.times.reserve(total);
  KeySlots slots;
  slots.reset(total);
  for (const auto& part : parts) {
    for (size_t i = 0; i < part.keys.size(); ++i) {
      const float* gradient = part.gradients + i * dim;
      uint32_t& slot = slots.find(part.keys[i], out.keys.data());
      if (slot == 0) {
        out.keys.push_back(part.keys[i]);
        for (size_t j = 0; j < dim; ++j) out.gradients.push_back(part.scale * gradient[j]);
        out.counts.push_back(part.counts[i]);
        out.times.push_back(part.times[i]);
        slot = static_cast<uint32_t>(out.keys.size());
      } else {
        const size_t at = slot - 1;
        float* sum = out.gradients.data() + at * dim;
        for (size_t j = 0; j < dim; ++j) sum[j] += part.scale * gradient[j];
        out.counts[at] += std::min(part.counts[i], kMax - out.counts[at]);
        out.times[at] = std::max(out.times[at], part.times[i]);
      }
    }
  }
  return out;
}

}  // namespace streamtrain
