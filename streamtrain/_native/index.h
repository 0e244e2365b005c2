// From a key to its row id: 1024 small hash tables (segments) that grow one at a time.
//
// A segment is an array of buckets, each one cache line of 12 slots {8-bit tag, row id} (buckets.h). A key belongs in
// bucket home * buckets >> 32, or in the next one that has room; so any number of buckets will do, and growing copies
// in order. Nine lookups in ten look at one cache line only, whose tags are compared at once: a bucket has a small
// filter of the keys that have passed it, so that being full alone sends no lookup on. A segment grows by a tenth when
// it is 7/8 full, and the sizes of the segments are spread evenly over such a step: slots are 5/6 full on average, 6.4
// bytes per key, at any size. When the whole index grows, the segments do so one after another, and no call has to wait
// for more than a few.
//
// Bits of a key's place (place.h): 63..54 segment, 53..22 home, of which the upper ones decide, 21..18 bit of the filter,
// 17..10 tag. Keys with equal tags are told apart by the caller, who compares the whole key in the row ("match"). A slot does not say where its key belongs: growing, and erasing where
// keys have passed, ask the caller for keys of rows.
//
// KeyOf, in what follows: key_of(row) is the key of a row that is in the index; key_of.prefetch(row) asks for it.
//
// Thread safety: external synchronisation; const functions may run together.
// Invariants: every (key, row) is in at most one slot; all buckets from a key's own one to the one before the key are
// full and have it in their filters (deletion pulls followers back, so there are no tombstones); a bucket whose filter
// is not empty is full, so lookups end.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "buckets.h"
#include "pages.h"
#include "place.h"

namespace streamtrain {

inline constexpr uint32_t kNoRow = UINT32_MAX;
inline constexpr uint32_t kUndecided = UINT32_MAX - 1;

class Index {
 public:
  static constexpr double kKeyBytes = 6.4;     // on average
  static constexpr uint32_t kSegments = 1024;  // as many as the segment's bits of a place tell apart

  Index() = default;
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;
  ~Index() {
    for (Segment& s : segments_) memory_.release(s.buckets);
  }

  void prefetch(uint64_t key) const {
    const uint64_t place = place_of(key);
    const Segment& s = segment(place);
    prefetch_line(&s.buckets[home(place, s)]);
  }

  // The row of a slot with the key's tag for which match(row) holds, or kNoRow.
  template <typename Match>
  uint32_t find(uint64_t key, Match match) const {
    const uint64_t place = place_of(key);
    const Segment& s = segment(place);
    for (uint32_t b = home(place, s);; b = next(b, s)) {
      const Bucket& bucket = s.buckets[b];
      for (uint32_t mask = bucket.matches(tag(place)); mask; mask &= mask - 1) {
        const uint32_t row = bucket.rows[std::countr_zero(mask)];
        if (match(row)) return row;
      }
      if (!(bucket.passed & mark(place))) return kNoRow;
    }
  }

  // First look, to be confirmed in the row or by find: a row with the key's tag, kNoRow, or kUndecided if that takes
  // a look at a second bucket, whose memory is asked for.
  uint32_t glance(uint64_t key) const {
    const uint64_t place = place_of(key);
    const Segment& s = segment(place);
    const uint32_t b = home(place, s);
    const Bucket& bucket = s.buckets[b];
    if (const uint32_t mask = bucket.matches(tag(place))) return bucket.rows[std::countr_zero(mask)];
    if (!(bucket.passed & mark(place))) return kNoRow;
    prefetch_line(&s.buckets[next(b, s)]);
    return kUndecided;
  }

  // Makes room for one more key like this one, so that insert cannot fail.
  template <typename KeyOf>
  void reserve(uint64_t key, const KeyOf& key_of) {
    Segment& s = segment(place_of(key));
    if ((uint64_t{s.keys} + 1) * 2 > uint64_t{s.buckets.size()} * 21) grow(s, key_of);
  }

  // REQUIRES: reserve(key) before; the key is absent.
  void insert(uint64_t key, uint32_t row) noexcept {
    const uint64_t place = place_of(key);
    Segment& s = segment(place);
    const uint32_t own = home(place, s);
    uint32_t b = own, empty;
    for (; !(empty = s.buckets[b].empty()); b = next(b, s)) s.buckets[b].passed |= mark(place);
    s.buckets[b].put(static_cast<uint32_t>(std::countr_zero(empty)), tag(place), row, b != own);
    ++s.keys;
  }

  // REQUIRES: (key, from) is present.
  void replace(uint64_t key, uint32_t from, uint32_t to) noexcept {
    const uint64_t place = place_of(key);
    const Slot at = locate(place, from);
    segment(place).buckets[at.bucket].rows[at.slot] = to;
  }

  // REQUIRES: (key, row) is present.
  template <typename KeyOf>
  void erase(uint64_t key, uint32_t row, const KeyOf& key_of) noexcept {
    const uint64_t place = place_of(key);
    Segment& s = segment(place);
    --s.keys;
    for (Slot hole = locate(place, row);;) {
      Bucket& bucket = s.buckets[hole.bucket];
      bucket.clear(hole.slot);
      if (!bucket.passed) return;
      // Keys that passed by the full bucket have to be found without it: one of them fills the hole, if there is any.
      const Slot from = first_passer(s, hole.bucket, key_of);
      if (from.bucket == hole.bucket) return;
      const Bucket& later = s.buckets[from.bucket];
      const uint32_t moved = later.rows[from.slot];
      bucket.put(hole.slot, later.tags[from.slot], moved, home(place_of(key_of(moved)), s) != hole.bucket);
      hole = from;
    }
  }

