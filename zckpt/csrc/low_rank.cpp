#include "low_rank.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "floats.h"
#include "kernels.h"
#include "simd.h"

namespace zckpt {
namespace {

constexpr size_t kRows = 6;       // of a tile, whose sums stay in registers
constexpr size_t kNear = 65536;   // floats in a near cache, beside others
constexpr size_t kBlock = 4 * kNear;

// Some rows of one panel: `right` and `total` are at the panel's first column, of which only columns [low, high) count.
struct Strip {
  const float *left, *right;
  float* total;
  size_t rank, rows, pitch, low, high;
  float scaling;
};

void strip_of_any(const Strip& s) {
  for (size_t i = 0; i < s.rows; ++i) {
    float sums[kPanel] = {};
    for (size_t k = 0; k < s.rank; ++k)
      for (size_t j = s.low; j < s.high; ++j) sums[j] = std::fma(s.left[i * s.rank + k], s.right[k * kPanel + j], sums[j]);
    for (size_t j = s.low; j < s.high; ++j) {
      const float scaled = sums[j] * s.scaling;
      s.total[i * s.pitch + j] += scaled;
    }
  }
}

#ifdef ZCKPT_X86
#define ZCKPT_AVX2 ZCKPT_FOR("avx2,fma")
#define ZCKPT_AVX512 ZCKPT_FOR("avx512f")

constexpr size_t kEights = 2, kSixteens = kPanel / 16;  // vectors in a row of a tile

// The tile below, which no processor foresees: its rows lie far apart.
ZCKPT_INLINE void fetch_below(const float* total, size_t pitch, size_t high, size_t wide) {
  for (size_t i = high; i < 2 * high; ++i)
    for (size_t j = 0; j < wide; j += 16) __builtin_prefetch(total + i * pitch + j, 1);
}

template <int kHigh>
ZCKPT_AVX2 void tile_of_eights(const float* left, const float* right, size_t rank, float scaling, float* total, size_t pitch) {
  fetch_below(total, pitch, kHigh, 8 * kEights);
  __m256 sum[kHigh][kEights];
  for (auto& row : sum)
    for (auto& one : row) one = _mm256_setzero_ps();
  for (size_t k = 0; k < rank; ++k, right += kPanel) {
    const __m256 r0 = _mm256_loadu_ps(right), r1 = _mm256_loadu_ps(right + 8);
    for (int i = 0; i < kHigh; ++i) {
      const __m256 l = _mm256_broadcast_ss(left + static_cast<size_t>(i) * rank + k);
      sum[i][0] = _mm256_fmadd_ps(l, r0, sum[i][0]);
      sum[i][1] = _mm256_fmadd_ps(l, r1, sum[i][1]);
    }
  }
  const __m256 factor = _mm256_set1_ps(scaling);
  for (int i = 0; i < kHigh; ++i)
    for (size_t half = 0; half < kEights; ++half) {
      float* out = total + static_cast<size_t>(i) * pitch + 8 * half;
      _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), _mm256_mul_ps(sum[i][half], factor)));
    }
}

template <int kHigh>
ZCKPT_AVX512 void tile_of_sixteens(const float* left, const float* right, size_t rank, float scaling, float* total, size_t pitch, const __mmask16* masks) {
  fetch_below(total, pitch, kHigh, 16 * kSixteens);
  __m512 sum[kHigh][kSixteens];
  for (auto& row : sum)
    for (auto& one : row) one = _mm512_setzero_ps();
  for (size_t k = 0; k < rank; ++k, right += kPanel) {
    __m512 r[kSixteens];
    for (size_t v = 0; v < kSixteens; ++v) r[v] = _mm512_loadu_ps(right + 16 * v);
    for (int i = 0; i < kHigh; ++i) {
      const __m512 l = _mm512_set1_ps(left[static_cast<size_t>(i) * rank + k]);
      for (size_t v = 0; v < kSixteens; ++v) sum[i][v] = _mm512_fmadd_ps(l, r[v], sum[i][v]);
    }
  }
  const __m512 factor = _mm512_set1_ps(scaling);
  for (int i = 0; i < kHigh; ++i)
    for (size_t v = 0; v < kSixteens; ++v) {
      float* out = total + static_cast<size_t>(i) * pitch + 16 * v;
      _mm512_mask_storeu_ps(out, masks[v], _mm512_add_ps(_mm512_maskz_loadu_ps(masks[v], out), _mm512_mul_ps(sum[i][v], factor)));
    }
}

// Sixteen columns of a strip.
void eights(const float* left, const float* right, const Strip& s, float* total, size_t pitch, size_t rows) {
  switch (rows) {
    case 1: return tile_of_eights<1>(left, right, s.rank, s.scaling, total, pitch);
    case 2: return tile_of_eights<2>(left, right, s.rank, s.scaling, total, pitch);
    case 3: return tile_of_eights<3>(left, right, s.rank, s.scaling, total, pitch);
    case 4: return tile_of_eights<4>(left, right, s.rank, s.scaling, total, pitch);
    case 5: return tile_of_eights<5>(left, right, s.rank, s.scaling, total, pitch);
    default: return tile_of_eights<6>(left, right, s.rank, s.scaling, total, pitch);
  }
}

