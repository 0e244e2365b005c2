#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>
#include <mutex>
#include <string>
#include <tuple>

#include "bind.h"
#include "micro.h"
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

// A planner that threads share.
struct SharedPlanner {
  explicit SharedPlanner(PlanSpec spec) : planner(std::move(spec)) {}
  Planner planner;
  std::mutex mutex;
};

Plan build(SharedPlanner& self, In<uint64_t, nb::ndim<1>> keys, In<int64_t, nb::ndim<1>> starts,
           In<int32_t, nb::ndim<2>> offsets, In<double, nb::ndim<1>> times) {
  const KeyColumns in{{keys.data(), keys.size()}, {starts.data(), starts.size()},
                      {offsets.data(), offsets.size()}, {times.data(), times.size()}};
  nb::gil_scoped_release release;
  const std::lock_guard lock(self.mutex);
  return self.planner.build(in);
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

using Kinds = std::vector<std::pair<std::string, uint32_t>>;

std::vector<std::pair<MicroPlan::Kind, uint32_t>> kinds_of(const Kinds& given) {
  std::vector<std::pair<MicroPlan::Kind, uint32_t>> kinds;
  for (const auto& [name, slots] : given) {
    if (name != "single" && name != "list" && name != "sequence")
      throw std::invalid_argument("a feature is single, list or sequence, not " + name);
    kinds.emplace_back(name == "single" ? MicroPlan::Kind::kSingle
                       : name == "list" ? MicroPlan::Kind::kList
                                        : MicroPlan::Kind::kSequence,
                       slots);
  }
  return kinds;
}

auto micro_index(const MicroPlan& micro, size_t group, uint32_t steps, uint32_t width, int32_t none) {
  auto out = aligned_numpy<int32_t>({steps, width});
  micro.index(group, steps, width, none, out.data());
  return out;
}

auto micro_live(const MicroPlan& micro, size_t group, uint32_t steps, uint32_t width,
                std::optional<In<uint8_t, nb::ndim<1>>> awaited) {
  if (awaited && awaited->size() != micro.rows(group)) throw nb::value_error("awaited must have one entry per row");
  auto out = aligned_numpy<float>({steps, width});
  micro.live(group, steps, width, awaited ? awaited->data() : nullptr, out.data());
  return out;
}

auto micro_occurrences(const MicroPlan& micro, size_t group, uint32_t steps, const Kinds& kinds, int32_t none) {
  size_t stride = 0;
  for (const auto& [name, slots] : kinds) stride += slots;
  auto out = aligned_numpy<int32_t>({steps, stride});
  micro.occurrences(group, steps, kinds_of(kinds), none, out.data());
  return out;
}

nb::tuple micro_segments(const MicroPlan& micro, uint32_t feature, uint32_t steps, uint32_t slots) {
  auto segments = aligned_numpy<int32_t>({steps, slots});
  auto scales = aligned_numpy<float>({steps, micro.size()});
  micro.segments(feature, steps, slots, segments.data(), scales.data());
  return nb::make_tuple(segments, scales);
}

nb::tuple micro_order(const MicroPlan& micro, size_t group, uint32_t width) {
  MicroPlan::Order order = micro.order(group, width);
  return nb::make_tuple(to_numpy(std::move(order.positions)), to_numpy(std::move(order.repeats)),
                        to_numpy(std::move(order.counts)));
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<SharedPlanner>(m, "Planner")
      .def("__init__", [](SharedPlanner* self, const std::vector<FeatureTuple>& features, std::vector<uint32_t> dims,
                          uint32_t shards) { new (self) SharedPlanner(spec_of(features, std::move(dims), shards)); },
           nb::arg("features"), nb::arg("dims"), nb::arg("shards"))
      .def_prop_ro("width", [](const SharedPlanner& p) { return p.planner.spec().width(); })
      .def_prop_ro("columns", [](const SharedPlanner& p) { return p.planner.spec().columns; })
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
      .def("common", [](const Plan& plan, const Plan& other, size_t table) {
        table_at(plan, table), table_at(other, table);
        auto [mine, theirs] = plan.common(other, table);
        return nb::make_tuple(to_numpy(std::move(mine)), to_numpy(std::move(theirs)));
      }, nb::arg("other"), nb::arg("table"))
      .def("pool", &pool, nb::arg("rows"), nb::arg("extra_columns") = 0)
      .def("unpool", &unpool, nb::arg("gradient"));

  nb::class_<MicroPlan>(m, "MicroPlan")
      .def("__init__", [](MicroPlan* self, const Plan& plan, uint32_t size,
                          const std::vector<std::vector<uint32_t>>& groups) { new (self) MicroPlan(plan, size, groups); },
           nb::arg("plan"), nb::arg("size"), nb::arg("groups"), nb::keep_alive<1, 2>())
      .def_prop_ro("steps", &MicroPlan::steps)
      .def_prop_ro("lengths", &MicroPlan::lengths)
      .def("rows", &MicroPlan::rows, nb::arg("group"))
      .def("width", &MicroPlan::width, nb::arg("group"))
      .def("index", &micro_index, nb::arg("group"), nb::arg("steps"), nb::arg("width"), nb::arg("none"))
      .def("live", &micro_live, nb::arg("group"), nb::arg("steps"), nb::arg("width"), nb::arg("awaited").none())
      .def("occurrences", &micro_occurrences, nb::arg("group"), nb::arg("steps"), nb::arg("kinds"), nb::arg("none"))
      .def("segments", &micro_segments, nb::arg("feature"), nb::arg("steps"), nb::arg("slots"))
      .def("order", &micro_order, nb::arg("group"), nb::arg("width"));
}

}  // namespace streamtrain
