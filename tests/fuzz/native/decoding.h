// What the harnesses of decoders share: the schemas, and the check that two decodings are the same.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "decode.h"
#include "input.h"

namespace streamtrain::fuzz {

inline std::vector<std::string> one(std::string id) { return {std::move(id)}; }

// Of tests/fuzz/readers/samples.py too, where each is held against the oracle.
inline DecoderSpec usual() {
  using Transform = NumericSpec::Transform;
  DecoderSpec spec{};
  spec.labels = {{"label", LabelSpec::Kind::kBinary, false}, {"dwell", LabelSpec::Kind::kCount, true}};
  spec.categoricals = {{"user", 0, {}}, {"item", 0, one("none")}, {"genres", 3, {}}};
  spec.crosses = {{"user_x_genres", {0, 2}, 0}};
  spec.numerics = {{"price", {}, Transform::kNone, 0, 1}, {"age", 30.0, Transform::kLog1p, 0, 1}};
  spec.time = "ts";
  spec.weight = "w";
  spec.max_message_bytes = 1000;
  spec.max_id_bytes = 64;
  spec.max_ids = 100;
  spec.max_depth = 5;
  return spec;
}

// Several columns read one field, whose names are hard; the limits are low.
inline DecoderSpec hard() {
  using Transform = NumericSpec::Transform;
  DecoderSpec spec{};
  spec.labels = {{"a", LabelSpec::Kind::kReal, true}};
  spec.categoricals = {{"a", 2, one("0")}, {"b", 0, {}}, {"", 1, one("")}, {"qu\"ote", 0, one("x")}};
  spec.categoricals.push_back({std::string("nul\0", 4), 7, std::vector<std::string>{}});
  spec.crosses = {{"x1", {0, 1, 2}, 2}, {"x2", {1, 1}, 0}};
  spec.numerics = {{"a", 0.0, Transform::kStandardize, 2.5, 0.5}, {"b", 1.0, Transform::kNone, 0, 1}};
  spec.time = "a";
  spec.max_message_bytes = 120;
  spec.max_id_bytes = 14;
  spec.max_ids = 6;
  spec.max_depth = 3;
  return spec;
}

// Nothing of a sample is needed: all is skipped.
inline DecoderSpec empty() {
  DecoderSpec spec{};
  spec.max_message_bytes = 1 << 20;
  spec.max_id_bytes = 256;
  spec.max_ids = 1;
  spec.max_depth = 256;
  return spec;
}

// Labels that have a positive class, and times that are milliseconds.
inline DecoderSpec classes() {
  DecoderSpec spec = empty();
  spec.labels = {{"label", LabelSpec::Kind::kBinary, true, "1"}, {"user", LabelSpec::Kind::kBinary, false, "u1"}};
  spec.time = "ts";
  spec.time_format.per_second = 1e3;
  return spec;
}

inline constexpr size_t kSpecs = 4;

inline DecoderSpec spec_of(size_t which) {
  return which == 0 ? usual() : which == 1 ? hard() : which == 2 ? empty() : classes();
}

inline bool equal(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

inline void check_same(const Columns& a, const Columns& b, bool with_positions = true) {
  CHECK(a.size == b.size && a.kept == b.kept && a.keys == b.keys && a.starts == b.starts && a.offsets == b.offsets);
  CHECK(a.single == b.single && a.times == b.times);
  CHECK(equal(a.numeric, b.numeric) && equal(a.labels, b.labels) && equal(a.weights, b.weights));
  CHECK(a.refusals.size() == b.refusals.size());
  for (size_t i = 0; i < a.refusals.size(); ++i) {
    const Refusal &x = a.refusals[i], &y = b.refusals[i];
    CHECK(x.message == y.message && x.reason == y.reason && x.name == y.name);
    CHECK(!with_positions || x.position == y.position);
  }
}

}  // namespace streamtrain::fuzz
