// The planner: builds the plans (plan.h) of one model's batches.
//
// Unique keys are found in a table that fits the batch (KeySlots of place.h); a stable counting sort groups them by shard.
//
// Thread safety: none; a planner keeps scratch space. The plans that it gives are independent of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "hash.h"
#include "place.h"
#include "plan.h"

namespace streamtrain {

// The keys of a batch, feature-major: feature f has keys[starts[f]..starts[f+1]), and sample i of it those from
// offsets[f*(samples+1)+i] to offsets[...+i+1], relative to starts[f]. times: event time in seconds by sample.
struct KeyColumns {
  std::span<const uint64_t> keys;
  std::span<const int64_t> starts;
  std::span<const int32_t> offsets;
  std::span<const double> times;
};

inline uint32_t to_seconds(double time) {
  if (!(time > 0)) return 0;
  return time >= 4294967295.0 ? std::numeric_limits<uint32_t>::max() : static_cast<uint32_t>(time);
}

class Planner {
 public:
  explicit Planner(PlanSpec spec) : spec_(std::make_shared<const PlanSpec>(std::move(spec))) {}

  const PlanSpec& spec() const { return *spec_; }

  // Throws std::invalid_argument when the columns do not fit together.
  Plan build(const KeyColumns& in) {
    Plan plan;
    plan.spec_ = spec_;
    plan.samples = static_cast<uint32_t>(in.times.size());
    check_shape(in);
    plan.inverse_.resize(in.keys.size());
    plan.tables.resize(spec_->dims.size());
    for (size_t f = 0; f < spec_->features.size(); ++f)
      plan.features_.push_back({plan.inverse_.data() + in.starts[f], offsets_of(in, f)});
    seconds_.resize(plan.samples);
    std::transform(in.times.begin(), in.times.end(), seconds_.begin(), to_seconds);
    plan.row_starts.push_back(0);
    for (uint32_t t = 0; t < spec_->dims.size(); ++t) {
      build_table(in, t, plan);
      plan.row_starts.push_back(plan.row_starts.back() + int64_t(plan.tables[t].keys.size()) * spec_->dims[t]);
    }
    return plan;
  }

 private:
  void check_shape(const KeyColumns& in) const {
    const size_t features = spec_->features.size();
    if (in.starts.size() != features + 1 || in.starts[0] != 0 || in.starts[features] != int64_t(in.keys.size()) ||
        !std::is_sorted(in.starts.begin(), in.starts.end()))
      throw std::invalid_argument("starts must have one entry per feature and one more, ascending from 0 to the number of keys");
    if (in.times.size() >= std::numeric_limits<int32_t>::max() || in.keys.size() >= std::numeric_limits<int32_t>::max())
      throw std::invalid_argument("a batch has at most 2^31-1 samples and keys");
    if (in.offsets.size() != features * (in.times.size() + 1))
      throw std::invalid_argument("offsets must be [features, samples + 1]");
  }

  // The offsets of feature f, checked; empty where every sample has exactly one id.
  std::vector<int32_t> offsets_of(const KeyColumns& in, size_t f) const {
    const size_t samples = in.times.size();
    const int32_t* o = in.offsets.data() + f * (samples + 1);
    const int64_t count = in.starts[f + 1] - in.starts[f];
    if (o[0] != 0 || o[samples] != count) throw std::invalid_argument("offsets must run from 0 to the feature's keys");
    if (!std::is_sorted(o, o + samples + 1)) throw std::invalid_argument("offsets must ascend");
    int32_t longest = 0, shortest = std::numeric_limits<int32_t>::max();
    for (size_t i = 0; i < samples; ++i) {
      longest = std::max(longest, o[i + 1] - o[i]);
      shortest = std::min(shortest, o[i + 1] - o[i]);
    }
    const FeaturePlan& feature = spec_->features[f];
    if (feature.combiner == Combiner::kNone && longest > int64_t{feature.max_length})
      throw std::invalid_argument("a sequence is longer than its max_length");
    if (longest == 1 && shortest == 1) return {};
    return {o, o + samples + 1};
  }

