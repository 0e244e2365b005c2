// The decoder: from many samples, JSON messages or rows of tensors, to columns, as the features of a schema say.
//
// A sample that cannot be decoded is left out of the columns and reported; it never touches others.
// What a sample may be, and every reason of refusal: docs/samples.md.
//
// Thread safety: none. A Decoder keeps scratch space between calls, so that a steady stream allocates only its results;
// give each thread its own.
// REQUIRES: the specs are valid (the constructor throws std::invalid_argument otherwise).
#pragma once

#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cell.h"
#include "columns.h"
#include "cross.h"
#include "hash.h"
#include "sample.h"

namespace streamtrain {

// A message or, if `tensors` is set, the samples there.
struct Source {
  std::string_view message;
  const TensorSamples* tensors = nullptr;

  size_t size() const { return tensors ? tensors->size() : 1; }
};

class Decoder {
 public:
  explicit Decoder(DecoderSpec spec);

  size_t features() const { return features_.size(); }
  size_t numerics() const { return spec_.numerics.size(); }
  size_t labels(bool with_labels) const { return with_labels ? spec_.labels.size() : 0; }
  std::string_view name(int32_t name) const { return name < 0 ? std::string_view{} : names_[static_cast<size_t>(name)]; }

  // Decodes messages, and samples whose columns are tensors. Without labels neither labels nor weights are read, and the
  // time may be missing.
  Columns decode(std::span<const Source> sources, bool with_labels);

 private:
  struct Feature {
    int field;                             // of a categorical
    uint32_t max_length;                   // 0: no limit
    bool has_default;
    std::vector<uint64_t> default_keys;
    std::vector<uint64_t> keys;            // of the batch
  };

  // The positive class of a label, as what it may be written; NaN: not so.
  struct Positive {
    uint64_t key;
    double number, boolean;
  };

  static Positive positive_of(const std::string& text);
  bool read(std::string_view message, bool with_labels);
  bool sample(size_t row, bool with_labels, Columns& out);
  void keep(size_t index, size_t row, Columns& out);
  void drop(size_t index, size_t row, Columns& out);
  bool labels_of(float* to);
  bool class_of(const Positive& positive, int field, const Value& value, float& to);
  bool time_of(bool required, double& to);
  bool weight_of(float& to);
  bool categorical_of(Feature& feature);
  bool cross_of(size_t cross, size_t row);
  bool number_of(size_t numeric, float& to);
  float transform(const NumericSpec& spec, double value) const;
  void collect(size_t count, Columns& out);

  bool refuse(Reason reason, int32_t name, int64_t position = -1) {
    refusal_ = {0, reason, name, position};
    return false;
  }

  // Where the keys of `feature` in sample `row` begin.
  int32_t& offset(size_t feature, size_t row) { return offsets_[feature * stride_ + row]; }

  // How many keys of `feature` the sample that is being read into row `row` has.
  size_t added(size_t feature, size_t row) {
    return features_[feature].keys.size() - static_cast<size_t>(offset(feature, row));
  }

  DecoderSpec spec_;
  SampleReader reader_;
  std::vector<Feature> features_;
  std::vector<int> label_fields_, numeric_fields_;
  std::vector<Positive> positives_;  // of each label; meaningless for one without a positive class
  std::vector<size_t> cell_features_;  // of each numeric; meaningless for one without cells
  int time_field_ = SampleReader::kUnknown, weight_field_ = SampleReader::kUnknown;
  std::vector<float> numeric_defaults_;
  std::vector<std::string> names_;  // of fields, then of crosses
  int32_t cross_names_ = 0;         // where those begin

