// Eight or sixteen elements at a time; called only where the processor has AVX2 and F16C.
#include "cast.h"
#include "halves.h"

#if defined(ZCKPT_X86)

namespace zckpt {

ZCKPT_HALVES size_t f32_to_f16_avx2(const float* src, uint16_t* dst, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i)), over = over_f16(magnitudes(x));
    if (!_mm256_testz_si256(over, over)) break;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), _mm256_cvtps_ph(_mm256_castsi256_ps(x), _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}

ZCKPT_HALVES size_t f32_to_bf16_avx2(const float* src, uint16_t* dst, size_t n) {
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i + 8));
    const __m256i a = magnitudes(x), b = magnitudes(y), over = _mm256_or_si256(over_bf16(a), over_bf16(b));
    if (!_mm256_testz_si256(over, over)) break;
    const __m256i packed = _mm256_packus_epi32(rounded_bf16(x, a), rounded_bf16(y, b));
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
