// Eight fp32 numbers at a time to bf16 or fp16, once and to nearest even; only where the processor has AVX2 and F16C.
#pragma once
#include "simd.h"

#if defined(ZCKPT_X86)
#define ZCKPT_HALVES ZCKPT_FOR("avx2,f16c")

namespace zckpt {

ZCKPT_HALVES ZCKPT_INLINE __m256i magnitudes(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi32(0x7FFFFFFF)); }

constexpr int kLargest = 0x7F7F7FFF;  // the magnitude of the largest number that does not become infinite in bf16

// All bits where a finite number, of this magnitude, would become infinite.
ZCKPT_HALVES ZCKPT_INLINE __m256i over_bf16(__m256i magnitude) {
  return _mm256_and_si256(_mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(kLargest)), _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F800000), magnitude));
}

ZCKPT_HALVES ZCKPT_INLINE __m256i over_f16(__m256i magnitude) {  // 0x477FF000: 65,520
  return _mm256_and_si256(_mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x477FEFFF)), _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F800000), magnitude));
}

// The high halves of the results are the numbers in bf16, of those that are no NaN.
ZCKPT_HALVES ZCKPT_INLINE __m256i nearest_bf16(__m256i x) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(x, _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), odd));
}

// The low halves of the results are the numbers in bf16; a NaN is 0x7FC0.
ZCKPT_HALVES ZCKPT_INLINE __m256i rounded_bf16(__m256i x, __m256i magnitude) {
  const __m256i y = _mm256_srli_epi32(nearest_bf16(x), 16);
  return _mm256_blendv_epi8(y, _mm256_set1_epi32(0x7FC0), _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000)));
}

}  // namespace zckpt
#endif