  void build_table(const KeyColumns& in, uint32_t table, Plan& plan) {
    TablePlan& out = plan.tables[table];
    size_t occurrences = 0;
    for (size_t f = 0; f < spec_->features.size(); ++f)
      if (spec_->features[f].table == table) occurrences += in.starts[f + 1] - in.starts[f];
    slots_.reset(occurrences);
    out.keys.reserve(occurrences);
    out.counts.reserve(occurrences);
    out.times.reserve(occurrences);
    for (size_t f = 0; f < spec_->features.size(); ++f) {
      if (spec_->features[f].table != table) continue;
      const auto& offsets = plan.features_[f].offsets;
      uint32_t* inverse = plan.inverse_.data() + in.starts[f];
      const uint64_t* keys = in.keys.data() + in.starts[f];
      if (offsets.empty()) {
        for (uint32_t i = 0; i < plan.samples; ++i) inverse[i] = find_or_add(out, keys[i], seconds_[i]);
      } else {
        for (uint32_t i = 0; i < plan.samples; ++i)
          for (int32_t k = offsets[i]; k < offsets[i + 1]; ++k)
            inverse[k] = find_or_add(out, keys[k], seconds_[i]);
      }
    }
    group_by_shard(in, table, plan);
  }

  uint32_t find_or_add(TablePlan& out, uint64_t key, uint32_t seconds) {
    uint32_t& slot = slots_.find(key, out.keys.data());
    if (slot == 0) {
      out.keys.push_back(key);
      out.counts.push_back(1);
      out.times.push_back(seconds);
      slot = static_cast<uint32_t>(out.keys.size());
    } else {
      ++out.counts[slot - 1];
      out.times[slot - 1] = std::max(out.times[slot - 1], seconds);
    }
    return slot - 1;
  }

  // Stable counting sort of the unique keys by owner shard; the inverse follows.
  void group_by_shard(const KeyColumns& in, uint32_t table, Plan& plan) {
    TablePlan& out = plan.tables[table];
    const uint32_t shards = spec_->shards;
    out.shard_starts.assign(shards + 1, 0);
    if (shards == 1) {
      out.shard_starts[1] = static_cast<int64_t>(out.keys.size());
      return;
    }
    for (uint64_t key : out.keys) ++out.shard_starts[shard_of(key, shards) + 1];
    for (uint32_t s = 0; s < shards; ++s) out.shard_starts[s + 1] += out.shard_starts[s];
    std::vector<int64_t> next(out.shard_starts.begin(), out.shard_starts.end() - 1);
    moved_.resize(out.keys.size());
    TablePlan sorted{std::vector<uint64_t>(out.keys.size()), std::vector<uint32_t>(out.keys.size()),
                     std::vector<uint32_t>(out.keys.size()), std::move(out.shard_starts)};
    for (size_t u = 0; u < out.keys.size(); ++u) {
      const auto to = static_cast<uint32_t>(next[shard_of(out.keys[u], shards)]++);
      moved_[u] = to;
      sorted.keys[to] = out.keys[u];
      sorted.counts[to] = out.counts[u];
      sorted.times[to] = out.times[u];
    }
    out = std::move(sorted);
    for (size_t f = 0; f < spec_->features.size(); ++f)
      if (spec_->features[f].table == table)
        for (int64_t k = in.starts[f]; k < in.starts[f + 1]; ++k) plan.inverse_[k] = moved_[plan.inverse_[k]];
  }

  std::shared_ptr<const PlanSpec> spec_;
  KeySlots slots_;                 // of a table's unique keys
  std::vector<uint32_t> seconds_;  // event time by sample
  std::vector<uint32_t> moved_;    // unique index before grouping -> after
};

}  // namespace streamtrain
