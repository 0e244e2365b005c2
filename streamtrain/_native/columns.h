// What goes into a decoder besides messages, and what comes out: the specs of the columns, and the columns.
//
// Specs are plain data; the constructor of Decoder checks them.
// Thread safety: plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "event_time.h"
#include "reason.h"

namespace streamtrain {

struct LabelSpec {
  enum class Kind : uint8_t { kBinary, kReal, kCount };
  std::string field;
  Kind kind;
  bool optional;  // missing or null is NaN
  std::optional<std::string> positive;  // the value that is 1, as text; all others are then 0
};

struct CategoricalSpec {
  std::string field;
  uint32_t max_length;                     // keep this many ids, the last ones; 0: all
  std::optional<std::vector<std::string>> default_ids;  // instead of missing or null
};

// All combinations of the ids of some categoricals.
struct CrossSpec {
  std::string name;
  std::vector<uint32_t> categoricals;
  uint32_t max_length;
};

struct NumericSpec {
  enum class Transform : uint8_t { kNone, kLog1p, kStandardize };
  std::string field;
  std::optional<double> default_value;  // before the transform
  Transform transform;
  double mean, stddev;
  std::vector<int> cells;  // bits of each of its cells (cell.h), largest cell first; empty: it has none
};

struct DecoderSpec {
  std::vector<LabelSpec> labels;
  std::vector<CategoricalSpec> categoricals;
  std::vector<CrossSpec> crosses;
  std::vector<NumericSpec> numerics;
  std::optional<std::string> time, weight;
  TimeFormat time_format;
  size_t max_message_bytes, max_id_bytes;
  size_t max_ids;  // of a sample, over all features and crosses
  int max_depth;
};

struct Refusal {
  int32_t message;
  Reason reason;
  int32_t name;      // of Decoder::name(), or -1
  int64_t position;  // byte in the message, or -1
};

// n samples, F features (categoricals, crosses, then numerics with cells), D numerics, L labels.
struct Columns {
  size_t size = 0;                // n
  std::vector<int32_t> kept;      // [n] message of each sample
  std::vector<uint64_t> keys;     // of feature 0, of feature 1, ...
  std::vector<int64_t> starts;    // [F + 1] where in `keys` each feature begins
  std::vector<int32_t> offsets;   // [F, n + 1] where among a feature's keys each sample begins
  std::vector<uint8_t> single;    // [F] every sample has exactly one key
  std::vector<float> numeric;     // [n, D]
  std::vector<float> labels;      // [n, L]
  std::vector<float> weights;     // [n]
  std::vector<double> times;      // [n]
  std::vector<Refusal> refusals;  // in order of messages
};

}  // namespace streamtrain
