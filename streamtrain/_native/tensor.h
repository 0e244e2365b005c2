// Tensors as clients of model servers send them: TensorFlow's TensorProto, and those of the Open Inference Protocol.
//
// What is wrong with one is thrown in words for its sender: std::invalid_argument, or std::overflow_error where it is
// too large.
//
// Thread safety: plain data. Texts are views of the bytes that a tensor was read from.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "half.h"
#include "protobuf.h"
#include "utf8.h"

namespace streamtrain {

// The values are flat, in `texts`, `floats` or (all other kinds) `integers`. Where those are fewer than `size`, the last
// one stands for all that are missing: a sender of a few bytes is not given memory for millions of values.
struct Tensor {
  enum class Kind : uint8_t { kText, kSigned, kUnsigned, kBoolean, kFloat };
  std::string name;
  std::vector<int64_t> shape;
  Kind kind = Kind::kText;
  std::vector<std::string_view> texts;  // UTF-8
  std::vector<uint64_t> integers;       // signed ones as two's complement, booleans as 0 and 1
  std::vector<double> floats;

  size_t size = 0;  // the product of `shape`

  size_t stored() const { return kind == Kind::kText ? texts.size() : kind == Kind::kFloat ? floats.size() : integers.size(); }

  // REQUIRES: at < size, and the kind is that of the value.
  std::string_view text(size_t at) const { return texts[std::min(at, texts.size() - 1)]; }
  uint64_t integer(size_t at) const { return integers[std::min(at, integers.size() - 1)]; }
  double number(size_t at) const { return floats[std::min(at, floats.size() - 1)]; }
};

inline constexpr size_t kMaxTensorValues = size_t{1} << 22;

namespace tensor_parts {

using Kind = Tensor::Kind;
using Wire = ProtobufReader::Wire;

struct Type {
  int32_t number;  // TensorFlow's DataType
  std::string_view name;
  Kind kind;
  uint8_t width;   // bytes of a value; 0: texts
  uint32_t field;  // of the message that holds values one by one; 0: none does
};

inline constexpr Type kTensorFlow[] = {
    {1, "DT_FLOAT", Kind::kFloat, 4, 5},      {2, "DT_DOUBLE", Kind::kFloat, 8, 6},
    {6, "DT_INT8", Kind::kSigned, 1, 7},      {5, "DT_INT16", Kind::kSigned, 2, 7},
    {3, "DT_INT32", Kind::kSigned, 4, 7},     {9, "DT_INT64", Kind::kSigned, 8, 10},
    {4, "DT_UINT8", Kind::kUnsigned, 1, 7},   {17, "DT_UINT16", Kind::kUnsigned, 2, 7},
    {22, "DT_UINT32", Kind::kUnsigned, 4, 16}, {23, "DT_UINT64", Kind::kUnsigned, 8, 17},
    {10, "DT_BOOL", Kind::kBoolean, 1, 11},   {7, "DT_STRING", Kind::kText, 0, 8},
};

inline constexpr Type kInference[] = {
    {0, "BYTES", Kind::kText, 0, 8},       {0, "INT8", Kind::kSigned, 1, 2},    {0, "INT16", Kind::kSigned, 2, 2},
    {0, "INT32", Kind::kSigned, 4, 2},     {0, "INT64", Kind::kSigned, 8, 3},   {0, "UINT8", Kind::kUnsigned, 1, 4},
    {0, "UINT16", Kind::kUnsigned, 2, 4},  {0, "UINT32", Kind::kUnsigned, 4, 4}, {0, "UINT64", Kind::kUnsigned, 8, 5},
    {0, "FP16", Kind::kFloat, 2, 0},       {0, "FP32", Kind::kFloat, 4, 6},     {0, "FP64", Kind::kFloat, 8, 7},
    {0, "BOOL", Kind::kBoolean, 1, 1},
};

[[noreturn]] inline void refuse(const Tensor& tensor, const std::string& what) {
  throw std::invalid_argument("input '" + tensor.name + "'" + what);
}

inline std::string listed(std::span<const Type> types) {
  std::string names;
  for (const Type& one : types) names += (names.empty() ? "" : ", ") + std::string(one.name);
  return names;
}

inline std::string shown(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Sets the number of values that the shape takes.
inline void measure(Tensor& tensor) {
  if (tensor.shape.empty() || *std::min_element(tensor.shape.begin(), tensor.shape.end()) < 0)
    refuse(tensor, ": shape must have one or more dimensions, none negative, not " + shown(tensor.shape));
  size_t values = 1;
  bool fits = true;
  for (const int64_t extent : tensor.shape) {
    fits &= static_cast<uint64_t>(extent) <= kMaxTensorValues;
    values = fits ? values * static_cast<size_t>(extent) : 0;  // both factors are small
    fits &= values <= kMaxTensorValues;
  }
  if (!fits)
    throw std::overflow_error("input '" + tensor.name + "' may have at most " + std::to_string(kMaxTensorValues) +
                              " values, not those of shape " + shown(tensor.shape));
  tensor.size = values;
}

inline void add(Tensor& tensor, const Type& type, uint64_t bits) {
  switch (type.kind) {
    case Kind::kFloat:
      tensor.floats.push_back(type.width == 8   ? std::bit_cast<double>(bits)
                              : type.width == 4 ? static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits)))
                                                : static_cast<double>(Float16::widen(static_cast<uint16_t>(bits))));
      break;
    case Kind::kBoolean: tensor.integers.push_back(bits != 0); break;
    default: tensor.integers.push_back(bits);
  }
}

