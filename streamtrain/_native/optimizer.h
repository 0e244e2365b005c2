// Row optimizers: how a gradient changes one row.
//
// All arithmetic is float32 in exactly the order written here, without contraction, so results are the same on every
// machine and equal those of NumPy. Each optimizer is a small struct of its constants with
//   state_size(dim)                          floats of state that a row carries
//   start(rate, w, state, dim)               the state of a row whose first value is w
//   apply(rate, w, state, gradient, dim)     one update
// `rate` is an argument: schedules and calls with different rates share no state.
//
// Thread safety: constants only; apply changes nothing but w and state. REQUIRES: w, state and gradient do not
// overlap.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <variant>
#include <vector>

namespace streamtrain {

// Gradients at or beyond this size count as not finite: sums of their squares would overflow and freeze the row.
inline constexpr float kGradientLimit = 0x1p56f;

inline bool usable_gradient(const float* g, size_t dim) {
  int bad = 0;
  for (size_t j = 0; j < dim; ++j) bad |= !(std::fabs(g[j]) < kGradientLimit);
  return !bad;
}

// w -= rate * g
struct Sgd {
  static size_t state_size(size_t) { return 0; }
  void start(float, const float*, float*, size_t) const {}
  void apply(float rate, float* __restrict w, float*, const float* __restrict g, size_t dim) const {
    for (size_t j = 0; j < dim; ++j) w[j] -= rate * g[j];
  }
};

// a = decay * a + ((1 - decay) * initial_accumulator + g * g);  w -= rate * g / (sqrt(a) + epsilon)
struct Adagrad {
  float initial_accumulator, epsilon, decay;

  static size_t state_size(size_t dim) { return dim; }
  void start(float, const float*, float* a, size_t dim) const { std::fill_n(a, dim, initial_accumulator); }
  void apply(float rate, float* __restrict w, float* __restrict a, const float* __restrict g, size_t dim) const {
    const float keep = decay, refill = (1.0f - decay) * initial_accumulator;
    for (size_t j = 0; j < dim; ++j) {
      const float sum = keep * a[j] + (refill + g[j] * g[j]);
      a[j] = sum;
      w[j] -= rate * g[j] / (std::sqrt(sum) + epsilon);
    }
  }
};

// One accumulator per row: a = decay * a + ((1 - decay) * initial_accumulator + mean(g * g));
//   w -= rate / (sqrt(a) + epsilon) * g
// The sum runs in 8 lanes (element j in lane j mod 8, in ascending order), which are then added as
// ((0+4)+(2+6)) + ((1+5)+(3+7)): an order that vectorises.
struct RowWiseAdagrad {
  float initial_accumulator, epsilon, decay;

  static size_t state_size(size_t) { return 1; }
  void start(float, const float*, float* a, size_t) const { *a = initial_accumulator; }
  void apply(float rate, float* __restrict w, float* __restrict a, const float* __restrict g, size_t dim) const {
    float s[8] = {};
    size_t j = 0;
    for (; j + 8 <= dim; j += 8)
      for (size_t lane = 0; lane < 8; ++lane) s[lane] += g[j + lane] * g[j + lane];
    for (size_t lane = 0; j + lane < dim; ++lane) s[lane] += g[j + lane] * g[j + lane];
    const float sum = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    *a = decay * *a + ((1.0f - decay) * initial_accumulator + sum / static_cast<float>(dim));
    const float step = rate / (std::sqrt(*a) + epsilon);
    for (j = 0; j < dim; ++j) w[j] -= step * g[j];
  }
};

// Lazy Adam: only rows with a gradient move, and the bias correction goes by the row's own number of updates t.
// State: m[dim], v[dim], t.
//   t += 1;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * (g * g)
//   w -= rate * (m * c1) / (sqrt(v * c2) + epsilon),  c = 1 / (1 - beta^t) computed in double and rounded once
class Adam {
 public:
  Adam(float beta1, float beta2, float epsilon)
      : beta1_(beta1), beta2_(beta2), epsilon_(epsilon), corrections_(std::make_shared<Corrections>(beta1, beta2)) {}

  static size_t state_size(size_t dim) { return 2 * dim + 1; }
  void start(float, const float*, float* state, size_t dim) const { std::fill_n(state, 2 * dim + 1, 0.0f); }
  void apply(float rate, float* __restrict w, float* __restrict state, const float* __restrict g, size_t dim) const {
    float* __restrict m = state;
    float* __restrict v = state + dim;
    // A float counts to 2^24; by then both corrections are 1 unless a beta is within 1e-6 of 1.
    const float t = std::min(state[2 * dim] + 1.0f, 0x1p24f);
    state[2 * dim] = t;
    const auto [c1, c2] = corrections_->at(static_cast<size_t>(t));
    const float keep1 = beta1_, keep2 = beta2_, take1 = 1.0f - beta1_, take2 = 1.0f - beta2_, eps = epsilon_;
    for (size_t j = 0; j < dim; ++j) {
      const float mean = keep1 * m[j] + take1 * g[j];
      const float square = keep2 * v[j] + take2 * (g[j] * g[j]);
      m[j] = mean;
      v[j] = square;
      w[j] -= rate * (mean * c1) / (std::sqrt(square * c2) + eps);
    }
  }

