// From a key to its row on disk: 1024 small hash tables as those of index.h, which never ask for the key of a row.
//
// A slot is one word: 30 bits of the key's place (place.h), below those that choose the table, and 34 bits of a row
// number. The former say where a slot belongs in a table of any size, so growing and erasing read no rows. A bucket is
// a cache line of 8 slots; a key belongs in bucket bits * buckets >> 30, or in one after that. Where a bucket is full,
// slots that are further from their own ones stay, and another one goes on instead (Robin Hood hashing, Celis 1986): so
// a lookup ends where slots begin that are nearer than its key would be, nearly always within two neighbouring lines.
// Tables grow as those of index.h do: slots are 5/6 full on average, 9.6 bytes per key.
// What is found are candidates: of two keys, the 40 bits are the same once in 2^39 (place.h); whoever has read the row
// compares its key.
//
// Thread safety: external synchronisation; const functions may run together.
// Invariants, for every slot that is not in its own bucket: all buckets from that one to the one before the slot are
// full, and no slot in these is nearer to its own one than this slot would be there.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "buckets.h"
#include "pages.h"
#include "place.h"

namespace streamtrain {

class DiskIndex {
 public:
  static constexpr double kKeyBytes = 9.6;     // on average
  static constexpr uint32_t kTables = 1024;  // as many as the upper bits of a place tell apart
  static constexpr uint64_t kMaxRows = (uint64_t{1} << 34) - 1;  // row numbers are below

  DiskIndex() = default;
  DiskIndex(const DiskIndex&) = delete;
  DiskIndex& operator=(const DiskIndex&) = delete;
  ~DiskIndex() {
    for (Table& t : tables_) memory_.release(t.buckets);
  }

  // Also of the bucket after the key's: every other lookup goes on to it.
  void prefetch(uint64_t key) const {
    const uint64_t place = place_of(key);
    const Table& t = table(place);
    const uint32_t own = home(bits(place), t);
    prefetch_line(&t.buckets[own]);
    if (own + 1 < t.buckets.size()) prefetch_line(&t.buckets[own + 1]);
  }

  // Calls visit(row) for each row that may be the key's.
  template <typename Visit>
  void find(uint64_t key, Visit visit) const {
    const uint64_t place = place_of(key);
    const Table& t = table(place);
    const uint32_t own = home(bits(place), t);
    for (uint32_t b = own, distance = 0;; b = next(b, t), ++distance) {
      const Bucket& bucket = t.buckets[b];
      for (const uint64_t slot : bucket.slots)
        if (slot && slot >> kRowBits == bits(place)) visit((slot & kRowMask) - 1);
      if (!bucket.full() || (distance && nearest(b, t).distance < distance)) return;
    }
  }

  bool has(uint64_t key, uint64_t row) const {
    const uint64_t place = place_of(key), word = word_of(place, row);
    const Table& t = table(place);
    for (uint32_t b = home(bits(place), t), distance = 0;; b = next(b, t), ++distance) {
      const Bucket& bucket = t.buckets[b];
      if (bucket.any(word)) return true;
      if (!bucket.full() || (distance && nearest(b, t).distance < distance)) return false;
    }
  }

  // Makes room for so many keys.
  void reserve(uint64_t keys) {
    for (Table& t : tables_) grow(t, keys / kTables);
  }

  // REQUIRES: the key is absent; row < kMaxRows.
  void insert(uint64_t key, uint64_t row) {
    const uint64_t place = place_of(key);
    Table& t = table(place);
    grow(t, uint64_t{t.keys} + 1);
    put(t, word_of(place, row));
    ++t.keys;
  }

  // REQUIRES: (key, from) is present.
  void replace(uint64_t key, uint64_t from, uint64_t to) noexcept {
    uint64_t& slot = *locate(key, from).slot;
    slot = (slot & ~kRowMask) | (to + 1);
  }

  // REQUIRES: (key, row) is present.
  void erase(uint64_t key, uint64_t row) noexcept {
    Table& t = table(place_of(key));
    --t.keys;
    for (Found hole = locate(key, row);;) {
      const bool was_full = t.buckets[hole.bucket].full();
      *hole.slot = 0;
      if (!was_full) return;
      // If any slot has passed by the full bucket, some are in the next one; the one that is furthest fills the hole.
      const uint32_t b = next(hole.bucket, t);
      uint64_t* furthest = nullptr;
      uint32_t most = 0;
      for (uint64_t& slot : t.buckets[b].slots)
        if (const uint32_t d = slot ? distance_of(slot, b, t) : 0; d > most) most = d, furthest = &slot;
      if (!furthest) return;
      *hole.slot = *furthest;
      hole = {b, furthest};
    }
  }