// Values that lie one after another, little-endian.
inline void read_dense(Tensor& tensor, const Type& type, std::string_view data) {
  if (data.size() % type.width) {
    refuse(tensor, ": " + std::to_string(data.size()) + " bytes are not a whole number of " + std::string(type.name) +
                       " values");
  }
  const int unused = 64 - 8 * type.width;
  (type.kind == Kind::kFloat ? tensor.floats.reserve(data.size() / type.width)
                             : tensor.integers.reserve(data.size() / type.width));
  for (size_t at = 0; at < data.size(); at += type.width) {
    uint64_t bits = 0;
    std::memcpy(&bits, data.data() + at, type.width);
    if (type.kind == Kind::kSigned) bits = static_cast<uint64_t>(static_cast<int64_t>(bits << unused) >> unused);
    add(tensor, type, bits);
  }
}

// Texts that are preceded by their length, in four bytes.
inline void read_texts(Tensor& tensor, std::string_view data) {
  for (size_t at = 0; at < data.size();) {
    uint32_t size = 0;
    const size_t left = data.size() - at;
    if (left >= sizeof size) std::memcpy(&size, data.data() + at, sizeof size);
    if (left < sizeof size || size > left - sizeof size)
      refuse(tensor, ": the last text is truncated; expected texts, each preceded by its length in four bytes");
    tensor.texts.push_back(data.substr(at + sizeof size, size));
    at += sizeof size + size;
  }
}

// A varint as an integer of 32 or 64 bits: longer ones are cut, as protobuf does.
inline uint64_t cut(const Type& type, uint64_t bits) {
  if (type.width == 8 || type.kind == Kind::kFloat || type.kind == Kind::kBoolean) return bits;
  const auto low = static_cast<uint32_t>(bits);
  return type.kind == Kind::kSigned ? static_cast<uint64_t>(int64_t{static_cast<int32_t>(low)}) : low;
}

// Values of a message's field.
inline void read_field(Tensor& tensor, const Type& type, std::string_view message) {
  const Wire wire = type.kind != Kind::kFloat ? Wire::kVarint : type.width == 8 ? Wire::kFixed64 : Wire::kFixed32;
  for (ProtobufReader reader(message); reader.next();) {
    if (type.kind != Kind::kText) reader.scalars(type.field, wire, [&](uint64_t bits) { add(tensor, type, cut(type, bits)); });
    else if (reader.is(type.field, Wire::kBytes)) tensor.texts.push_back(reader.bytes());
  }
}

// REQUIRES: texts are views of one text, in its order; begin and end are those of the first and the last.
inline bool is_ascii(const char* begin, const char* end) {
  char high = 0;
  for (const char* p = begin; p < end; ++p) high |= *p;
  return !(high & 0x80);
}

// Where the values are not as many as the shape says, or texts are not UTF-8, it is refused.
inline Tensor checked(Tensor&& tensor, bool last_stands_for_more = false) {
  const size_t stored = tensor.stored();
  if (stored != tensor.size && !(last_stands_for_more && 0 < stored && stored < tensor.size)) {
    refuse(tensor, " has " + std::to_string(stored) + " values, which do not fill its shape " + shown(tensor.shape));
  }
  if (!tensor.texts.empty() && !is_ascii(tensor.texts.front().data(), tensor.texts.back().data() + tensor.texts.back().size())) {
    for (const std::string_view text : tensor.texts)
      if (find_bad_utf8(text.data(), text.data() + text.size())) refuse(tensor, " has a value that is not UTF-8");
  }
  return std::move(tensor);
}

