// Crosses: the combinations of the ids of several lists, as keys.
//
// Thread safety: pure functions.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "hash.h"

namespace streamtrain {

inline constexpr size_t kMaxCrossed = 8;          // lists in a cross
inline constexpr size_t kMaxCombinations = 4096;  // of one sample

// Appends the keys of the product of `lists`, the last list varying fastest; of more than max_length (0: no limit) the
// last ones. Appends nothing and gives false when there are more than kMaxCombinations.
// REQUIRES: lists.size() <= kMaxCrossed.
inline bool append_cross(std::span<const std::span<const uint64_t>> lists, size_t max_length,
                         std::vector<uint64_t>& out) {
  if (std::ranges::any_of(lists, [](const auto& list) { return list.empty(); }))
    return true;  // nothing to combine with, however long the other lists
  size_t combinations = 1;
  for (const auto& list : lists) {
    combinations *= list.size();
    if (combinations > kMaxCombinations) return false;
  }
  std::array<uint64_t, kMaxCrossed> combination{};
  const size_t first = max_length != 0 && combinations > max_length ? combinations - max_length : 0;
  for (size_t i = first; i < combinations; ++i) {
    size_t rest = i;
    for (size_t c = lists.size(); c-- > 0; rest /= lists[c].size()) combination[c] = lists[c][rest % lists[c].size()];
    out.push_back(hash_cross(combination.data(), lists.size()));
  }
  return true;
}

}  // namespace streamtrain
