// The grids of numbers that codes stand for, and how numbers are taken from fp32 or bf16: for codes.cpp and codes_wide.cpp.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "codes.h"
#include "simd.h"

namespace zckpt {

using Bf16 = uint16_t;  // its bits

template <typename To, typename From>
ZCKPT_INLINE To as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &x, sizeof to);
  return to;
}

#ifdef ZCKPT_X86
ZCKPT_FOR("avx2") static ZCKPT_INLINE __m256 eight_from(const float* x) { return _mm256_loadu_ps(x); }
ZCKPT_FOR("avx2") static ZCKPT_INLINE __m256 eight_from(const Bf16* x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16));
}
#endif

// A grid has steps of 2^(kLeast - kDigits) below 2^kLeast, and kDigits bits behind the first one from there on. kLargest is the code of its
// largest number, and kHalfway the middle between that and where the next one would be.
#ifdef ZCKPT_X86
#define ZCKPT_SIGNS(with) \
  ZCKPT_FOR("avx2,fma") static ZCKPT_INLINE __m256i with_signs(__m256i code, __m256i negative) { return with; }
#else
#define ZCKPT_SIGNS(with)
#endif
struct E4M3 {
  static constexpr int kDigits = 3, kLeast = -6;
  static constexpr uint32_t kLargest = 0x7E, kMore = 0, kNan = 0x7F;
  static constexpr float kHalfway = 464, kTop = 448;
  static ZCKPT_INLINE uint32_t with_sign(uint32_t code, uint32_t negative) { return code | negative << 7; }
  ZCKPT_SIGNS(_mm256_or_si256(code, _mm256_and_si256(negative, _mm256_set1_epi32(1 << 7))))
};
struct E2M1 {
  static constexpr int kDigits = 1, kLeast = 0;
  static constexpr uint32_t kLargest = 7, kMore = 0, kNan = 0;
  static constexpr float kHalfway = 7, kTop = 6;
  static ZCKPT_INLINE uint32_t with_sign(uint32_t code, uint32_t negative) { return code | negative << 3; }
  ZCKPT_SIGNS(_mm256_or_si256(code, _mm256_and_si256(negative, _mm256_set1_epi32(1 << 3))))
};
template <int kBits, uint32_t kBase>
struct Whole {  // steps of 1; below 0 there is one number more
  static constexpr int kDigits = 0, kLeast = 0;
  static constexpr uint32_t kLargest = (1 << (kBits - 1)) - 1, kMore = 1, kNan = 0;
  static constexpr float kHalfway = kLargest + 0.5F, kTop = kLargest;
  static ZCKPT_INLINE uint32_t with_sign(uint32_t code, uint32_t negative) { return kBase + ((code ^ (0 - negative)) + negative); }
  ZCKPT_SIGNS(_mm256_and_si256(_mm256_add_epi32(_mm256_sub_epi32(_mm256_xor_si256(code, negative), negative), _mm256_set1_epi32(kBase)), _mm256_set1_epi32(0xFF)))
};

constexpr float power(int n) { return n > 0 ? 2 * power(n - 1) : n < 0 ? power(n + 1) / 2 : 1; }

// Brings numbers and factors that are tiny or huge to where quotients and what is left of them are exact.
ZCKPT_INLINE float scale_for(float factor) { return factor < power(-64) ? power(80) : factor > power(64) ? power(-80) : 1.0F; }

#ifdef ZCKPT_X86
Rounded to_codes_wide(NumberGrid grid, const float* x, const Blocks& blocks, const float* factors, uint8_t* out);  // where there is Unit::kWideLanes
Rounded to_codes_wide(NumberGrid grid, const Bf16* x, const Blocks& blocks, const float* factors, uint8_t* out);
#endif

}  // namespace zckpt
