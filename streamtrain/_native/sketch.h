// Admission: a count-min sketch that remembers how often keys without a row have been seen, in bounded memory.
//
// Four rows of `width` saturating 8-bit counters with conservative update (only counters below the new estimate are
// raised). An estimate is never below the true count since the last ageing, up to 255. Ageing: when what was added
// exceeds 8 x width, all counters are halved, so that yesterday's rare keys do not add up to frequent ones. Halving
// goes along with the following additions, 64 columns each, so that no call stalls and the result does not depend on
// how a stream is cut into calls.
//
// Column of a key in row r: (low + r * high) mod width; low and high are the halves of mix64(key ^ kSketchSalt), high
// made odd.
//
// Thread safety: external synchronisation. Invariant: cursor_ <= width_; columns before cursor_ are halved already.
// Format of bytes(): total u64, cursor u64, then row by row the counters; little-endian.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "bits.h"

namespace streamtrain {

class Sketch {
 public:
  static constexpr uint32_t kRows = 4, kMinWidth = 64, kMaxWidth = 1u << 28;
  static constexpr uint64_t kSketchSalt = 0xA0761D6478BD642FULL;
  static constexpr size_t kHeader = 2 * sizeof(uint64_t);

  explicit Sketch(uint32_t width) : width_(width), cursor_(width) {
    if (width < kMinWidth || width > kMaxWidth || !std::has_single_bit(width))
      throw std::invalid_argument("sketch_width must be a power of two between 64 and 2^28");
    cells_.resize(size_t{kRows} * width);
  }

  // Adds `count` occurrences of the key and returns its new estimate, at most 255.
  uint32_t add(uint64_t key, uint32_t count) {
    const uint64_t h = mix64(key ^ kSketchSalt);
    const auto low = static_cast<uint32_t>(h), high = static_cast<uint32_t>(h >> 32) | 1;
    uint8_t* cell[kRows];
    uint32_t estimate = 255;
    for (uint32_t r = 0; r < kRows; ++r) {
      cell[r] = &cells_[size_t{r} * width_ + ((low + r * high) & (width_ - 1))];
      estimate = std::min<uint32_t>(estimate, *cell[r]);
    }
    estimate = static_cast<uint32_t>(std::min<uint64_t>(uint64_t{estimate} + count, 255));
    for (uint8_t* c : cell) *c = std::max(*c, static_cast<uint8_t>(estimate));
    total_ += count;
    if (cursor_ < width_) {
      halve(cells_.data(), cursor_, cursor_ + kMinWidth);
      cursor_ += kMinWidth;
    } else if (total_ > uint64_t{8} * width_) {
      total_ /= 2;
      cursor_ = 0;
    }
    return estimate;
  }

  // How often the key has been added, as `add` would begin with.
  uint32_t estimate(uint64_t key) const {
    const uint64_t h = mix64(key ^ kSketchSalt);
    const auto low = static_cast<uint32_t>(h), high = static_cast<uint32_t>(h >> 32) | 1;
    uint32_t estimate = 255;
    for (uint32_t r = 0; r < kRows; ++r)
      estimate = std::min<uint32_t>(estimate, cells_[size_t{r} * width_ + ((low + r * high) & (width_ - 1))]);
    return estimate;
  }

  size_t byte_size() const { return kHeader + cells_.size(); }

  // REQUIRES: room for byte_size() bytes.
  void bytes(uint8_t* out) const {
    const uint64_t header[2] = {total_, cursor_};
    std::memcpy(out, header, kHeader);
    std::memcpy(out + kHeader, cells_.data(), cells_.size());
  }

  // Adds another sketch, saturating; into an empty sketch this is an exact copy.
  void merge(const uint8_t* data, size_t size) {
    uint64_t header[2];
    if (size != byte_size()) throw std::invalid_argument("a sketch of another width");
    std::memcpy(header, data, kHeader);
    if (header[1] > width_ || header[1] % kMinWidth) throw std::invalid_argument("not the bytes of a sketch");
    if (total_ == 0 && cursor_ == width_) {
      std::memcpy(cells_.data(), data + kHeader, cells_.size());
      total_ = header[0];
      cursor_ = static_cast<uint32_t>(header[1]);
      return;
    }
    std::vector<uint8_t> other(data + kHeader, data + size);
    halve(other.data(), static_cast<uint32_t>(header[1]), width_);  // both sides end their ageing first
    halve(cells_.data(), cursor_, width_);
    cursor_ = width_;
    for (size_t i = 0; i < cells_.size(); ++i)
      cells_[i] = static_cast<uint8_t>(std::min(255, cells_[i] + other[i]));
    total_ += header[0];
  }

 private:
  void halve(uint8_t* cells, uint32_t begin, uint32_t end) const {
    for (uint32_t r = 0; r < kRows; ++r) {
      uint8_t* row = cells + size_t{r} * width_;
      for (uint32_t c = begin; c < end; ++c) row[c] = static_cast<uint8_t>(row[c] >> 1);
    }
  }

  uint32_t width_, cursor_;
  uint64_t total_ = 0;
  std::vector<uint8_t> cells_;
};

}  // namespace streamtrain
