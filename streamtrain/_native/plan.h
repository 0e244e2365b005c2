// The plan of a batch: which rows it needs from which shard, and how rows become the graph's input and back.
//
// build:    the keys of all features -> per table its unique keys, grouped by owner shard, with occurrence counts and
//           latest event times, and for every occurrence the index of its unique row ("inverse"): planner.h.
// pool:     rows of the unique keys -> one matrix [samples, width], the graph's input (forward).
// unpool:   gradient of that matrix -> gradients of the unique rows, summed over occurrences (backward).
//
// All rows of a batch live in one flat float buffer: table t's rows are [unique_t, dim_t] from row_start(t), and within
// them shard s owns the rows shard_starts(t)[s] .. [s+1], so that one shard's answer is one contiguous slice.
//
// Columns of the matrix: features in order; a pooled feature has dim columns, a sequence max_length * dim (position
// major, positions past the sample's length are zero and get no gradient).
//
// Thread safety: a built Plan is immutable.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bits.h"
#include "hash.h"
#include "pages.h"
#include "place.h"

namespace streamtrain {

enum class Combiner { kSum, kMean, kSqrtN, kNone };

struct FeaturePlan {
  uint32_t table;
  Combiner combiner;
  uint32_t max_length;  // length of a sequence (kNone); unused by pooled features
};

// What all plans of one model share. Immutable.
struct PlanSpec {
  std::vector<FeaturePlan> features;
  std::vector<uint32_t> dims;      // by table
  std::vector<uint32_t> columns;   // first column of each feature, and at the end the width
  uint32_t shards;

  PlanSpec(std::vector<FeaturePlan> features_, std::vector<uint32_t> dims_, uint32_t shards_)
      : features(std::move(features_)), dims(std::move(dims_)), shards(shards_) {
    if (shards == 0 || shards > kHashSlots) throw std::invalid_argument("shards must be between 1 and 65536");
    uint64_t column = 0;
    for (const auto& f : features) {
      if (f.table >= dims.size()) throw std::invalid_argument("a feature names a table that does not exist");
      if (f.combiner == Combiner::kNone && f.max_length == 0)
        throw std::invalid_argument("a sequence needs a max_length");
      columns.push_back(static_cast<uint32_t>(column));
      column += uint64_t{dims[f.table]} * (f.combiner == Combiner::kNone ? f.max_length : 1);
      if (column > std::numeric_limits<uint32_t>::max()) throw std::invalid_argument("the features are too wide");
    }
    columns.push_back(static_cast<uint32_t>(column));
  }

  uint32_t width() const { return columns.back(); }
};

struct TablePlan {
  std::vector<uint64_t> keys;          // unique, grouped by shard, within a shard by first occurrence
  std::vector<uint32_t> counts;        // occurrences of each
  std::vector<uint32_t> times;         // latest event time of each, in seconds
  std::vector<int64_t> shard_starts;   // [shards + 1]
};

class Plan {
 public:
  uint32_t samples = 0;
  std::vector<TablePlan> tables;
  std::vector<int64_t> row_starts;  // first float of each table in the row buffer, and at the end the buffer's size

  Plan() = default;
  Plan(Plan&&) = default;  // not copied: features_ points into inverse_
  Plan& operator=(Plan&&) = default;

  // Pairs of rows of a table that stand for the same key: in this plan, and in another one of the same model.
  std::pair<std::vector<int64_t>, std::vector<int64_t>> common(const Plan& other, size_t table) const {
    const auto& mine = tables.at(table).keys;
    const auto& theirs = other.tables.at(table).keys;
    KeySlots slots;
    slots.reset(theirs.size());
    for (uint32_t i = 0; i < theirs.size(); ++i) slots.find(theirs[i], theirs.data()) = i + 1;
    std::pair<std::vector<int64_t>, std::vector<int64_t>> pairs;
    for (size_t i = 0; i < mine.size(); ++i)
      if (const uint32_t slot = slots.find(mine[i], theirs.data())) {
        pairs.first.push_back(static_cast<int64_t>(i));
        pairs.second.push_back(slot - 1);
      }
    return pairs;
  }

  const PlanSpec& spec() const { return *spec_; }
  int64_t row_floats() const { return row_starts.back(); }

  // Writes the first width() columns of the matrix out[samples, stride].
  // REQUIRES: rows has row_floats() floats, out has samples * stride floats, stride >= width().
  void pool(const float* rows, float* out, size_t stride) const {
    for_each_block([&](size_t f, uint32_t begin, uint32_t end) {
      const auto dim = spec_->dims[spec_->features[f].table];
      const float* table = rows + row_starts[spec_->features[f].table];
      with_dim(dim, [&](auto d) { pool_block(f, begin, end, d, table, out, stride); });
    });
  }

  // Reads the first width() columns of gradient[samples, stride].
  // REQUIRES: gradient has samples * stride floats, out has row_floats() floats, stride >= width().
  void unpool(const float* gradient, size_t stride, float* out) const {
    std::fill_n(out, row_floats(), 0.0f);
    for_each_block([&](size_t f, uint32_t begin, uint32_t end) {
      const auto dim = spec_->dims[spec_->features[f].table];
      float* table = out + row_starts[spec_->features[f].table];
      with_dim(dim, [&](auto d) { unpool_block(f, begin, end, d, gradient, stride, table); });
    });
  }

