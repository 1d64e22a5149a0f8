// Matrices with factors for blocks of their elements.
#include <algorithm>
#include <cstring>

#include "floats.h"
#include "kernels.h"
#include "simd.h"

namespace zckpt {
namespace {

constexpr uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000, kNan = 0x7FC00000;

ZCKPT_INLINE uint32_t bits_of(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}
ZCKPT_INLINE float from_bits(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

// Magnitudes are in the order of their bits, so whole numbers are compared.
ZCKPT_VECTOR uint32_t largest_of(const float* x, size_t n) {
  uint32_t top = 0;
  for (size_t i = 0; i < n; ++i) top = std::max(top, bits_of(x[i]) & kMagnitude);
  return top;
}

// Of bf16, as the bits of fp32.
ZCKPT_VECTOR uint32_t largest_of(const uint16_t* x, size_t n) {
  uint16_t top = 0;
  for (size_t i = 0; i < n; ++i) top = std::max<uint16_t>(top, x[i] & 0x7FFF);
  return static_cast<uint32_t>(top) << 16;
}

#ifdef ZCKPT_X86
// There is an instruction for the least of eight whole numbers: that of those turned round is the largest.
ZCKPT_FOR("avx2") uint32_t largest_with_vectors(const uint16_t* x, size_t n) {
  const __m256i sizes = _mm256_set1_epi16(0x7FFF);
  __m256i one = _mm256_setzero_si256(), other = one;
  size_t i = 0;
  for (; i + 32 <= n; i += 32) {
    one = _mm256_max_epu16(one, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), sizes));
    other = _mm256_max_epu16(other, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 16)), sizes));
  }
  for (; i + 16 <= n; i += 16) one = _mm256_max_epu16(one, _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), sizes));
  one = _mm256_max_epu16(one, other);
  const __m128i both = _mm_max_epu16(_mm256_castsi256_si128(one), _mm256_extracti128_si256(one, 1));
  auto top = static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(both, _mm_set1_epi16(-1)))) & 0xFFFF) ^ 0xFFFF;
  for (; i < n; ++i) top = std::max<uint32_t>(top, x[i] & 0x7FFF);
  return top << 16;
}
#endif

ZCKPT_VECTOR void multiply(float* x, size_t n, float factor) {
  for (size_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace

template <typename X, typename Of>
static void largest_by(const X* x, const Blocks& blocks, float* found, const Of& of) {
  const size_t across = (blocks.columns + blocks.block_columns - 1) / blocks.block_columns;
  const size_t down = (blocks.first + blocks.rows + blocks.block_rows - 1) / blocks.block_rows;
  std::memset(found, 0, down * across * sizeof(float));
  for_each_run(blocks, [&](size_t at, size_t n, size_t block) {
    const uint32_t top = std::max(of(x + at, n), bits_of(found[block]));
    found[block] = from_bits(top > kInfinity ? kNan : top);
  });
}

void largest(const float* x, const Blocks& blocks, float* found) {
  largest_by(x, blocks, found, [](const float* own, size_t n) { return largest_of(own, n); });
}

void largest(const uint16_t* x, const Blocks& blocks, float* found) {
#ifdef ZCKPT_X86
  if (has(Unit::kMultiplyAdd)) return largest_by(x, blocks, found, largest_with_vectors);
#endif
  largest_by(x, blocks, found, [](const uint16_t* own, size_t n) { return largest_of(own, n); });
}

void multiply_blocks(float* x, const Blocks& blocks, const float* factors) {
  const PlainFloats floats;
  for_each_run(blocks, [&](size_t at, size_t n, size_t block) { multiply(x + at, n, factors[block]); });
}

}  // namespace zckpt
