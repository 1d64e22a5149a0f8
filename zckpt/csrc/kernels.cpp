#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "floats.h"
#include "simd.h"

namespace zckpt {
namespace {

constexpr size_t kRows = 4, kColumns = 16;  // of a tile, whose sums stay in registers
constexpr size_t kPanel = 4 * kColumns;     // columns that are packed at once

// A tile of left @ right into kRows x kColumns sums: left is packed as rank x kRows, right has rows of kPanel.
using Tile = void (*)(const float* left, const float* right, size_t rank, float* sums);

void tile(const float* left, const float* right, size_t rank, float* sums) {
  std::fill_n(sums, kRows * kColumns, 0.0f);
  for (size_t k = 0; k < rank; ++k)
    for (size_t i = 0; i < kRows; ++i)
      for (size_t j = 0; j < kColumns; ++j)
        sums[i * kColumns + j] = std::fma(left[k * kRows + i], right[k * kPanel + j], sums[i * kColumns + j]);
}

#ifdef ZCKPT_X86
ZCKPT_FOR("avx2,fma") void vector_tile(const float* left, const float* right, size_t rank, float* sums) {
  __m256 sum[kRows][2];
  for (auto& row : sum) row[0] = row[1] = _mm256_setzero_ps();
  for (size_t k = 0; k < rank; ++k) {
    const __m256 r0 = _mm256_loadu_ps(right + k * kPanel), r1 = _mm256_loadu_ps(right + k * kPanel + 8);
    for (size_t i = 0; i < kRows; ++i) {
      const __m256 l = _mm256_broadcast_ss(left + k * kRows + i);
      sum[i][0] = _mm256_fmadd_ps(l, r0, sum[i][0]);
      sum[i][1] = _mm256_fmadd_ps(l, r1, sum[i][1]);
    }
  }
  for (size_t i = 0; i < kRows; ++i) {
    _mm256_storeu_ps(sums + i * kColumns, sum[i][0]);
    _mm256_storeu_ps(sums + i * kColumns + 8, sum[i][1]);
  }
}
#endif

void low_rank(Tile sum_tile, float* total, const float* left, const float* right, size_t rows, size_t columns, size_t rank, float scaling) {
  std::vector<float> l((rows + kRows - 1) / kRows * kRows * rank), r(rank * kPanel);
  for (size_t i = 0; i < rows; ++i)
    for (size_t k = 0; k < rank; ++k) l[i / kRows * kRows * rank + k * kRows + i % kRows] = left[i * rank + k];
  float sums[kRows * kColumns];
  for (size_t panel = 0; panel < columns; panel += kPanel) {
    const size_t wide = std::min(kPanel, columns - panel);
    for (size_t k = 0; k < rank; ++k) std::copy_n(right + k * columns + panel, wide, r.data() + k * kPanel);
    for (size_t i = 0; i < rows; i += kRows) {
      for (size_t j = 0; j < wide; j += kColumns) {
        sum_tile(l.data() + i * rank, r.data() + j, rank, sums);
        const size_t high = std::min(kRows, rows - i), width = std::min(kColumns, wide - j);
        for (size_t a = 0; a < high; ++a) {
          float* out = total + (i + a) * columns + panel + j;
          for (size_t b = 0; b < width; ++b) {
            const float scaled = sums[a * kColumns + b] * scaling;
            out[b] += scaled;
          }
        }
      }
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
