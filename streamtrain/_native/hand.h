// Which rows leave memory for the disk: those that have not been used for longest, by the clock algorithm.
//
// Each use of a row counts but the one that it came for, up to a few; a hand goes round the ids, takes one from every
// count and lets go of rows that have none left. So a row that is used often stays through a few rounds, and one that is
// never seen again goes at the first. Costs a byte per row, and a few visits of neighbouring bytes for each row let go.
//
// Thread safety: external synchronisation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace streamtrain {

class ClockHand {
 public:
  static constexpr uint8_t kMost = 3;

  // A row came to an id, to be used.
  void came(uint32_t id) {
    if (id >= counts_.size()) counts_.resize(std::max<size_t>(size_t{id} + 1, counts_.size() + counts_.size() / 8));
    counts_[id] = kNew;
  }
  void used(uint32_t id) {
    uint8_t& count = counts_[id];
    count = count == kNew ? 0 : static_cast<uint8_t>(std::min<int>(count + 1, kMost));
  }
  // Where the hand goes on.
  void put(uint32_t id) { at_ = id; }
  void moved(uint32_t from, uint32_t to) { counts_[to] = counts_[from]; }

  // Visits at most `limit` ids below `end` and calls leave(id), which says whether there was a row, until it has `most`
  // times; returns how many times that was.
  template <typename Leave>
  uint32_t run(uint32_t end, uint32_t limit, uint32_t most, Leave leave) {
    uint32_t left = 0;
    for (; end && limit && left < most; --limit, ++at_) {
      if (at_ >= end) at_ = 0;
      if (counts_[at_] && counts_[at_] != kNew) --counts_[at_];
      else left += leave(at_);
    }
    return left;
  }

  size_t bytes() const { return counts_.capacity(); }

 private:
  static constexpr uint8_t kNew = UINT8_MAX;

  std::vector<uint8_t> counts_;
  uint32_t at_ = 0;
};

}  // namespace streamtrain
