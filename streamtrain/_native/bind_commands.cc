#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>

#include "bind.h"
#include "commands.h"

namespace streamtrain {
namespace {

using Keys = In<uint64_t, nb::ndim<1>>;
using Indices = In<int64_t, nb::ndim<1>>;
using RowBytes = In<uint8_t, nb::ndim<2>>;

template <typename T>
std::span<const T> span_of(In<T, nb::ndim<1>> values) {
  return {values.data(), values.shape(0)};
}

std::string_view text(nb::bytes value) { return {value.c_str(), value.size()}; }

nb::tuple group(Indices buckets) {
  Grouped found;
  {
    nb::gil_scoped_release release;
    found = group_by_bucket(span_of<int64_t>(buckets));
  }
  return nb::make_tuple(to_numpy(std::move(found.order)), to_numpy(std::move(found.buckets)),
                        to_numpy(std::move(found.starts)));
}

auto last(Keys keys) {
  std::vector<int64_t> found;
  {
    nb::gil_scoped_release release;
    found = last_of_each(span_of<uint64_t>(keys));
  }
  return to_numpy(std::move(found));
}

bool within(std::span<const int64_t> values, size_t end) {
  return std::all_of(values.begin(), values.end(), [&](int64_t i) { return i >= 0 && static_cast<size_t>(i) < end; });
}

void check(const FieldCommands& commands, std::span<const int64_t> order, std::span<const int64_t> buckets,
           std::span<const int64_t> starts) {
  if (starts.size() != buckets.size() + 1) throw std::invalid_argument("starts must be one more than buckets");
  if (starts.front() < 0 || starts.back() > static_cast<int64_t>(order.size()) || !std::ranges::is_sorted(starts))
    throw std::invalid_argument("starts must ascend and stay within order");
  if (!within(order.subspan(starts.front(), starts.back() - starts.front()), commands.keys.size())) throw std::invalid_argument("order must be of indices of keys");
  if (!within(buckets, kMaxBuckets)) throw std::invalid_argument("a bucket must be between 0 and 2^24 - 1");
}

auto pack(nb::bytes verb, nb::bytes before, nb::bytes after, Indices order, Indices buckets, Indices starts, Keys keys,
          std::optional<RowBytes> rows) {
  FieldCommands commands{text(verb), text(before), text(after), span_of<uint64_t>(keys)};
  if (rows) {
    if (rows->shape(0) != keys.shape(0)) throw std::invalid_argument("there must be as many rows as keys");
    commands.rows = rows->data();
    commands.width = rows->shape(1);
  }
  const auto of = span_of<int64_t>(order), at = span_of<int64_t>(buckets), ends = span_of<int64_t>(starts);
  std::unique_ptr<char[]> data;
  size_t size = 0;
  {
    nb::gil_scoped_release release;
    check(commands, of, at, ends);
    const FieldPacker packer(commands);
    size = packer.size(ends);
    data = std::make_unique_for_overwrite<char[]>(size);
    packer.pack(of, at, ends, data.get());
  }
  nb::capsule owner(data.get(), [](void* p) noexcept { delete[] static_cast<char*>(p); });
  return nb::ndarray<nb::numpy, uint8_t>(data.release(), {size}, owner);
}

}  // namespace

void bind_commands(nb::module_& m) {
  using namespace nb::literals;
  m.def("group_by_bucket", &group, "buckets"_a.noconvert());
  m.def("last_of_each", &last, "keys"_a.noconvert());
  m.def("pack_fields", &pack, "verb"_a, "before"_a, "after"_a, nb::kw_only(), "order"_a.noconvert(),
        "buckets"_a.noconvert(), "starts"_a.noconvert(), "keys"_a.noconvert(), "rows"_a.noconvert() = nb::none());
}

}  // namespace streamtrain
