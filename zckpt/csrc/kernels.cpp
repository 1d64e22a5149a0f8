#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "floats.h"
#include "simd.h"

namespace zckpt {
namespace {

constexpr size_t kRows = 6, kColumns = 16;  // of a tile, whose sums stay in registers
constexpr size_t kNear = 65536;             // floats in a near cache, beside others

// Adds scaling times a tile of left @ right to a tile of `total`: left is packed as rank x kRows, right as rank x kColumns.
using Tile = void (*)(const float* left, const float* right, size_t rank, float scaling, float* total, size_t columns);

void tile(const float* left, const float* right, size_t rank, float scaling, float* total, size_t columns) {
  float sums[kRows * kColumns] = {};
  for (size_t k = 0; k < rank; ++k)
    for (size_t i = 0; i < kRows; ++i)
      for (size_t j = 0; j < kColumns; ++j)
        sums[i * kColumns + j] = std::fma(left[k * kRows + i], right[k * kColumns + j], sums[i * kColumns + j]);
  for (size_t i = 0; i < kRows; ++i)
    for (size_t j = 0; j < kColumns; ++j) {
      const float scaled = sums[i * kColumns + j] * scaling;
      total[i * columns + j] += scaled;
    }
}

#ifdef ZCKPT_X86
ZCKPT_FOR("avx2,fma") void vector_tile(const float* left, const float* right, size_t rank, float scaling, float* total, size_t columns) {
  __m256 sum[kRows][2];
  for (auto& row : sum) row[0] = row[1] = _mm256_setzero_ps();
  for (size_t k = 0; k < rank; ++k) {
    const __m256 r0 = _mm256_loadu_ps(right + k * kColumns), r1 = _mm256_loadu_ps(right + k * kColumns + 8);
    for (size_t i = 0; i < kRows; ++i) {
      const __m256 l = _mm256_broadcast_ss(left + k * kRows + i);
      sum[i][0] = _mm256_fmadd_ps(l, r0, sum[i][0]);
      sum[i][1] = _mm256_fmadd_ps(l, r1, sum[i][1]);
    }
  }
  const __m256 factor = _mm256_set1_ps(scaling);
  for (size_t i = 0; i < kRows; ++i)
    for (size_t half = 0; half < 2; ++half) {
      float* out = total + i * columns + 8 * half;
      _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), _mm256_mul_ps(sum[i][half], factor)));
    }
}
#endif

// So many columns at once that their part of right stays in a near cache; of these, row by row of tiles.
void low_rank(Tile add_tile, float* total, const float* left, const float* right, size_t rows, size_t columns, size_t rank, float scaling) {
  const size_t most = std::max<size_t>(kNear / std::max<size_t>(rank, 1) / kColumns, 4) * kColumns;
  const size_t tiles = (rows + kRows - 1) / kRows;
  std::vector<float> l(tiles * kRows * rank), r(most * rank);
  for (size_t i = 0; i < rows; ++i)
    for (size_t k = 0; k < rank; ++k) l[(i / kRows * rank + k) * kRows + i % kRows] = left[i * rank + k];
  for (size_t first = 0; first < columns; first += most) {
    const size_t width = std::min(most, columns - first);
    for (size_t k = 0; k < rank; ++k)
      for (size_t j = 0; j < width; ++j) r[(j / kColumns * rank + k) * kColumns + j % kColumns] = right[k * columns + first + j];
    for (size_t i = 0; i < rows; i += kRows)
      for (size_t j = 0; j < width; j += kColumns) {
        const size_t high = std::min(kRows, rows - i), wide = std::min(kColumns, width - j);
        const float *upper = l.data() + i * rank, *lower = r.data() + j * rank;
        float* out = total + i * columns + first + j;
        if (high == kRows && wide == kColumns) {
          add_tile(upper, lower, rank, scaling, out, columns);
          continue;
        }
        float edge[kRows * kColumns] = {};
        for (size_t a = 0; a < high; ++a) std::copy_n(out + a * columns, wide, edge + a * kColumns);
        add_tile(upper, lower, rank, scaling, edge, kColumns);
        for (size_t a = 0; a < high; ++a) std::copy_n(edge + a * kColumns, wide, out + a * columns);
      }
  }
}

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

void add_low_rank(float* total, const float* left, const float* right, size_t rows, size_t columns, size_t rank, float scaling) {
  const PlainFloats floats;
#ifdef ZCKPT_X86
  if (has(Unit::kMultiplyAdd)) return low_rank(vector_tile, total, left, right, rows, columns, rank, scaling);
#endif
  low_rank(tile, total, left, right, rows, columns, rank, scaling);
}

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
