// A reader of protobuf's wire format, field by field, in place.
//
// https://protobuf.dev/programming-guides/encoding
//
// Groups, which proto3 does not have, are refused.
// Thread safety: none; views are valid as long as the message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace streamtrain {

struct MalformedProtobuf : std::runtime_error {
  MalformedProtobuf() : std::runtime_error("malformed protobuf") {}
};

class ProtobufReader {
 public:
  enum class Wire : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

  explicit ProtobufReader(std::string_view message) : at_(message.data()), end_(at_ + message.size()) {}

  // Reads a field; false at the end. Throws MalformedProtobuf.
  bool next() {
    if (at_ == end_) return false;
    const uint64_t tag = varint();
    field_ = static_cast<uint32_t>(tag >> 3);
    if (tag >> 32 || field_ == 0) malformed();
    switch (wire_ = static_cast<Wire>(tag & 7)) {
      case Wire::kVarint: number_ = varint(); return true;
      case Wire::kFixed64: number_ = fixed<uint64_t>(); return true;
      case Wire::kFixed32: number_ = fixed<uint32_t>(); return true;
      case Wire::kBytes: {
        const uint64_t size = varint();
        if (size > static_cast<uint64_t>(end_ - at_)) malformed();
        bytes_ = {at_, static_cast<size_t>(size)};
        at_ += size;
        return true;
      }
      default: malformed();
    }
  }

  // Whether the field read last is `field`, in this form. One in another form is unknown, as to protobuf.
  bool is(uint32_t field, Wire wire) const { return field_ == field && wire_ == wire; }

  uint64_t number() const { return number_; }         // REQUIRES: the last field is a varint, or fixed
  std::string_view bytes() const { return bytes_; }   // REQUIRES: it is bytes

  // Calls take(number) for each value of a repeated scalar, packed or not, if the field read last is that.
  template <typename Take>
  void scalars(uint32_t field, Wire wire, Take&& take) const {
    if (is(field, wire)) take(number_);
    if (!is(field, Wire::kBytes)) return;
    for (ProtobufReader packed(bytes_); packed.at_ != packed.end_;)
      take(wire == Wire::kVarint ? packed.varint() : wire == Wire::kFixed64 ? packed.fixed<uint64_t>() : packed.fixed<uint32_t>());
  }

 private:
  [[noreturn]] static void malformed() { throw MalformedProtobuf(); }

  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 70 && at_ != end_; shift += 7) {
      const auto byte = static_cast<uint8_t>(*at_++);
      value |= static_cast<uint64_t>(byte & 0x7F) << (shift < 64 ? shift : 63);
      if (!(byte & 0x80)) return value;
    }
    malformed();
  }

  template <typename T>
  T fixed() {
    T value;
    if (static_cast<size_t>(end_ - at_) < sizeof value) malformed();
    std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    return value;
  }

  const char* at_;
  const char* end_;
  uint32_t field_ = 0;
  Wire wire_ = Wire::kVarint;
  uint64_t number_ = 0;
  std::string_view bytes_;
};

}  // namespace streamtrain
