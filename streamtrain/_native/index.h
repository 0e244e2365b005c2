// From a key to its row id: 1024 small hash tables (segments) that grow one at a time.
//
// A segment is an array of buckets, each one cache line of 8 slots {32-bit tag, row id + 1}. A key belongs in bucket
// tag * buckets >> 32, or in the next one that has room; so any number of buckets will do, growing reads no rows, and
// growing copies almost in order. Four lookups in five look at one cache line only, whose tags are compared at once.
// A segment grows by two fifths when it is four fifths full, and the sizes of the segments are spread evenly over
// such a step: when the whole index grows, the segments do so one after another, and no call has to wait for more
// than a few.
//
// Bits of a key: 47..16 tag, 9..0 segment; 63..48 choose the shard and hardly vary inside one (hash.h). Keys with
// equal bits in both are told apart by the caller, who compares the whole key in the row ("match").
//
// Thread safety: external synchronisation; const functions may run together.
// Invariants: every (key, row) is in at most one slot; used slots of a bucket come first; all buckets from a key's
// own one to the one before the key are full (deletion pulls followers back, so there are no tombstones).
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "pages.h"

namespace streamtrain {

inline constexpr uint32_t kNoRow = UINT32_MAX;
inline constexpr uint32_t kUndecided = UINT32_MAX - 1;

struct alignas(64) Bucket {
  static constexpr uint32_t kSlots = 8;

  uint32_t tags[kSlots];
  uint32_t rows[kSlots];  // row id + 1; 0: empty

  bool full() const { return rows[kSlots - 1]; }

  // Bit j is set if slot j is used and has this tag.
  uint32_t matches(uint32_t tag) const {
#if defined(__AVX2__)
    const __m256i t = _mm256_load_si256(reinterpret_cast<const __m256i*>(tags));
    const __m256i r = _mm256_load_si256(reinterpret_cast<const __m256i*>(rows));
    const __m256i equal = _mm256_cmpeq_epi32(t, _mm256_set1_epi32(static_cast<int>(tag)));
    const __m256i empty = _mm256_cmpeq_epi32(r, _mm256_setzero_si256());
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_andnot_si256(empty, equal))));
#else
    uint32_t mask = 0;
    for (uint32_t j = 0; j < kSlots; ++j) mask |= uint32_t{rows[j] != 0 && tags[j] == tag} << j;
    return mask;
#endif
  }

  uint32_t size() const {
#if defined(__AVX2__)
    const __m256i r = _mm256_load_si256(reinterpret_cast<const __m256i*>(rows));
    const __m256i empty = _mm256_cmpeq_epi32(r, _mm256_setzero_si256());
    return static_cast<uint32_t>(std::countr_zero(_mm256_movemask_ps(_mm256_castsi256_ps(empty)) | 0x100u));
#else
    uint32_t n = 0;
    while (n < kSlots && rows[n]) ++n;
    return n;
#endif
  }
};
static_assert(sizeof(Bucket) == 64);

// Memory of the segments. Small arrays come from the heap. Larger ones are cut one after another from 2 MiB chunks of
// huge pages; a chunk is used again when everything in it has been freed. Segments grow in turn, so chunks empty in
// about the order they were filled, and little is lost to holes.
class BucketArena {
 public:
  // `count` zeroed buckets.
  Bucket* allocate(size_t count) {
    const size_t bytes = count * sizeof(Bucket);
    Bucket* buckets;
    if (bytes < kSmall) {
      buckets = static_cast<Bucket*>(::operator new(bytes, std::align_val_t{alignof(Bucket)}));
      heap_bytes_ += bytes;
    } else {
      Chunk* chunk = bytes + sizeof(Chunk) > kHugePage ? add_chunk(bytes + sizeof(Chunk)) : chunk_with(bytes);
      buckets = reinterpret_cast<Bucket*>(reinterpret_cast<std::byte*>(chunk) + chunk->used);
      chunk->used += bytes;
      chunk->live += bytes;
    }
    std::memset(static_cast<void*>(buckets), 0, bytes);
    return buckets;
  }

