// [Note: torch's order of operations] of torch 2.13's fused kernels on CPUs with AVX2 (FusedAdamKernel.cpp, FusedAdagradKernel.cpp), as its
// build computes it: sums of a product are fused multiply-adds. In Adam's second moment it is the product with the gradient that is fused,
// but in the last `count % 8` elements, which are no whole vector, it is the one with beta2. Nothing else is fused: this file is compiled
// with -ffp-contract=off. Square roots and divisions are exact to the last bit. (torch's foreach kernels take MKL's square root, which is
// not: nothing but MKL equals them.) tests/runtime/test_swap_kernel.py holds this against torch itself, and `kernels.py` asks at run time.
#include "optimizers.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include "simd.h"

namespace zckpt {
namespace {

ZCKPT_INLINE void adam(const Rates& r, float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, size_t n) {
  const bool small = std::fabs(r.one_less_beta1) < 0.5f;  // of lerp
  const float weight = small ? r.one_less_beta1 : r.one_less_beta1 - 1.0f;
  const size_t vectors = n / 8 * 8;
  const auto decayed = [&](size_t i) __attribute__((always_inline)) { return r.decay != 0.0f ? __builtin_fmaf(p[i], r.decay, g[i]) : g[i]; };
  const auto update = [&](size_t i, float mean, float square) __attribute__((always_inline)) {
    m[i] = mean;
    v[i] = square;
    p[i] = p[i] * r.shrink - (r.rate * mean) / (std::sqrt(square) / r.root + r.eps);
  };
  for (size_t i = 0; i < vectors; ++i) {
    const float grad = decayed(i);
    const float mean = __builtin_fmaf(weight, grad - m[i], small ? m[i] : grad);
    update(i, mean, __builtin_fmaf(r.one_less_beta2 * grad, grad, v[i] * r.beta2));
  }
  for (size_t i = vectors; i < n; ++i) {
    const float grad = decayed(i);
    const float mean = small ? __builtin_fmaf(weight, grad - m[i], m[i]) : __builtin_fmaf(-(grad - m[i]), 1.0f - r.one_less_beta1, grad);
    update(i, mean, __builtin_fmaf(v[i], r.beta2, r.one_less_beta2 * grad * grad));
  }
}

ZCKPT_INLINE void adagrad(const Rates& r, float* __restrict p, const float* __restrict g, float* __restrict s, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float grad = r.decay != 0.0f ? __builtin_fmaf(p[i], r.decay, g[i]) : g[i];
    const float sum = __builtin_fmaf(grad, grad, s[i]);
    s[i] = sum;
    p[i] = p[i] - (r.rate * grad) / (std::sqrt(sum) + r.eps);
  }
}

ZCKPT_INLINE void lion(const Rates& r, float* __restrict p, const float* __restrict g, float* __restrict m, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float update = __builtin_fmaf(g[i], r.one_less_beta1, m[i] * r.beta1);
    const float sign = static_cast<float>(update > 0.0f) - static_cast<float>(update < 0.0f);
    p[i] = __builtin_fmaf(sign, -r.rate, p[i] * r.shrink);
    m[i] = __builtin_fmaf(g[i], r.one_less_beta2, m[i] * r.beta2);
  }
}

ZCKPT_INLINE void rows(Rule rule, const Rates& r, float* p, const float* g, float* first, float* second, size_t n) {
  switch (rule) {
    case Rule::kAdam: return adam(r, p, g, first, second, n);
    case Rule::kAdagrad: return adagrad(r, p, g, first, n);
    case Rule::kLion: return lion(r, p, g, first, n);
  }
}

using Rows = void (*)(Rule, const Rates&, float*, const float*, float*, float*, size_t);

#ifdef ZCKPT_X86
ZCKPT_FOR("avx2,fma") void rows_avx2(Rule rule, const Rates& r, float* p, const float* g, float* first, float* second, size_t n) {
  rows(rule, r, p, g, first, second, n);
}
#endif

void rows_portable(Rule rule, const Rates& r, float* p, const float* g, float* first, float* second, size_t n) {
  rows(rule, r, p, g, first, second, n);
}

Rows chosen() {
#ifdef ZCKPT_X86
  if (has(Unit::kMultiplyAdd)) return rows_avx2;
#endif
  return rows_portable;
}

}  // namespace

void step(Rule rule, const Rates& rates, float* weights, const float* gradients, float* first, float* second, size_t count, unsigned threads) {
  constexpr size_t kLeast = 1 << 16;  // elements that are worth a thread
  const Rows work = chosen();
  const size_t parts = std::max<size_t>(1, std::min<size_t>(threads, count / kLeast));
  const size_t part = (count / parts + 15) / 16 * 16;
  const auto run = [&](size_t number) {
    const size_t from = std::min(count, number * part), to = number + 1 == parts ? count : std::min(count, from + part);
    work(rule, rates, weights + from, gradients + from, first + from, second ? second + from : nullptr, to - from);
  };
  std::vector<std::thread> others;
  for (size_t number = 1; number < parts; ++number) others.emplace_back(run, number);
  run(0);
  for (auto& other : others) other.join();
}

}  // namespace zckpt
