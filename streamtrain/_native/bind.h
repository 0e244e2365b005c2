// What the binding files share. The headers of the core include neither this file nor nanobind.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace streamtrain {

namespace nb = nanobind;

template <typename T, typename... Shape>
using In = nb::ndarray<const T, nb::numpy, nb::c_contig, nb::device::cpu, Shape...>;
template <typename T, typename... Shape>
using Out = nb::ndarray<T, nb::numpy, nb::c_contig, nb::device::cpu, Shape...>;

// A new NumPy array that takes over a vector, without a copy.
template <typename T>
auto to_numpy(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto holder = std::make_unique<std::vector<T>>(std::move(values));
  T* data = holder->data();
  nb::capsule owner(holder.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  holder.release();
  return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

template <typename T>
auto to_numpy(std::vector<T>&& values) {
  const size_t size = values.size();
  return to_numpy(std::move(values), {size});
}

// A new uninitialised NumPy array on a cache line of its own, which TensorFlow takes without a copy.
template <typename T>
auto aligned_numpy(std::initializer_list<size_t> shape) {
  constexpr size_t kLine = 64;
  size_t bytes = sizeof(T);
  for (size_t extent : shape) bytes *= extent;
  void* data = std::aligned_alloc(kLine, (bytes + kLine) / kLine * kLine);
  if (data == nullptr) throw std::bad_alloc();
  nb::capsule owner(data, [](void* p) noexcept { std::free(p); });
  return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

// Texts lie one after another in `size` bytes, text i from offsets[i] to offsets[i + 1].
template <typename Offset>
void check_offsets(const Offset* offsets, size_t count, size_t size) {
  if (count == 0) return;
  if (offsets[0] < 0 || static_cast<size_t>(offsets[count - 1]) > size || !std::is_sorted(offsets, offsets + count))
    throw nb::value_error("offsets must ascend and stay within the data");
}

class TensorSamples;

// Those of a Python object; nullptr: it is none.
const TensorSamples* samples_of(nb::handle object);

void bind_commands(nb::module_& m);
void bind_decode(nb::module_& m);
void bind_dense(nb::module_& m);
void bind_hash(nb::module_& m);
void bind_lane(nb::module_& m);
void bind_merge(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_table(nb::module_& m);
void bind_tensor(nb::module_& m);
void bind_wire(nb::module_& m);

}  // namespace streamtrain
