#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "bind.h"
#include "dense.h"
#include "guarded.h"

namespace streamtrain {
namespace {

using Vector = In<float, nb::ndim<1>>;
using SharedDense = Guarded<DenseVector>;

// What look(dense) returns. The lock is waited for without Python's.
template <typename Look>
auto read(const SharedDense& shared, Look look) {
  nb::gil_scoped_release release;
  return shared.read(look);
}

// A property that is the result of a function.
template <auto kFunction>
auto property(const SharedDense& shared) {
  return read(shared, [](const DenseVector& dense) { return (dense.*kFunction)(); });
}

void construct(SharedDense* self, Vector values, std::string_view optimizer, float rate, float initial_accumulator,
               float epsilon, float decay, float beta1, float beta2) {
  if (optimizer != "sgd" && optimizer != "adagrad" && optimizer != "adam")
    throw std::invalid_argument("the optimizer of dense parameters must be sgd, adagrad or adam");
  new (self) SharedDense(
      std::vector<float>(values.data(), values.data() + values.size()),
      make_optimizer(optimizer, {initial_accumulator, epsilon, decay, beta1, beta2}), rate);
}

nb::object pull(const SharedDense& shared, std::optional<Out<float, nb::ndim<1>>> out) {
  const size_t size = property<&DenseVector::size>(shared);
  if (out && out->size() != size) throw std::invalid_argument("out must have the vector's size");
  nb::object result = out ? nb::cast(*out) : nb::cast(aligned_numpy<float>({size}));
  float* to = out ? out->data() : nb::cast<Out<float, nb::ndim<1>>>(result).data();
  read(shared, [&](const DenseVector& dense) { std::copy_n(dense.values().data(), size, to); });
  return result;
}

// Values and slots as of one moment, and the number of steps.
float pull_state(const SharedDense& shared, Out<float, nb::ndim<1>> values, Out<float, nb::ndim<2>> slots) {
  const size_t size = property<&DenseVector::size>(shared), count = property<&DenseVector::slots>(shared);
  if (values.size() != size || slots.shape(0) != count || slots.shape(1) != size)
    throw std::invalid_argument("values must be [size] and slots [number of slots, size]");
  return read(shared, [&](const DenseVector& dense) {
    std::copy_n(dense.values().data(), size, values.data());
    std::copy_n(dense.state().data(), count * size, slots.data());
    return dense.steps();
  });
}

bool change(SharedDense& shared, Vector by, In<float, nb::ndim<2>> added, Vector decay, float steps) {
  const size_t size = property<&DenseVector::size>(shared), count = property<&DenseVector::slots>(shared);
  if (by.size() != size || added.shape(0) != count || added.shape(1) != size || decay.size() != count)
    throw std::invalid_argument("by must be [size], added [number of slots, size] and decay [number of slots]");
  nb::gil_scoped_release release;
  return shared.write([&](DenseVector& dense) { return dense.change(by.data(), added.data(), decay.data(), steps); });
}

nb::object slots(const SharedDense& shared) {
  const size_t size = property<&DenseVector::size>(shared), count = property<&DenseVector::slots>(shared);
  auto copy = read(shared, [&](const DenseVector& dense) {
    return std::vector<float>(dense.state().data(), dense.state().data() + count * size);
  });
  return nb::cast(to_numpy(std::move(copy), {count, size}));
}

bool apply(SharedDense& shared, Vector gradient, std::optional<float> rate) {
  if (gradient.size() != property<&DenseVector::size>(shared))
    throw std::invalid_argument("the gradient does not have the vector's size");
  nb::gil_scoped_release release;
  return shared.write([&](DenseVector& dense) { return dense.apply(gradient.data(), rate); });
}

void load(SharedDense& shared, Vector values, In<float, nb::ndim<2>> slots, float steps) {
  const size_t size = property<&DenseVector::size>(shared), count = property<&DenseVector::slots>(shared);
  if (values.size() != size || slots.shape(0) != count || slots.shape(1) != size)
    throw std::invalid_argument("values must be [size] and slots [number of slots, size]");
  nb::gil_scoped_release release;
  shared.write([&](DenseVector& dense) { dense.load(values.data(), slots.data(), steps); });
}

}  // namespace

void bind_dense(nb::module_& m) {
  using namespace nb::literals;
  m.def("aligned_floats", [](size_t size) { return aligned_numpy<float>({size}); }, "size"_a);
  nb::class_<SharedDense>(m, "DenseVector")
      .def("__init__", &construct, "values"_a, nb::kw_only(), "optimizer"_a, "rate"_a, "initial_accumulator"_a = 0.1f,
           "epsilon"_a = 1e-7f, "decay"_a = 1.0f, "beta1"_a = 0.9f, "beta2"_a = 0.999f)
      .def("__len__", &property<&DenseVector::size>)
      .def_prop_ro("nbytes", &property<&DenseVector::nbytes>)
      .def_prop_ro("slots", &slots)
      .def_prop_ro("steps", &property<&DenseVector::steps>)
      .def("pull", &pull, "out"_a.noconvert() = nb::none())
      .def("pull_state", &pull_state, "values"_a.noconvert(), "slots"_a.noconvert())
      .def("change", &change, "by"_a, "added"_a, "decay"_a, "steps"_a)
      .def("apply", &apply, "gradient"_a, "rate"_a = nb::none())
      .def("load", &load, "values"_a, "slots"_a, "steps"_a);
}

}  // namespace streamtrain
