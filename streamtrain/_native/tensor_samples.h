// Samples whose columns are tensors.
//
// A tensor of shape [n] or [n, 1] has a value for each sample, one of shape [n, k] a list of k ids. Where lists differ in
// length, integers [n] say how many of the k count.
//
// Thread safety: immutable once all columns are there.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tensor.h"

namespace streamtrain {

struct TensorColumn {
  const Tensor* tensor;
  bool is_list;
  size_t width;           // values of a sample
  const Tensor* lengths;  // of them those that count, by sample; nullptr: all

  size_t length(size_t row) const { return lengths ? static_cast<size_t>(lengths->integer(row)) : width; }
};

inline constexpr size_t kMaxTensorWidth = size_t{1} << 19;  // values of a sample: as many as ids in a message of 1 MiB

class TensorSamples {
 public:
  // Adds a column, whose tensors outlive this; `is_ids`: whether it may hold lists. Throws std::invalid_argument, or
  // std::overflow_error where samples are too large.
  void add(const Tensor& tensor, bool is_ids, const Tensor* lengths) {
    using namespace tensor_parts;
    const std::vector<int64_t>& shape = tensor.shape;
    const auto count = static_cast<size_t>(shape[0]);
    if (!columns_.empty() && count != size_) {
      throw std::invalid_argument("inputs must have the same first dimension: '" + columns_[0].tensor->name + "' has " +
                                  shown(columns_[0].tensor->shape) + ", '" + tensor.name + "' " + shown(shape));
    }
    size_ = count;
    const bool is_single = shape.size() == 1 || (shape.size() == 2 && shape[1] == 1);
    if (shape.size() > 2 || (!is_single && !is_ids)) {
      refuse(tensor, std::string(" must be of shape ") + (is_ids ? "[n], [n, 1] or [n, k]" : "[n] or [n, 1]") + ", not " +
                         shown(shape));
    }
    for (const double value : tensor.floats)
      if (!std::isfinite(value)) refuse(tensor, " has a value that is not finite");
    const size_t width = shape.size() == 2 ? static_cast<size_t>(shape[1]) : 1;
    if ((width_ += width) > kMaxTensorWidth) {
      throw std::overflow_error("input '" + tensor.name + "': a sample may have at most " +
                                std::to_string(kMaxTensorWidth) + " values");
    }
    if (lengths) check_lengths(*lengths, width);
    columns_.push_back({&tensor, !is_single || lengths, width, lengths});
  }

  size_t size() const { return size_; }
  size_t width() const { return width_; }  // values of a sample, over all columns
  const std::vector<TensorColumn>& columns() const { return columns_; }

  // A sample as JSON. REQUIRES: row < size().
  std::string json(size_t row) const {
    std::string text;
    for (const TensorColumn& column : columns_) {
      text += text.empty() ? '{' : ',';
      write_text(column.tensor->name, text);
      text += column.is_list ? ":[" : ":";
      for (size_t i = 0; i < column.length(row); ++i) {
        if (i) text += ',';
        write_value(*column.tensor, row * column.width + i, text);
      }
      if (column.is_list) text += ']';
    }
    return text += text.empty() ? "{}" : "}";
  }

 private:
  void check_lengths(const Tensor& lengths, size_t width) const {
    const bool are_integers = lengths.kind == Tensor::Kind::kSigned || lengths.kind == Tensor::Kind::kUnsigned;
    bool fit = are_integers && lengths.size == size_;
    for (const uint64_t one : lengths.integers) fit = fit && one <= width;  // negative ones are large
    if (!fit) {
      tensor_parts::refuse(lengths, " must be " + std::to_string(size_) + " integers from 0 to " + std::to_string(width));
    }
  }

  static void write_value(const Tensor& tensor, size_t at, std::string& text) {
    char digits[32];
    const auto write = [&](auto value) { text.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr); };
    switch (tensor.kind) {
      case Tensor::Kind::kText: write_text(tensor.text(at), text); return;
      case Tensor::Kind::kBoolean: text += tensor.integer(at) ? "true" : "false"; return;
      case Tensor::Kind::kSigned: write(static_cast<int64_t>(tensor.integer(at))); return;
      case Tensor::Kind::kUnsigned: write(tensor.integer(at)); return;
      case Tensor::Kind::kFloat: break;
    }
    const size_t start = text.size();
    write(tensor.number(at));
    if (text.find_first_of(".e", start) == std::string::npos) text += ".0";  // it is no integer, which an id might be
  }

  static void write_text(std::string_view value, std::string& text) {
    static constexpr char kHex[] = "0123456789abcdef";
    text += '"';
    for (const char c : value) {
      if (c == '"' || c == '\\') (text += '\\') += c;
      else if (static_cast<uint8_t>(c) >= 0x20) text += c;
      else ((text += "\\u00") += kHex[c >> 4]) += kHex[c & 15];
    }
    text += '"';
  }

  std::vector<TensorColumn> columns_;
  size_t size_ = 0, width_ = 0;
};

}  // namespace streamtrain
