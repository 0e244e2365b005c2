// The one hash of streamtrain: from an id to its 64-bit key, and from a key to its shard.
//
// The key of an id is XXH64 (seed 0) of its UTF-8 text; the text of an integer is its decimal form, so that an integer
// and its decimal string are the same key. A cross of ids is XXH64 over their keys, little-endian, in order.
// Algorithm: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md (XXH64).
//
// Bits 63..48 of a key are its hash slot, which maps to a shard (shard_of); Redis' buckets go by others. The tables of a
// process go by none of them, but by the place of a key under a secret (place.h).
//
// Thread safety: pure functions.
#pragma once

#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>

#include "bits.h"

namespace streamtrain {

inline constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
inline constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
inline constexpr uint64_t kPrime3 = 0x165667B19E3779F9ULL;
inline constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
inline constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;

inline uint64_t xxh64_round(uint64_t acc, uint64_t lane) { return std::rotl(acc + lane * kPrime2, 31) * kPrime1; }

inline uint64_t xxh64_merge(uint64_t h, uint64_t acc) { return (h ^ xxh64_round(0, acc)) * kPrime1 + kPrime4; }

inline uint64_t xxh64_avalanche(uint64_t h) {
  h = (h ^ (h >> 33)) * kPrime2;
  h = (h ^ (h >> 29)) * kPrime3;
  return h ^ (h >> 32);
}

// XXH64 of `size` bytes with seed 0.
inline uint64_t hash_bytes(const char* p, size_t size) {
  const char* const end = p + size;
  uint64_t h;
  if (size >= 32) {
    uint64_t a = kPrime1 + kPrime2, b = kPrime2, c = 0, d = 0 - kPrime1;
    for (; end - p >= 32; p += 32) {
      a = xxh64_round(a, load64(p));
      b = xxh64_round(b, load64(p + 8));
      c = xxh64_round(c, load64(p + 16));
      d = xxh64_round(d, load64(p + 24));
    }
    h = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
    h = xxh64_merge(xxh64_merge(xxh64_merge(xxh64_merge(h, a), b), c), d);
  } else {
    h = kPrime5;
  }
  h += size;
  for (; end - p >= 8; p += 8) h = std::rotl(h ^ xxh64_round(0, load64(p)), 27) * kPrime1 + kPrime4;
  if (end - p >= 4) {
    h = std::rotl(h ^ (uint64_t{load32(p)} * kPrime1), 23) * kPrime2 + kPrime3;
    p += 4;
  }
  for (; p < end; ++p) h = std::rotl(h ^ (static_cast<uint8_t>(*p) * kPrime5), 11) * kPrime1;
  return xxh64_avalanche(h);
}

// Key of an integer id: the hash of its decimal text. `Int` is int64_t or uint64_t.
template <typename Int>
uint64_t hash_integer(Int id) {
  char text[24];
  const auto result = std::to_chars(text, text + sizeof text, id);
  return hash_bytes(text, static_cast<size_t>(result.ptr - text));
}

// Key of a cross of `count` ids, given their keys in order.
inline uint64_t hash_cross(const uint64_t* keys, size_t count) {
  return hash_bytes(reinterpret_cast<const char*>(keys), count * sizeof(uint64_t));
}

inline constexpr uint32_t kHashSlots = 1u << 16;

// The hash slot of a key: 0 .. kHashSlots-1.
inline uint32_t hash_slot(uint64_t key) { return static_cast<uint32_t>(key >> 48); }

// The shard that owns a key when `shards` shards split the slots evenly.
inline uint32_t shard_of(uint64_t key, uint32_t shards) {
  return static_cast<uint32_t>((uint64_t{hash_slot(key)} * shards) >> 16);
}

}  // namespace streamtrain
