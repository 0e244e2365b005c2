// A scanner of one JSON text (RFC 8259), strict: the message's values are read in place, without a tree.
//
// The text is copied behind a pad of NUL bytes first. A NUL is neither space, digit nor allowed inside a string, so
// every loop stops there by itself: no bounds are checked on the way, and wide loads never leave the allocation.
//
// The scanning functions take the position to read at and return the one after what they read; nullptr means refused,
// with reason() and error_at() set.
// Invariant: begin() <= every returned position <= end().
// Thread safety: none; a scanner is scratch space of its owner.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "bits.h"
#include "number.h"
#include "reason.h"
#include "simd.h"
#include "utf8.h"

namespace streamtrain {

class JsonScanner {
 public:
  // Containers nest at most `max_depth` deep. Skipping recurses once per level, so the limit also bounds the stack.
  explicit JsonScanner(int max_depth) : max_depth_(max_depth) {}

  // Makes [text, text + size) the current message. False, with the reason set, when it is not UTF-8.
  bool load(const char* text, size_t size) {
    if (buffer_.size() < size + kPad) {
      buffer_.resize(size + size / 2 + kPad);
      unescaped_.resize(buffer_.size());  // an escape is never shorter than what it stands for
    }
    char* const to = buffer_.data();
    std::memcpy(to, text, size);
    std::memset(to + size, 0, kPad);
    end_ = to + size;
    uint64_t high = 0;
    for (const char* p = to; p < end_; p += 32) high |= load64(p) | load64(p + 8) | load64(p + 16) | load64(p + 24);
    if (!(high & 0x8080808080808080ULL)) [[likely]] return true;
    const char* const bad = find_bad_utf8(to, end_);
    return !bad || fail(Reason::kNotUtf8, bad);
  }

  const char* begin() const { return buffer_.data(); }
  const char* end() const { return end_; }
  Reason reason() const { return reason_; }
  int64_t error_at() const { return error_at_; }

  // Refuses the message at `at`.
  const char* fail(Reason reason, const char* at) {
    reason_ = reason;
    error_at_ = at - begin();
    return nullptr;
  }

