#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "bind.h"
#include "shared_table.h"

namespace streamtrain {
namespace {

using Keys = In<uint64_t, nb::ndim<1>>;
using Words = In<uint32_t, nb::ndim<1>>;
using Matrix = In<float, nb::ndim<2>>;

// Locks are waited for without Python's.
using Released = nb::call_guard<nb::gil_scoped_release>;

// Who goes through all rows of a table, which it keeps alive.
class RowScan {
 public:
  RowScan(const SharedTable& table, uint32_t max_rows) : table_(table), max_rows_(max_rows) { table_.begin_scan(scan_); }
  RowScan(const RowScan&) = delete;
  RowScan& operator=(const RowScan&) = delete;
  ~RowScan() { end(); }

  Rows next() {
    Rows rows;
    rows.dim = table_.layout().dim;
    rows.state_size = table_.layout().state_size;
    if (ended_) throw nb::stop_iteration();
    nb::gil_scoped_release release;
    if (!table_.scan(scan_, max_rows_, rows)) end();
    return rows;
  }

 private:
  void end() {
    if (!std::exchange(ended_, true)) table_.end_scan(scan_);
  }

  const SharedTable& table_;
  const uint32_t max_rows_;
  TableScan scan_;
  bool ended_ = false;
};

struct Drained {
  Rows rows;
  std::vector<uint64_t> tombstones;
};

void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

void check(Matrix values, size_t rows, size_t columns, const char* message) {
  require(values.shape(0) == rows && values.shape(1) == columns, message);
}

void check(Words values, size_t rows, const char* message) { require(values.shape(0) == rows, message); }

// A NumPy view of a vector inside `owner`, which it keeps alive.
template <typename T>
auto view(const std::vector<T>& values, nb::handle owner, std::initializer_list<size_t> shape) {
  return nb::ndarray<nb::numpy, const T>(values.data(), shape, owner);
}

template <typename T>
auto view(const std::vector<T>& values, nb::handle owner) {
  return view(values, owner, {values.size()});
}

// A property that is a view of the vector which get(object) returns.
template <typename Object, typename Get>
auto column(Get get) {
  return [get](nb::handle self) { return view(get(nb::cast<const Object&>(self)), self); };
}

Storage storage_of(std::string_view dtype) {
  if (dtype == "float32") return Storage::kFloat32;
  if (dtype == "bfloat16") return Storage::kBfloat16;
  require(dtype == "float16", "dtype must be float32, bfloat16 or float16");
  return Storage::kFloat16;
}

Init init_of(std::string_view kind, float scale, uint64_t seed) {
  require(kind == "uniform" || kind == "constant", "init must be uniform or constant");
  return {kind == "uniform" ? InitKind::kUniform : InitKind::kConstant, scale, seed};
}

// float32 rows [count, dim]: those that fill(data) writes, into `out` or a new array.
template <typename Fill>
nb::object rows_into(std::optional<Out<float, nb::ndim<2>>> out, size_t count, size_t dim, Fill fill) {
  if (out) {
    require(out->shape(0) == count && out->shape(1) == dim, "out must be [number of keys, floats of a row]");
    {
      nb::gil_scoped_release release;
      fill(out->data());
    }
    return nb::cast(*out);
  }
  auto* data = new float[count * dim];  // not zeroed, for it is written at once
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  {
    nb::gil_scoped_release release;
    fill(data);
  }
  return nb::cast(nb::ndarray<nb::numpy, float>(data, {count, dim}, owner));
}

nb::object birth_rows(Keys keys, size_t dim, uint64_t seed, std::string_view kind, float scale, std::string_view dtype,
                      std::optional<Out<float, nb::ndim<2>>> out) {
  require(dim >= 1 && dim <= kMaxDim, "dim must be between 1 and 4096");
  const Init init = init_of(kind, scale, seed);
  const Storage storage = storage_of(dtype);
  return rows_into(out, keys.shape(0), dim, [&](float* data) {
    for (size_t i = 0; i < keys.shape(0); ++i) birth(init, storage, keys.data()[i], data + i * dim, dim);
  });
}

void construct(SharedTable* self, size_t dim, std::string_view optimizer, float rate, float initial_accumulator,
               float epsilon, float decay, float beta1, float beta2, float beta, float l1, float l2, uint64_t seed,
               std::string_view init, float init_scale, std::string_view dtype, uint32_t min_count,
               uint32_t sketch_width, uint32_t expire_after, uint32_t capacity, uint64_t memory, std::string_view folder,
               uint64_t segment_bytes) {
  TableConfig config;
  config.dim = dim;
  config.optimizer = make_optimizer(optimizer, {initial_accumulator, epsilon, decay, beta1, beta2, beta, l1, l2});
  config.rate = rate;
  config.init = init_of(init, init_scale, seed);
  config.storage = storage_of(dtype);
  config.min_count = min_count;
  config.sketch_width = sketch_width;
  config.expire_after = expire_after;
  config.capacity = capacity;
  config.memory = memory;
  config.folder = folder;
  config.segment_bytes = segment_bytes;
  new (self) SharedTable(config);
}

nb::object pull(const SharedTable& t, Keys keys, std::optional<Out<float, nb::ndim<2>>> out) {
  return rows_into(out, keys.shape(0), t.layout().dim,
                   [&](float* data) { t.pull(keys.data(), keys.shape(0), data); });
}

nb::tuple pull_state(const SharedTable& t, Keys keys, std::optional<Out<float, nb::ndim<2>>> out) {
  const size_t n = keys.shape(0);
  std::vector<uint8_t> awaited(n);
  nb::object rows = rows_into(out, n, size_t{t.layout().dim} + t.layout().state_size,
                              [&](float* data) { t.pull_state(keys.data(), n, data, awaited.data()); });
  return nb::make_tuple(rows, to_numpy(std::move(awaited)));
}

PushResult push(SharedTable& t, Keys keys, Matrix gradients, Words counts, Words times, std::optional<float> rate,
                std::optional<Words> repeats) {
  const size_t n = keys.shape(0);
  uint64_t total = n;
  if (repeats) {
    check(*repeats, n, "repeats must have as many elements as keys");
    total = std::accumulate(repeats->data(), repeats->data() + n, uint64_t{0});
  }
  require(total < std::numeric_limits<uint32_t>::max(), "there must be fewer than 2^32 - 1 gradients");
  check(gradients, total, t.layout().dim, "gradients must be [number of keys, or sum of repeats, dim]");
  check(counts, total, "counts must have as many elements as there are gradients");
  check(times, n, "times must have as many elements as keys");
  nb::gil_scoped_release release;
  return t.push({keys.data(), repeats ? repeats->data() : nullptr, gradients.data(), counts.data(), times.data(), n},
                rate);
}

uint64_t load(SharedTable& t, Keys keys, Matrix embeddings, Matrix state, Words counts, Words last_seen, bool cold,
              bool only_new) {
  const size_t n = keys.shape(0);
  check(embeddings, n, t.layout().dim, "embeddings must be [number of keys, dim]");
  check(state, n, t.layout().state_size, "state must be [number of keys, state_size]");
  check(counts, n, "counts must have as many elements as keys");
  check(last_seen, n, "last_seen must have as many elements as keys");
  nb::gil_scoped_release release;
  return t.load({keys.data(), embeddings.data(), state.data(), counts.data(), last_seen.data(), n}, cold,
                only_new);
}

uint64_t remove_keys(SharedTable& t, Keys keys) {
  nb::gil_scoped_release release;
  return t.remove(keys.data(), keys.shape(0));
}

nb::tuple lookup(const SharedTable& t, Keys keys) {
  Found f;
  {
    nb::gil_scoped_release release;
    f = t.lookup(keys.data(), keys.shape(0));
  }
  const nb::object found = nb::cast(to_numpy(std::move(f.found))).attr("view")("bool");
  return nb::make_tuple(found, to_numpy(std::move(f.counts)), to_numpy(std::move(f.last_seen)));
}

Rows empty_rows(const SharedTable& t) {
  Rows rows;
  rows.dim = t.layout().dim;
  rows.state_size = t.layout().state_size;
  return rows;
}

nb::tuple scan(const SharedTable& t, uint64_t cursor, uint32_t max_rows) {
  require(max_rows > 0, "max_rows must be positive");
  Rows rows = empty_rows(t);
  std::optional<uint64_t> next;
  {
    nb::gil_scoped_release release;
    next = t.scan(cursor, max_rows, rows);
  }
  return nb::make_tuple(next, std::move(rows));
}

Drained drain(SharedTable& t, uint32_t channel, uint32_t max_rows) {
  Drained part{empty_rows(t), {}};
  nb::gil_scoped_release release;
  t.drain(channel, max_rows, part.rows, part.tombstones);
  return part;
}

void mark_dirty(SharedTable& t, uint32_t channel, Keys keys) {
  nb::gil_scoped_release release;
  t.mark_dirty(channel, keys.data(), keys.shape(0));
}

std::optional<Rows> read_snapshot(SharedTable& t, uint32_t max_rows) {
  require(max_rows > 0, "max_rows must be positive");
  Rows rows = empty_rows(t);
  nb::gil_scoped_release release;
  if (!t.read_snapshot(max_rows, rows)) return std::nullopt;
  return rows;
}

TableStats stats_of(const SharedTable& t) {
  nb::gil_scoped_release release;
  return t.stats();
}

auto admission(const SharedTable& t) {
  std::vector<uint8_t> bytes;
  {
    nb::gil_scoped_release release;
    bytes = t.admission_bytes();
  }
  return to_numpy(std::move(bytes));
}

nb::dict stats(const SharedTable& t) {
  const TableStats s = stats_of(t);
  nb::dict d;
  d["rows"] = s.rows;
  d["inserted"] = s.inserted;
  d["removed"] = s.removed;
  d["expired"] = s.expired;
  d["evicted"] = s.evicted;
  d["unadmitted"] = s.unadmitted;
  d["non_finite"] = s.non_finite;
  d["row_bytes"] = s.row_bytes;
  d["rows_bytes"] = s.rows_bytes;
  d["index_bytes"] = s.index_bytes;
  d["dirty_bytes"] = s.dirty_bytes;
  d["sketch_bytes"] = s.sketch_bytes;
  d["snapshot_bytes"] = s.snapshot_bytes;
  d["rows_on_disk"] = s.rows_on_disk;
  d["disk_index_bytes"] = s.disk_index_bytes;
  d["disk_bytes"] = s.disk_bytes;
  d["disk_written_bytes"] = s.disk_written_bytes;
  d["disk_reads"] = s.disk_reads;
  d["disk_errors"] = t.disk_errors();
  return d;
}

size_t byte_count(const SharedTable& t) {
  const TableStats s = stats_of(t);
  return s.rows_bytes + s.index_bytes + s.dirty_bytes + s.sketch_bytes + s.snapshot_bytes + s.disk_index_bytes;
}

void bind_parts(nb::module_& m) {
  nb::class_<Rows>(m, "Rows")
      .def("__len__", [](const Rows& r) { return r.keys.size(); })
      .def_prop_ro("keys", column<Rows>([](const Rows& r) -> const auto& { return r.keys; }))
      .def_prop_ro("embeddings", [](nb::handle self) {
        const auto& r = nb::cast<const Rows&>(self);
        return view(r.embeddings, self, {r.keys.size(), r.dim});
      })
      .def_prop_ro("state", [](nb::handle self) {
        const auto& r = nb::cast<const Rows&>(self);
        return view(r.state, self, {r.keys.size(), r.state_size});
      })
      .def_prop_ro("counts", column<Rows>([](const Rows& r) -> const auto& { return r.counts; }))
      .def_prop_ro("last_seen", column<Rows>([](const Rows& r) -> const auto& { return r.last_seen; }));
  nb::class_<Drained>(m, "Drained")
      .def_ro("rows", &Drained::rows)
      .def_prop_ro("tombstones", column<Drained>([](const Drained& d) -> const auto& { return d.tombstones; }));
  nb::class_<RowScan>(m, "RowScan")
      .def("__iter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__next__", &RowScan::next);
  nb::class_<PushResult>(m, "PushResult")
      .def_ro("applied", &PushResult::applied)
      .def_ro("inserted", &PushResult::inserted)
      .def_ro("unadmitted", &PushResult::unadmitted)
      .def_ro("evicted", &PushResult::evicted)
      .def_prop_ro("non_finite", column<PushResult>([](const PushResult& r) -> const auto& { return r.non_finite; }));
}

}  // namespace

void bind_table(nb::module_& m) {
  using namespace nb::literals;
  bind_parts(m);
  m.def("state_size", [](std::string_view optimizer, size_t dim) {
    require(dim >= 1 && dim <= kMaxDim, "dim must be between 1 and 4096");
    return state_size(optimizer, dim);
  }, "optimizer"_a, "dim"_a);
  m.def("birth", &birth_rows, "keys"_a.noconvert(), "dim"_a, nb::kw_only(), "seed"_a, "init"_a = "uniform",
        "init_scale"_a = 0.01f, "dtype"_a = "float32", "out"_a.noconvert() = nb::none());
  nb::class_<SharedTable>(m, "Table")
      .def("__init__", &construct, "dim"_a, nb::kw_only(), "optimizer"_a, "rate"_a, "initial_accumulator"_a = 0.1f,
           "epsilon"_a = 1e-7f, "decay"_a = 1.0f, "beta1"_a = 0.9f, "beta2"_a = 0.999f, "beta"_a = 1.0f,
           "l1"_a = 0.0f, "l2"_a = 0.0f,
           "seed"_a = 0, "init"_a = "uniform", "init_scale"_a = 0.01f, "dtype"_a = "float32", "min_count"_a = 1,
           "sketch_width"_a = 1u << 20, "expire_after"_a = 0, "capacity"_a = 0, "memory"_a = 0, "folder"_a = "",
           "segment_bytes"_a = DiskLayout::kSegmentBytes)
      .def_prop_ro("dim", [](const SharedTable& t) { return t.layout().dim; })
      .def_prop_ro("state_size", [](const SharedTable& t) { return t.layout().state_size; })
      .def_prop_ro("nbytes", &byte_count)
      .def_prop_ro("disk_error", [](const SharedTable& t) { return std::string(t.disk_error()); })
      .def("__len__", &SharedTable::size, Released())
      .def("stats", &stats)
      .def("pull", &pull, "keys"_a.noconvert(), "out"_a.noconvert() = nb::none())
      .def("pull_state", &pull_state, "keys"_a.noconvert(), "out"_a.noconvert() = nb::none())
      .def("push", &push, "keys"_a.noconvert(), "gradients"_a.noconvert(), "counts"_a.noconvert(),
           "times"_a.noconvert(), "rate"_a = nb::none(), "repeats"_a.noconvert() = nb::none())
      .def("load", &load, "keys"_a.noconvert(), "embeddings"_a.noconvert(), "state"_a.noconvert(),
           "counts"_a.noconvert(), "last_seen"_a.noconvert(), nb::kw_only(), "cold"_a = false,
           "only_new"_a = false)
      .def("expect", &SharedTable::expect, "rows"_a, Released())
      .def("remove", &remove_keys, "keys"_a.noconvert())
      .def("lookup", &lookup, "keys"_a.noconvert())
      .def("expire", &SharedTable::expire, "now"_a, "max_rows"_a, Released())
      .def("set_slots", &SharedTable::set_slots, "begin"_a, "end"_a, Released())
      .def("sweep", &SharedTable::sweep, "max_rows"_a, Released())
      .def("scan", &scan, "cursor"_a, "max_rows"_a)
      .def("rows", [](const SharedTable& t, uint32_t max_rows) {
        require(max_rows > 0, "max_rows must be positive");
        return new RowScan(t, max_rows);
      }, "max_rows"_a, nb::rv_policy::take_ownership, nb::keep_alive<0, 1>())
      .def("open_channel", &SharedTable::open_channel, Released())
      .def("seal", &SharedTable::seal, "channel"_a, Released())
      .def("close_channel", &SharedTable::close_channel, "channel"_a, Released())
      .def("pending", &SharedTable::pending, "channel"_a, Released())
      .def("drain", &drain, "channel"_a, "max_rows"_a)
      .def("mark_dirty", &mark_dirty, "channel"_a, "keys"_a.noconvert())
      .def("begin_snapshot", &SharedTable::begin_snapshot, Released())
      .def("read_snapshot", &read_snapshot, "max_rows"_a)
      .def("end_snapshot", &SharedTable::end_snapshot, Released())
      .def("admission", &admission)
      .def("reset_admission", &SharedTable::reset_admission, Released())
      .def("set_capacity", &SharedTable::set_capacity, "capacity"_a, Released())
      .def("set_memory", &SharedTable::set_memory, "memory"_a, Released())
      .def("merge_admission", [](SharedTable& t, In<uint8_t, nb::ndim<1>> state) {
        nb::gil_scoped_release release;
        t.merge_admission(state.data(), state.shape(0));
      }, "state"_a.noconvert());
}

}  // namespace streamtrain
