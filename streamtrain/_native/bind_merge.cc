#include <nanobind/stl/vector.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "merge.h"

namespace streamtrain {
namespace {

using Keys = In<uint64_t, nb::ndim<1>>;
using Words = In<uint32_t, nb::ndim<1>>;
using Matrix = In<float, nb::ndim<2>>;

GradientPart part_of(size_t index, const Keys& keys, const Matrix& gradients, const Words& counts, const Words& times,
                     float scale, size_t dim) {
  const size_t n = keys.size();
  const auto require = [&](bool holds, const std::string& message) {
    if (!holds) throw std::invalid_argument("part " + std::to_string(index) + ": " + message);
  };
  require(gradients.shape(0) == n && gradients.shape(1) == dim,
          "gradients must be [number of keys, dim], dim the same for all parts");
  require(counts.size() == n, "counts must have as many elements as keys");
  require(times.size() == n, "times must have as many elements as keys");
  require(std::isfinite(scale), "the scale must be finite");
  return {{keys.data(), n}, gradients.data(), counts.data(), times.data(), scale};
}

nb::tuple merge(const std::vector<Keys>& keys, const std::vector<Matrix>& gradients, const std::vector<Words>& counts,
                const std::vector<Words>& times, const std::vector<float>& scales) {
  const size_t parts = keys.size();
  if (parts == 0) throw std::invalid_argument("there must be at least one part, whose gradients say what dim is");
  if (gradients.size() != parts || counts.size() != parts || times.size() != parts || scales.size() != parts)
    throw std::invalid_argument("give keys, gradients, counts, times and a scale of each part");
  const size_t dim = gradients[0].shape(1);
  std::vector<GradientPart> all;
  for (size_t p = 0; p < parts; ++p)
    all.push_back(part_of(p, keys[p], gradients[p], counts[p], times[p], scales[p], dim));
  MergedGradients out;
  {
    nb::gil_scoped_release release;
    out = merge_rows(all, dim);
  }
  const size_t n = out.keys.size();
  return nb::make_tuple(to_numpy(std::move(out.keys)), to_numpy(std::move(out.gradients), {n, dim}),
                        to_numpy(std::move(out.counts)), to_numpy(std::move(out.times)));
}

}  // namespace

void bind_merge(nb::module_& m) {
  using namespace nb::literals;
  m.def("merge_rows", &merge, "keys"_a.noconvert(), "gradients"_a.noconvert(), "counts"_a.noconvert(),
        "times"_a.noconvert(), "scales"_a);
}

}  // namespace streamtrain
