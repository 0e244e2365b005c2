// The decoder: any bytes are decoded or refused, and neither other messages nor earlier calls change what comes of one.
//
// Input: a byte that chooses schema and labels, then messages, each ended by 0xFF, which no text has.
#include "decode.h"

#include <cmath>
#include <memory>
#include <string_view>
#include <vector>

#include "input.h"

namespace streamtrain::fuzz {
namespace {

constexpr size_t kMostMessages = 64;

// Of tests/fuzz/readers/samples.py too, where each is held against the oracle.
DecoderSpec usual() {
  using Transform = NumericSpec::Transform;
  DecoderSpec spec{};
  spec.labels = {{"label", LabelSpec::Kind::kBinary, false}, {"dwell", LabelSpec::Kind::kCount, true}};
  spec.categoricals = {{"user", 0, {}}, {"item", 0, "none"}, {"genres", 3, {}}};
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
DecoderSpec hard() {
  using Transform = NumericSpec::Transform;
  DecoderSpec spec{};
  spec.labels = {{"a", LabelSpec::Kind::kReal, true}};
  spec.categoricals = {{"a", 2, "0"}, {"b", 0, {}}, {"", 1, ""}, {"qu\"ote", 0, "x"}};
  spec.categoricals.push_back({std::string("nul\0", 4), 7, "y"});
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
DecoderSpec empty() {
  DecoderSpec spec{};
  spec.max_message_bytes = 1 << 20;
  spec.max_id_bytes = 256;
  spec.max_ids = 1;
  spec.max_depth = 256;
  return spec;
}

DecoderSpec spec_of(size_t which) { return which == 0 ? usual() : which == 1 ? hard() : empty(); }

void check(const Columns& columns, const std::vector<std::string_view>& messages, const Decoder& decoder,
           bool with_labels) {
  const size_t n = columns.size;
  CHECK(n + columns.refusals.size() == messages.size());
  CHECK(columns.kept.size() == n && columns.weights.size() == n && columns.times.size() == n);
  CHECK(columns.numeric.size() == n * decoder.numerics() && columns.labels.size() == n * decoder.labels(with_labels));
  CHECK(columns.starts.size() == decoder.features() + 1 && columns.offsets.size() == decoder.features() * (n + 1));
  CHECK(columns.starts.back() == static_cast<int64_t>(columns.keys.size()));
  for (size_t f = 0; f < decoder.features(); ++f) {
    const int32_t* offsets = columns.offsets.data() + f * (n + 1);
    CHECK(offsets[0] == 0 && offsets[n] == columns.starts[f + 1] - columns.starts[f]);
    for (size_t i = 0; i < n; ++i) CHECK(offsets[i] <= offsets[i + 1]);
  }
  for (const float value : columns.numeric) CHECK(std::isfinite(value));
  for (const float value : columns.labels) CHECK(!std::isinf(value));
  for (const float value : columns.weights) CHECK(std::isfinite(value) && value >= 0);
  for (const double value : columns.times) CHECK(is_time(value));
  size_t kept = 0;
  auto refusal = columns.refusals.begin();
  for (size_t i = 0; i < messages.size(); ++i) {
    if (kept < n && columns.kept[kept] == static_cast<int32_t>(i)) { ++kept; continue; }
    CHECK(refusal->message == static_cast<int32_t>(i) && refusal->reason != Reason::kNone);
    CHECK(refusal->position >= -1 && refusal->position <= static_cast<int64_t>(messages[i].size()));
    ++refusal;
  }
}

bool equal(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
}

void check_same(const Columns& a, const Columns& b) {
  CHECK(a.size == b.size && a.kept == b.kept && a.keys == b.keys && a.starts == b.starts && a.offsets == b.offsets);
  CHECK(a.single == b.single && a.times == b.times);
  CHECK(equal(a.numeric, b.numeric) && equal(a.labels, b.labels) && equal(a.weights, b.weights));
  CHECK(a.refusals.size() == b.refusals.size());
  for (size_t i = 0; i < a.refusals.size(); ++i) {
    const Refusal &x = a.refusals[i], &y = b.refusals[i];
    CHECK(x.message == y.message && x.reason == y.reason && x.name == y.name && x.position == y.position);
  }
}

// What message i became in a batch is what it becomes alone.
void check_alone(const Columns& batch, size_t row, size_t refusal, bool refused, const Columns& alone,
                 size_t features) {
  if (refused) {
    CHECK(alone.size == 0 && alone.refusals.size() == 1);
    const Refusal &x = batch.refusals[refusal], &y = alone.refusals[0];
    CHECK(x.reason == y.reason && x.name == y.name && x.position == y.position);
    return;
  }
  CHECK(alone.size == 1 && batch.times[row] == alone.times[0] && same(batch.weights[row], alone.weights[0]));
  const size_t numerics = alone.numeric.size(), labels = alone.labels.size();
  for (size_t i = 0; i < numerics; ++i) CHECK(same(batch.numeric[row * numerics + i], alone.numeric[i]));
  for (size_t i = 0; i < labels; ++i) CHECK(same(batch.labels[row * labels + i], alone.labels[i]));
  for (size_t f = 0; f < features; ++f) {
    const int32_t* offsets = batch.offsets.data() + f * (batch.size + 1);
    const uint64_t* keys = batch.keys.data() + batch.starts[f];
    const uint64_t* mine = alone.keys.data() + alone.starts[f];
    CHECK(std::equal(keys + offsets[row], keys + offsets[row + 1], mine, mine + alone.starts[f + 1] - alone.starts[f]));
  }
}

void run(const uint8_t* data, size_t size) {
  if (size == 0) return;
  const size_t which = data[0] % 3;
  const bool with_labels = data[0] & 0x80;
  std::vector<std::string_view> messages;
  const auto* at = reinterpret_cast<const char*>(data + 1);
  const char* const end = at + size - 1;
  while (messages.size() < kMostMessages && at < end) {
    const char* stop = std::find(at, end, '\xFF');
    messages.emplace_back(at, static_cast<size_t>(stop - at));
    at = stop == end ? end : stop + 1;
  }
  static std::unique_ptr<Decoder> lasting[3];
  if (!lasting[which]) lasting[which] = std::make_unique<Decoder>(spec_of(which));
  Decoder fresh(spec_of(which));
  const Columns columns = fresh.decode(messages.data(), messages.size(), with_labels);
  check(columns, messages, fresh, with_labels);
  check_same(columns, lasting[which]->decode(messages.data(), messages.size(), with_labels));
  size_t row = 0, refusal = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    const bool refused = row == columns.size || columns.kept[row] != static_cast<int32_t>(i);
    Decoder one(spec_of(which));
    check_alone(columns, row, refusal, refused, one.decode(&messages[i], 1, with_labels), fresh.features());
    if (refused) ++refusal; else ++row;
  }
}

}  // namespace
}  // namespace streamtrain::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  streamtrain::fuzz::run(data, size);
  return 0;
}
