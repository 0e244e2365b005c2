// A consistent view of the table as it was at one moment, read in parts while training continues.
//
// Copy on write, row by row: before a row that has not been read yet changes or goes away, its bytes are put aside.
// The reader takes what was put aside first, so little piles up as long as it keeps reading. Rows that came after the
// beginning are not part of the view, also when they use the id of a removed one.
//
// Thread safety: external synchronisation.
// Invariant: a set bit means that the row's own bytes are not part of the view: they were put aside, or came later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "aside.h"
#include "pages.h"
#include "rows.h"

namespace streamtrain {

class Snapshot {
 public:
  void begin(uint32_t end) {
    if (open_) throw std::logic_error("a snapshot is open already");
    bits_ = Pages(end / 8 + 1);  // untouched zeroes, so that beginning takes no time
    cursor_ = 0;
    end_ = end;
    open_ = true;
  }

  // What it held, whose memory so need not be let go of at once.
  Snapshot end() {
    if (!open_) throw std::logic_error("no snapshot is open");
    return std::exchange(*this, Snapshot());
  }

  bool open() const { return open_; }

  // To be called before a live row changes or goes away.
  void before_change(uint32_t id, const std::byte* row, size_t stride) {
    if (!open_ || !unread(id)) return;
    aside_.put(row, stride);
    exclude(id);
  }

  // To be called when an id gets a new row.
  void inserted(uint32_t id) noexcept {
    if (open_ && unread(id)) exclude(id);
  }

  // A row of the view that was on disk leaves it unread.
  void put_aside(const std::byte* row, size_t stride) { aside_.put(row, stride); }

  // Calls take(row bytes) for each row of the next part, visiting at most `limit` rows; false when all has been read.
  template <typename Take>
  bool read(const RowStore& rows, uint32_t limit, Take take) {
    if (!open_) throw std::logic_error("no snapshot is open");
    if (aside_.empty() && cursor_ == end_) return false;
    for (; limit && !aside_.empty(); --limit) aside_.take(take);
    for (; limit && cursor_ < end_; --limit, ++cursor_) {
      const std::byte* row = rows.row(cursor_);
      if (RowLayout::header(row)->live() && unread(cursor_)) take(row);
    }
    return true;
  }

  size_t bytes() const { return bits_.size() + aside_.bytes(); }

 private:
  bool unread(uint32_t id) const {
    return id >= cursor_ && id < end_ && !(std::to_integer<uint32_t>(bits_.data()[id / 8]) >> (id % 8) & 1);
  }
  void exclude(uint32_t id) noexcept { bits_.data()[id / 8] |= std::byte{1} << (id % 8); }

  bool open_ = false;
  uint32_t cursor_ = 0, end_ = 0;
  Pages bits_;
  RowsAside aside_;
};

}  // namespace streamtrain
