// The steps of a batch that is learned in micro-batches: which rows each step reads and changes, in which order.
//
// The rows of tables that are alike (of one dim and optimizer) lie in one matrix, table after table: a group. Of each
// step and group there are
//   entries      its different rows, in order of their first occurrence;
//   occurrences  for each id of each feature the position of its row among the entries.
// Both come as matrices [steps, width] whose widths the caller chooses, as XLA has one program for each; what is left
// over points to a row, and a position, that stand for nothing. Where the last step has fewer samples than the others,
// copies of its last sample fill it: they are not occurrences, and the graph gives them no weight.
//
// Afterwards the gradients of the entries, [steps * width, dim], are put in the order of the rows: `order`.
//
// Thread safety: a built MicroPlan is immutable.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "plan.h"

namespace streamtrain {

class MicroPlan {
 public:
  // What a feature's ids become: one position a sample; or the positions of all ids of a step and the sample of each,
  // padded (pooled lists); or max_length positions a sample, padded (sequences).
  enum class Kind : uint8_t { kSingle, kList, kSequence };

  struct Order {
    std::vector<uint32_t> positions;  // of entries in [steps * width], row by row, for each in order of the steps
    std::vector<uint32_t> repeats;    // by row, how many of these
    std::vector<uint32_t> counts;     // by entry, in the order of `positions`: occurrences of the row in the step
  };

  // groups: tables of each, in order. REQUIRES: plan outlives this.
  MicroPlan(const Plan& plan, uint32_t size, const std::vector<std::vector<uint32_t>>& groups)
      : plan_(plan), size_(size) {
    if (size == 0) throw std::invalid_argument("a micro-batch must have at least one sample");
    steps_ = plan.samples / size + (plan.samples % size != 0);
    std::vector<int> seen(plan.tables.size());
    for (const auto& tables : groups) {
      Group group;
      uint32_t rows = 0;
      for (uint32_t t : tables) {
        if (t >= plan.tables.size() || seen[t]++) throw std::invalid_argument("groups must name each table once");
        for (uint32_t f = 0; f < plan.spec().features.size(); ++f)
          if (plan.spec().features[f].table == t) group.features.push_back({f, rows, 0, 0});
        rows += static_cast<uint32_t>(plan.tables[t].keys.size());
      }
      // In the order of the features, as the graph takes them.
      std::sort(group.features.begin(), group.features.end(), [](const auto& a, const auto& b) { return a.f < b.f; });
      group.rows = rows;
      build(group);
      groups_.push_back(std::move(group));
    }
    if (std::count(seen.begin(), seen.end(), 0)) throw std::invalid_argument("groups must name each table once");
  }

  uint32_t steps() const { return steps_; }
  uint32_t size() const { return size_; }
  size_t groups() const { return groups_.size(); }
  uint32_t rows(size_t g) const { return groups_.at(g).rows; }
  // Most entries of a step.
  uint32_t width(size_t g) const { return groups_.at(g).width; }
  // By feature: whether every sample has exactly one id, and the most ids of a step.
  std::vector<std::pair<bool, uint32_t>> lengths() const {
    std::vector<std::pair<bool, uint32_t>> all(plan_.spec().features.size());
    for (const auto& group : groups_)
      for (const auto& one : group.features)
        all[one.f] = {plan_.features_[one.f].offsets.empty(), one.longest};
    return all;
  }

  // index[steps_padded, width]: row of each entry; the rest is `none`.
  void index(size_t g, uint32_t steps_padded, uint32_t width, int32_t none, int32_t* out) const {
    const Group& group = checked(g, steps_padded, width);
    std::fill_n(out, size_t{steps_padded} * width, none);
    for (uint32_t k = 0; k < steps_; ++k)
      std::copy(group.entry_rows.begin() + group.starts[k], group.entry_rows.begin() + group.starts[k + 1],
                out + size_t{k} * width);
  }

