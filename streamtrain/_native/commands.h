// Commands on the fields of hashes in the Redis protocol: one for each bucket, with all fields that are in it.
//
//   command = "*" arguments CRLF bulk(verb) bulk(name) field*         name  = before, six hexadecimal digits, after
//   field   = bulk(key, 8 bytes little-endian) [bulk(row)]            bulk(x) = "$" length CRLF x CRLF
//
// Thread safety: pure functions.
#pragma once

#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "place.h"

namespace streamtrain {

inline constexpr int64_t kMaxBuckets = 1 << 24;  // what six hexadecimal digits tell apart

// Things by their buckets: those of bucket buckets[i] are order[starts[i]] to order[starts[i + 1]], in their order.
struct Grouped {
  std::vector<int64_t> order, buckets, starts;  // buckets ascend
};

// A radix sort of the buckets' two halves. Throws std::invalid_argument if one is negative or kMaxBuckets or more.
inline Grouped group_by_bucket(std::span<const int64_t> of) {
  constexpr uint32_t kDigits = 1 << 12;
  std::array<std::vector<size_t>, 2> at{std::vector<size_t>(kDigits), std::vector<size_t>(kDigits)};
  for (const int64_t bucket : of) {
    if (bucket < 0 || bucket >= kMaxBuckets) throw std::invalid_argument("a bucket must be between 0 and 2^24 - 1");
    ++at[0][bucket % kDigits];
    ++at[1][bucket / kDigits];
  }
  for (auto& counts : at) std::exclusive_scan(counts.begin(), counts.end(), counts.begin(), size_t{0});
  Grouped out{std::vector<int64_t>(of.size()), {}, {}};
  std::vector<int64_t> by_low(of.size());
  for (size_t i = 0; i < of.size(); ++i) by_low[at[0][of[i] % kDigits]++] = static_cast<int64_t>(i);
  for (const int64_t i : by_low) out.order[at[1][of[i] / kDigits]++] = i;
  for (size_t i = 0; i < of.size(); ++i) {
    const int64_t bucket = of[out.order[i]];
    if (!out.buckets.empty() && out.buckets.back() == bucket) continue;
    out.buckets.push_back(bucket);
    out.starts.push_back(static_cast<int64_t>(i));
  }
  out.starts.push_back(static_cast<int64_t>(of.size()));
  return out;
}

// Of equal keys the last: their indices, ascending. The result is a function of the keys and their order.
inline std::vector<int64_t> last_of_each(std::span<const uint64_t> keys) {
  if (keys.size() >= std::numeric_limits<uint32_t>::max())
    throw std::invalid_argument("there must be fewer than 2^32 - 1 keys");
  KeySlots slots;
  slots.reset(keys.size());
  std::vector<int64_t> out;
  out.reserve(keys.size());
  for (size_t i = keys.size(); i-- > 0;) {
    uint32_t& slot = slots.find(keys[i], keys.data());
    if (slot) continue;
    slot = static_cast<uint32_t>(i + 1);
    out.push_back(static_cast<int64_t>(i));
  }
  return {out.rbegin(), out.rend()};
}

// What all commands have in common, and the fields that they may have.
struct FieldCommands {
  std::string_view verb, before, after;
  std::span<const uint64_t> keys;
  const uint8_t* rows = nullptr;  // [keys, width]; none: fields have no values
  size_t width = 0;
};

// Packs commands to a buffer of exactly the size that `size` told.
class FieldPacker {
 public:
  explicit FieldPacker(const FieldCommands& commands)
      : of_(commands),
        verb_(bulk(commands.verb) + frame('$', commands.before.size() + kDigits + commands.after.size()) +
              std::string(commands.before)),
        after_(std::string(commands.after) + "\r\n"),
        row_frame_(commands.rows ? frame('$', commands.width) : "") {}

  // Bytes of commands whose fields begin at `starts`.
  size_t size(std::span<const int64_t> starts) const {
    size_t sum = 0;
    for (size_t i = 0; i + 1 < starts.size(); ++i)
      sum += head(starts[i + 1] - starts[i]).size() + verb_.size() + kDigits + after_.size();
    const size_t row = of_.rows ? row_frame_.size() + of_.width + 2 : 0;
    return starts.size() < 2 ? 0 : sum + (starts.back() - starts.front()) * (kKeyFrame.size() + 8 + 2 + row);
  }

  // REQUIRES: starts ascend within `order`, whose elements are indices of keys; one bucket for each command.
  void pack(std::span<const int64_t> order, std::span<const int64_t> buckets, std::span<const int64_t> starts,
            char* out) const {
    constexpr int64_t kAhead = 16;  // rows lie anywhere
    for (size_t i = 0; i < buckets.size(); ++i) {
      put(out, head(starts[i + 1] - starts[i]));
      put(out, verb_);
      for (int shift = 4 * (kDigits - 1); shift >= 0; shift -= 4) *out++ = "0123456789abcdef"[buckets[i] >> shift & 15];
      put(out, after_);
      for (int64_t j = starts[i]; j < starts[i + 1]; ++j) {
        if (of_.rows && j + kAhead < static_cast<int64_t>(order.size()))
          __builtin_prefetch(of_.rows + order[j + kAhead] * of_.width);
        put_field(out, order[j]);
      }
    }
  }

 private:
  static constexpr int kDigits = 6;
  static constexpr std::string_view kKeyFrame = "$8\r\n";

  static std::string frame(char kind, size_t count) { return kind + std::to_string(count) + "\r\n"; }
  static std::string bulk(std::string_view value) { return frame('$', value.size()) + std::string(value) + "\r\n"; }

  static void put(char*& out, std::string_view value) {
    std::memcpy(out, value.data(), value.size());
    out += value.size();
  }

  // The first line of a command with `fields` fields.
  std::string head(int64_t fields) const { return frame('*', 2 + fields * (of_.rows ? 2 : 1)); }

  void put_field(char*& out, int64_t at) const {
    put(out, kKeyFrame);
    uint64_t key = of_.keys[at];
    if constexpr (std::endian::native == std::endian::big) key = __builtin_bswap64(key);
    std::memcpy(out, &key, 8);
    out += 8;
    put(out, "\r\n");
    if (!of_.rows) return;
    put(out, row_frame_);
    put(out, {reinterpret_cast<const char*>(of_.rows) + at * of_.width, of_.width});
    put(out, "\r\n");
  }

  const FieldCommands of_;
  const std::string verb_, after_, row_frame_;
};

}  // namespace streamtrain