  size_t bytes() const { return sizeof segments_ + memory_.bytes(); }

 private:
  using Buckets = BucketArray<Bucket>;

  struct Segment {
    Buckets buckets;
    uint32_t keys = 0;
  };
  struct Slot {
    uint32_t bucket, slot;
  };

  static uint8_t tag(uint64_t place) {
    const auto bits = static_cast<uint8_t>(place >> 10);
    return static_cast<uint8_t>(bits + !bits);
  }
  static uint16_t mark(uint64_t place) { return static_cast<uint16_t>(1u << (place >> 18 & 15)); }  // in Bucket::passed
  static uint32_t home(uint64_t place, const Segment& s) {
    return static_cast<uint32_t>(((place >> 22 & UINT32_MAX) * s.buckets.size()) >> 32);
  }
  static uint32_t next(uint32_t b, const Segment& s) { return b + 1 == s.buckets.size() ? 0 : b + 1; }
  Segment& segment(uint64_t place) { return segments_[place >> 54]; }
  const Segment& segment(uint64_t place) const { return segments_[place >> 54]; }

  // The first key that has passed bucket `hole`, or the bucket itself if there is none. Its filter becomes that of the
  // others.
  template <typename KeyOf>
  static Slot first_passer(const Segment& s, uint32_t hole, const KeyOf& key_of) noexcept {
    Slot first{hole, 0};
    uint32_t others = 0;
    for (uint32_t b = next(hole, s); b != hole; b = next(b, s)) {
      const Bucket& bucket = s.buckets[b];
      for (uint32_t mask = bucket.strays; mask; mask &= mask - 1) key_of.prefetch(bucket.rows[std::countr_zero(mask)]);
      for (uint32_t mask = bucket.strays; mask; mask &= mask - 1) {
        const auto j = static_cast<uint32_t>(std::countr_zero(mask));
        const uint64_t place = place_of(key_of(bucket.rows[j]));
        if (!passes(home(place, s), hole, b)) continue;
        if (first.bucket == hole) first = {b, j};
        else others |= mark(place);
      }
      if (!bucket.passed) break;
    }
    s.buckets[hole].passed = static_cast<uint16_t>(others);
    return first;
  }

  // Whether a key in bucket b has its own bucket at or before `hole`, going round.
  static bool passes(uint32_t own, uint32_t hole, uint32_t b) {
    return hole <= b ? own <= hole || own > b : own <= hole && own > b;
  }

  Slot locate(uint64_t place, uint32_t row) const noexcept {
    const Segment& s = segment(place);
    for (uint32_t b = home(place, s);; b = next(b, s))
      for (uint32_t mask = s.buckets[b].matches(tag(place)); mask; mask &= mask - 1) {
        const auto j = static_cast<uint32_t>(std::countr_zero(mask));
        if (s.buckets[b].rows[j] == row) return {b, j};
      }
  }

  // Copies bucket by bucket, having asked for the keys of those a few buckets ahead: rows are anywhere in memory. Keys
  // for which their own buckets have no room come last: so there are as few of them as can be.
  template <typename KeyOf>
  void grow(Segment& s, const KeyOf& key_of) {
    constexpr uint32_t kAhead = 4;
    const uint32_t from = s.buckets.size(), to = larger_size(from, static_cast<double>(&s - segments_.data()) / kSegments);
    std::vector<uint8_t> used(to);  // slots: reading them as a whole just after writing one would stall
    std::vector<uint32_t> left;
    left.reserve(s.keys);
    Segment larger{memory_.allocate(to), s.keys};
    const auto put = [&](uint64_t place, uint32_t row, uint32_t b, bool stray) {
      larger.buckets[b].put(used[b]++, tag(place), row, stray);
    };
    const auto rows = [&](uint32_t b, auto visit) {
      const Bucket& bucket = s.buckets[b];
      for (uint32_t mask = bucket.used(); mask; mask &= mask - 1) visit(bucket.rows[std::countr_zero(mask)]);
    };
    for (uint32_t b = 0; b < from + kAhead; ++b) {
      if (b < from) rows(b, [&](uint32_t row) { key_of.prefetch(row); });
      if (b < kAhead) continue;
      rows(b - kAhead, [&](uint32_t row) {
        const uint64_t place = place_of(key_of(row));
        const uint32_t own = home(place, larger);
        if (used[own] < Bucket::kSlots) put(place, row, own, false);
        else left.push_back(row);
      });
    }
    for (const uint32_t row : left) {
      const uint64_t place = place_of(key_of(row));
      uint32_t b = home(place, larger);
      for (; used[b] == Bucket::kSlots; b = next(b, larger)) larger.buckets[b].passed |= mark(place);
      put(place, row, b, true);
    }
    memory_.release(s.buckets);
    s = larger;
  }

  BucketMemory<Bucket> memory_;
  std::array<Segment, kSegments> segments_;
};

}  // namespace streamtrain