 private:
  friend class Planner;
  friend class MicroPlan;

  struct FeatureRows {
    const uint32_t* inverse;       // by occurrence
    std::vector<int32_t> offsets;  // [samples + 1]; empty where every sample has exactly one id
  };

  static constexpr uint32_t kBlock = 16;

  // A few samples of every feature at a time: the matrix is then walked once, front to back.
  template <typename Body>
  void for_each_block(Body&& body) const {
    for (uint32_t begin = 0; begin < samples; begin += kBlock)
      for (size_t f = 0; f < features_.size(); ++f) body(f, begin, std::min(begin + kBlock, samples));
  }

  // Calls body with the dimension as a compile-time constant where it is a usual one: loops over it then unroll.
  template <typename Body>
  static void with_dim(uint32_t dim, Body&& body) {
    switch (dim) {
      case 1: return body(std::integral_constant<uint32_t, 1>{});
      case 4: return body(std::integral_constant<uint32_t, 4>{});
      case 8: return body(std::integral_constant<uint32_t, 8>{});
      case 16: return body(std::integral_constant<uint32_t, 16>{});
      case 32: return body(std::integral_constant<uint32_t, 32>{});
      case 64: return body(std::integral_constant<uint32_t, 64>{});
      case 128: return body(std::integral_constant<uint32_t, 128>{});
      default: return body(dim);
    }
  }

  // Asks for the row of what the same feature has in the next block, where every sample has exactly one id: rows are
  // more than the caches next to the processor hold, and in no order that it could foresee.
  template <int kForWriting>
  void prefetch_next(const FeatureRows& rows, uint32_t i, const float* table, uint32_t dim) const {
    if (!rows.offsets.empty() || i + kBlock >= samples) return;
    prefetch_line<kForWriting>(table + size_t{rows.inverse[i + kBlock]} * dim);
  }

  // By value of `dim`, which so is known when it is compiled: no call for a few bytes.
  template <typename Dim>
  static void copy_row(const float* from, Dim dim, float* to) {
    copy_floats(reinterpret_cast<const std::byte*>(from), to, dim);
  }

  static float scale_of(Combiner combiner, int32_t length) {
    switch (combiner) {
      case Combiner::kMean: return 1.0f / static_cast<float>(length);
      case Combiner::kSqrtN: return 1.0f / std::sqrt(static_cast<float>(length));
      default: return 1.0f;
    }
  }

  template <typename Dim>
  void pool_block(size_t f, uint32_t begin, uint32_t end, Dim dim, const float* table, float* out, size_t stride) const {
    const FeatureRows& rows = features_[f];
    const FeaturePlan& feature = spec_->features[f];
    float* to = out + begin * stride + spec_->columns[f];
    for (uint32_t i = begin; i < end; ++i, to += stride) {
      const int32_t first = rows.offsets.empty() ? static_cast<int32_t>(i) : rows.offsets[i];
      const int32_t length = rows.offsets.empty() ? 1 : rows.offsets[i + 1] - first;
      const uint32_t* inverse = rows.inverse + first;
      prefetch_next<0>(rows, i, table, dim);
      if (feature.combiner == Combiner::kNone) {
        for (int32_t k = 0; k < length; ++k) copy_row(table + size_t{inverse[k]} * dim, dim, to + size_t(k) * dim);
        std::fill_n(to + size_t(length) * dim, (feature.max_length - size_t(length)) * dim, 0.0f);
      } else if (length == 1) {
        copy_row(table + size_t{inverse[0]} * dim, dim, to);
      } else {
        std::fill_n(to, dim, 0.0f);
        for (int32_t k = 0; k < length; ++k) {
          const float* row = table + size_t{inverse[k]} * dim;
          for (uint32_t j = 0; j < dim; ++j) to[j] += row[j];
        }
        const float scale = length ? scale_of(feature.combiner, length) : 1.0f;
        for (uint32_t j = 0; j < dim; ++j) to[j] *= scale;
      }
    }
  }

  template <typename Dim>
  void unpool_block(size_t f, uint32_t begin, uint32_t end, Dim dim, const float* gradient, size_t stride,
                    float* table) const {
    const FeatureRows& rows = features_[f];
    const FeaturePlan& feature = spec_->features[f];
    const float* from = gradient + begin * stride + spec_->columns[f];
    for (uint32_t i = begin; i < end; ++i, from += stride) {
      const int32_t first = rows.offsets.empty() ? static_cast<int32_t>(i) : rows.offsets[i];
      const int32_t length = rows.offsets.empty() ? 1 : rows.offsets[i + 1] - first;
      const float scale = scale_of(feature.combiner, length);
      prefetch_next<1>(rows, i, table, dim);
      for (int32_t k = 0; k < length; ++k) {
        float* row = table + size_t{rows.inverse[first + k]} * dim;
        const float* g = feature.combiner == Combiner::kNone ? from + size_t(k) * dim : from;
        for (uint32_t j = 0; j < dim; ++j) row[j] += g[j] * scale;
      }
    }
  }

  std::shared_ptr<const PlanSpec> spec_;
  std::vector<uint32_t> inverse_;  // feature-major, like the keys
  std::vector<FeatureRows> features_;
};

}  // namespace streamtrain