  size_t bytes() const { return sizeof tables_ + memory_.bytes(); }

 private:
  static constexpr uint32_t kSlots = 8;
  static constexpr int kRowBits = 34, kPlaceBits = 30;
  static constexpr uint64_t kRowMask = (uint64_t{1} << kRowBits) - 1;

  struct alignas(64) Bucket {
    uint64_t slots[kSlots];  // 0: empty; in the lower bits, row numbers are one more

    bool any(uint64_t word) const {
      bool found = false;
      for (const uint64_t slot : slots) found |= slot == word;
      return found;
    }
    bool full() const { return !any(0); }
    // The first slot with this word. REQUIRES: any(word).
    uint32_t first(uint64_t word) const {
      uint32_t mask = 0;
      for (uint32_t j = 0; j < kSlots; ++j) mask |= uint32_t{slots[j] == word} << j;
      return static_cast<uint32_t>(std::countr_zero(mask));
    }
  };
  using Buckets = BucketArray<Bucket>;

  struct Table {
    Buckets buckets;
    uint32_t keys = 0;
  };
  struct Found {
    uint32_t bucket;
    uint64_t* slot;
  };

  static uint64_t bits(uint64_t place) { return place >> 24 & ((uint64_t{1} << kPlaceBits) - 1); }
  static uint64_t word_of(uint64_t place, uint64_t row) { return bits(place) << kRowBits | (row + 1); }
  static uint32_t home(uint64_t bits, const Table& t) {
    return static_cast<uint32_t>(bits * t.buckets.size() >> kPlaceBits);
  }
  static uint32_t next(uint32_t b, const Table& t) { return b + 1 == t.buckets.size() ? 0 : b + 1; }
  Table& table(uint64_t place) { return tables_[place >> 54]; }
  const Table& table(uint64_t place) const { return tables_[place >> 54]; }

  // How many buckets a slot in bucket b is from its own.
  static uint32_t distance_of(uint64_t slot, uint32_t b, const Table& t) {
    const uint32_t own = home(slot >> kRowBits, t);
    return b >= own ? b - own : b + t.buckets.size() - own;
  }
  struct Nearest {
    uint32_t distance, slot;
  };
  // Of a full bucket. Without branches, which nobody could foresee.
  static Nearest nearest(uint32_t b, const Table& t) {
    uint64_t least = UINT64_MAX;
    for (uint32_t j = 0; j < kSlots; ++j)
      least = std::min(least, uint64_t{distance_of(t.buckets[b].slots[j], b, t)} * kSlots + j);
    return {static_cast<uint32_t>(least / kSlots), static_cast<uint32_t>(least % kSlots)};
  }

  static void put(Table& t, uint64_t word) {
    for (uint32_t b = home(word >> kRowBits, t), distance = 0;; b = next(b, t), ++distance) {
      Bucket& bucket = t.buckets[b];
      if (!bucket.full()) {
        bucket.slots[bucket.first(0)] = word;
        return;
      }
      if (!distance) continue;  // nothing is nearer than in its own bucket
      const Nearest other = nearest(b, t);
      if (other.distance < distance) std::swap(bucket.slots[other.slot], word), distance = other.distance;
    }
  }

  Found locate(uint64_t key, uint64_t row) noexcept {
    const uint64_t place = place_of(key), word = word_of(place, row);
    Table& t = table(place);
    for (uint32_t b = home(bits(place), t);; b = next(b, t))
      for (uint64_t& slot : t.buckets[b].slots)
        if (slot == word) return {b, &slot};
  }

  void grow(Table& t, uint64_t keys) {
    const double phase = static_cast<double>(&t - tables_.data()) / kTables;
    uint32_t size = t.buckets.size();
    while (keys > uint64_t{size} * 7) size = larger_size(size, phase);
    if (size == t.buckets.size()) return;
    Table larger{memory_.allocate(size), t.keys};
    // Slots for which their own buckets have no room come last: so there are as few of them as can be.
    std::vector<uint8_t> used(size);
    std::vector<uint64_t> left;
    for (uint32_t b = 0; b < t.buckets.size(); ++b)
      for (const uint64_t slot : t.buckets[b].slots) {
        if (!slot) continue;
        const uint32_t own = home(slot >> kRowBits, larger);
        if (used[own] < kSlots) larger.buckets[own].slots[used[own]++] = slot;
        else left.push_back(slot);
      }
    for (const uint64_t slot : left) put(larger, slot);
    memory_.release(t.buckets);
    t = larger;
  }

  BucketMemory<Bucket> memory_;
  std::array<Table, kTables> tables_;
};

}  // namespace streamtrain
