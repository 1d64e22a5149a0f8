// Matrices of fp8 with factors for blocks of their elements.
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

// E4M3 has steps of 1/512 below 1/64, and three bits behind the first one from there on. Its largest number is 448; 464 is halfway to 480.
constexpr uint32_t kLeastNormal = 0x3C800000, kHalfway = 0x43E80000, kLargest = 0x43E00000;  // 1/64, 464, 448
constexpr float kSteps = 16384.0f;  // fp32 has steps of 1/512 there

struct Losses {
  uint32_t saturated, underflowed, error;
};

// All bits set where it is so, none where not: choices between numbers without a branch, of which compilers make vector code.
ZCKPT_INLINE uint32_t mask(bool is) { return 0u - static_cast<uint32_t>(is); }
ZCKPT_INLINE uint32_t chosen(uint32_t mask, uint32_t yes, uint32_t no) { return (yes & mask) | (no & ~mask); }

ZCKPT_VECTOR void round_run(const float* __restrict x, size_t n, float factor, uint8_t* __restrict out, Losses* __restrict losses) {
  uint32_t saturated = 0, underflowed = 0, error = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(x[i]), size = bits & kMagnitude;
    const float y = from_bits(size) / factor;
    const uint32_t a = bits_of(y) & kMagnitude;
    const uint32_t over = mask(a > kHalfway), none = mask(a > kInfinity), small = mask(a < kLeastNormal);
    const float steps = y + kSteps;
    const uint32_t rounded = chosen(over, kLargest, (a + 0x7FFFF + ((a >> 20) & 1)) & 0xFFF00000u);
    const uint32_t number = chosen(small, bits_of(steps) - 0x46800000u, (rounded >> 20) - 960);
    const float value = from_bits(chosen(small, bits_of(steps - kSteps), rounded));
    out[i] = static_cast<uint8_t>((number & ~none) | (0x7Fu & none) | (bits >> 24 & 0x80u));
    const float scaled = value * factor;
    const uint32_t off = bits_of(from_bits(size) - scaled) & kMagnitude;
    const uint32_t here = chosen(none | mask(off > kInfinity), kNan, off);
    error = error > here ? error : here;
    saturated -= over & ~none;
    underflowed -= mask(number == 0) & mask(size != 0);
  }
  *losses = {saturated, underflowed, error};
}

// Calls `each(first element, elements, block)` for every part of a row that is in one block.
template <typename Each>
void for_each_run(const Blocks& b, const Each& each) {
  const size_t across = (b.columns + b.block_columns - 1) / b.block_columns;
  for (size_t row = 0; row < b.rows; ++row)
    for (size_t block = (b.first + row) / b.block_rows * across, at = 0; at < b.columns; ++block, at += b.block_columns)
      each(row * b.columns + at, std::min(b.block_columns, b.columns - at), block);
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

Rounded to_e4m3(const float* x, const Blocks& blocks, const float* factors, uint8_t* out) {
  const PlainFloats floats;
  Rounded rounded;
  uint32_t error = 0;
  for_each_run(blocks, [&](size_t at, size_t n, size_t block) {
    constexpr size_t kMost = size_t{1} << 30;  // counts of so many fit
    for (size_t done = 0; done < n; done += kMost) {
      Losses losses{};
      round_run(x + at + done, std::min(kMost, n - done), factors[block], out + at + done, &losses);
      rounded.saturated += losses.saturated;
      rounded.underflowed += losses.underflowed;
      error = std::max(error, losses.error);
    }
  });
  rounded.error = from_bits(error);
  return rounded;
}

}  // namespace zckpt
