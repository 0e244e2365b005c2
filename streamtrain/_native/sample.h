// One sample: the values of the fields that a schema reads, out of one JSON object.
//
// A value is interpreted as it is read, once, for every role that its field has, however many columns use it. Why it
// cannot play a role is kept with the value and not raised: the last of duplicate keys wins, so a value may yet be
// overwritten. Unknown keys are skipped, but must be valid JSON.
//
// Messages of one stream repeat their keys in one order. The bytes from the end of a value to the start of the next
// (`,"price": `) are remembered by position and compared at once; only where they differ is a key read and looked up.
//
// Thread safety: none; a reader is scratch space of its owner. Views and values are valid until the next read().
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hash.h"
#include "event_time.h"
#include "json.h"
#include "tensor_samples.h"

namespace streamtrain {

// What a field is read for; a set of bits.
enum Role : uint8_t { kIds = 1, kNumber = 2, kTime = 4 };

struct Value {
  enum class Kind : uint8_t { kNull, kBoolean, kNumber, kString, kList, kObject };
  Kind kind = Kind::kNull;
  // Why the value is not an id or list of ids, a number (or boolean), or a time. Meaningful for the roles of its field.
  Reason id_reason = Reason::kWrongType;
  Reason number_reason = Reason::kWrongType;
  Reason time_reason = Reason::kWrongType;
  uint32_t count = 0;             // number of ids
  int64_t position = 0;           // of the value in the message
  int64_t id_position = 0;        // of the first thing that is not an id
  const uint64_t* ids = nullptr;  // their keys
  double number = 0;              // booleans are 0 and 1
  bool is_blank = false;          // a text that stands for a missing number
  double time = 0;                // seconds since the epoch
};

// Whether a text stands for a missing number in the files of this world.
inline bool stands_for_missing(std::string_view text) {
  static constexpr std::string_view kTexts[] = {"",    "NA",  "N/A",  "n/a",  "#N/A", "<NA>", "NaN",
                                                "nan", "NULL", "null", "None", "\\N",  "-",    "?"};
  return text.size() <= 4 && std::find(std::begin(kTexts), std::end(kTexts), text) != std::end(kTexts);
}

class SampleReader {
 public:
  SampleReader(int max_depth, size_t max_id_bytes, TimeFormat time_format = {})
      : json_(max_depth), max_id_bytes_(max_id_bytes), time_format_(std::move(time_format)), table_(16, kUnknown) {}

  SampleReader(const SampleReader&) = delete;  // parts of a reader point to others
  SampleReader& operator=(const SampleReader&) = delete;

  // The number of the field `name`, new or known. Its roles grow: `roles` when labels are read, `without_labels` else.
  int field(const std::string& name, uint8_t roles, uint8_t without_labels) {
    int number = find(name);
    if (number == kUnknown) {
      number = static_cast<int>(fields_.size());
      fields_.push_back({name, {}, Value{}, 0});
      if (fields_.size() * 2 > table_.size()) table_.resize(table_.size() * 2);
      std::fill(table_.begin(), table_.end(), kUnknown);
      expected_.clear();  // it points to fields
      for (size_t i = 0; i < fields_.size(); ++i) *slot(fields_[i].name) = static_cast<int>(i);
    }
    fields_[static_cast<size_t>(number)].roles[1] |= roles;
    fields_[static_cast<size_t>(number)].roles[0] |= without_labels;
    return number;
  }

  int fields() const { return static_cast<int>(fields_.size()); }
  const std::string& name(int field) const { return fields_[static_cast<size_t>(field)].name; }

  // Reads one message. False when it is refused as a whole, with reason(), error_at() and error_field().
  bool read(const char* text, size_t size, bool with_labels) {
    ++sample_;
    field_ = nullptr;
    roles_ = with_labels;
    if (!json_.load(text, size)) return false;
    // An id takes two bytes of the message at least, with what separates it from the next.
    if (ids_.size() < size / 2 + 1) ids_.resize(size / 2 + size / 4 + 1);
    next_id_ = ids_.data();
    const char* p = JsonScanner::skip_space(json_.begin());
    const char* const start = p;
    if (!(p = *start == '{' ? object(p) : json_.skip_value(p, 0))) return false;
    p = JsonScanner::skip_space(p);
    field_ = nullptr;
    if (p != json_.end()) return json_.fail(Reason::kNotJson, p);
    return *start == '{' || json_.fail(Reason::kNotAnObject, start);
  }

