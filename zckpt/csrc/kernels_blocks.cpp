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

ZCKPT_VECTOR void multiply(float* x, size_t n, float factor) {
  for (size_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace

void largest(const float* x, const Blocks& blocks, float* found) {
  const size_t across = (blocks.columns + blocks.block_columns - 1) / blocks.block_columns;
  const size_t down = (blocks.first + blocks.rows + blocks.block_rows - 1) / blocks.block_rows;
  std::memset(found, 0, down * across * sizeof(float));
  for_each_run(blocks, [&](size_t at, size_t n, size_t block) {
    const uint32_t top = std::max(largest_of(x + at, n), bits_of(found[block]));
    found[block] = from_bits(top > kInfinity ? kNan : top);
  });
}

void multiply_blocks(float* x, const Blocks& blocks, const float* factors) {
  const PlainFloats floats;
  for_each_run(blocks, [&](size_t at, size_t n, size_t block) { multiply(x + at, n, factors[block]); });
}

}  // namespace zckpt
