// Which rows go when a table exceeds its capacity: approximately those not seen for longest.
//
// A hand sweeps over the row ids and takes the rows whose last_seen is at or below a threshold: the 1/8-quantile of
// a random sample of 4096 rows (or a higher one if a single call must take more than 1/8 of the rows).
// Guarantee: in a table of at most 4096 row ids the sample is the whole table, and only rows among the oldest eighth
// (with ties) are taken; in a larger one the threshold lies, with probability 1 - 1e-9, between the quantiles 0.09
// and 0.16. The threshold is drawn again after the hand has passed 1/16 of the ids, within which rows only get
// younger. After two rounds without enough, which takes adversarial times, any row will do: eviction always ends.
// Costs: about 8 visits of neighbouring rows per row taken. All choices are functions of the table's history, so a
// replay makes the same ones.
//
// Thread safety: external synchronisation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "bits.h"
#include "rows.h"

namespace streamtrain {

class EvictionClock {
 public:
  // To be called before the first of the calls of run that take an excess away.
  void begin(const RowStore& rows, uint32_t excess) {
    patience_ = uint64_t{2} * rows.end();
    if (excess > rows.end() / 16) budget_ = 0;  // the threshold at hand was drawn for smaller calls
  }

  // Visits at most `limit` rows and calls evict(id) for live ones that count(id), at most `excess`; returns for how many.
  // REQUIRES: last_seen is kept; excess <= live rows that count; evict removes the row.
  template <typename Count, typename Evict>
  uint32_t run(const RowStore& rows, const RowLayout& layout, uint32_t excess, uint32_t limit, Count count,
               Evict evict) {
    const uint32_t end = rows.end(), wanted = excess;
    for (; excess && limit; --limit) {
      if (budget_ == 0) {
        draw(rows, layout, excess);
        budget_ = std::max(end / 16, 1u);
      }
      if (hand_ >= end) hand_ = 0;
      const std::byte* row = rows.row(hand_);
      if (RowLayout::header(row)->live() && (layout.last_seen(row) <= threshold_ || patience_ == 0) &&
          count(hand_)) {
        evict(hand_);
        --excess;
      }
      ++hand_;
      --budget_;
      if (patience_) --patience_;
    }
    return wanted - excess;
  }

 private:
  static constexpr uint32_t kSample = 4096;

  void draw(const RowStore& rows, const RowLayout& layout, uint32_t excess) {
    const uint32_t end = rows.end();
    std::vector<uint32_t> times;
    times.reserve(kSample);
    const auto look = [&](uint32_t id) {
      const std::byte* row = rows.row(id);
      if (RowLayout::header(row)->live()) times.push_back(layout.last_seen(row));
    };
    if (end <= kSample) {
      for (uint32_t id = 0; id < end; ++id) look(id);
    } else {
      for (uint32_t i = 0; i < 4 * kSample && times.size() < kSample; ++i)
        look(static_cast<uint32_t>(((mix64(++draws_) >> 32) * end) >> 32));
    }
    threshold_ = UINT32_MAX;
    if (times.empty()) return;
    const double share = std::max(0.125, static_cast<double>(excess) / rows.live());
    const auto rank = static_cast<size_t>(share * static_cast<double>(times.size()));
    const auto at = times.begin() + static_cast<ptrdiff_t>(rank ? std::min(rank, times.size()) - 1 : 0);
    std::nth_element(times.begin(), at, times.end());
    threshold_ = *at;
  }

  uint32_t hand_ = 0, threshold_ = 0, budget_ = 0;
  uint64_t draws_ = 0, patience_ = 0;
};

}  // namespace streamtrain