  // live[steps_padded, width]: 1 where an entry is and its gradient will be applied. awaited: by row of the group, how
  // many occurrences it takes until then; null: none.
  void live(size_t g, uint32_t steps_padded, uint32_t width, const uint8_t* awaited, float* out) const {
    const Group& group = checked(g, steps_padded, width);
    std::fill_n(out, size_t{steps_padded} * width, 0.0f);
    std::vector<uint32_t> seen(awaited ? group.rows : 0);
    for (uint32_t k = 0; k < steps_; ++k)
      for (uint32_t e = group.starts[k]; e < group.starts[k + 1]; ++e) {
        const uint32_t row = group.entry_rows[e];
        const bool applied = !awaited || (seen[row] += group.entry_counts[e]) >= awaited[row];
        out[size_t{k} * width + (e - group.starts[k])] = applied ? 1.0f : 0.0f;
      }
  }

  // Positions of the group's occurrences, feature by feature: kinds[i] and slots[i] (positions a step) of its i-th
  // feature. out[steps_padded, sum of slots]; the rest is `none`.
  void occurrences(size_t g, uint32_t steps_padded, const std::vector<std::pair<Kind, uint32_t>>& kinds, int32_t none,
                   int32_t* out) const {
    const Group& group = groups_.at(g);
    if (kinds.size() != group.features.size()) throw std::invalid_argument("there must be a kind for each feature");
    size_t stride = 0;
    for (const auto& [kind, slots] : kinds) stride += slots;
    if (steps_padded < steps_) throw std::invalid_argument("the matrix has too few steps");
    std::fill_n(out, steps_padded * stride, none);
    size_t column = 0;
    for (size_t i = 0; i < kinds.size(); ++i) {
      place(group, group.features[i], kinds[i].first, kinds[i].second, stride, out + column);
      column += kinds[i].second;
    }
  }

  // Of a pooled list: segments[steps_padded, slots], the sample of each position within its step, `size` for the rest;
  // scales[steps_padded, size], what the sum of each sample's rows is multiplied with.
  void segments(uint32_t f, uint32_t steps_padded, uint32_t slots, int32_t* segments, float* scales) const {
    if (f >= plan_.features_.size() || steps_padded < steps_) throw std::invalid_argument("no such feature, or too few steps");
    std::fill_n(segments, size_t{steps_padded} * slots, static_cast<int32_t>(size_));
    std::fill_n(scales, size_t{steps_padded} * size_, 0.0f);
    for (uint32_t k = 0; k < steps_; ++k) {
      uint32_t at = 0;
      for (uint32_t i = k * size_; i < (k + 1) * size_; ++i) {
        const auto [first, last] = ids_of(f, i);
        if (at + uint32_t(last - first) > slots) throw std::invalid_argument("a list is too long for the matrix");
        for (int32_t n = first; n < last; ++n) segments[size_t{k} * slots + at++] = static_cast<int32_t>(i - k * size_);
        scales[size_t{k} * size_ + (i - k * size_)] =
            first == last ? 0.0f : Plan::scale_of(plan_.spec().features[f].combiner, last - first);
      }
    }
  }

  Order order(size_t g, uint32_t width) const {
    const Group& group = checked(g, steps_, width);
    Order out;
    out.repeats.assign(group.rows, 0);
    for (uint32_t row : group.entry_rows) ++out.repeats[row];
    std::vector<uint32_t> next(group.rows);
    for (uint32_t r = 1; r < group.rows; ++r) next[r] = next[r - 1] + out.repeats[r - 1];
    out.positions.resize(group.entry_rows.size());
    out.counts.resize(group.entry_rows.size());
    for (uint32_t k = 0; k < steps_; ++k)
      for (uint32_t e = group.starts[k]; e < group.starts[k + 1]; ++e) {
        const uint32_t to = next[group.entry_rows[e]]++;
        out.positions[to] = k * width + (e - group.starts[k]);
        out.counts[to] = group.entry_counts[e];
      }
    return out;
  }

 private:
  struct Feature {
    uint32_t f, base, longest;  // base: first row of its table in the group; longest: most ids of a step
    uint32_t first;             // of its ids in `locals`
  };

