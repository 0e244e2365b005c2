// Byte scans over 32 bytes at once, which is longer than nearly every id and every key.
//
// REQUIRES of every function: 32 readable bytes at each pointer. Callers scan padded copies (json.h), never the bytes of
// a caller's object, so that no read crosses the end of an allocation.
// Thread safety: pure functions.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace streamtrain {

#if defined(__AVX2__)

// Bit i: byte i cannot stand for itself inside a JSON string (quote, backslash or control character).
inline uint32_t string_stops(const char* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i control = _mm256_cmpeq_epi8(_mm256_max_epu8(v, _mm256_set1_epi8(0x1f)), _mm256_set1_epi8(0x1f));
  const __m256i quote = _mm256_cmpeq_epi8(v, _mm256_set1_epi8('"'));
  const __m256i slash = _mm256_cmpeq_epi8(v, _mm256_set1_epi8('\\'));
  return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_or_si256(control, _mm256_or_si256(quote, slash))));
}

// Bit i: byte i of `a` and of `b` are the same.
inline uint32_t equal_bytes(const char* a, const char* b) {
  return static_cast<uint32_t>(
      _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)),
                                             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)))));
}

#elif defined(__SSE2__)

inline uint32_t string_stops_16(const char* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i control = _mm_cmpeq_epi8(_mm_max_epu8(v, _mm_set1_epi8(0x1f)), _mm_set1_epi8(0x1f));
  const __m128i quote = _mm_cmpeq_epi8(v, _mm_set1_epi8('"'));
  const __m128i slash = _mm_cmpeq_epi8(v, _mm_set1_epi8('\\'));
  return static_cast<uint32_t>(_mm_movemask_epi8(_mm_or_si128(control, _mm_or_si128(quote, slash))));
}

inline uint32_t equal_bytes_16(const char* a, const char* b) {
  return static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)),
                                                                _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)))));
}

inline uint32_t string_stops(const char* p) { return string_stops_16(p) | string_stops_16(p + 16) << 16; }
inline uint32_t equal_bytes(const char* a, const char* b) { return equal_bytes_16(a, b) | equal_bytes_16(a + 16, b + 16) << 16; }

#else

inline uint32_t string_stops(const char* p) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) {
    const auto c = static_cast<uint8_t>(p[i]);
    bits |= static_cast<uint32_t>(c < 0x20 || c == '"' || c == '\\') << i;
  }
  return bits;
}

inline uint32_t equal_bytes(const char* a, const char* b) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(a[i] == b[i]) << i;
  return bits;
}

#endif

}  // namespace streamtrain
