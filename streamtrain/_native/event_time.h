// Event time: seconds since the epoch (UTC) as a double, from a number or from ISO 8601 text.
//
//   date   = YYYY-MM-DD
//   time   = hh:mm [ :ss [ ("." / ",") 1*digit ] ]
//   offset = "Z" / ("+" / "-") hh [ [":"] mm ]
//   text   = date [ ("T" / " ") time [ offset ] ]          without an offset: UTC
//
// Or as a TimeFormat says: a number of another unit, or text of another form.
// Years 0001 to 9999 only, also for numbers: this is what refuses milliseconds passed as seconds.
// Digits of the fraction beyond the ninth are dropped. Leap seconds (":60") are refused, as Python's datetime does.
// Thread safety: pure functions.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

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

  // A number of one digit to `width`, at most `limit`.
  int short_number(size_t width, int limit) {
    size_t digits = 0;
    while (digits < width && digits < text_.size() && is_digit(text_[digits])) ++digits;
    if (digits == 0) ok_ = false;
    return number(digits, limit);
  }

  // Which of the words it begins with, whatever the case; -1 and no longer ok: none.
  template <size_t n>
  int word(const std::string_view (&words)[n]) {
    for (size_t i = 0; i < n; ++i) {
      const std::string_view word = words[i];
      if (text_.size() < word.size()) continue;
      bool same = true;
      for (size_t c = 0; c < word.size(); ++c) same &= (text_[c] | 0x20) == word[c];
      if (!same) continue;
      text_.remove_prefix(word.size());
      return static_cast<int>(i);
    }
    ok_ = false;
    return -1;
  }

  // "Z" or an offset from UTC, +hh, +hhmm or +hh:mm, in seconds.
  int offset() {
    const char sign = peek();
    if (take('Z')) return 0;
    if (!take('+') && !take('-')) { ok_ = false; return 0; }
    int seconds = number(2, 23) * 3600;
    if (take(':') || is_digit(peek())) seconds += number(2, 59) * 60;
    return sign == '-' ? -seconds : seconds;
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
    if (cursor.ok() && !cursor.done()) whole -= cursor.offset();
  }
  seconds = static_cast<double>(whole) + fraction;
  return cursor.ok() && cursor.done() && is_time(seconds);
}

// How a field says the event time, beside ISO 8601.
//
// Text has the form of `pattern`, if it has one, else that of ISO 8601. Of Python's directives there are %Y %m %d %y %b
// %H %I %p %M %S %f %z; digits of a number other than a year may be fewer, and without %z a time is UTC.
struct TimeFormat {
  double per_second = 1;  // units of a number
  std::string pattern;

  // Throws std::invalid_argument unless a pattern's directives are known and say the day.
  void check() const {
    std::string found;
    for (size_t i = 0; i < pattern.size(); ++i) {
      if (pattern[i] != '%') continue;
      const char directive = ++i < pattern.size() ? pattern[i] : '\0';
      if (directive == '\0' || std::string_view("YmdybHIpMSfz").find(directive) == std::string_view::npos)
        throw std::invalid_argument(std::string("%") + (directive ? std::string(1, directive) : "") +
                                    " is not one of %Y %m %d %y %b %H %I %p %M %S %f %z");
      if (found.find(directive) != std::string::npos)
        throw std::invalid_argument(std::string("%") + directive + " is there twice");
      found += directive;
    }
    const auto has = [&](const char* any) { return found.find_first_of(any) != std::string::npos; };
    if (!pattern.empty() && !(has("Yy") && has("mb") && has("d")))
      throw std::invalid_argument("it needs a year (%Y or %y), a month (%m or %b) and a day (%d)");
  }

  // Parses text into `seconds`; false when it does not have the form, or is out of range.
  bool parse(std::string_view text, double& seconds) const {
    static constexpr std::string_view kMonths[] = {"jan", "feb", "mar", "apr", "may", "jun",
                                                   "jul", "aug", "sep", "oct", "nov", "dec"};
    static constexpr std::string_view kHalves[] = {"am", "pm"};
    if (pattern.empty()) return parse_time(text, seconds);
    internal::Cursor cursor(text);
    int year = 0, month = 0, day = 0, hour = 0, half = -1, minute = 0, second = 0, offset = 0;
    double fraction = 0;
    for (size_t i = 0; i < pattern.size() && cursor.ok(); ++i) {
      if (pattern[i] != '%') {
        cursor.expect(pattern[i]);
        continue;
      }
      switch (pattern[++i]) {
        case 'Y': year = cursor.number(4, 9999); break;
        case 'y': year = cursor.number(2, 99); year += year < 69 ? 2000 : 1900; break;
        case 'm': month = cursor.short_number(2, 12); break;
        case 'b': month = cursor.word(kMonths) + 1; break;
        case 'd': day = cursor.short_number(2, 31); break;
        case 'H': hour = cursor.short_number(2, 23); break;
        case 'I': hour = cursor.short_number(2, 12) % 12; break;
        case 'p': half = cursor.word(kHalves); break;
        case 'M': minute = cursor.short_number(2, 59); break;
        case 'S': second = cursor.short_number(2, 59); break;
        case 'f': fraction = cursor.fraction(); break;
        default: offset = cursor.offset();
      }
    }
    const std::chrono::year_month_day date{std::chrono::year{year}, std::chrono::month{static_cast<unsigned>(month)},
                                           std::chrono::day{static_cast<unsigned>(day)}};
    if (!cursor.ok() || !cursor.done() || !date.ok() || year == 0) return false;
    const int64_t whole = int64_t{std::chrono::sys_days{date}.time_since_epoch().count()} * 86400 +
                          (hour % 12 + (half == 1 ? 12 : half == 0 ? 0 : hour / 12 * 12)) * 3600 + minute * 60 + second -
                          offset;
    seconds = static_cast<double>(whole) + fraction;
    return is_time(seconds);
  }
};

}  // namespace streamtrain