 private:
  // Powers are dear, so the corrections of the first 2^16 updates are tabled, up to where both are exactly 1.
  class Corrections {
   public:
    Corrections(float beta1, float beta2) : beta1_(beta1), beta2_(beta2) {
      for (size_t t = 0; t <= 0x10000; ++t) {
        table_.push_back(compute(std::max<size_t>(t, 1)));
        if (t > 0 && table_.back() == std::array{1.0f, 1.0f}) break;
      }
    }
    std::array<float, 2> at(size_t t) const {
      if (t < table_.size()) return table_[t];
      return table_.size() <= 0x10000 ? std::array{1.0f, 1.0f} : compute(t);
    }

   private:
    std::array<float, 2> compute(size_t t) const {
      const auto n = static_cast<double>(t);
      return {static_cast<float>(1.0 / (1.0 - std::pow(double{beta1_}, n))),
              static_cast<float>(1.0 / (1.0 - std::pow(double{beta2_}, n)))};
    }
    float beta1_, beta2_;
    std::vector<std::array<float, 2>> table_;
  };

  float beta1_, beta2_, epsilon_;
  std::shared_ptr<const Corrections> corrections_;
};

// FTRL-proximal with L1 and L2 (McMahan et al. 2013, algorithm 1); alpha is the rate. State: z[dim], n[dim].
//   next = n + g * g;  z += g - (sqrt(next) - sqrt(n)) / alpha * w;  n = next
//   w = 0 if |z| <= l1, else -sign(z) * (|z| - l1) / ((beta + sqrt(n)) / alpha + l2)
// The w in the first line is the stored one, which the gradient was taken at (with 16-bit storage: the rounded one).
// A row starts with n = initial_accumulator and the z that gives its first value. REQUIRES: rate > 0.
struct Ftrl {
  float initial_accumulator, beta, l1, l2;

  static size_t state_size(size_t dim) { return 2 * dim; }
  void start(float alpha, const float* w, float* state, size_t dim) const {
    const float scale = (beta + std::sqrt(initial_accumulator)) / alpha + l2;
    for (size_t j = 0; j < dim; ++j) {
      state[j] = w[j] == 0.0f ? 0.0f : -(w[j] * scale + std::copysign(l1, w[j]));
      state[dim + j] = initial_accumulator;
    }
  }
  void apply(float alpha, float* __restrict w, float* __restrict state, const float* __restrict g, size_t dim) const {
    float* __restrict z = state;
    float* __restrict n = state + dim;
    const float b = beta, lambda1 = l1, lambda2 = l2;
    for (size_t j = 0; j < dim; ++j) {
      const float next = n[j] + g[j] * g[j];
      const float root = std::sqrt(next);
      const float sum = z[j] + (g[j] - (root - std::sqrt(n[j])) / alpha * w[j]);
      const float excess = std::fabs(sum) - lambda1;
      const float value = -std::copysign(excess, sum) / ((b + root) / alpha + lambda2);
      z[j] = sum;
      n[j] = next;
      w[j] = excess > 0.0f ? value : 0.0f;
    }
  }
};

using Optimizer = std::variant<Sgd, Adagrad, RowWiseAdagrad, Adam, Ftrl>;

// The constants of all optimizers together; each takes those that it has.
struct OptimizerConstants {
  float initial_accumulator = 0.1f, epsilon = 1e-7f, decay = 1.0f, beta1 = 0.9f, beta2 = 0.999f;
  float beta = 1.0f, l1 = 0.0f, l2 = 0.0f;
};

inline constexpr const char* kUnknownOptimizer = "optimizer must be sgd, adagrad, rowwise_adagrad, adam or ftrl";

inline Optimizer make_optimizer(std::string_view name, const OptimizerConstants& c) {
  const auto require = [](bool holds, const char* message) {
    if (!holds) throw std::invalid_argument(message);
  };
  const auto in = [](float value, float low, float high) { return value >= low && value < high; };  // false for NaN
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  require(in(c.initial_accumulator, 0, kInfinity), "initial_accumulator must be finite and not negative");
  require(in(c.epsilon, std::numeric_limits<float>::min(), kInfinity), "epsilon must be finite and positive");
  require(c.decay > 0 && c.decay <= 1, "decay must be above 0 and at most 1");
  require(in(c.beta1, 0, 1) && in(c.beta2, 0, 1), "beta1 and beta2 must be at least 0 and below 1");
  require(in(c.beta, 0, kInfinity) && in(c.l1, 0, kInfinity) && in(c.l2, 0, kInfinity),
          "beta, l1 and l2 must be finite and not negative");
  if (name == "sgd") return Sgd{};
  if (name == "adagrad") return Adagrad{c.initial_accumulator, c.epsilon, c.decay};
  if (name == "rowwise_adagrad") return RowWiseAdagrad{c.initial_accumulator, c.epsilon, c.decay};
  if (name == "adam") return Adam(c.beta1, c.beta2, c.epsilon);
  require(name == "ftrl", kUnknownOptimizer);
  require(c.beta > 0 || c.initial_accumulator > 0, "ftrl needs a positive beta or initial_accumulator");
  return Ftrl{c.initial_accumulator, c.beta, c.l1, c.l2};
}

// Floats of state that a row carries. Makes no optimizer: tabling Adam's corrections takes a millisecond.
inline size_t state_size(std::string_view name, size_t dim) {
  if (name == "sgd") return Sgd::state_size(dim);
  if (name == "adagrad") return Adagrad::state_size(dim);
  if (name == "rowwise_adagrad") return RowWiseAdagrad::state_size(dim);
  if (name == "adam") return Adam::state_size(dim);
  if (name == "ftrl") return Ftrl::state_size(dim);
  throw std::invalid_argument(kUnknownOptimizer);
}

}  // namespace streamtrain
