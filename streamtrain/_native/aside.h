// Copies of rows as they were, for a reader who comes to them after they changed; taken first put first.
//
// Thread safety: external synchronisation. A deque: it grows and shrinks without copying.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

namespace streamtrain {

class RowsAside {
 public:
  void put(const std::byte* row, size_t stride) { rows_.emplace_back(row, row + stride); }

  // Calls take(row bytes) for the first row. REQUIRES: not empty.
  template <typename Take>
  void take(Take take) {
    take(static_cast<const std::byte*>(rows_.front().data()));
    rows_.pop_front();
  }

  bool empty() const { return rows_.empty(); }
  size_t size() const { return rows_.size(); }
  size_t bytes() const { return rows_.empty() ? 0 : rows_.size() * (rows_.front().size() + sizeof rows_.front()); }

 private:
  std::deque<std::vector<std::byte>> rows_;
};

}  // namespace streamtrain
