#include "kernels.h"

#include "floats.h"
#include "simd.h"

namespace zckpt {
namespace {

ZCKPT_VECTOR void add_weighted(float* __restrict total, const float* __restrict x, size_t n, float weight) {
  for (size_t i = 0; i < n; ++i) total[i] += weight * x[i];
}

ZCKPT_VECTOR void move_towards(float* __restrict total, const float* __restrict x, size_t n, float divisor) {
  for (size_t i = 0; i < n; ++i) total[i] += (x[i] - total[i]) / divisor;
}

ZCKPT_VECTOR void mix(float* __restrict total, const float* __restrict x, size_t n, float keep, float weight) {
  for (size_t i = 0; i < n; ++i) total[i] = keep * total[i] + weight * x[i];
}

constexpr size_t kLanes = 16;  // sums that are taken side by side

struct Sums {
  double ab[kLanes], aa[kLanes], bb[kLanes];
};

// Of whole rows of lanes.
ZCKPT_VECTOR void add_products(const float* __restrict a, const float* __restrict b, size_t n, Sums* __restrict sums) {
  Sums own = *sums;
  for (size_t i = 0; i < n; i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double x = a[i + lane], y = b[i + lane];
      own.ab[lane] += x * y;
      own.aa[lane] += x * x;
      own.bb[lane] += y * y;
    }
  *sums = own;
}

}  // namespace

void accumulate(float* __restrict total, const float* __restrict x, size_t n, float weight) {
  const PlainFloats floats;
  add_weighted(total, x, n, weight);
}

void approach(float* __restrict total, const float* __restrict x, size_t n, float divisor) {
  const PlainFloats floats;
  move_towards(total, x, n, divisor);
}

void blend(float* __restrict total, const float* __restrict x, size_t n, float keep, float weight) {
  const PlainFloats floats;
  mix(total, x, n, keep, weight);
}

Products products(const float* a, const float* b, size_t n) {
  const PlainFloats floats;
  Sums lanes{};
  const size_t whole = n / kLanes * kLanes;
  add_products(a, b, whole, &lanes);
  for (size_t lane = 0; whole + lane < n; ++lane) {
    const double x = a[whole + lane], y = b[whole + lane];
    lanes.ab[lane] += x * y;
    lanes.aa[lane] += x * x;
    lanes.bb[lane] += y * y;
  }
  Products sums{};
  for (size_t lane = 0; lane < kLanes; ++lane) sums = {sums.ab + lanes.ab[lane], sums.aa + lanes.aa[lane], sums.bb + lanes.bb[lane]};
  return sums;
}

}  // namespace zckpt