  void release(Bucket* buckets, size_t count) noexcept {
    const size_t bytes = count * sizeof(Bucket);
    if (bytes < kSmall) {
      ::operator delete(buckets, std::align_val_t{alignof(Bucket)});
      heap_bytes_ -= bytes;
      return;
    }
    // Also in a chunk larger than a huge page the buckets start in its first one.
    auto* chunk = reinterpret_cast<Chunk*>(reinterpret_cast<uintptr_t>(buckets) & ~(kHugePage - 1));
    chunk->live -= bytes;
    if (chunk->live) return;
    if (chunks_[chunk->number].size() > kHugePage) {
      chunks_[chunk->number] = Pages();
    } else {
      chunk->used = sizeof(Chunk);
      if (chunk != current_) spare(chunk);
    }
  }

  size_t bytes() const {
    size_t sum = heap_bytes_;
    for (const Pages& chunk : chunks_) sum += chunk.size();
    return sum;
  }

 private:
  static constexpr size_t kSmall = 4096;
  struct alignas(64) Chunk {  // heads each chunk
    size_t number, used, live;
    Chunk* next;
  };

  Chunk* add_chunk(size_t bytes) {
    chunks_.emplace_back((bytes + kHugePage - 1) / kHugePage * kHugePage);
    return new (chunks_.back().data()) Chunk{chunks_.size() - 1, sizeof(Chunk), 0, nullptr};
  }

  Chunk* chunk_with(size_t bytes) {
    if (current_ && current_->used + bytes <= kHugePage) return current_;
    Chunk* fresh = spare_ ? std::exchange(spare_, spare_->next) : add_chunk(kHugePage);
    if (current_ && !current_->live) spare(current_);  // emptied while it was being filled
    return current_ = fresh;
  }

  void spare(Chunk* chunk) noexcept { chunk->next = std::exchange(spare_, chunk); }

  std::vector<Pages> chunks_;
  Chunk* current_ = nullptr;
  Chunk* spare_ = nullptr;
  size_t heap_bytes_ = 0;
};

class Index {
 public:
  static constexpr uint32_t kSegments = 1024;

  Index() = default;
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;
  ~Index() {
    for (Segment& s : segments_)
      if (s.size_in_buckets) arena_.release(s.buckets, s.size_in_buckets);
  }

  void prefetch(uint64_t key) const {
    const Segment& s = segment(key);
    prefetch_line(s.buckets + home(tag(key), s));
  }

  // The row of a slot with the key's tag for which match(row) holds, or kNoRow.
  template <typename Match>
  uint32_t find(uint64_t key, Match match) const {
    const Segment& s = segment(key);
    for (uint32_t b = home(tag(key), s);; b = next(b, s)) {
      const Bucket& bucket = s.buckets[b];
      for (uint32_t mask = bucket.matches(tag(key)); mask; mask &= mask - 1) {
        const uint32_t row = bucket.rows[std::countr_zero(mask)] - 1;
        if (match(row)) return row;
      }
      if (!bucket.full()) return kNoRow;
    }
  }

  // First look, to be confirmed in the row or by find: a row with the key's tag, kNoRow, or kUndecided if that takes
  // a look at a second bucket, whose memory is asked for.
  uint32_t glance(uint64_t key) const {
    const Segment& s = segment(key);
    const uint32_t b = home(tag(key), s);
    const Bucket& bucket = s.buckets[b];
    if (const uint32_t mask = bucket.matches(tag(key))) return bucket.rows[std::countr_zero(mask)] - 1;
    if (!bucket.full()) return kNoRow;
    prefetch_line(s.buckets + next(b, s));
    return kUndecided;
  }

  // Makes room for one more key like this one, so that insert cannot fail.
  void reserve(uint64_t key) {
    Segment& s = segment(key);
    if ((uint64_t{s.keys} + 1) * 5 > uint64_t{s.size_in_buckets} * Bucket::kSlots * 4) grow(s);
  }

  // REQUIRES: reserve(key) before; the key is absent.
  void insert(uint64_t key, uint32_t row) noexcept {
    Segment& s = segment(key);
    uint32_t b = home(tag(key), s), j;
    while ((j = s.buckets[b].size()) == Bucket::kSlots) b = next(b, s);
    s.buckets[b].tags[j] = tag(key);
    s.buckets[b].rows[j] = row + 1;
    ++s.keys;
  }

  // REQUIRES: (key, from) is present.
  void replace(uint64_t key, uint32_t from, uint32_t to) noexcept {
    const Place at = locate(key, from);
    segment(key).buckets[at.bucket].rows[at.slot] = to + 1;
  }