void strip_of_eights(const Strip& s) {
  constexpr size_t kWide = 8 * kEights;
  for (size_t j = s.low / kWide * kWide; j < s.high; j += kWide) {
    const size_t low = std::max(j, s.low), wide = std::min(j + kWide, s.high) - low;
    for (size_t i = 0; i < s.rows; i += kRows) {
      const size_t high = std::min(kRows, s.rows - i);
      float* out = s.total + i * s.pitch + low;
      if (wide == kWide) {
        eights(s.left + i * s.rank, s.right + j, s, out, s.pitch, high);
        continue;
      }
      float edge[kRows * kWide] = {};
      for (size_t a = 0; a < high; ++a) std::copy_n(out + a * s.pitch, wide, edge + a * kWide + (low - j));
      eights(s.left + i * s.rank, s.right + j, s, edge, kWide, high);
      for (size_t a = 0; a < high; ++a) std::copy_n(edge + a * kWide + (low - j), wide, out + a * s.pitch);
    }
  }
}

void strip_of_sixteens(const Strip& s) {
  __mmask16 masks[kSixteens];
  for (size_t v = 0; v < kSixteens; ++v) {
    const auto bits = [&](size_t column) { return (1U << (std::clamp<size_t>(column, 16 * v, 16 * v + 16) - 16 * v)) - 1; };
    masks[v] = static_cast<__mmask16>(bits(s.high) & ~bits(s.low));
  }
  for (size_t i = 0; i < s.rows; i += kRows) {
    const float* left = s.left + i * s.rank;
    float* out = s.total + i * s.pitch;
    switch (std::min(kRows, s.rows - i)) {
      case 1: tile_of_sixteens<1>(left, s.right, s.rank, s.scaling, out, s.pitch, masks); break;
      case 2: tile_of_sixteens<2>(left, s.right, s.rank, s.scaling, out, s.pitch, masks); break;
      case 3: tile_of_sixteens<3>(left, s.right, s.rank, s.scaling, out, s.pitch, masks); break;
      case 4: tile_of_sixteens<4>(left, s.right, s.rank, s.scaling, out, s.pitch, masks); break;
      case 5: tile_of_sixteens<5>(left, s.right, s.rank, s.scaling, out, s.pitch, masks); break;
      default: tile_of_sixteens<6>(left, s.right, s.rank, s.scaling, out, s.pitch, masks);
    }
  }
}
#endif

using Strips = void (*)(const Strip&);

Strips strips() {
#ifdef ZCKPT_X86
  if (has(Unit::kWideLanes)) return strip_of_sixteens;
  if (has(Unit::kMultiplyAdd)) return strip_of_eights;
#endif
  return strip_of_any;
}

}  // namespace

void pack_right(const float* right, size_t row_step, size_t step, size_t rank, size_t columns, float* packed) {
  for (size_t first = 0; first < columns; first += kPanel, packed += rank * kPanel) {
    const size_t wide = std::min(kPanel, columns - first);
    for (size_t k = 0; k < rank; ++k) {
      const float* from = right + k * row_step + first * step;
      float* to = packed + k * kPanel;
      if (step == 1)
        std::copy_n(from, wide, to);
      else
        for (size_t j = 0; j < wide; ++j) to[j] = from[j * step];
      std::fill(to + wide, to + kPanel, 0.0F);
    }
  }
}

// So many rows at once that they stay in a near cache while all panels pass.
void add_product(float* total, size_t pitch, const Product& p) {
  const PlainFloats floats;
  const Strips add_strip = strips();
  const size_t most = std::max<size_t>(kBlock / (p.high - p.low) / kRows, 1) * kRows;
  for (size_t row = 0; row < p.rows; row += most)
    for (size_t panel = p.low / kPanel; panel * kPanel < p.high; ++panel) {
      const size_t first = panel * kPanel, low = std::max(first, p.low), high = std::min(first + kPanel, p.high);
      float* out = total + (static_cast<std::ptrdiff_t>(row * pitch + first) - static_cast<std::ptrdiff_t>(p.low));
      add_strip({p.left + row * p.rank, p.right + first * p.rank, out, p.rank, std::min(most, p.rows - row), pitch, low - first, high - first, p.scaling});
    }
}

// So many columns at once that their part of right stays in a near cache.
void add_low_rank(float* total, const float* left, const float* right, size_t rows, size_t columns, size_t rank, float scaling) {
  const size_t most = std::max<size_t>(kNear / std::max<size_t>(rank, 1) / kPanel, 1) * kPanel;
  std::vector<float> packed(packed_size(rank, std::min(most, columns)));
  for (size_t first = 0; first < columns; first += most) {
    const size_t width = std::min(most, columns - first);
    pack_right(right + first, columns, 1, rank, width, packed.data());
    add_product(total + first, columns, {left, packed.data(), rank, rows, 0, width, scaling});
  }
}

}  // namespace zckpt
