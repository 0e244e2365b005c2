// From a key to its row on disk: 1024 small hash tables as those of index.h, which never ask for the key of a row.
//
// A slot is one word: 30 bits of the key's place (place.h), below those that choose the table, and 34 bits of a row
// number. The former say where a slot belongs in a table of any size, so growing and erasing read no rows. A bucket is
// a cache line of 8 slots; a key belongs in bucket bits * buckets >> 30, or in the next one that has room. Tables grow
// as those of index.h do: slots are 5/6 full on average, 9.6 bytes per key.
// What is found are candidates: of two keys, the 40 bits are the same once in 2^39 (place.h); whoever has read the row
// compares its key.
//
// Thread safety: external synchronisation; const functions may run together.
// Invariant: all buckets from a slot's own one to the one before it are full.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "buckets.h"
#include "pages.h"
#include "place.h"

namespace streamtrain {

class DiskIndex {
 public:
  static constexpr uint32_t kTables = 1024;  // as many as the upper bits of a place tell apart
  static constexpr uint64_t kMaxRows = (uint64_t{1} << 34) - 1;  // row numbers are below

  DiskIndex() = default;
  DiskIndex(const DiskIndex&) = delete;
  DiskIndex& operator=(const DiskIndex&) = delete;
  ~DiskIndex() {
    for (Table& t : tables_) memory_.release(t.buckets);
  }

  void prefetch(uint64_t key) const {
    const uint64_t place = place_of(key);
    const Table& t = table(place);
    prefetch_line(&t.buckets[home(bits(place), t)]);
  }

  // Calls visit(row) for each row that may be the key's.
  template <typename Visit>
  void find(uint64_t key, Visit visit) const {
    const uint64_t place = place_of(key);
    const Table& t = table(place);
    for (uint32_t b = home(bits(place), t);; b = next(b, t)) {
      const Bucket& bucket = t.buckets[b];
      for (const uint64_t slot : bucket.slots)
        if (slot && slot >> kRowBits == bits(place)) visit((slot & kRowMask) - 1);
      if (!bucket.full()) return;
    }
  }

  bool has(uint64_t key, uint64_t row) const {
    bool found = false;
    find(key, [&](uint64_t candidate) { found |= candidate == row; });
    return found;
  }

  // REQUIRES: the key is absent; row < kMaxRows.
  void insert(uint64_t key, uint64_t row) {
    const uint64_t place = place_of(key);
    Table& t = table(place);
    if ((uint64_t{t.keys} + 1) > uint64_t{t.buckets.size()} * 7) grow(t);
    put(t, bits(place) << kRowBits | (row + 1));
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
      // Slots that passed by the full bucket have to be found without it: the first of them fills the hole.
      const Found from = first_passer(t, hole.bucket);
      if (!from.slot) return;
      *hole.slot = *from.slot;
      hole = from;
    }
  }

  size_t bytes() const { return sizeof tables_ + memory_.bytes(); }

 private:
  static constexpr int kRowBits = 34, kPlaceBits = 30;
  static constexpr uint64_t kRowMask = (uint64_t{1} << kRowBits) - 1;

  struct alignas(64) Bucket {
    uint64_t slots[8];  // 0: empty; in the lower bits, row numbers are one more

    bool full() const {
      bool all = true;
      for (const uint64_t slot : slots) all &= slot != 0;
      return all;
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
  static uint32_t home(uint64_t bits, const Table& t) {
    return static_cast<uint32_t>(bits * t.buckets.size() >> kPlaceBits);
  }
  static uint32_t next(uint32_t b, const Table& t) { return b + 1 == t.buckets.size() ? 0 : b + 1; }
  Table& table(uint64_t place) { return tables_[place >> 54]; }
  const Table& table(uint64_t place) const { return tables_[place >> 54]; }

  static void put(Table& t, uint64_t word) {
    for (uint32_t b = home(word >> kRowBits, t);; b = next(b, t))
      for (uint64_t& slot : t.buckets[b].slots)
        if (!slot) {
          slot = word;
          return;
        }
  }

  Found locate(uint64_t key, uint64_t row) noexcept {
    const uint64_t place = place_of(key), word = bits(place) << kRowBits | (row + 1);
    Table& t = table(place);
    for (uint32_t b = home(bits(place), t);; b = next(b, t))
      for (uint64_t& slot : t.buckets[b].slots)
        if (slot == word) return {b, &slot};
  }

  // The first slot after bucket `hole` that belongs in it or before; none if there is none.
  static Found first_passer(Table& t, uint32_t hole) noexcept {
    for (uint32_t b = next(hole, t); b != hole; b = next(b, t)) {
      Bucket& bucket = t.buckets[b];
      for (uint64_t& slot : bucket.slots) {
        if (!slot) continue;
        const uint32_t own = home(slot >> kRowBits, t);
        if (hole <= b ? own <= hole || own > b : own <= hole && own > b) return {b, &slot};
      }
      if (!bucket.full()) break;
    }
    return {hole, nullptr};
  }

  void grow(Table& t) {
    const double phase = static_cast<double>(&t - tables_.data()) / kTables;
    Table larger{memory_.allocate(larger_size(t.buckets.size(), phase)), t.keys};
    for (uint32_t b = 0; b < t.buckets.size(); ++b)
      for (const uint64_t slot : t.buckets[b].slots)
        if (slot) put(larger, slot);
    memory_.release(t.buckets);
    t = larger;
  }

  BucketMemory<Bucket> memory_;
  std::array<Table, kTables> tables_;
};

}  // namespace streamtrain
