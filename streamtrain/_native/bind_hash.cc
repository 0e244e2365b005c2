#include <cstring>

#include "bind.h"
#include "hash.h"

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
  const size_t count = offsets.shape(0) ? offsets.shape(0) - 1 : 0;
  const auto* bytes = reinterpret_cast<const char*>(data.data());
  const auto limit = static_cast<Offset>(data.shape(0));
  std::vector<uint64_t> keys(count);
  bool valid = true;
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < count; ++i) {
      const Offset begin = offsets.data()[i], end = offsets.data()[i + 1];
      if (begin < 0 || end < begin || end > limit) { valid = false; break; }
      keys[i] = hash_bytes(bytes + begin, static_cast<size_t>(end - begin));
    }
  }
  if (!valid) throw nb::value_error("offsets must ascend and stay within the data");
  return to_numpy(std::move(keys));
}

auto cross_keys(In<uint64_t, nb::ndim<2>> keys) {
  std::vector<uint64_t> crossed(keys.shape(0));
  {
    nb::gil_scoped_release release;
    for (size_t i = 0; i < crossed.size(); ++i)
      crossed[i] = hash_cross(keys.data() + i * keys.shape(1), keys.shape(1));
  }
  return to_numpy(std::move(crossed));
}

auto shards_of(In<uint64_t, nb::ndim<1>> keys, uint32_t shards) {
  if (shards == 0 || shards > kHashSlots) throw nb::value_error("shards must be between 1 and 65536");
  std::vector<uint32_t> owners(keys.shape(0));
  for (size_t i = 0; i < owners.size(); ++i) owners[i] = shard_of(keys.data()[i], shards);
  return to_numpy(std::move(owners));
}

}  // namespace

void bind_hash(nb::module_& m) {
  m.def("hash_bytes", [](nb::bytes text) { return hash_bytes(text.c_str(), text.size()); });
  m.def("hash_integers", &hash_integers<int64_t>);
  m.def("hash_integers", &hash_integers<uint64_t>);
  m.def("hash_strings", &hash_strings<int32_t>);
  m.def("hash_strings", &hash_strings<int64_t>);
  m.def("cross_keys", &cross_keys);
  m.def("shards_of", &shards_of);
}

}  // namespace streamtrain