  // Makes the columns of `samples`, which outlive this, those that read_row() reads.
  void bind(const TensorSamples& samples) {
    bound_.clear();
    for (const TensorColumn& column : samples.columns()) {
      const int field = find(column.tensor->name);
      if (field != kUnknown) bound_.push_back({&column, &fields_[static_cast<size_t>(field)]});
    }
    if (ids_.size() < samples.width()) ids_.resize(samples.width());
  }

  // Reads a sample of what is bound, as its JSON would be read; its values have no positions.
  void read_row(size_t row, bool with_labels) {
    ++sample_;
    field_ = nullptr;
    roles_ = with_labels;
    next_id_ = ids_.data();
    for (const auto& [column, field] : bound_) {
      const uint8_t roles = field->roles[roles_];
      if (!roles) continue;
      Value& value = field->value;
      field->sample = sample_;
      value.position = value.id_position = -1;
      value.is_blank = false;
      value.id_reason = value.number_reason = value.time_reason = Reason::kWrongType;
      const size_t at = row * column->width;
      if (column->is_list) tensor_list(*column->tensor, at, column->length(row), roles, value);
      else tensor_value(*column->tensor, at, roles, value);
    }
  }

  // The value of a field in the sample read last; nullptr when it is missing or null.
  const Value* value(int field) const {
    const Field& f = fields_[static_cast<size_t>(field)];
    return f.sample == sample_ && f.value.kind != Value::Kind::kNull ? &f.value : nullptr;
  }

  Reason reason() const { return json_.reason(); }
  int64_t error_at() const { return json_.error_at(); }
  // The known field whose value could not be read, or kUnknown.
  int error_field() const { return field_ ? static_cast<int>(field_ - fields_.data()) : kUnknown; }

  static constexpr int kUnknown = -1;

 private:
  struct Field {
    std::string name;
    uint8_t roles[2];  // without labels, with labels
    Value value;
    uint64_t sample;  // the sample that `value` is of
  };

  static constexpr size_t kMaxPrefix = 32;
  static constexpr size_t kMaxExpected = 1024;

  // The bytes before a value, as seen at the same place of an earlier message.
  struct Expected {
    char prefix[kMaxPrefix];
    uint32_t size;  // 1 .. kMaxPrefix
    Field* field;   // nullptr: unknown
  };

  int* slot(std::string_view name) {
    size_t i = hash_bytes(name.data(), name.size());
    for (;; ++i) {
      int& entry = table_[i & (table_.size() - 1)];
      if (entry == kUnknown || fields_[static_cast<size_t>(entry)].name == name) return &entry;
    }
  }

  int find(std::string_view name) { return *slot(name); }

  const char* object(const char* p) {
    if (json_.too_deep(p, 1)) return nullptr;
    for (size_t at = 0;; ++at) {  // p is at '{' first, then at ','
      const char* start = expected(p, at);
      if (!start) {
        start = JsonScanner::skip_space(p + 1);
        if (*start == '}' && *p == '{') return start + 1;
        std::string_view text;
        field_ = nullptr;
        if (!(start = json_.key(start, text))) return nullptr;
        const int field = find(text);
        field_ = field == kUnknown ? nullptr : &fields_[static_cast<size_t>(field)];
        expect(at, p, static_cast<size_t>(start - p));
      }
      start = JsonScanner::skip_space(start);  // there may be more of it than was expected
      if (!(p = known_value(start))) return nullptr;
      if (*p == ',') [[likely]] continue;
      p = JsonScanner::skip_space(p);
      if (*p == '}') return p + 1;
      field_ = nullptr;
      if (*p != ',') return json_.fail(Reason::kNotJson, p);
    }
  }