  struct Group {
    std::vector<Feature> features;
    uint32_t rows = 0, width = 0;
    std::vector<uint32_t> starts;        // [steps + 1] of entries
    std::vector<uint32_t> entry_rows, entry_counts;
    std::vector<uint32_t> locals;        // by id, feature by feature: position of its row in the step
  };

  uint32_t end_of(uint32_t step) const { return std::min((step + 1) * size_, plan_.samples); }

  // Where a sample's ids are among those of its feature; behind the last sample, that one's.
  std::pair<int32_t, int32_t> ids_of(uint32_t f, uint32_t sample) const {
    sample = std::min(sample, plan_.samples - 1);
    const auto& offsets = plan_.features_[f].offsets;
    if (offsets.empty()) return {static_cast<int32_t>(sample), static_cast<int32_t>(sample) + 1};
    return {offsets[sample], offsets[sample + 1]};
  }

  uint32_t copied_length(uint32_t f) const {
    const auto [first, last] = ids_of(f, plan_.samples - 1);
    return static_cast<uint32_t>(last - first);
  }

  const Group& checked(size_t g, uint32_t steps_padded, uint32_t width) const {
    const Group& group = groups_.at(g);
    if (steps_padded < steps_ || width < group.width) throw std::invalid_argument("the matrix is too small");
    return group;
  }

  void build(Group& group) const {
    size_t ids = 0;
    for (auto& one : group.features) {
      one.first = static_cast<uint32_t>(ids);
      const auto& offsets = plan_.features_[one.f].offsets;
      ids += offsets.empty() ? plan_.samples : static_cast<size_t>(offsets.back());
    }
    group.locals.resize(ids);
    group.starts.push_back(0);
    std::vector<uint32_t> last(group.rows);  // entry of each row, and one more; 0: none yet
    for (uint32_t k = 0; k < steps_; ++k) {
      const auto begin = static_cast<uint32_t>(group.entry_rows.size());
      for (auto& one : group.features) {
        const uint32_t* inverse = plan_.features_[one.f].inverse;
        const int32_t first = ids_of(one.f, k * size_).first, end = ids_of(one.f, end_of(k) - 1).second;
        const uint32_t missing = (k + 1) * size_ - end_of(k);  // filled by copies of the last sample
        one.longest = std::max(one.longest, static_cast<uint32_t>(end - first) + missing * copied_length(one.f));
        for (int32_t n = first; n < end; ++n) {
          uint32_t& entry = last[one.base + inverse[n]];
          if (entry <= begin) {
            group.entry_rows.push_back(one.base + inverse[n]);
            group.entry_counts.push_back(0);
            entry = static_cast<uint32_t>(group.entry_rows.size());
          }
          ++group.entry_counts[entry - 1];
          group.locals[one.first + static_cast<uint32_t>(n)] = entry - 1 - begin;
        }
      }
      group.starts.push_back(static_cast<uint32_t>(group.entry_rows.size()));
      group.width = std::max(group.width, group.starts[k + 1] - begin);
    }
  }

  void place(const Group& group, const Feature& one, Kind kind, uint32_t slots, size_t stride, int32_t* out) const {
    const auto& offsets = plan_.features_[one.f].offsets;
    if (kind == Kind::kSingle && (!offsets.empty() || slots != size_))
      throw std::invalid_argument("a sample has not exactly one id");
    const uint32_t length = slots / size_;  // of a sequence
    for (uint32_t k = 0; k < steps_; ++k) {
      int32_t* to = out + k * stride;
      uint32_t at = 0;
      for (uint32_t i = k * size_; i < (k + 1) * size_; ++i) {
        const auto [first, last] = ids_of(one.f, i);
        if (kind == Kind::kSequence) at = (i - k * size_) * length;
        const uint32_t end = kind == Kind::kSequence ? at + length : slots;
        if (at + static_cast<uint32_t>(last - first) > end) throw std::invalid_argument("a list is too long for the matrix");
        for (int32_t n = first; n < last; ++n) to[at++] = static_cast<int32_t>(group.locals[one.first + uint32_t(n)]);
      }
    }
  }

  const Plan& plan_;
  uint32_t size_, steps_ = 0;
  std::vector<Group> groups_;
};

}  // namespace streamtrain