inline const Type& inference_type(const Tensor& tensor, std::string_view name) {
  for (const Type& one : kInference)
    if (one.name == name) return one;
  refuse(tensor, ": datatype '" + std::string(name) + "' is not one of " + listed(kInference));
}

inline Tensor read_binary(Tensor&& tensor, std::string_view datatype, std::string_view data) {
  const Type& type = inference_type(tensor, datatype);
  tensor.kind = type.kind;
  measure(tensor);
  if (type.kind == Kind::kText) read_texts(tensor, data);
  else read_dense(tensor, type, data);
  return checked(std::move(tensor));
}

inline Tensor read_proto(Tensor&& tensor, std::string_view message) {
  int32_t dtype = 0;
  std::string_view content;
  for (ProtobufReader reader(message); reader.next();) {
    if (reader.is(1, Wire::kVarint)) dtype = static_cast<int32_t>(reader.number());
    if (reader.is(4, Wire::kBytes)) content = reader.bytes();
    if (!reader.is(2, Wire::kBytes)) continue;
    for (ProtobufReader shape(reader.bytes()); shape.next();) {
      if (!shape.is(2, Wire::kBytes)) continue;
      int64_t extent = 0;
      for (ProtobufReader dim(shape.bytes()); dim.next();)
        if (dim.is(1, Wire::kVarint)) extent = static_cast<int64_t>(dim.number());
      tensor.shape.push_back(extent);
    }
  }
  const auto* const type = std::find_if(std::begin(kTensorFlow), std::end(kTensorFlow),
                                        [&](const Type& one) { return one.number == dtype; });
  if (type == std::end(kTensorFlow)) refuse(tensor, ": dtype " + std::to_string(dtype) + " is not one of " + listed(kTensorFlow));
  tensor.kind = type->kind;
  measure(tensor);
  if (!content.empty() && type->kind != Kind::kText) {
    read_dense(tensor, *type, content);
    return checked(std::move(tensor));
  }
  read_field(tensor, *type, message);
  return checked(std::move(tensor), true);
}

inline Tensor read_input(Tensor&& tensor, std::string_view message, std::optional<std::string_view> raw) {
  std::string_view datatype;
  std::vector<std::string_view> contents;
  for (ProtobufReader reader(message); reader.next();) {
    if (reader.is(1, Wire::kBytes)) tensor.name = reader.bytes();
    if (reader.is(2, Wire::kBytes)) datatype = reader.bytes();
    if (reader.is(5, Wire::kBytes)) contents.push_back(reader.bytes());
    reader.scalars(3, Wire::kVarint, [&](uint64_t extent) { tensor.shape.push_back(static_cast<int64_t>(extent)); });
  }
  for (const std::string_view one : {std::string_view(tensor.name), datatype})
    if (find_bad_utf8(one.data(), one.data() + one.size())) throw MalformedProtobuf();
  if (raw) return read_binary(std::move(tensor), datatype, *raw);
  const Type& type = inference_type(tensor, datatype);
  if (!type.field) refuse(tensor, ": " + std::string(type.name) + " values must be raw");
  tensor.kind = type.kind;
  measure(tensor);
  for (const std::string_view one : contents) read_field(tensor, type, one);
  return checked(std::move(tensor));
}

}  // namespace tensor_parts

// A TensorProto: its values are in `tensor_content` or in the field of their type.
inline Tensor read_tensorflow_tensor(const std::string& name, std::string_view message) {
  try {
    return tensor_parts::read_proto({.name = name}, message);
  } catch (const MalformedProtobuf&) {
    throw std::invalid_argument("input '" + name + "' is not a TensorProto");
  }
}

// An InferInputTensor: its values are in its contents, or in the `raw` bytes beside it.
inline Tensor read_inference_tensor(std::string_view message, std::optional<std::string_view> raw) {
  try {
    return tensor_parts::read_input({}, message, raw);
  } catch (const MalformedProtobuf&) {
    throw std::invalid_argument("one of the inputs is not an InferInputTensor");
  }
}

// A tensor of the Open Inference Protocol's binary extension.
inline Tensor read_binary_tensor(std::string name, std::vector<int64_t> shape, std::string_view datatype, std::string_view data) {
  return tensor_parts::read_binary({.name = std::move(name), .shape = std::move(shape)}, datatype, data);
}

}  // namespace streamtrain
