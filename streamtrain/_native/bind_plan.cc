#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <string>
#include <tuple>

#include "bind.h"
#include "plan.h"
#include "planner.h"

namespace streamtrain {
namespace {

using FeatureTuple = std::tuple<uint32_t, std::string, uint32_t>;
using Matrix = nb::ndarray<float, nb::numpy, nb::c_contig, nb::device::cpu>;

Combiner combiner_of(const std::string& name) {
  if (name == "sum") return Combiner::kSum;
  if (name == "mean") return Combiner::kMean;
  if (name == "sqrtn") return Combiner::kSqrtN;
  if (name == "none") return Combiner::kNone;
  throw std::invalid_argument("combiner must be sum, mean, sqrtn or none, not " + name);
}

PlanSpec spec_of(const std::vector<FeatureTuple>& features, std::vector<uint32_t> dims, uint32_t shards) {
  std::vector<FeaturePlan> plans;
  for (const auto& [table, combiner, max_length] : features) plans.push_back({table, combiner_of(combiner), max_length});
  return PlanSpec(std::move(plans), std::move(dims), shards);
}

Plan build(Planner& planner, In<uint64_t, nb::ndim<1>> keys, In<int64_t, nb::ndim<1>> starts,
           In<int32_t, nb::ndim<2>> offsets, In<double, nb::ndim<1>> times) {
  const KeyColumns in{{keys.data(), keys.size()}, {starts.data(), starts.size()},
                      {offsets.data(), offsets.size()}, {times.data(), times.size()}};
  nb::gil_scoped_release release;
  return planner.build(in);
}

// A view of a vector that lives as long as the plan.
template <typename T>
auto view(nb::handle plan, const std::vector<T>& values) {
  return nb::ndarray<nb::numpy, const T, nb::ndim<1>>(values.data(), {values.size()}, plan);
}

const TablePlan& table_at(const Plan& plan, size_t table) {
  if (table >= plan.tables.size()) throw nb::index_error("no such table");
  return plan.tables[table];
}

auto pool(const Plan& plan, In<float, nb::ndim<1>> rows, uint32_t extra_columns) {
  if (int64_t(rows.size()) != plan.row_floats()) throw nb::value_error("rows do not have the plan's size");
  const size_t stride = size_t{plan.spec().width()} + extra_columns;
  auto out = aligned_numpy<float>({plan.samples, stride});
  float* to = out.data();
  nb::gil_scoped_release release;
  plan.pool(rows.data(), to, stride);
  return out;
}

auto unpool(const Plan& plan, In<float, nb::ndim<2>> gradient) {
  if (gradient.shape(0) != plan.samples || gradient.shape(1) < plan.spec().width())
    throw nb::value_error("the gradient does not have the shape [samples, width or more]");
  auto out = aligned_numpy<float>({size_t(plan.row_floats())});
  float* to = out.data();
  nb::gil_scoped_release release;
  plan.unpool(gradient.data(), gradient.shape(1), to);
  return out;
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<Planner>(m, "Planner")
      .def("__init__", [](Planner* self, const std::vector<FeatureTuple>& features, std::vector<uint32_t> dims,
                          uint32_t shards) { new (self) Planner(spec_of(features, std::move(dims), shards)); },
           nb::arg("features"), nb::arg("dims"), nb::arg("shards"))
      .def_prop_ro("width", [](const Planner& p) { return p.spec().width(); })
      .def_prop_ro("columns", [](const Planner& p) { return p.spec().columns; })
      .def("plan", &build, nb::arg("keys"), nb::arg("starts"), nb::arg("offsets"), nb::arg("times"));

  nb::class_<Plan>(m, "Plan")
      .def_ro("samples", &Plan::samples)
      .def_prop_ro("width", [](const Plan& p) { return p.spec().width(); })
      .def_prop_ro("row_starts", [](nb::handle_t<Plan> p) { return view(p, nb::cast<const Plan&>(p).row_starts); })
      .def("keys", [](nb::handle_t<Plan> p, size_t t) { return view(p, table_at(nb::cast<const Plan&>(p), t).keys); })
      .def("counts", [](nb::handle_t<Plan> p, size_t t) { return view(p, table_at(nb::cast<const Plan&>(p), t).counts); })
      .def("times", [](nb::handle_t<Plan> p, size_t t) { return view(p, table_at(nb::cast<const Plan&>(p), t).times); })
      .def("shard_starts",
           [](nb::handle_t<Plan> p, size_t t) { return view(p, table_at(nb::cast<const Plan&>(p), t).shard_starts); })
      .def("pool", &pool, nb::arg("rows"), nb::arg("extra_columns") = 0)
      .def("unpool", &unpool, nb::arg("gradient"));
}

}  // namespace streamtrain
