// JSON numbers: the grammar of RFC 8259, and the correctly rounded double.
//
//   number = [ "-" ] ( "0" / digit1-9 *digit ) [ "." 1*digit ] [ ("e" / "E") [ "+" / "-" ] 1*digit ]
//
// REQUIRES of every function: the text is followed by a byte that is not part of a number, and from any byte of the text
// eight can be loaded (json.h pads with NUL).
// Thread safety: pure functions.
#pragma once

#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <system_error>

#include "bits.h"

namespace streamtrain {

struct Number {
  uint64_t digits = 0;   // all digits as one integer; meaningful only when `fits`
  int32_t exponent = 0;  // the value is digits * 10^exponent
  bool negative = false;
  bool integer = true;  // neither fraction nor exponent
  bool fits = true;     // at most 19 digits, so that `digits` did not overflow
};

inline bool is_digit(char c) { return static_cast<uint8_t>(c - '0') < 10; }

// Reads all digits at p, appends them to `digits` (modulo 2^64) and returns their end. Numbers of a sample have about
// as many digits as they please: a loop over them would mispredict its end nearly every time, so eight go at once.
inline const char* read_digits(const char* p, uint64_t& digits) {
  static constexpr uint64_t kShift[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000};
  // Eight values 0..9, the first in the lowest byte, as one number: pairs, then fours, then all.
  const auto join = [](uint64_t v) {
    v = v * 10 + (v >> 8);
    return ((v & 0x000000FF000000FFULL) * 0x000F424000000064ULL + (v >> 16 & 0x000000FF000000FFULL) * 0x0000271000000001ULL) >> 32;
  };
  for (;;) {
    const uint64_t values = load64(p) ^ 0x3030303030303030ULL;
    // The top bit of each byte that is above 9; a carry only reaches bytes after the first of these.
    const uint64_t others = (values | (values + 0x7676767676767676ULL)) & 0x8080808080808080ULL;
    if (others) [[likely]] {
      const int count = std::countr_zero(others) >> 3;
      if (count) digits = digits * kShift[count] + join(values << (64 - 8 * count));
      return p + count;
    }
    digits = digits * 100'000'000 + join(values);
    p += 8;
  }
}

// Reads one number. Returns its end, or nullptr when the grammar is broken, with `*broken` at the offending byte.
// REQUIRES: *p is '-' or a digit.
inline const char* scan_number(const char* p, Number& out, const char** broken) {
  uint64_t digits = 0;
  out.negative = *p == '-';
  p += out.negative;
  const char* const whole = p;
  if (!is_digit(*p)) { *broken = p; return nullptr; }
  p = read_digits(p, digits);
  if ((*whole == '0') & (p > whole + 1)) { *broken = whole + 1; return nullptr; }
  ptrdiff_t count = p - whole;
  ptrdiff_t exponent = 0;
  if (*p == '.') {
    const char* const fraction = ++p;
    p = read_digits(p, digits);
    if (p == fraction) { *broken = p; return nullptr; }
    exponent = fraction - p;
    count += p - fraction;
    out.integer = false;
  }
  if ((*p | 0x20) == 'e') {
    ++p;
    const bool minus = *p == '-';
    if (*p == '-' || *p == '+') ++p;
    if (!is_digit(*p)) { *broken = p; return nullptr; }
    ptrdiff_t power = 0;
    // Past a hundred million no number of digits that fits in a message brings the value back into range.
    for (; is_digit(*p); ++p)
      if (power < 100'000'000) power = power * 10 + (*p - '0');
    exponent += minus ? -power : power;
    out.integer = false;
  }
  out.digits = digits;
  out.exponent = static_cast<int32_t>(exponent);
  out.fits = count <= 19;
  return p;
}

// Infinity when the value at [p, end), known to be out of the range of double, is too large; zero when too small.
inline double out_of_range(const char* p, const char* end, int64_t exponent) {
  // `exponent` counts from the last digit: add the digits from the first that is not zero to get the magnitude.
  int64_t significant = 0;
  for (; p < end && (*p | 0x20) != 'e'; ++p)
    if (is_digit(*p) && (significant || *p != '0')) ++significant;
  return significant + exponent > 0 ? std::numeric_limits<double>::infinity() : 0.0;
}

// The double nearest to the number at [begin, end); infinite when it overflows.
inline double to_double(const Number& number, const char* begin, const char* end) {
  static constexpr double kPowers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                       1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
  double value;
  if (number.fits && number.digits <= (uint64_t{1} << 53) && number.exponent >= -22 && number.exponent <= 22) [[likely]] {
    // Both operands are exact doubles, so the one rounding of the operation is the correct one (Clinger).
    value = static_cast<double>(number.digits);
    // Integers divide by one: whether a number has a fraction is not worth a branch that guesses.
    value = number.exponent <= 0 ? value / kPowers[-number.exponent] : value * kPowers[number.exponent];
    return number.negative ? -value : value;
  }
  const char* const magnitude = begin + number.negative;
  if (std::from_chars(magnitude, end, value).ec != std::errc{}) value = out_of_range(magnitude, end, number.exponent);
  return number.negative ? -value : value;
}

}  // namespace streamtrain