  static const char* skip_space(const char* p) {
    while (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t') ++p;
    return p;
  }

  // Reads a string into `text`, which is valid until the next string or message. Inlined: most of a sample is strings.
  // REQUIRES: p is behind the opening quote.
  [[gnu::always_inline]] const char* string(const char* p, std::string_view& text) {
    const char* const start = p;
    uint32_t stops;
    for (; (stops = string_stops(p)) == 0;) p += 32;
    p += std::countr_zero(stops);
    if (*p == '"') [[likely]] {
      text = {start, static_cast<size_t>(p - start)};
      return p + 1;
    }
    return escaped_string(start, p, text);
  }

  // Reads a number. REQUIRES: *p is '-' or a digit.
  const char* number(const char* p, Number& out) {
    const char* broken = p;
    const char* const after = scan_number(p, out, &broken);
    if (after) [[likely]] return after;
    return *p == '-' && broken == p + 1 && *broken == 'I' ? not_a_number(broken, "Infinity") : fail(Reason::kNotJson, broken);
  }

  // Reads the word that a value without a sign of its own is made of: true, false or null.
  const char* word(const char* p) {
    switch (*p) {
      case 't': return expect(p, "true");
      case 'f': return expect(p, "false");
      case 'n': return expect(p, "null");
      case 'N': return not_a_number(p, "NaN");
      case 'I': return not_a_number(p, "Infinity");
      default: return fail(Reason::kNotJson, p);
    }
  }

  // Reads any value inside `depth` containers and forgets it.
  const char* skip_value(const char* p, int depth) {
    if (*p == '"') {
      std::string_view ignored;
      return string(p + 1, ignored);
    }
    if (*p == '-' || is_digit(*p)) {
      Number ignored;
      return number(p, ignored);
    }
    if (*p == '{') return skip_items<'}'>(p, depth + 1);
    if (*p == '[') return skip_items<']'>(p, depth + 1);
    return word(p);
  }

  // Refuses a container opened at `p` that would be the `depth`-th.
  bool too_deep(const char* p, int depth) { return depth > max_depth_ && !fail(Reason::kTooDeep, p); }

  // Reads `"key" : ` up to the value. REQUIRES: nothing of p.
  const char* key(const char* p, std::string_view& text) {
    if (*p != '"') return fail(Reason::kNotJson, p);
    if (!(p = string(p + 1, text))) return nullptr;
    p = skip_space(p);
    return *p == ':' ? skip_space(p + 1) : fail(Reason::kNotJson, p);
  }

 private:
  static constexpr size_t kPad = 64;  // at least one wide load

  const char* expect(const char* p, std::string_view text) {
    if (std::memcmp(p, text.data(), text.size()) == 0) [[likely]] return p + text.size();
    return fail(Reason::kNotJson, p);
  }

  // What Python's json writes for floats that JSON does not have gets a reason of its own.
  const char* not_a_number(const char* p, std::string_view text) {
    return expect(p, text) ? fail(Reason::kNotFinite, p) : nullptr;
  }

  template <char kClose>
  const char* skip_items(const char* p, int depth) {
    if (too_deep(p, depth)) return nullptr;
    p = skip_space(p + 1);
    if (*p == kClose) return p + 1;
    for (;;) {
      if constexpr (kClose == '}') {
        std::string_view ignored;
        if (!(p = key(p, ignored))) return nullptr;
      }
      if (!(p = skip_value(p, depth))) return nullptr;
      p = skip_space(p);
      if (*p == kClose) return p + 1;
      if (*p != ',') return fail(Reason::kNotJson, p);
      p = skip_space(p + 1);
    }
  }

  // The rest of a string whose first stop is `p`: unescapes into scratch.
  const char* escaped_string(const char* start, const char* p, std::string_view& text) {
    char* to = unescaped_.data();
    for (;;) {
      std::memcpy(to, start, static_cast<size_t>(p - start));
      to += p - start;
      if (*p == '"') {
        text = {unescaped_.data(), static_cast<size_t>(to - unescaped_.data())};
        return p + 1;
      }
      if (*p != '\\') return fail(Reason::kNotJson, p);  // a control character, or the end of the message
      if (!(p = escape(p, to))) return nullptr;
      start = p;
      uint32_t stops;
      for (; (stops = string_stops(p)) == 0;) p += 32;
      p += std::countr_zero(stops);
    }
  }

  // Reads one escape (both halves of a surrogate pair) and writes what it stands for.
  const char* escape(const char* p, char*& to) {
    switch (p[1]) {
      case '"': case '\\': case '/': *to++ = p[1]; return p + 2;
      case 'b': *to++ = '\b'; return p + 2;
      case 'f': *to++ = '\f'; return p + 2;
      case 'n': *to++ = '\n'; return p + 2;
      case 'r': *to++ = '\r'; return p + 2;
      case 't': *to++ = '\t'; return p + 2;
      case 'u': break;
      default: return fail(Reason::kBadEscape, p);
    }
    const int32_t first = hex4(p + 2);
    if (first < 0 || (first >= 0xDC00 && first <= 0xDFFF)) return fail(Reason::kBadEscape, p);
    if (first < 0xD800 || first > 0xDFFF) {
      to = write_utf8(static_cast<uint32_t>(first), to);
      return p + 6;
    }
    const int32_t second = p[6] == '\\' && p[7] == 'u' ? hex4(p + 8) : -1;
    if (second < 0xDC00 || second > 0xDFFF) return fail(Reason::kBadEscape, p);
    to = write_utf8(0x10000 + (static_cast<uint32_t>(first - 0xD800) << 10) + static_cast<uint32_t>(second - 0xDC00), to);
    return p + 12;
  }

  // The value of four hexadecimal digits, or -1. The pad makes the loads past the end of a message harmless.
  static int32_t hex4(const char* p) {
    int32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = p[i];
      const char lower = static_cast<char>(c | 0x20);
      if (is_digit(c)) value = value * 16 + (c - '0');
      else if (lower >= 'a' && lower <= 'f') value = value * 16 + (lower - 'a' + 10);
      else return -1;
    }
    return value;
  }

  const int max_depth_;
  std::vector<char> buffer_, unescaped_;
  const char* end_ = nullptr;
  Reason reason_ = Reason::kNone;
  int64_t error_at_ = -1;
};

}  // namespace streamtrain