  // REQUIRES: (key, row) is present.
  void erase(uint64_t key, uint32_t row) noexcept {
    Segment& s = segment(key);
    auto [hole, slot] = locate(key, row);
    --s.keys;
    for (bool full = s.buckets[hole].full(); full;) {
      // Keys that passed by the full bucket have to be found without it: one of them fills the hole, if there is any.
      uint32_t b = hole, j = Bucket::kSlots;
      do {
        b = next(b, s);
        full = s.buckets[b].full();
        for (j = 0; j < Bucket::kSlots && s.buckets[b].rows[j]; ++j)
          if (passes(s, s.buckets[b].tags[j], hole, b)) break;
      } while (full && j == Bucket::kSlots && b != hole);
      if (j == Bucket::kSlots || !s.buckets[b].rows[j]) break;
      s.buckets[hole].tags[slot] = s.buckets[b].tags[j];
      s.buckets[hole].rows[slot] = s.buckets[b].rows[j];
      hole = b;
      slot = j;
    }
    Bucket& bucket = s.buckets[hole];
    const uint32_t last = bucket.size() - 1;
    bucket.tags[slot] = bucket.tags[last];
    bucket.rows[slot] = bucket.rows[last];
    bucket.rows[last] = 0;
  }

  size_t bytes() const { return sizeof segments_ + arena_.bytes(); }

 private:
  struct Segment {
    Bucket* buckets = no_buckets();
    uint32_t size_in_buckets = 0, keys = 0;
  };
  struct Place {
    uint32_t bucket, slot;
  };

  // What segments without buckets point to, so that lookups need no special case. Never written.
  static Bucket* no_buckets() {
    static Bucket empty{};
    return &empty;
  }

  static uint32_t tag(uint64_t key) { return static_cast<uint32_t>(key >> 16); }
  static uint32_t home(uint32_t tag, const Segment& s) {
    return static_cast<uint32_t>((uint64_t{tag} * s.size_in_buckets) >> 32);
  }
  static uint32_t next(uint32_t b, const Segment& s) { return b + 1 == s.size_in_buckets ? 0 : b + 1; }
  Segment& segment(uint64_t key) { return segments_[key % kSegments]; }
  const Segment& segment(uint64_t key) const { return segments_[key % kSegments]; }

  // Whether a key in bucket b has its own bucket at or before `hole`, going round.
  static bool passes(const Segment& s, uint32_t tag, uint32_t hole, uint32_t b) {
    const uint32_t own = home(tag, s);
    return hole <= b ? own <= hole || own > b : own <= hole && own > b;
  }

  Place locate(uint64_t key, uint32_t row) const noexcept {
    const Segment& s = segment(key);
    for (uint32_t b = home(tag(key), s);; b = next(b, s))
      for (uint32_t mask = s.buckets[b].matches(tag(key)); mask; mask &= mask - 1) {
        const auto j = static_cast<uint32_t>(std::countr_zero(mask));
        if (s.buckets[b].rows[j] == row + 1) return {b, j};
      }
  }

  // The next size of the segment's own ladder, 1.4^(phase + k), in buckets.
  uint32_t next_size(const Segment& s) const {
    double size = std::pow(1.4, static_cast<double>(&s - segments_.data()) / kSegments);
    while (static_cast<uint32_t>(size) <= s.size_in_buckets) size *= 1.4;
    return static_cast<uint32_t>(size);
  }

  void grow(Segment& s) {
    Segment larger;
    larger.keys = s.keys;
    larger.size_in_buckets = next_size(s);
    std::vector<uint8_t> used(larger.size_in_buckets);
    larger.buckets = arena_.allocate(larger.size_in_buckets);
    // Keeps its own count of each bucket: reading slots as a whole just after writing one of them would stall.
    for (uint32_t b = 0; b < s.size_in_buckets; ++b)
      for (uint32_t j = 0, n = s.buckets[b].size(); j < n; ++j) {
        uint32_t to = home(s.buckets[b].tags[j], larger);
        while (used[to] == Bucket::kSlots) to = next(to, larger);
        larger.buckets[to].tags[used[to]] = s.buckets[b].tags[j];
        larger.buckets[to].rows[used[to]++] = s.buckets[b].rows[j];
      }
    if (s.size_in_buckets) arena_.release(s.buckets, s.size_in_buckets);
    s = larger;
  }

  BucketArena arena_;
  std::array<Segment, kSegments> segments_;
};

}  // namespace streamtrain
