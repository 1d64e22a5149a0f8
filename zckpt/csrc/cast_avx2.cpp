// Eight or sixteen elements at a time; called only where the processor has AVX2 and F16C.
#include "cast.h"
#include "simd.h"

#if defined(ZCKPT_X86)
#define ZCKPT_HALVES ZCKPT_FOR("avx2,f16c")

namespace zckpt {

ZCKPT_HALVES size_t f32_to_f16_avx2(const float* src, uint16_t* dst, size_t n) {
  const __m256 absolute = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  const __m256 infinity = _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000)), limit = _mm256_set1_ps(65520.0f);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_loadu_ps(src + i), a = _mm256_and_ps(x, absolute);
    const __m256 over = _mm256_and_ps(_mm256_cmp_ps(a, limit, _CMP_GE_OQ), _mm256_cmp_ps(a, infinity, _CMP_LT_OQ));
    if (_mm256_movemask_ps(over)) break;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}

ZCKPT_HALVES size_t f32_to_bf16_avx2(const float* src, uint16_t* dst, size_t n) {
  const __m256i absolute = _mm256_set1_epi32(0x7FFFFFFF), infinity = _mm256_set1_epi32(0x7F800000);
  const __m256i limit = _mm256_set1_epi32(0x7F7F7FFF), half = _mm256_set1_epi32(0x7FFF), one = _mm256_set1_epi32(1);
  const __m256i nan = _mm256_set1_epi32(0x7FC0);
  const auto rounded = [&](__m256i x, __m256i a) ZCKPT_HALVES {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), one);
    const __m256i y = _mm256_srli_epi32(_mm256_add_epi32(x, _mm256_add_epi32(half, odd)), 16);
    return _mm256_blendv_epi8(y, nan, _mm256_cmpgt_epi32(a, infinity));
  };
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 8));
    const __m256i a = _mm256_and_si256(x, absolute), b = _mm256_and_si256(y, absolute);
    const __m256i over = _mm256_or_si256(_mm256_and_si256(_mm256_cmpgt_epi32(a, limit), _mm256_cmpgt_epi32(infinity, a)),
                                         _mm256_and_si256(_mm256_cmpgt_epi32(b, limit), _mm256_cmpgt_epi32(infinity, b)));
    if (!_mm256_testz_si256(over, over)) break;
    const __m256i packed = _mm256_packus_epi32(rounded(x, a), rounded(y, b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), _mm256_permute4x64_epi64(packed, 0xD8));
  }
  return i;
}

ZCKPT_HALVES size_t f16_to_f32_avx2(const uint16_t* src, float* dst, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  return i;
}

}  // namespace zckpt
#endif