  // The start of the value when the bytes at p are those expected at this place, or at the next two (a field may be
  // left out now and then); sets field_ and moves `at` there. Otherwise nullptr.
  const char* expected(const char* p, size_t& at) {
    const size_t end = std::min(at + 3, expected_.size());
    for (size_t i = at; i < end; ++i) {
      const Expected& e = expected_[i];
      if (static_cast<uint32_t>(~equal_bytes(p, e.prefix)) << (kMaxPrefix - e.size) == 0) [[likely]] {
        at = i;
        field_ = e.field;
        return p + e.size;
      }
    }
    return nullptr;
  }

  // Remembers what precedes the value of field_.
  void expect(size_t at, const char* prefix, size_t size) {
    if (size > kMaxPrefix || at >= kMaxExpected) return;
    if (at >= expected_.size()) expected_.resize(at + 1, Expected{{}, 1, nullptr});  // an empty one matches nothing
    std::memcpy(expected_[at].prefix, prefix, size);
    expected_[at].size = static_cast<uint32_t>(size);
    expected_[at].field = field_;
  }

  // Reads the value of field_ and interprets it.
  const char* known_value(const char* p) {
    if (!field_) return json_.skip_value(p, 1);
    Field& field = *field_;
    const uint8_t roles = field.roles[roles_];
    Value& value = field.value;
    if (!roles) return json_.skip_value(p, 1);
    field.sample = sample_;
    value.position = value.id_position = p - json_.begin();
    value.is_blank = false;
    value.id_reason = value.number_reason = value.time_reason = Reason::kWrongType;
    switch (*p) {
      case '"': return string_value(p, roles, value);
      case '[':
        value.kind = Value::Kind::kList;
        return roles & kIds ? id_list(p, value) : json_.skip_value(p, 1);
      case '{':
        value.kind = Value::Kind::kObject;
        return json_.skip_value(p, 1);
      case 'n':
        value.kind = Value::Kind::kNull;
        return json_.word(p);
      default: break;
    }
    if (*p == '-' || is_digit(*p)) return number_value(p, roles, value);
    value.kind = Value::Kind::kBoolean;
    value.number_reason = Reason::kNone;
    value.number = *p == 't';
    return json_.word(p);
  }

  const char* string_value(const char* p, uint8_t roles, Value& value) {
    std::string_view text;
    if (!(p = json_.string(p + 1, text))) return nullptr;
    take_text(text, roles, value);
    return p;
  }

  void take_text(std::string_view text, uint8_t roles, Value& value) {
    value.kind = Value::Kind::kString;
    if (roles & kIds) single_id(text, value);
    if (roles & kNumber) value.is_blank = stands_for_missing(text);
    if (roles & kTime) value.time_reason = time_format_.parse(text, value.time) ? Reason::kNone : Reason::kBadTime;
  }

  const char* number_value(const char* p, uint8_t roles, Value& value) {
    value.kind = Value::Kind::kNumber;
    Number number;
    const char* const start = p;
    if (!(p = json_.number(p, number))) return nullptr;
    if (roles & kIds && number.integer) single_id(integer_text(start, p), value);
    if (roles & (kNumber | kTime)) take_number(to_double(number, start, p), value);
    return p;
  }

  void take_number(double number, Value& value) const {
    value.number = number;
    value.time = number / time_format_.per_second;
    value.number_reason = std::isfinite(number) ? Reason::kNone : Reason::kNotFinite;
    value.time_reason = value.number_reason != Reason::kNone ? value.number_reason
                        : is_time(value.time)                ? Reason::kNone
                                                             : Reason::kBadTime;
  }

  void tensor_value(const Tensor& tensor, size_t at, uint8_t roles, Value& value) {
    char digits[kIntegerSize];
    value.kind = Value::Kind::kNumber;
    switch (tensor.kind) {
      case Tensor::Kind::kText: take_text(tensor.text(at), roles, value); return;
      case Tensor::Kind::kFloat: take_number(tensor.number(at), value); return;
      case Tensor::Kind::kBoolean:
        value.kind = Value::Kind::kBoolean;
        value.number_reason = Reason::kNone;
        value.number = static_cast<double>(tensor.integer(at));
        return;
      default: break;
    }
    if (roles & kIds) single_id(integer_text(tensor, at, digits), value);
    const uint64_t bits = tensor.integer(at);
    const bool is_signed = tensor.kind == Tensor::Kind::kSigned;
    take_number(is_signed ? static_cast<double>(static_cast<int64_t>(bits)) : static_cast<double>(bits), value);
  }

