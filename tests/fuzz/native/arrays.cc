// What travels between workers and shards as arrays: 16-bit floats, merged gradients, and times that came as text.
//
// Input: a byte that chooses which, then its values.
#include <cmath>
#include <limits>
#include <map>
#include <string_view>
#include <vector>

#include "cross.h"
#include "event_time.h"
#include "input.h"
#include "merge.h"
#include "wire.h"

namespace streamtrain::fuzz {
namespace {

constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();

float widened(Storage format, uint16_t bits) {
  float value;
  widen_from_wire(format, &bits, &value, 1);
  return value;
}

// The finite 16-bit value nearest to `value`, by looking at the one below and the one above; ties go to the even one.
uint16_t nearest(Storage format, float value, uint16_t largest) {
  const auto magnitude = static_cast<double>(std::fabs(value));
  uint16_t low = 0, high = largest;  // by bisection: 16-bit values ascend with their bits
  while (high - low > 1) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    (static_cast<double>(widened(format, middle)) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - static_cast<double>(widened(format, low));
  const double above = static_cast<double>(widened(format, high)) - magnitude;
  const bool up = above < below || (above == below && (low & 1));
  return static_cast<uint16_t>((up ? high : low) | (std::signbit(value) ? 0x8000 : 0));
}

void narrow_and_widen(Input input) {
  const Storage format = input.below(2) ? Storage::kFloat16 : Storage::kBfloat16;
  const uint16_t largest = format == Storage::kFloat16 ? 0x7BFF : 0x7F7F;
  std::vector<float> values;
  while (!input.done()) values.push_back(input.take<float>());
  std::vector<uint16_t> bits(values.size());
  std::vector<float> back(values.size());
  narrow_for_wire(format, values.data(), bits.data(), values.size());
  widen_from_wire(format, bits.data(), back.data(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const float value = values[i];
    CHECK(std::signbit(back[i]) == std::signbit(value));
    if (std::isnan(value)) CHECK(std::isnan(back[i]));
    else if (std::isinf(value)) CHECK(back[i] == value);
    else CHECK(bits[i] == nearest(format, value, largest));
  }
  std::vector<uint16_t> again(values.size());
  narrow_for_wire(format, back.data(), again.data(), values.size());
  for (size_t i = 0; i < values.size(); ++i) CHECK(std::isnan(back[i]) || again[i] == bits[i]);
}

struct Part {
  std::vector<uint64_t> keys;
  std::vector<float> gradients;
  std::vector<uint32_t> counts, times;
  float scale;
};

struct Merged {
  std::vector<float> gradient;
  uint32_t count = 0, time = 0;
};

void merge(Input input) {
  const size_t dim = input.below(5);
  std::vector<Part> parts(1 + input.below(4));
  for (Part& part : parts) {
    const float scale = input.take<float>();
    part.scale = std::isfinite(scale) ? scale : 1.0f;
    for (uint32_t n = input.below(20); n > 0 && !input.done(); --n) {
      part.keys.push_back(input.key());
      part.counts.push_back(input.below(2) ? kMost - input.below(4) : input.below(4));
      part.times.push_back(input.take<uint32_t>());
      for (size_t j = 0; j < dim; ++j) part.gradients.push_back(input.take<float>());
    }
  }
  std::vector<GradientPart> given;
  std::vector<uint64_t> order;
  std::map<uint64_t, Merged> expected;
  for (const Part& part : parts) {
    given.push_back({part.keys, part.gradients.data(), part.counts.data(), part.times.data(), part.scale});
    for (size_t i = 0; i < part.keys.size(); ++i) {
      const auto [found, is_new] = expected.try_emplace(part.keys[i]);
      Merged& one = found->second;
      if (is_new) order.push_back(part.keys[i]);
      for (size_t j = 0; j < dim; ++j) {
        const float term = part.scale * part.gradients[i * dim + j];
        if (is_new) one.gradient.push_back(term); else one.gradient[j] += term;
      }
      one.count = static_cast<uint32_t>(std::min<uint64_t>(kMost, uint64_t{one.count} + part.counts[i]));
      one.time = std::max(one.time, part.times[i]);
    }
  }
  const MergedGradients merged = merge_rows(given, dim);
  CHECK(merged.keys == order && merged.gradients.size() == order.size() * dim);
  for (size_t i = 0; i < order.size(); ++i) {
    const Merged& one = expected[order[i]];
    CHECK(merged.counts[i] == one.count && merged.times[i] == one.time);
    for (size_t j = 0; j < dim; ++j) CHECK(same(merged.gradients[i * dim + j], one.gradient[j]));
  }
}

void time(Input input) {
  std::vector<char> text;
  while (!input.done()) text.push_back(input.take<char>());
  double seconds = 0;
  if (parse_time({text.data(), text.size()}, seconds)) CHECK(is_time(seconds));
}

void cross(Input input) {
  const size_t max_length = input.below(8);
  std::vector<std::vector<uint64_t>> lists(2 + input.below(kMaxCrossed - 1));
  size_t combinations = 1;
  bool is_empty = false;
  for (auto& list : lists) {
    for (uint32_t n = input.below(10); n > 0; --n) list.push_back(input.key());
    is_empty |= list.empty();
    combinations = std::min(combinations * list.size(), kMaxCombinations + 1);
  }
  const std::vector<std::span<const uint64_t>> views(lists.begin(), lists.end());
  std::vector<uint64_t> keys;
  const bool fits = append_cross(views, max_length, keys);
  CHECK(fits == (is_empty || combinations <= kMaxCombinations));
  if (!fits || is_empty) CHECK(keys.empty());
  else CHECK(keys.size() == (max_length ? std::min(combinations, max_length) : combinations));
}

}  // namespace
}  // namespace streamtrain::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace streamtrain::fuzz;
  if (size == 0) return 0;
  static constexpr void (*kAll[])(Input) = {&narrow_and_widen, &merge, &time, &cross};
  kAll[data[0] % 4](Input(data + 1, size - 1));
  return 0;
}
