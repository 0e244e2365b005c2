#include <nanobind/stl/vector.h>

#include <algorithm>
#include <span>

#include "bind.h"
#include "cell.h"
#include "cross.h"
#include "hash.h"
#include "place.h"

namespace streamtrain {
namespace {

template <typename Int>
auto hash_integers(In<Int, nb::ndim<1>> ids) {
  std::vector<uint64_t> keys(ids.shape(0));
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = hash_integer(ids.data()[i]);
  }
  return to_numpy(std::move(keys));
}

template <typename Offset>
auto hash_strings(In<uint8_t, nb::ndim<1>> data, In<Offset, nb::ndim<1>> offsets) {
  check_offsets(offsets.data(), offsets.size(), data.size());
  std::vector<uint64_t> keys(offsets.size() ? offsets.size() - 1 : 0);
  const auto* bytes = reinterpret_cast<const char*>(data.data());
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < keys.size(); ++i) {
      const Offset begin = offsets.data()[i], end = offsets.data()[i + 1];
      keys[i] = hash_bytes(bytes + begin, static_cast<size_t>(end - begin));
    }
  }
  return to_numpy(std::move(keys));
}

// Crosses ragged columns sample by sample: the keys, the offsets [samples + 1] and which samples have too many.
nb::tuple cross_ragged(const std::vector<In<uint64_t, nb::ndim<1>>>& keys,
                       const std::vector<In<int32_t, nb::ndim<1>>>& offsets, uint32_t max_length) {
  if (keys.size() != offsets.size()) throw nb::value_error("give keys and offsets of each column");
  if (keys.empty() || keys.size() > kMaxCrossed) throw nb::value_error("a cross is of 1 to 8 columns");
  const size_t ends = offsets[0].size();
  if (ends == 0) throw nb::value_error("offsets must be [samples + 1]");
  for (size_t c = 0; c < keys.size(); ++c) {
    const int32_t* of = offsets[c].data();
    if (offsets[c].size() != ends || of[0] != 0 || of[ends - 1] != int64_t(keys[c].size()) ||
        !std::is_sorted(of, of + ends))
      throw nb::value_error("offsets must ascend from 0 to the number of keys, and all have the same length");
  }
  std::vector<uint64_t> out;
  std::vector<int32_t> out_offsets(1, 0);
  std::vector<uint8_t> too_large(ends - 1, 0);
  {
    nb::gil_scoped_release release;
    std::vector<std::span<const uint64_t>> lists(keys.size());
    for (size_t i = 0; i + 1 < ends; ++i) {
      for (size_t c = 0; c < keys.size(); ++c) {
        const int32_t* of = offsets[c].data();
        lists[c] = {keys[c].data() + of[i], static_cast<size_t>(of[i + 1] - of[i])};
      }
      too_large[i] = !append_cross(lists, max_length, out);
      out_offsets.push_back(static_cast<int32_t>(out.size()));
    }
  }
  return nb::make_tuple(to_numpy(std::move(out)), to_numpy(std::move(out_offsets)), to_numpy(std::move(too_large)));
}

// Keys of the cells of numbers, by number then by bits; NaN is a missing one, which has one key as often.
auto hash_cells(In<float, nb::ndim<1>> numbers, const std::vector<int>& bits) {
  for (const int of : bits)
    if (of < 0 || of > kMaxCellBits) throw nb::value_error("cells have 0 to 23 bits");
  const size_t count = bits.size();
  std::vector<uint64_t> keys(numbers.shape(0) * count);
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < numbers.shape(0); ++i)
      for (size_t j = 0; j < count; ++j) {
        const float number = numbers.data()[i];
        keys[i * count + j] = cell_key(number == number ? cell_id(number, bits[j]) : kNoCell);
      }
  }
  return to_numpy(std::move(keys));
}

auto shards_of(In<uint64_t, nb::ndim<1>> keys, uint32_t shards) {
  if (shards == 0 || shards > kHashSlots) throw nb::value_error("shards must be between 1 and 65536");
  std::vector<uint32_t> owners(keys.shape(0));
  for (size_t i = 0; i < owners.size(); ++i) owners[i] = shard_of(keys.data()[i], shards);
  return to_numpy(std::move(owners));
}

// The keys at some places, which differ from process to process: for tests of keys that collide.
auto keys_at(In<uint64_t, nb::ndim<1>> places) {
  std::vector<uint64_t> keys(places.shape(0));
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = kPlacement.key_at(places.data()[i]);
  return to_numpy(std::move(keys));
}

}  // namespace

void bind_hash(nb::module_& m) {
  m.def("hash_bytes", [](nb::bytes text) { return hash_bytes(text.c_str(), text.size()); });
  m.def("hash_integers", &hash_integers<int64_t>);
  m.def("hash_integers", &hash_integers<uint64_t>);
  m.def("hash_strings", &hash_strings<int32_t>);
  m.def("hash_strings", &hash_strings<int64_t>);
  m.def("hash_cells", &hash_cells);
  m.def("cross_ragged", &cross_ragged);
  m.def("shards_of", &shards_of);
  m.def("keys_at", &keys_at);
}

}  // namespace streamtrain
