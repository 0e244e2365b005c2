// Event time: seconds since the epoch (UTC) as a double, from a number or from ISO 8601 text.
//
//   date   = YYYY-MM-DD
//   time   = hh:mm [ :ss [ ("." / ",") 1*digit ] ]
//   offset = "Z" / ("+" / "-") hh [ [":"] mm ]
//   text   = date [ ("T" / " ") time [ offset ] ]          without an offset: UTC
//
// Years 0001 to 9999 only, also for numbers: this is what refuses milliseconds passed as seconds.
// Digits of the fraction beyond the ninth are dropped. Leap seconds (":60") are refused, as Python's datetime does.
// Thread safety: pure functions.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "number.h"

namespace streamtrain {

inline constexpr double kTimeBegin = -62135596800.0;  // 0001-01-01T00:00:00Z
inline constexpr double kTimeEnd = 253402300800.0;    // 10000-01-01T00:00:00Z

inline bool is_time(double seconds) { return seconds >= kTimeBegin && seconds < kTimeEnd; }

namespace internal {

// Takes what is expected off the front of a text; once something is missing it stays not ok.
class Cursor {
 public:
  explicit Cursor(std::string_view text) : text_(text) {}
  bool ok() const { return ok_; }
  bool done() const { return text_.empty(); }
  char peek() const { return text_.empty() ? '\0' : text_.front(); }

  bool take(char c) {
    if (peek() != c || text_.empty()) return false;
    text_.remove_prefix(1);
    return true;
  }
  void expect(char c) { ok_ &= take(c); }

  // A number of exactly `width` digits, at most `limit`.
  int number(size_t width, int limit) {
    int value = 0;
    for (size_t i = 0; i < width; ++i) {
      if (!is_digit(peek())) { ok_ = false; return 0; }
      value = value * 10 + (peek() - '0');
      text_.remove_prefix(1);
    }
    ok_ &= value <= limit;
    return value;
  }

  // One or more digits after a decimal point, as a fraction of one.
  double fraction() {
    int64_t value = 0, scale = 1;
    ok_ &= is_digit(peek());
    for (; is_digit(peek()); text_.remove_prefix(1))
      if (scale < 1'000'000'000) { value = value * 10 + (peek() - '0'); scale *= 10; }
    return static_cast<double>(value) / static_cast<double>(scale);
  }

 private:
  std::string_view text_;
  bool ok_ = true;
};

}  // namespace internal

// Parses ISO 8601 text into `seconds`; false when it is none, or out of range.
inline bool parse_time(std::string_view text, double& seconds) {
  internal::Cursor cursor(text);
  const int year = cursor.number(4, 9999);
  cursor.expect('-');
  const auto month = static_cast<unsigned>(cursor.number(2, 12));
  cursor.expect('-');
  const auto day = static_cast<unsigned>(cursor.number(2, 31));
  const std::chrono::year_month_day date{std::chrono::year{year}, std::chrono::month{month}, std::chrono::day{day}};
  if (!cursor.ok() || !date.ok() || year == 0) return false;

  int64_t whole = int64_t{std::chrono::sys_days{date}.time_since_epoch().count()} * 86400;
  double fraction = 0;
  if (cursor.take('T') || cursor.take(' ')) {
    whole += cursor.number(2, 23) * 3600;
    cursor.expect(':');
    whole += cursor.number(2, 59) * 60;
    if (cursor.take(':')) {
      whole += cursor.number(2, 59);
      if (cursor.take('.') || cursor.take(',')) fraction = cursor.fraction();
    }
    if (const char sign = cursor.peek(); !cursor.take('Z') && (cursor.take('+') || cursor.take('-'))) {
      int offset = cursor.number(2, 23) * 3600;
      if (cursor.take(':') || !cursor.done()) offset += cursor.number(2, 59) * 60;
      whole += sign == '-' ? offset : -offset;
    }
  }
  seconds = static_cast<double>(whole) + fraction;
  return cursor.ok() && cursor.done() && is_time(seconds);
}

}  // namespace streamtrain