  // Scratch of one call.
  std::vector<int32_t> offsets_;  // [F, stride_]
  size_t stride_ = 0;
  Refusal refusal_{};
};

inline Decoder::Decoder(DecoderSpec spec)
    : spec_(std::move(spec)), reader_(spec_.max_depth, spec_.max_id_bytes, spec_.time_format) {
  const auto require = [](bool valid, const std::string& what) {
    if (!valid) throw std::invalid_argument(what);
  };
  require(spec_.max_message_bytes >= 2 && spec_.max_message_bytes <= size_t{1} << 30,
          "max_message_bytes must be between 2 and 2**30");
  require(spec_.max_ids >= 1, "max_ids must be 1 or more");
  require(spec_.max_depth >= 1 && spec_.max_depth <= 256, "max_depth must be between 1 and 256");
  if (spec_.time) time_field_ = reader_.field(*spec_.time, kTime, kTime);
  for (const LabelSpec& label : spec_.labels) {
    require(!label.positive || label.kind == LabelSpec::Kind::kBinary,
            "label \"" + label.field + "\" has a positive class and is not binary");
    label_fields_.push_back(reader_.field(label.field, label.positive ? kNumber | kIds : kNumber, 0));
    positives_.push_back(positive_of(label.positive.value_or("")));
  }
  if (spec_.weight) weight_field_ = reader_.field(*spec_.weight, kNumber, 0);
  for (const CategoricalSpec& c : spec_.categoricals) {
    std::vector<uint64_t> keys;
    for (const std::string& id : c.default_ids.value_or(std::vector<std::string>{})) {
      require(id.size() <= spec_.max_id_bytes, "default id of \"" + c.field + "\" is longer than max_id_bytes");
      keys.push_back(hash_bytes(id.data(), id.size()));
    }
    features_.push_back({reader_.field(c.field, kIds, kIds), c.max_length, c.default_ids.has_value(),
                         std::move(keys), {}});
  }
  for (const CrossSpec& cross : spec_.crosses) {
    require(cross.categoricals.size() >= 2 && cross.categoricals.size() <= kMaxCrossed,
            "cross \"" + cross.name + "\" needs between 2 and 8 categoricals");
    for (const uint32_t c : cross.categoricals)
      require(c < spec_.categoricals.size(), "cross \"" + cross.name + "\" refers to a categorical that is not there");
    features_.push_back({SampleReader::kUnknown, cross.max_length, false, {}, {}});
  }
  for (const NumericSpec& numeric : spec_.numerics) {
    require(numeric.transform != NumericSpec::Transform::kStandardize ||
                (std::isfinite(numeric.mean) && std::isfinite(numeric.stddev) && numeric.stddev > 0),
            "numeric \"" + numeric.field + "\" needs a finite mean and a positive, finite stddev");
    const float value = transform(numeric, numeric.default_value.value_or(0));
    require(!numeric.default_value || std::isfinite(value), "default of numeric \"" + numeric.field + "\" is not finite");
    for (const int bits : numeric.cells)
      require(bits >= 0 && bits <= kMaxCellBits, "cells of numeric \"" + numeric.field + "\" have 0 to 23 bits");
    numeric_fields_.push_back(reader_.field(numeric.field, kNumber, kNumber));
    numeric_defaults_.push_back(value);
    cell_features_.push_back(features_.size());
    if (!numeric.cells.empty()) features_.push_back({SampleReader::kUnknown, 0, false, {}, {}});
  }
  for (int f = 0; f < reader_.fields(); ++f) names_.push_back(reader_.name(f));
  cross_names_ = static_cast<int32_t>(names_.size());
  for (const CrossSpec& cross : spec_.crosses) names_.push_back(cross.name);
}

inline Columns Decoder::decode(std::span<const Source> sources, bool with_labels) {
  size_t count = 0;
  for (const Source& source : sources) count += source.size();
  if (count >= static_cast<size_t>(std::numeric_limits<int32_t>::max())) throw std::length_error("too many messages");
  Columns out;
  out.numeric.resize(count * numerics());
  out.labels.resize(count * labels(with_labels));
  out.weights.resize(count, 1.0f);
  out.times.resize(count);
  out.kept.resize(count);
  // An odd number of cache lines: the features' ends then fall into different sets of the cache, however many samples.
  stride_ = ((count + 16) / 16 | 1) * 16;
  if (offsets_.size() < features() * stride_) offsets_.resize(features() * stride_);
  for (size_t f = 0; f < features(); ++f) {
    features_[f].keys.clear();
    offset(f, 0) = 0;
  }
  size_t row = 0, index = 0;
  for (const Source& source : sources) {
    if (source.tensors) reader_.bind(*source.tensors);
    for (size_t i = 0; i < source.size(); ++i, ++index) {
      if (source.tensors) reader_.read_row(i, with_labels);
      if ((source.tensors || read(source.message, with_labels)) && sample(row, with_labels, out)) [[likely]] {
        keep(index, row++, out);
      } else {
        drop(index, row, out);
      }
    }
  }
  out.size = row;
  out.numeric.resize(row * numerics());
  out.labels.resize(row * labels(with_labels));
  out.weights.resize(row);
  out.times.resize(row);
  out.kept.resize(row);
  collect(row, out);
  return out;
}

// Ends row `row`, which sample `index` has filled.
inline void Decoder::keep(size_t index, size_t row, Columns& out) {
  for (size_t f = 0; f < features(); ++f) {
    const size_t size = features_[f].keys.size();
    if (size > static_cast<size_t>(std::numeric_limits<int32_t>::max())) throw std::length_error("too many ids");
    offset(f, row + 1) = static_cast<int32_t>(size);
  }
  out.kept[row] = static_cast<int32_t>(index);
}

// Empties row `row` again, and reports why sample `index` is refused.
inline void Decoder::drop(size_t index, size_t row, Columns& out) {
  refusal_.message = static_cast<int32_t>(index);
  out.refusals.push_back(refusal_);
  for (size_t f = 0; f < features(); ++f) features_[f].keys.resize(static_cast<size_t>(offset(f, row)));
  if (!out.weights.empty()) out.weights[row] = 1.0f;
}

inline bool Decoder::read(std::string_view message, bool with_labels) {
  if (message.size() > spec_.max_message_bytes) return refuse(Reason::kTooLarge, -1);
  return reader_.read(message.data(), message.size(), with_labels) ||
         refuse(reader_.reason(), reader_.error_field(), reader_.error_at());
}

// Puts the sample that was read into row `row`; false when it is refused, with the reason in refusal_.
inline bool Decoder::sample(size_t row, bool with_labels, Columns& out) {
  if (time_field_ >= 0 && !time_of(with_labels, out.times[row])) return false;
  if (with_labels && !labels_of(out.labels.data() + row * spec_.labels.size())) return false;
  if (with_labels && weight_field_ >= 0 && !weight_of(out.weights[row])) return false;
  const size_t categoricals = spec_.categoricals.size();
  size_t ids = 0;
  for (size_t c = 0; c < categoricals; ++c) {
    if (!categorical_of(features_[c])) return false;
    if ((ids += added(c, row)) > spec_.max_ids) return refuse(Reason::kTooManyIds, features_[c].field);
  }
  for (size_t c = 0; c < spec_.crosses.size(); ++c) {
    if (!cross_of(c, row)) return false;
    if ((ids += added(categoricals + c, row)) > spec_.max_ids)
      return refuse(Reason::kTooManyIds, cross_names_ + static_cast<int32_t>(c));
  }
  for (size_t i = 0; i < numerics(); ++i)
    if (!number_of(i, out.numeric[row * numerics() + i])) return false;
  return true;
}

inline bool Decoder::time_of(bool required, double& to) {
  const Value* value = reader_.value(time_field_);
  to = 0;
  if (!value) return !required || refuse(Reason::kMissingField, time_field_);
  if (value->time_reason != Reason::kNone) return refuse(value->time_reason, time_field_, value->position);
  to = value->time;
  return true;
}

inline bool Decoder::labels_of(float* to) {
  for (size_t i = 0; i < spec_.labels.size(); ++i) {
    const LabelSpec& spec = spec_.labels[i];
    const int field = label_fields_[i];
    const Value* value = reader_.value(field);
    to[i] = std::numeric_limits<float>::quiet_NaN();
    if (spec.positive && value && class_of(positives_[i], field, *value, to[i])) continue;
    if (!value || value->is_blank) {
      if (!spec.optional) return refuse(Reason::kMissingField, field);
      continue;
    }
    if (spec.positive) return false;
    if (value->number_reason != Reason::kNone) return refuse(value->number_reason, field, value->position);
    const double number = value->number;
    if ((spec.kind == LabelSpec::Kind::kBinary && number != 0 && number != 1) ||
        (spec.kind == LabelSpec::Kind::kCount && number < 0))
      return refuse(Reason::kBadLabel, field, value->position);
    to[i] = static_cast<float>(number);
    if (!std::isfinite(to[i])) return refuse(Reason::kNotFinite, field, value->position);
  }
  return true;
}

// Whether a value is of the positive class (1) or another (0); false, with the reason, if it is of none.
inline bool Decoder::class_of(const Positive& positive, int field, const Value& value, float& to) {
  bool is_positive = false;
  switch (value.kind) {
    case Value::Kind::kString:
      if (value.id_reason != Reason::kNone) return refuse(value.id_reason, field, value.position);
      is_positive = *value.ids == positive.key;
      if (value.is_blank && !is_positive) return false;
      break;
    case Value::Kind::kNumber:
      if (value.number_reason != Reason::kNone) return refuse(value.number_reason, field, value.position);
      is_positive = value.number == positive.number;
      break;
    case Value::Kind::kBoolean: is_positive = value.number == positive.number || value.number == positive.boolean; break;
    default: return refuse(Reason::kWrongType, field, value.position);
  }
  to = is_positive ? 1.0f : 0.0f;
  return true;
}

// What a value of the positive class looks like, by its text.
inline Decoder::Positive Decoder::positive_of(const std::string& text) {
  const double none = std::numeric_limits<double>::quiet_NaN();
  const char* const end = text.data() + text.size();
  double number = 0;
  const std::from_chars_result parsed = std::from_chars(text.data(), end, number);
  const bool is_number = parsed.ec == std::errc() && parsed.ptr == end;
  return {hash_bytes(text.data(), text.size()), is_number ? number : none,
          text == "true" ? 1 : text == "false" ? 0 : none};
}

inline bool Decoder::weight_of(float& to) {
  to = 1;
  const Value* value = reader_.value(weight_field_);
  if (!value || value->is_blank) return true;
  if (value->kind == Value::Kind::kBoolean) return refuse(Reason::kWrongType, weight_field_, value->position);
  if (value->number_reason != Reason::kNone) return refuse(value->number_reason, weight_field_, value->position);
  if (value->number < 0) return refuse(Reason::kBadWeight, weight_field_, value->position);
  to = static_cast<float>(value->number);
  return std::isfinite(to) || refuse(Reason::kNotFinite, weight_field_, value->position);
}

inline bool Decoder::categorical_of(Feature& feature) {
  const Value* value = reader_.value(feature.field);
  if (!value) {
    if (!feature.has_default) return refuse(Reason::kMissingField, feature.field);
    feature.keys.insert(feature.keys.end(), feature.default_keys.begin(), feature.default_keys.end());
    return true;
  }
  if (value->id_reason != Reason::kNone) return refuse(value->id_reason, feature.field, value->id_position);
  if (value->count == 1) [[likely]] {
    feature.keys.push_back(*value->ids);
    return true;
  }
  const uint32_t dropped = feature.max_length && value->count > feature.max_length ? value->count - feature.max_length : 0;
  feature.keys.insert(feature.keys.end(), value->ids + dropped, value->ids + value->count);
  return true;
}

inline bool Decoder::cross_of(size_t cross, size_t row) {
  const CrossSpec& spec = spec_.crosses[cross];
  std::array<std::span<const uint64_t>, kMaxCrossed> lists;
  for (size_t i = 0; i < spec.categoricals.size(); ++i) {
    const uint32_t c = spec.categoricals[i];
    lists[i] = std::span<const uint64_t>(features_[c].keys).subspan(static_cast<size_t>(offset(c, row)));
  }
  return append_cross({lists.data(), spec.categoricals.size()}, spec.max_length,
                      features_[spec_.categoricals.size() + cross].keys) ||
         refuse(Reason::kCrossTooLarge, cross_names_ + static_cast<int32_t>(cross));
}

inline float Decoder::transform(const NumericSpec& spec, double value) const {
  switch (spec.transform) {
    case NumericSpec::Transform::kLog1p: value = std::copysign(std::log1p(std::abs(value)), value); break;
    case NumericSpec::Transform::kStandardize: value = (value - spec.mean) / spec.stddev; break;
    case NumericSpec::Transform::kNone: break;
  }
  return static_cast<float>(value);
}

inline bool Decoder::number_of(size_t numeric, float& to) {
  const int field = numeric_fields_[numeric];
  const NumericSpec& spec = spec_.numerics[numeric];
  const Value* value = reader_.value(field);
  if (!value || value->is_blank) {
    if (!spec.default_value) return refuse(Reason::kMissingField, field);
    to = numeric_defaults_[numeric];
    if (!spec.cells.empty()) features_[cell_features_[numeric]].keys.push_back(cell_key(kNoCell));
    return true;
  }
  if (value->number_reason != Reason::kNone) return refuse(value->number_reason, field, value->position);
  to = transform(spec, value->number);
  const float number = static_cast<float>(value->number);
  for (const int bits : spec.cells)
    features_[cell_features_[numeric]].keys.push_back(cell_key(cell_id(number, bits)));
  return std::isfinite(to) || refuse(Reason::kNotFinite, field, value->position);
}

// Moves what the features gathered for `count` samples into the columns.
inline void Decoder::collect(size_t count, Columns& out) {
  size_t total = 0;
  for (const Feature& feature : features_) total += feature.keys.size();
  out.keys.reserve(total);
  out.offsets.reserve(features() * (count + 1));
  out.starts.push_back(0);
  for (size_t f = 0; f < features(); ++f) {
    const int32_t* const offsets = &offset(f, 0);
    out.keys.insert(out.keys.end(), features_[f].keys.begin(), features_[f].keys.end());
    out.starts.push_back(static_cast<int64_t>(out.keys.size()));
    out.offsets.insert(out.offsets.end(), offsets, offsets + count + 1);
    bool single = true;
    for (size_t i = 0; i <= count; ++i) single &= offsets[i] == static_cast<int32_t>(i);
    out.single.push_back(single);
  }
}

}  // namespace streamtrain
