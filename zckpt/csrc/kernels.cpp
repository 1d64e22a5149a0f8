#include "kernels.h"

#include "floats.h"

namespace zckpt {

void accumulate(float* __restrict total, const float* __restrict x, size_t n, float weight) {
  const PlainFloats floats;
  for (size_t i = 0; i < n; ++i) total[i] += weight * x[i];
}

void approach(float* __restrict total, const float* __restrict x, size_t n, float divisor) {
  const PlainFloats floats;
  for (size_t i = 0; i < n; ++i) total[i] += (x[i] - total[i]) / divisor;
}

void blend(float* __restrict total, const float* __restrict x, size_t n, float keep, float weight) {
  const PlainFloats floats;
  for (size_t i = 0; i < n; ++i) total[i] = keep * total[i] + weight * x[i];
}

Products products(const float* a, const float* b, size_t n) {
  constexpr size_t kLanes = 16;
  const PlainFloats floats;
  double ab[kLanes] = {}, aa[kLanes] = {}, bb[kLanes] = {};
  const auto add = [&](size_t i, size_t lane) {
    const double x = a[i], y = b[i];
    ab[lane] += x * y;
    aa[lane] += x * x;
    bb[lane] += y * y;
  };
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  for (size_t lane = 0; i + lane < n; ++lane) add(i + lane, lane);
  Products sums{};
  for (size_t lane = 0; lane < kLanes; ++lane) sums = {sums.ab + ab[lane], sums.aa + aa[lane], sums.bb + bb[lane]};
  return sums;
}

}  // namespace zckpt
