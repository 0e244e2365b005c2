// Storage of rows: what one row is, and where rows live.
//
// One row is one buffer; reading it for a pull touches its header and embedding only:
//   0   key        u64
//   8   meta       u32: 28 bits count of occurrences (saturating), 1 bit live, 3 bits dirty channels
//   12  last_seen  u32: event time of the last occurrence, seconds; 0: not known. Only where it is kept
//   ..  embedding  dim x 4 or 2 bytes
//   ..  state      floats of the optimizer, from the next multiple of 4
// A multiple of 4, so keys need not be aligned. Rows live in blocks of a power-of-two number of rows, at most 64 MiB,
// that never move. A block is address space until its rows are touched, so a large one costs nothing and keeps the list
// of blocks in cache. Ids of removed rows are used again, last first; memory once touched stays with the table, unless
// gaps are closed: the last rows move to the ids of removed ones, until all ids in use are the first ones.
//
// Thread safety: external synchronisation; const functions may run together.
// Invariant: a row that is not live holds the next free id in its key, but for those from gap_ on while gaps are closed;
// its dirty bits stay (see dirty.h), unless its memory was let go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "half.h"
#include "index.h"
#include "pages.h"

namespace streamtrain {

struct __attribute__((packed, aligned(4))) RowHeader {
  static constexpr uint32_t kMaxCount = (1u << 28) - 1;
  static constexpr uint32_t kLive = 1u << 28;
  static constexpr uint32_t kDirtyShift = 29;

  uint64_t key;
  uint32_t meta;

  bool live() const { return meta & kLive; }
  uint32_t count() const { return meta & kMaxCount; }
  void set_count(uint64_t count) {
    meta = (meta & ~kMaxCount) | static_cast<uint32_t>(count < kMaxCount ? count : kMaxCount);
  }
};
static_assert(sizeof(RowHeader) == 12);

// Where the parts of a row are.
struct RowLayout {
  Storage storage;
  bool keeps_time;  // last_seen
  uint32_t dim, state_size;
  size_t embedding_offset, state_offset, stride;

  RowLayout(Storage s, bool time, size_t d, size_t state)
      : storage(s),
        keeps_time(time),
        dim(static_cast<uint32_t>(d)),
        state_size(static_cast<uint32_t>(state)),
        embedding_offset(sizeof(RowHeader) + (time ? sizeof(uint32_t) : 0)),
        state_offset((embedding_offset + d * element_size(s) + 3) / 4 * 4),
        stride(state_offset + state * sizeof(float)) {}

  template <typename Byte>  // std::byte or const std::byte
  static auto header(Byte* row) {
    if constexpr (std::is_const_v<Byte>) return reinterpret_cast<const RowHeader*>(row);
    else return reinterpret_cast<RowHeader*>(row);
  }
  template <typename Byte>
  Byte* embedding(Byte* row) const { return row + embedding_offset; }
  // 0 where it is not kept.
  uint32_t last_seen(const std::byte* row) const {
    return keeps_time ? *reinterpret_cast<const uint32_t*>(row + sizeof(RowHeader)) : 0;
  }
  void set_last_seen(std::byte* row, uint32_t time) const {
    if (keeps_time) *reinterpret_cast<uint32_t*>(row + sizeof(RowHeader)) = time;
  }
  template <typename Byte>
  auto state(Byte* row) const {
    if constexpr (std::is_const_v<Byte>) return reinterpret_cast<const float*>(row + state_offset);
    else return reinterpret_cast<float*>(row + state_offset);
  }
};

class RowStore {
 public:
  explicit RowStore(const RowLayout& layout) : stride_(layout.stride) {
    while ((size_t{2} << shift_) * stride_ <= kBlockBytes) ++shift_;
  }

  std::byte* row(uint32_t id) const {
    return blocks_[id >> shift_].data() + (id & ((1u << shift_) - 1)) * stride_;
  }
  RowHeader* header(uint32_t id) const { return RowLayout::header(row(id)); }

  // Asks for the cache lines of a row's first `bytes`, up to a dozen: beyond that the processor sees the pattern
  // itself.
  template <int kForWriting>
  void prefetch(uint32_t id, size_t bytes) const {
    const auto begin = reinterpret_cast<uintptr_t>(row(id));
    const uintptr_t end = begin + (bytes < 12 * 64 ? bytes : 12 * 64);
    for (uintptr_t line = begin & ~uintptr_t{63}; line < end; line += 64)
      prefetch_line<kForWriting>(reinterpret_cast<const void*>(line));
  }

  // An id whose row is not live and has no contents yet.
  uint32_t allocate() {
    if (free_ != kNoRow) {
      const uint32_t id = free_;
      free_ = static_cast<uint32_t>(header(id)->key);
      ++live_;
      return id;
    }
    // While gaps are closed, new rows must not come faster than these: each looks for one, too.
    for (int looks = 0; gap_ < end_ && looks < 8; ++looks, ++gap_) {
      if (header(gap_)->live()) continue;
      ++live_;
      return gap_++;
    }
    if (end_ == kUndecided - 1) throw std::length_error("the table has run out of row ids (2^32)");
    if (end_ >> shift_ == blocks_.size())
      blocks_.emplace_back(stride_ << shift_, blocks_.empty() ? kHugePage : 0);
    ++live_;
    return end_++;
  }

  void release(uint32_t id) noexcept {
    RowHeader* h = header(id);
    h->meta &= ~(RowHeader::kMaxCount | RowHeader::kLive);
    --live_;
    if (id >= gap_) return;  // found when its turn comes
    h->key = free_;
    free_ = id;
  }

  void begin_closing() {
    gap_ = 0;
    free_ = kNoRow;
    kept_ = blocks_.size();
  }
  // Visits an id at either end, and calls move(from, to) if there is a row to be moved, which is dead afterwards; then
  // lets a block of memory go after the last row. How many visits that was as much work as; 0: all is done.
  template <typename Move>
  uint32_t close_gaps(Move move) {
    if (gap_ >= end_) {
      const size_t last = end_ >> shift_;
      if (kept_ > last + 1) {
        blocks_[--kept_].release(0);
        return kBlockVisits;
      }
      if (last < blocks_.size()) blocks_[last].release((end_ & ((1u << shift_) - 1)) * stride_);
      gap_ = UINT32_MAX;
      return 0;
    }
    if (!header(end_ - 1)->live()) {
      --end_;
    } else if (header(gap_)->live()) {
      ++gap_;
    } else {
      move(end_ - 1, gap_);
      ++gap_;
      --end_;
    }
    return 1;
  }

  uint32_t live() const { return live_; }
  uint32_t end() const { return end_; }  // all ids are below this one
  size_t bytes() const { return end_ * stride_ + blocks_.capacity() * sizeof(Pages); }

 private:
  static constexpr size_t kBlockBytes = size_t{64} << 20;
  static constexpr uint32_t kBlockVisits = 4096;  // letting 64 MiB go takes a millisecond or more

  size_t stride_;
  uint32_t shift_ = 0;
  uint32_t end_ = 0, live_ = 0, free_ = kNoRow;
  size_t kept_ = 0;  // while gaps are closed, blocks whose memory was not let go
  uint32_t gap_ = UINT32_MAX;  // while gaps are closed, all ids below it are in use or in the list of free ones
  std::vector<Pages> blocks_;
};

}  // namespace streamtrain
