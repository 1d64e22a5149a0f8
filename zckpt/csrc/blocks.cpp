#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cast.h"
#include "floats.h"
#include "simd.h"

namespace zckpt {
namespace {

constexpr size_t kNumbers = 32, kBytes = 34, kAtOnce = 256;
constexpr uint32_t kInfinity = 0x7F800000;
constexpr uint16_t kNoHalf = 0x7E00;  // NaN

ZCKPT_VECTOR uint32_t largest_bits(const float* x) {
  uint32_t largest = 0;
  for (size_t i = 0; i < kNumbers; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    largest = std::max(largest, bits & 0x7FFFFFFFU);
  }
  return largest;
}

// Whole numbers of one block; its numbers are finite, and none of them times `factor` is greater than 128.
ZCKPT_VECTOR void whole_numbers(const float* __restrict x, float factor, uint8_t* __restrict out) {
  for (size_t i = 0; i < kNumbers; ++i) {
    const float scaled = x[i] * factor, size = std::fabs(scaled);
    const int32_t below = static_cast<int32_t>(size);
    const int32_t whole = below + static_cast<int32_t>(2.0F * (size - static_cast<float>(below)));
    out[i] = static_cast<uint8_t>(scaled < 0 ? -whole : whole);
  }
}

}  // namespace

namespace {

#ifdef ZCKPT_X86
ZCKPT_FOR("avx2") ZCKPT_INLINE __m256 eight(const float* x) { return _mm256_loadu_ps(x); }
ZCKPT_FOR("avx2") ZCKPT_INLINE __m256 eight(const uint16_t* x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16));
}

// One block as `as_blocks` makes it, but for its scale; returns the bits of the largest magnitude.
template <typename X>
ZCKPT_FOR("avx2") ZCKPT_INLINE uint32_t block_with_vectors(const X* x, uint8_t* out) {
  const __m256i sizes = _mm256_set1_epi32(0x7FFFFFFF);
  const __m256 four[] = {eight(x), eight(x + 8), eight(x + 16), eight(x + 24)};
  const auto size_of = [&](__m256 one) ZCKPT_FOR("avx2") ZCKPT_PART { return _mm256_and_si256(_mm256_castps_si256(one), sizes); };
  const __m256i most = _mm256_max_epu32(_mm256_max_epu32(size_of(four[0]), size_of(four[1])), _mm256_max_epu32(size_of(four[2]), size_of(four[3])));
  __m128i top = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0x4E)), top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0xB1));
  const auto largest = static_cast<uint32_t>(_mm_cvtsi128_si32(top));
  float scale = 0;
  std::memcpy(&scale, &largest, 4);
  scale /= 127.0F;
  const float reciprocal = scale > 0 ? 1.0F / scale : 0.0F;
  if (largest >= kInfinity || !std::isfinite(reciprocal)) {
    std::memset(out, 0, kNumbers);
    return largest;
  }
  const __m256 factor = _mm256_set1_ps(reciprocal);
  __m256i whole[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 scaled = _mm256_mul_ps(four[i], factor), size = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), scaled);
    const __m256i below = _mm256_cvttps_epi32(size);
    const __m256 rest = _mm256_sub_ps(size, _mm256_cvtepi32_ps(below));
    const __m256i own = _mm256_add_epi32(below, _mm256_cvttps_epi32(_mm256_add_ps(rest, rest)));
    whole[i] = _mm256_and_si256(_mm256_sign_epi32(own, _mm256_castps_si256(scaled)), _mm256_set1_epi32(0xFF));
  }
  const __m256i packed = _mm256_packus_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
  const __m256i bytes = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
  return largest;
}

template <typename X>
ZCKPT_FOR("avx2") void wholes_with_vectors(const X* x, size_t count, uint8_t* blocks, uint32_t* largest) {
  for (size_t b = 0; b < count; ++b) largest[b] = block_with_vectors(x + b * kNumbers, blocks + b * kBytes + 2);
}
#endif

const float* as_floats(const float* x, float*) { return x; }
const float* as_floats(const uint16_t* x, float* beside) {
  for (size_t i = 0; i < kNumbers; ++i) {
    const uint32_t bits = static_cast<uint32_t>(x[i]) << 16;
    std::memcpy(beside + i, &bits, 4);
  }
  return beside;
}

template <typename X>
void wholes_anywhere(const X* x, size_t count, uint8_t* blocks, uint32_t* largest) {
  float widened[kNumbers];
  for (size_t b = 0; b < count; ++b) {
    const float* own = as_floats(x + b * kNumbers, widened);
    largest[b] = largest_bits(own);
    float scale = 0;
    std::memcpy(&scale, &largest[b], 4);
    scale /= 127.0F;
    const float factor = largest[b] >= kInfinity ? INFINITY : scale > 0 ? 1.0F / scale : 0.0F;
    uint8_t* const to = blocks + b * kBytes + 2;
    if (std::isfinite(factor))
      whole_numbers(own, factor, to);
    else
      std::memset(to, 0, kNumbers);
  }
}

template <typename X>
void as_blocks(const X* x, uint8_t* blocks, size_t count) {
  const PlainFloats floats;
  auto wholes = wholes_anywhere<X>;
#ifdef ZCKPT_X86
  if (has(Unit::kMultiplyAdd)) wholes = wholes_with_vectors<X>;
#endif
  for (size_t first = 0; first < count; first += kAtOnce, x += kAtOnce * kNumbers, blocks += kAtOnce * kBytes) {
    const size_t n = std::min(kAtOnce, count - first);
    uint32_t largest[kAtOnce];
    wholes(x, n, blocks, largest);
    float scales[kAtOnce];
    for (size_t b = 0; b < n; ++b) {
      const uint32_t own = largest[b] < kInfinity ? largest[b] : 0;
      std::memcpy(&scales[b], &own, 4);
      scales[b] /= 127.0F;
    }
    uint16_t rounded[kAtOnce];
    Overflow overflow;
    cast(F32, F16, scales, rounded, n, false, overflow);
    for (size_t b = 0; b < n; ++b) {
      const uint16_t half = largest[b] < kInfinity ? rounded[b] : kNoHalf;
      blocks[b * kBytes] = static_cast<uint8_t>(half);
      blocks[b * kBytes + 1] = static_cast<uint8_t>(half >> 8);
    }
  }
}

}  // namespace

void to_q8_0(const float* x, uint8_t* blocks, size_t count) { as_blocks(x, blocks, count); }
void to_q8_0(const uint16_t* x, uint8_t* blocks, size_t count) { as_blocks(x, blocks, count); }

void of_q8_0(const uint8_t* __restrict blocks, float* __restrict x, size_t count) {
  const PlainFloats floats;
  uint16_t halves[kAtOnce];
  float scales[kAtOnce];
  for (size_t first = 0; first < count; first += kAtOnce) {
    const size_t n = std::min(kAtOnce, count - first);
    for (size_t b = 0; b < n; ++b) {
      const uint8_t* own = blocks + (first + b) * kBytes;
      halves[b] = static_cast<uint16_t>(own[0] | own[1] << 8);
    }
    Overflow overflow;
    cast(F16, F32, halves, scales, n, false, overflow);
    for (size_t b = 0; b < n; ++b) {
      const uint8_t* own = blocks + (first + b) * kBytes + 2;
      float* to = x + (first + b) * kNumbers;
      for (size_t i = 0; i < kNumbers; ++i) to[i] = static_cast<float>(static_cast<int8_t>(own[i])) * scales[b];
    }
  }
}

}  // namespace zckpt
