#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include <optional>
#include <stdexcept>
#include <string_view>

#include "bind.h"
#include "wire.h"

namespace streamtrain {
namespace {

template <typename T>
using Vector = In<T, nb::ndim<1>>;
template <typename T>
using OutVector = Out<T, nb::ndim<1>>;

Storage format_of(std::string_view dtype) {
  if (dtype == "bfloat16") return Storage::kBfloat16;
  if (dtype != "float16") throw std::invalid_argument("dtype must be float16 or bfloat16");
  return Storage::kFloat16;
}

// What convert(format, from, to, n) writes, into `out` or a new array.
template <typename From, typename To, typename Convert>
nb::object converted(Vector<From> values, std::string_view dtype, std::optional<OutVector<To>> out, Convert convert) {
  const Storage format = format_of(dtype);
  const size_t n = values.size();
  if (out && out->size() != n) throw std::invalid_argument("out must have as many elements as values");
  nb::object result = out ? nb::cast(*out) : nb::cast(aligned_numpy<To>({n}));
  To* to = out ? out->data() : nb::cast<OutVector<To>>(result).data();
  nb::gil_scoped_release release;
  convert(format, values.data(), to, n);
  return result;
}

nb::object narrowed(Vector<float> values, std::string_view dtype, std::optional<OutVector<uint16_t>> out) {
  return converted<float, uint16_t>(values, dtype, out, &narrow_for_wire);
}

nb::object widened(Vector<uint16_t> values, std::string_view dtype, std::optional<OutVector<float>> out) {
  return converted<uint16_t, float>(values, dtype, out, &widen_from_wire);
}

}  // namespace

void bind_wire(nb::module_& m) {
  using namespace nb::literals;
  m.def("narrow", &narrowed, "values"_a.noconvert(), "dtype"_a, "out"_a.noconvert() = nb::none());
  m.def("widen", &widened, "values"_a.noconvert(), "dtype"_a, "out"_a.noconvert() = nb::none());
}

}  // namespace streamtrain
