#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <mutex>
#include <string_view>

#include "bind.h"
#include "decode.h"
#include "event_time.h"

namespace streamtrain {
namespace {

// A decoder, and the lock that makes concurrent calls on it take turns: with the GIL released, nothing else would.
struct SharedDecoder {
  explicit SharedDecoder(DecoderSpec spec) : decoder(std::move(spec)) {}
  Decoder decoder;
  std::mutex mutex;
};

// A choice out of names, as the enumerator of the same position.
template <typename Enum>
Enum choose(std::string_view name, std::initializer_list<std::string_view> names, const char* message) {
  int i = 0;
  for (const std::string_view candidate : names) {
    if (candidate == name) return static_cast<Enum>(i);
    ++i;
  }
  throw nb::value_error(message);
}

LabelSpec label_spec(std::string field, std::string_view kind, bool optional, std::optional<std::string> positive) {
  return {std::move(field),
          choose<LabelSpec::Kind>(kind, {"binary", "real", "count"}, "kind must be binary, real or count"), optional,
          std::move(positive)};
}

TimeFormat time_format(double per_second, std::string pattern) {
  TimeFormat format{per_second, std::move(pattern)};
  if (!(per_second > 0)) throw std::invalid_argument("per_second must be > 0");
  format.check();
  return format;
}

NumericSpec numeric_spec(std::string field, std::optional<double> value, std::string_view transform, double mean,
                         double stddev, std::vector<int> cells) {
  return {std::move(field), value,
          choose<NumericSpec::Transform>(transform, {"none", "log1p", "standardize"},
                                         "transform must be none, log1p or standardize"),
          mean, stddev, std::move(cells)};
}

// What Python sees of the columns: the arrays own the vectors.
struct DecodedColumns {
  size_t size;
  nb::object kept, keys, starts, offsets, single, numeric, labels, weights, times, errors;
};

template <typename... Args>
nb::object array(Args&&... args) {
  return nb::cast(to_numpy(std::forward<Args>(args)...));
}

DecodedColumns to_python(Columns&& columns, const Decoder& decoder, bool with_labels) {
  const size_t n = columns.size;
  nb::list errors;
  for (const Refusal& refusal : columns.refusals) {
    const std::string_view reason = reason_name(refusal.reason), name = decoder.name(refusal.name);
    errors.append(nb::make_tuple(refusal.message, nb::str(reason.data(), reason.size()),
                                 nb::str(name.data(), name.size()), refusal.position));
  }
  return {n,
          array(std::move(columns.kept)),
          array(std::move(columns.keys)),
          array(std::move(columns.starts)),
          array(std::move(columns.offsets), std::initializer_list<size_t>{decoder.features(), n + 1}),
          array(std::move(columns.single)).attr("view")("bool"),
          array(std::move(columns.numeric), std::initializer_list<size_t>{n, decoder.numerics()}),
          array(std::move(columns.labels), std::initializer_list<size_t>{n, decoder.labels(with_labels)}),
          array(std::move(columns.weights)),
          array(std::move(columns.times)),
          std::move(errors)};
}

DecodedColumns decode(SharedDecoder& self, nb::sequence messages, bool with_labels) {
  // The tuple keeps every message alive while the GIL is released, whatever happens to a list meanwhile.
  const nb::tuple held(messages);
  std::vector<Source> sources;
  sources.reserve(held.size());
  for (const nb::handle message : held) {
    if (PyBytes_Check(message.ptr()))
      sources.push_back({{PyBytes_AsString(message.ptr()), static_cast<size_t>(PyBytes_Size(message.ptr()))}});
    else if (const TensorSamples* const tensors = samples_of(message))
      sources.push_back({{}, tensors});
    else
      throw nb::type_error("messages must be bytes, or TensorSamples");
  }
  Columns columns;
  {
    nb::gil_scoped_release release;
    const std::lock_guard lock(self.mutex);
    columns = self.decoder.decode(sources, with_labels);
  }
  return to_python(std::move(columns), self.decoder, with_labels);
}

// Event times of texts of a format; NaN where a text is none.
auto parse_times(In<uint8_t, nb::ndim<1>> data, In<int64_t, nb::ndim<1>> offsets, const TimeFormat& format) {
  check_offsets(offsets.data(), offsets.size(), data.size());
  std::vector<double> times(offsets.size() ? offsets.size() - 1 : 0);
  const auto* text = reinterpret_cast<const char*>(data.data());
  for (size_t i = 0; i < times.size(); ++i) {
    const int64_t begin = offsets.data()[i], end = offsets.data()[i + 1];
    if (!format.parse({text + begin, static_cast<size_t>(end - begin)}, times[i]))
      times[i] = std::numeric_limits<double>::quiet_NaN();
  }
  return to_numpy(std::move(times));
}

}  // namespace

void bind_decode(nb::module_& m) {
  nb::list reasons;
  for (size_t i = 1; i < kReasonNames.size(); ++i) reasons.append(nb::str(kReasonNames[i].data(), kReasonNames[i].size()));
  m.attr("DECODE_REASONS") = nb::tuple(reasons);

  m.attr("TIME_RANGE") = nb::make_tuple(kTimeBegin, kTimeEnd);
  nb::class_<LabelSpec>(m, "LabelSpec")
      .def(nb::new_(&label_spec), nb::arg("field"), nb::kw_only(), nb::arg("kind") = "binary",
           nb::arg("optional") = false, nb::arg("positive") = nb::none());
  nb::class_<TimeFormat>(m, "TimeFormat")
      .def(nb::new_(&time_format), nb::arg("per_second") = 1.0, nb::arg("pattern") = "");
  m.def("parse_times", &parse_times, nb::arg("data"), nb::arg("offsets"), nb::arg("format") = TimeFormat{});
  nb::class_<CategoricalSpec>(m, "CategoricalSpec")
      .def(nb::new_([](std::string field, uint32_t max_length,
                       std::optional<std::vector<std::string>> default_ids) {
             return CategoricalSpec{std::move(field), max_length, std::move(default_ids)};
           }),
           nb::arg("field"), nb::kw_only(), nb::arg("max_length") = 0, nb::arg("default") = nb::none());
  nb::class_<CrossSpec>(m, "CrossSpec")
      .def(nb::new_([](std::string name, std::vector<uint32_t> categoricals, uint32_t max_length) {
             return CrossSpec{std::move(name), std::move(categoricals), max_length};
           }),
           nb::arg("name"), nb::arg("categoricals"), nb::kw_only(), nb::arg("max_length") = 0);
  nb::class_<NumericSpec>(m, "NumericSpec")
      .def(nb::new_(&numeric_spec), nb::arg("field"), nb::kw_only(), nb::arg("default") = nb::none(),
           nb::arg("transform") = "none", nb::arg("mean") = 0.0, nb::arg("stddev") = 1.0,
           nb::arg("cells") = std::vector<int>{});

  nb::class_<DecodedColumns>(m, "Columns")
      .def_ro("size", &DecodedColumns::size)
      .def_ro("kept", &DecodedColumns::kept)
      .def_ro("keys", &DecodedColumns::keys)
      .def_ro("starts", &DecodedColumns::starts)
      .def_ro("offsets", &DecodedColumns::offsets)
      .def_ro("single", &DecodedColumns::single)
      .def_ro("numeric", &DecodedColumns::numeric)
      .def_ro("labels", &DecodedColumns::labels)
      .def_ro("weights", &DecodedColumns::weights)
      .def_ro("times", &DecodedColumns::times)
      .def_ro("errors", &DecodedColumns::errors);

  nb::class_<SharedDecoder>(m, "Decoder")
      .def("__init__",
           [](SharedDecoder* self, std::vector<LabelSpec> labels, std::vector<CategoricalSpec> categoricals,
              std::vector<CrossSpec> crosses, std::vector<NumericSpec> numerics, std::optional<std::string> time,
              std::optional<std::string> weight, TimeFormat time_format, size_t max_message_bytes,
              size_t max_id_bytes, size_t max_ids, int max_depth) {
             new (self) SharedDecoder(DecoderSpec{std::move(labels), std::move(categoricals), std::move(crosses),
                                                  std::move(numerics), std::move(time), std::move(weight),
                                                  std::move(time_format), max_message_bytes, max_id_bytes, max_ids, max_depth});
           },
           nb::kw_only(), nb::arg("labels"), nb::arg("categoricals"), nb::arg("crosses"), nb::arg("numerics"),
           nb::arg("time").none(), nb::arg("weight").none(), nb::arg("time_format") = TimeFormat{},
           nb::arg("max_message_bytes") = size_t{1} << 20,
           nb::arg("max_id_bytes") = 256, nb::arg("max_ids") = 10'000, nb::arg("max_depth") = 32)
      .def("decode", &decode, nb::arg("messages"), nb::arg("with_labels") = true);
}

}  // namespace streamtrain
