#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <optional>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "bind.h"
#include "dense.h"

namespace streamtrain {
namespace {

using Vector = In<float, nb::ndim<1>>;

void construct(DenseVector* self, Vector values, std::string_view optimizer, float rate, float initial_accumulator,
               float epsilon, float beta1, float beta2) {
  if (optimizer != "sgd" && optimizer != "adagrad" && optimizer != "adam")
    throw std::invalid_argument("the optimizer of dense parameters must be sgd, adagrad or adam");
  new (self) DenseVector({values.data(), values.data() + values.size()},
                         make_optimizer(optimizer, {initial_accumulator, epsilon, beta1, beta2, 1.0f, 0.0f, 0.0f}), rate);
}

bool apply(DenseVector& dense, Vector gradient, std::optional<float> rate) {
  if (gradient.size() != dense.size()) throw std::invalid_argument("the gradient does not have the vector's size");
  nb::gil_scoped_release release;
  return dense.apply(gradient.data(), rate);
}

void load(DenseVector& dense, Vector values, In<float, nb::ndim<2>> slots, float steps) {
  if (values.size() != dense.size() || slots.shape(0) != dense.slots() || slots.shape(1) != dense.size())
    throw std::invalid_argument("values must be [size] and slots [number of slots, size]");
  dense.load(values.data(), slots.data(), steps);
}

auto values_of(nb::handle_t<DenseVector> self) {
  const auto& dense = nb::cast<const DenseVector&>(self);
  return nb::ndarray<nb::numpy, const float, nb::ndim<1>>(dense.values().data(), {dense.size()}, self);
}

auto slots_of(nb::handle_t<DenseVector> self) {
  const auto& dense = nb::cast<const DenseVector&>(self);
  return nb::ndarray<nb::numpy, const float, nb::ndim<2>>(dense.state().data(), {dense.slots(), dense.size()}, self);
}

}  // namespace

void bind_dense(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<DenseVector>(m, "DenseVector")
      .def("__init__", &construct, "values"_a, nb::kw_only(), "optimizer"_a, "rate"_a, "initial_accumulator"_a = 0.1f,
           "epsilon"_a = 1e-7f, "beta1"_a = 0.9f, "beta2"_a = 0.999f)
      .def("__len__", &DenseVector::size)
      .def_prop_ro("nbytes", &DenseVector::nbytes)
      .def_prop_ro("values", &values_of)
      .def_prop_ro("slots", &slots_of)
      .def_prop_ro("steps", &DenseVector::steps)
      .def("apply", &apply, "gradient"_a, "rate"_a = nb::none())
      .def("load", &load, "values"_a, "slots"_a, "steps"_a);
}

}  // namespace streamtrain
