#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bind.h"
#include "tensor_samples.h"

namespace streamtrain {
namespace {

std::string_view view(const nb::bytes& data) { return {data.c_str(), data.size()}; }

// A tensor, and the bytes that its texts are in.
struct HeldTensor {
  Tensor tensor;
  nb::object bytes;
};

HeldTensor of_tensorflow(const std::string& name, nb::bytes message) {
  return {read_tensorflow_tensor(name, view(message)), message};
}

HeldTensor of_inference(nb::bytes message, std::optional<nb::bytes> raw) {
  if (!raw) return {read_inference_tensor(view(message), {}), message};
  return {read_inference_tensor(view(message), view(*raw)), *raw};
}

HeldTensor of_binary(std::string name, std::vector<int64_t> shape, std::string_view datatype, nb::bytes data) {
  return {read_binary_tensor(std::move(name), std::move(shape), datatype, view(data)), data};
}

nb::list values_of(const HeldTensor& self) {
  const Tensor& tensor = self.tensor;
  nb::list values;
  for (size_t at = 0; at < tensor.size; ++at) {
    switch (tensor.kind) {
      case Tensor::Kind::kText: values.append(nb::str(tensor.text(at).data(), tensor.text(at).size())); break;
      case Tensor::Kind::kFloat: values.append(tensor.number(at)); break;
      case Tensor::Kind::kBoolean: values.append(tensor.integer(at) != 0); break;
      case Tensor::Kind::kSigned: values.append(static_cast<int64_t>(tensor.integer(at))); break;
      case Tensor::Kind::kUnsigned: values.append(tensor.integer(at)); break;
    }
  }
  return values;
}

// Samples, and the tensors that they are in.
struct HeldSamples {
  TensorSamples samples;
  nb::tuple tensors;
};

constexpr std::string_view kLength = ".length";

void make_samples(HeldSamples* self, nb::sequence given, nb::dict fields) {
  const nb::tuple tensors(given);
  std::unordered_map<std::string_view, const Tensor*> named;
  for (const nb::handle one : tensors) {
    const Tensor& tensor = nb::cast<const HeldTensor&>(one).tensor;
    if (!named.try_emplace(tensor.name, &tensor).second)
      throw nb::value_error(("input '" + tensor.name + "' appears twice").c_str());
  }
  TensorSamples samples;
  for (const nb::handle one : tensors) {
    const Tensor& tensor = nb::cast<const HeldTensor&>(one).tensor;
    const nb::str name(tensor.name.data(), tensor.name.size());
    if (!fields.contains(name)) continue;
    const auto lengths = named.find(tensor.name + std::string(kLength));
    samples.add(tensor, nb::cast<bool>(fields[name]), lengths == named.end() ? nullptr : lengths->second);
  }
  if (samples.columns().empty()) {
    const std::string names = nb::cast<std::string>(nb::repr(nb::list(fields.keys())));
    throw nb::value_error(("the request has none of the model's inputs, which are " + names).c_str());
  }
  new (self) HeldSamples{std::move(samples), tensors};
}

nb::bytes json_of(const HeldSamples& self, int64_t row) {
  const auto size = static_cast<int64_t>(self.samples.size());
  if (row < -size || row >= size) throw nb::index_error("there is no such sample");
  const std::string text = self.samples.json(static_cast<size_t>(row < 0 ? row + size : row));
  return nb::bytes(text.data(), text.size());
}

}  // namespace

const TensorSamples* samples_of(nb::handle object) {
  const HeldSamples* held = nullptr;
  return nb::try_cast(object, held) && held ? &held->samples : nullptr;
}

void bind_tensor(nb::module_& m) {
  nb::class_<HeldTensor>(m, "InputTensor")
      .def_static("of_tensorflow", &of_tensorflow, nb::arg("name"), nb::arg("message"))
      .def_static("of_inference", &of_inference, nb::arg("message"), nb::arg("raw").none())
      .def_static("of_binary", &of_binary, nb::arg("name"), nb::arg("shape"), nb::arg("datatype"), nb::arg("data"))
      .def_prop_ro("name", [](const HeldTensor& self) { return self.tensor.name; })
      .def_prop_ro("shape", [](const HeldTensor& self) { return self.tensor.shape; })
      .def("tolist", &values_of);

  nb::class_<HeldSamples>(m, "TensorSamples")
      .def("__init__", &make_samples, nb::arg("tensors"), nb::arg("fields"))
      .def("__len__", [](const HeldSamples& self) { return self.samples.size(); })
      .def("__getitem__", &json_of);
}

}  // namespace streamtrain
