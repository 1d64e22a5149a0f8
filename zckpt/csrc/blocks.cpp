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

void to_q8_0(const float* __restrict x, uint8_t* __restrict blocks, size_t count) {
  const PlainFloats floats;
  float scales[kAtOnce];
  bool sounds[kAtOnce];
  for (size_t first = 0; first < count; first += kAtOnce) {
    const size_t n = std::min(kAtOnce, count - first);
    for (size_t b = 0; b < n; ++b) {
      const float* own = x + (first + b) * kNumbers;
      const uint32_t largest = largest_bits(own);
      float scale = 0;
      std::memcpy(&scale, &largest, 4);
      scale /= 127.0F;
      const bool sound = largest < kInfinity;
      scales[b] = sound ? scale : 0;
      const float factor = !sound ? INFINITY : scale > 0 ? 1.0F / scale : 0.0F;
      uint8_t* const to = blocks + (first + b) * kBytes + 2;
      if (std::isfinite(factor))
        whole_numbers(own, factor, to);
      else
        std::memset(to, 0, kNumbers);
      sounds[b] = sound;
    }
    uint16_t rounded[kAtOnce];
    Overflow overflow;
    cast(F32, F16, scales, rounded, n, false, overflow);
    for (size_t b = 0; b < n; ++b) {
      const uint16_t half = sounds[b] ? rounded[b] : kNoHalf;
      blocks[(first + b) * kBytes] = static_cast<uint8_t>(half);
      blocks[(first + b) * kBytes + 1] = static_cast<uint8_t>(half >> 8);
    }
  }
}

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
