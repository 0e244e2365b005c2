// Strict UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF.
//
// Thread safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bits.h"

namespace streamtrain {

// The first byte of [p, end) that is not part of a well-formed sequence (Unicode 15, table 3-7), or nullptr.
inline const char* find_bad_utf8(const char* p, const char* end) {
  const auto in = [&](const char* at, int low, int high) {
    return at < end && static_cast<uint8_t>(*at) >= low && static_cast<uint8_t>(*at) <= high;
  };
  while (p < end) {
    if (end - p >= 8 && !(load64(p) & 0x8080808080808080ULL)) { p += 8; continue; }
    const auto lead = static_cast<uint8_t>(*p);
    if (lead < 0x80) { ++p; continue; }
    if (lead >= 0xC2 && lead <= 0xDF) {
      if (!in(p + 1, 0x80, 0xBF)) return p;
      p += 2;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
      if (!in(p + 1, lead == 0xE0 ? 0xA0 : 0x80, lead == 0xED ? 0x9F : 0xBF) || !in(p + 2, 0x80, 0xBF)) return p;
      p += 3;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
      if (!in(p + 1, lead == 0xF0 ? 0x90 : 0x80, lead == 0xF4 ? 0x8F : 0xBF)) return p;
      if (!in(p + 2, 0x80, 0xBF) || !in(p + 3, 0x80, 0xBF)) return p;
      p += 4;
    } else {
      return p;
    }
  }
  return nullptr;
}

// Writes code point `c` at `to`, at most 4 bytes, and returns the end. REQUIRES: c is a Unicode scalar value.
inline char* write_utf8(uint32_t c, char* to) {
  const auto put = [&](uint32_t byte) { *to++ = static_cast<char>(byte); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6);
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  }
  return to;
}

}  // namespace streamtrain