  void tensor_list(const Tensor& tensor, size_t at, size_t count, uint8_t roles, Value& value) {
    char digits[kIntegerSize];
    value.kind = Value::Kind::kList;
    if (!(roles & kIds)) return;
    value.ids = next_id_;
    value.id_reason = Reason::kNone;
    for (size_t i = at; i < at + count; ++i) {
      Reason reason = Reason::kWrongType;
      if (tensor.kind == Tensor::Kind::kText) reason = id(tensor.text(i));
      else if (tensor.kind == Tensor::Kind::kSigned || tensor.kind == Tensor::Kind::kUnsigned)
        reason = id(integer_text(tensor, i, digits));
      if (value.id_reason == Reason::kNone) value.id_reason = reason;
    }
    value.count = static_cast<uint32_t>(next_id_ - value.ids);
  }

  // Reads a list of ids. The first item that is none becomes the value's reason; the rest is still read as JSON.
  const char* id_list(const char* p, Value& value) {
    if (json_.too_deep(p, 2)) return nullptr;
    value.ids = next_id_;
    value.id_reason = Reason::kNone;
    p = JsonScanner::skip_space(p + 1);
    for (bool empty = *p == ']'; !empty;) {
      const char* const start = p;
      Reason reason = Reason::kWrongType;
      if (*p == '"') {
        std::string_view text;
        if (!(p = json_.string(p + 1, text))) return nullptr;
        reason = id(text);
      } else if (*p == '-' || is_digit(*p)) {
        Number number;
        if (!(p = json_.number(p, number))) return nullptr;
        if (number.integer) reason = id(integer_text(start, p));
      } else if (!(p = json_.skip_value(p, 2))) {
        return nullptr;
      }
      if (reason != Reason::kNone && value.id_reason == Reason::kNone) {
        value.id_reason = reason;
        value.id_position = start - json_.begin();
      }
      p = JsonScanner::skip_space(p);
      if (*p == ']') break;
      if (*p != ',') return json_.fail(Reason::kNotJson, p);
      p = JsonScanner::skip_space(p + 1);
    }
    value.count = static_cast<uint32_t>(next_id_ - value.ids);
    return p + 1;
  }

  // JSON integers are their own decimal text, but for the second spelling of zero.
  static std::string_view integer_text(const char* start, const char* end) {
    const std::string_view text(start, static_cast<size_t>(end - start));
    return text == "-0" ? text.substr(1) : text;
  }

  static constexpr size_t kIntegerSize = 24;  // digits of 64 bits, and a sign

  static std::string_view integer_text(const Tensor& tensor, size_t at, char (&to)[kIntegerSize]) {
    const uint64_t bits = tensor.integer(at);
    const std::to_chars_result end = tensor.kind == Tensor::Kind::kSigned
                                         ? std::to_chars(to, to + kIntegerSize, static_cast<int64_t>(bits))
                                         : std::to_chars(to, to + kIntegerSize, bits);
    return {to, static_cast<size_t>(end.ptr - to)};
  }

  void single_id(std::string_view text, Value& value) {
    value.ids = next_id_;
    value.count = 1;
    value.id_reason = id(text);
  }

  // Adds the key of an id.
  Reason id(std::string_view text) {
    if (text.size() > max_id_bytes_) return Reason::kIdTooLong;
    *next_id_++ = hash_bytes(text.data(), text.size());
    return Reason::kNone;
  }

  JsonScanner json_;
  const size_t max_id_bytes_;
  const TimeFormat time_format_;
  std::vector<Field> fields_;
  std::vector<int> table_;  // hash table of field numbers, at most half full; a power of two long
  std::vector<Expected> expected_;
  std::vector<std::pair<const TensorColumn*, Field*>> bound_;
  std::vector<uint64_t> ids_;  // keys of the ids of this sample
  uint64_t* next_id_ = nullptr;
  uint64_t sample_ = 0;
  Field* field_ = nullptr;  // whose value is being read; nullptr: of none that is known
  size_t roles_ = 1;      // which set of roles counts
};

}  // namespace streamtrain
