// A slice of the dense parameters with its optimizer, as one vector.
//
// Thread safety: external synchronisation: one writer, or many readers.
// REQUIRES: the optimizer is one whose state is by element (SGD, Adagrad, Adam), so that slices can be cut anew.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <utility>
#include <variant>
#include <vector>

#include "optimizer.h"

namespace streamtrain {

class DenseVector {
 public:
  DenseVector(std::vector<float> values, Optimizer optimizer, float rate)
      : values_(std::move(values)), optimizer_(std::move(optimizer)), rate_(rate) {
    std::visit(
        [&](const auto& one) {
          state_.resize(one.state_size(size()));
          one.start(rate_, values_.data(), state_.data(), size());
          slots_ = one.state_size(2) - one.state_size(1);
        },
        optimizer_);
  }

  size_t size() const { return values_.size(); }
  const std::vector<float>& values() const { return values_; }
  // Floats of state by element; what is left of the state is one step counter (Adam) or nothing.
  size_t slots() const { return slots_; }
  const std::vector<float>& state() const { return state_; }
  size_t nbytes() const { return (values_.size() + state_.size()) * sizeof(float); }

  // One update. A gradient that is not finite (optimizer.h) changes nothing and gives false.
  bool apply(const float* gradient, std::optional<float> rate) {
    if (!usable_gradient(gradient, size())) return false;
    std::visit([&](const auto& one) { one.apply(rate.value_or(rate_), values_.data(), state_.data(), gradient, size()); },
               optimizer_);
    return true;
  }

  // What several updates made elsewhere come to: values += by, slots = decay * slots + added, so that two changes that
  // began with the same state come to what they would have been one after the other. One that is not finite changes
  // nothing and gives false. REQUIRES: by has size() floats, added slots() * size(), decay slots().
  bool change(const float* by, const float* added, const float* decay, float steps) {
    // A sum of squares of usable gradients is below the limit; larger ones could add up to infinity.
    const auto usable = [](float value) { return std::fabs(value) < kGradientLimit * kGradientLimit; };
    if (!usable_gradient(by, size()) || !std::all_of(added, added + slots_ * size(), usable) ||
        !std::all_of(decay, decay + slots_, [](float d) { return d >= 0 && d <= 1; }) || !(steps >= 0))
      return false;
    for (size_t i = 0; i < size(); ++i) values_[i] += by[i];
    for (size_t s = 0; s < slots_; ++s) {
      float* slot = state_.data() + s * size();
      for (size_t i = 0; i < size(); ++i) slot[i] = decay[s] * slot[i] + added[s * size() + i];
    }
    // The last slot holds sums of squares (optimizer.h): rounding must not take one below zero.
    for (size_t i = slots_ ? (slots_ - 1) * size() : 0; i < slots_ * size(); ++i) state_[i] = std::max(state_[i], 0.0f);
    if (state_.size() > slots_ * size()) state_.back() = std::min(state_.back() + steps, 0x1p24f);
    return true;
  }

  float steps() const { return state_.size() > slots_ * size() ? state_.back() : 0.0f; }

  // REQUIRES: values has size() floats, slots has slots() * size().
  void load(const float* values, const float* slots, float steps) {
    std::copy_n(values, size(), values_.begin());
    std::copy_n(slots, slots_ * size(), state_.begin());
    if (state_.size() > slots_ * size()) state_.back() = steps;
  }

 private:
  std::vector<float> values_;
  Optimizer optimizer_;
  float rate_;
  std::vector<float> state_;
  size_t slots_ = 0;
};

}  // namespace streamtrain
