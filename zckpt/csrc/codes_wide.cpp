// Numbers to codes, sixteen at a time: as RoundEight of codes.cpp does it, which says why; for processors with AVX-512.
#include "number_grids.h"

#ifdef ZCKPT_X86
#define ZCKPT_WIDE ZCKPT_FOR("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,popcnt")

namespace zckpt {
namespace {

ZCKPT_WIDE ZCKPT_INLINE __m512 sixteen_from(const float* x, __mmask16 here) { return _mm512_maskz_loadu_ps(here, x); }
ZCKPT_WIDE ZCKPT_INLINE __m512 sixteen_from(const Bf16* x, __mmask16 here) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, x)), 16));
}

template <typename G, typename X>
struct RoundSixteen {
  __m512i error;
  __m512 factor, scale, divisor;
  uint64_t saturated, underflowed;

  ZCKPT_WIDE ZCKPT_INLINE void begin(float own) {
    const float lift = scale_for(own);
    factor = _mm512_set1_ps(own), scale = _mm512_set1_ps(lift), divisor = _mm512_set1_ps(own * lift);
  }

  ZCKPT_WIDE ZCKPT_INLINE __m128i sixteen(const X* from, __mmask16 here) {
    constexpr bool kWhole = G::kDigits == 0;
    const __m512i one = _mm512_set1_epi32(1);
    const __m512 x = sixteen_from(from, here), zero = _mm512_setzero_ps(), size = _mm512_andnot_ps(_mm512_set1_ps(-0.0F), x);
    const __mmask16 none = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
    const __m512 dividend = _mm512_mul_ps(size, scale), near = _mm512_min_ps(_mm512_div_ps(dividend, divisor), _mm512_set1_ps(1 << 20));
    const __m512 left = _mm512_fnmadd_ps(near, divisor, dividend);
    const __m512i cut = _mm512_castps_si512(near);
    const __m512i below_it = _mm512_mask_sub_epi32(cut, _mm512_cmp_ps_mask(left, zero, _CMP_LT_OQ), cut, one);
    const __m512i q = _mm512_mask_or_epi32(below_it, _mm512_cmp_ps_mask(left, zero, _CMP_NEQ_UQ), below_it, one);
    const __m512i below = _mm512_max_epi32(_mm512_and_si512(q, _mm512_set1_epi32(0x7F800000)), _mm512_set1_epi32((127 + G::kLeast) << 23));
    const __m512i lift = kWhole ? _mm512_set1_epi32((127 + 23) << 23) : _mm512_add_epi32(below, _mm512_set1_epi32((23 - G::kDigits) << 23));
    const __m512 a = _mm512_castsi512_ps(q), sum = _mm512_add_ps(a, _mm512_castsi512_ps(lift));
    __m512i code = _mm512_sub_epi32(_mm512_castps_si512(sum), lift);
    if (!kWhole) code = _mm512_add_epi32(code, _mm512_sub_epi32(_mm512_srli_epi32(below, 23 - G::kDigits), _mm512_set1_epi32((127 + G::kLeast) << G::kDigits)));
    __m512 top = _mm512_set1_ps(G::kTop), halfway = _mm512_set1_ps(G::kHalfway);
    __m512i most = _mm512_set1_epi32(G::kLargest);
    if (kWhole) {
      top = _mm512_mask_add_ps(top, negative, top, _mm512_set1_ps(1)), halfway = _mm512_mask_add_ps(halfway, negative, halfway, _mm512_set1_ps(1));
      most = _mm512_mask_add_epi32(most, negative, most, one);
    }
    code = _mm512_min_epi32(code, most);
    const __m512 value = _mm512_min_ps(_mm512_sub_ps(sum, _mm512_castsi512_ps(lift)), top);
    const __m512 off = _mm512_andnot_ps(_mm512_set1_ps(-0.0F), _mm512_sub_ps(size, _mm512_mul_ps(value, factor)));
    error = _mm512_max_epu32(error, _mm512_castps_si512(off));
    const __mmask16 over = _mm512_cmp_ps_mask(a, halfway, _CMP_GT_OQ), lost = _mm512_testn_epi32_mask(code, code);
    saturated += static_cast<uint64_t>(__builtin_popcount(static_cast<unsigned>(over & ~none)));
    underflowed += static_cast<uint64_t>(__builtin_popcount(static_cast<unsigned>(lost & _mm512_test_epi32_mask(_mm512_castps_si512(size), _mm512_castps_si512(size)))));
    code = _mm512_mask_mov_epi32(code, none, _mm512_set1_epi32(G::kNan));
    if (kWhole)
      code = _mm512_add_epi32(_mm512_mask_sub_epi32(code, negative, _mm512_setzero_si512(), code), _mm512_set1_epi32(static_cast<int>(G::with_sign(0, 0))));
    else
      code = _mm512_mask_or_epi32(code, negative, code, _mm512_set1_epi32(static_cast<int>(G::with_sign(0, 1))));
    return _mm512_cvtepi32_epi8(code);
  }

  ZCKPT_WIDE ZCKPT_INLINE void run(const X* x, size_t n, uint8_t* out) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), sixteen(x + i, 0xFFFF));
    if (i == n) return;
    const auto here = static_cast<__mmask16>((1U << (n - i)) - 1);
    _mm_mask_storeu_epi8(out + i, here, sixteen(x + i, here));
  }
};

template <typename G, typename X>
ZCKPT_WIDE Rounded round_wide(const X* x, const Blocks& b, const float* factors, uint8_t* out) {
  RoundSixteen<G, X> all;
  all.error = _mm512_setzero_si512(), all.saturated = all.underflowed = 0;
  const size_t across = (b.columns + b.block_columns - 1) / b.block_columns;
  for (size_t row = 0; row < b.rows; ++row, x += b.columns, out += b.columns) {
    const float* factor = factors + (b.first + row) / b.block_rows * across;
    for (size_t at = 0; at < b.columns; at += b.block_columns) {
      all.begin(*factor++);
      all.run(x + at, std::min(b.block_columns, b.columns - at), out + at);
    }
  }
  const uint32_t error = _mm512_reduce_max_epu32(all.error);
  return {all.saturated, all.underflowed, as<float>(error > 0x7F800000 ? 0x7FC00000 : error)};
}

template <typename X>
Rounded rounded(NumberGrid grid, const X* x, const Blocks& blocks, const float* factors, uint8_t* out) {
  switch (grid) {
    case NumberGrid::kE4M3: return round_wide<E4M3>(x, blocks, factors, out);
    case NumberGrid::kE2M1: return round_wide<E2M1>(x, blocks, factors, out);
    case NumberGrid::kInt8: return round_wide<Whole<8, 0>>(x, blocks, factors, out);
    default: return round_wide<Whole<4, 8>>(x, blocks, factors, out);
  }
}

}  // namespace

Rounded to_codes_wide(NumberGrid grid, const float* x, const Blocks& blocks, const float* factors, uint8_t* out) {
  return rounded(grid, x, blocks, factors, out);
}

Rounded to_codes_wide(NumberGrid grid, const Bf16* x, const Blocks& blocks, const float* factors, uint8_t* out) {
  return rounded(grid, x, blocks, factors, out);
}

}  // namespace zckpt
#endif
