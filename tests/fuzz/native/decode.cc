// The decoder: any bytes are decoded or refused, and neither other messages nor earlier calls change what comes of one.
//
// Input: a byte that chooses schema and labels, then messages, each ended by 0xFF, which no text has.
#include "decode.h"

#include <cmath>
#include <memory>
#include <string_view>
#include <vector>

#include "decoding.h"

namespace streamtrain::fuzz {
namespace {

constexpr size_t kMostMessages = 64;

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
  const size_t which = data[0] % kSpecs;
  const bool with_labels = data[0] & 0x80;
  std::vector<std::string_view> messages;
  const auto* at = reinterpret_cast<const char*>(data + 1);
  const char* const end = at + size - 1;
  while (messages.size() < kMostMessages && at < end) {
    const char* stop = std::find(at, end, '\xFF');
    messages.emplace_back(at, static_cast<size_t>(stop - at));
    at = stop == end ? end : stop + 1;
  }
  static std::unique_ptr<Decoder> lasting[kSpecs];
  if (!lasting[which]) lasting[which] = std::make_unique<Decoder>(spec_of(which));
  Decoder fresh(spec_of(which));
  std::vector<Source> sources;
  for (const std::string_view message : messages) sources.push_back({message});
  const Columns columns = fresh.decode(sources, with_labels);
  check(columns, messages, fresh, with_labels);
  check_same(columns, lasting[which]->decode(sources, with_labels));
  size_t row = 0, refusal = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    const bool refused = row == columns.size || columns.kept[row] != static_cast<int32_t>(i);
    Decoder one(spec_of(which));
    check_alone(columns, row, refusal, refused, one.decode(std::span(sources).subspan(i, 1), with_labels), fresh.features());
    if (refused) ++refusal; else ++row;
  }
}

}  // namespace
}  // namespace streamtrain::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  streamtrain::fuzz::run(data, size);
  return 0;
}
