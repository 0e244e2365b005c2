// What the binding files share. The headers of the core include neither this file nor nanobind.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <initializer_list>
#include <memory>
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

void bind_hash(nb::module_& m);

}  // namespace streamtrain
