// Blocks of ggml's types as numbers. Products and differences are rounded in ggml's order (ggml-quants.c, dequantize_row_*).
#include <cstring>

#include "blocks.h"
#include "floats.h"
#include "simd.h"

namespace zckpt {
namespace {

ZCKPT_INLINE float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

ZCKPT_INLINE float half(const uint8_t* at) {
  const uint32_t bits = at[0] | static_cast<uint32_t>(at[1]) << 8, size = bits & 0x7FFF, sign = bits >> 15 << 31;
  if (size >= 0x7C00) return from_bits(sign | 0x7F800000 | (size & 0x3FF) << 13);
  return from_bits(sign | 0x3F800000) * (from_bits(size << 13) * 0x1p112F);
}

constexpr int8_t kIq4Nl[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kTwiceE2M1[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Codes of so many bits: each stretch of kTogether bytes holds the lowest bits of all, then the next ones, and so on. They are added to
// `codes`, so many bits up.
template <int kBits, int kTogether>
ZCKPT_INLINE void add_bits(const uint8_t* from, int count, int up, uint8_t* codes) {
  for (int done = 0; done < count; from += kTogether)
    for (int shift = 0; shift < 8 && done < count; shift += kBits, done += kTogether)
      for (int j = 0; j < kTogether; ++j) codes[done + j] |= static_cast<uint8_t>((from[j] >> shift & ((1 << kBits) - 1)) << up);
}

// Blocks of 32: a step, perhaps a least number, perhaps the fifth bits, and two codes in a byte, 16 elements apart.
template <bool kLeast, bool kFifth, int kLess>
ZCKPT_INLINE void of_32(const uint8_t* b, float* x) {
  constexpr int kFifths = kLeast ? 4 : 2, kCodes = kFifths + (kFifth ? 4 : 0);
  const float step = half(b), least = kLeast ? half(b + 2) : 0;
  uint32_t fifths = 0;
  for (int j = 0; kFifth && j < 4; ++j) fifths |= static_cast<uint32_t>(b[kFifths + j]) << 8 * j;
  const auto number_of = [&](int code, int j) ZCKPT_PART {
    if (kFifth) code |= static_cast<int>(fifths >> j & 1) << 4;
    return kLeast ? step * static_cast<float>(code) + least : step * static_cast<float>(code - kLess);
  };
  for (int j = 0; j < 16; ++j) x[j] = number_of(b[kCodes + j] & 15, j);
  for (int j = 0; j < 16; ++j) x[j + 16] = number_of(b[kCodes + j] >> 4, j + 16);
}

ZCKPT_INLINE void of_table(float step, const uint8_t* codes, const int8_t* table, float* x) {
  for (int j = 0; j < 16; ++j) x[j] = step * static_cast<float>(table[codes[j] & 15]), x[j + 16] = step * static_cast<float>(table[codes[j] >> 4]);
}

template <int kPart>
ZCKPT_INLINE void of_parts(const uint8_t* codes, const float* steps, const float* least, int less, float* x) {
  for (int part = 0; part < 256 / kPart; ++part)
    for (int j = part * kPart; j < (part + 1) * kPart; ++j) {
      const float scaled = steps[part] * static_cast<float>(codes[j] - less);
      x[j] = least ? scaled - least[part] : scaled;
    }
}

// The steps and the least numbers of eight parts, of 6 bits each.
ZCKPT_INLINE void pairs_of_6(const uint8_t* b, float* steps, float* least) {
  const float step = half(b), own = half(b + 2);
  for (int i = 0; i < 4; ++i) {
    const uint8_t a = b[4 + i], m = b[8 + i], c = b[12 + i];
    steps[i] = step * static_cast<float>(a & 63), steps[i + 4] = step * static_cast<float>((c & 15) | (a >> 2 & 48));
    least[i] = own * static_cast<float>(m & 63), least[i + 4] = own * static_cast<float>(c >> 4 | (m >> 2 & 48));
  }
}

ZCKPT_INLINE void of_q2_k(const uint8_t* b, float* x) {
  uint8_t codes[256] = {};
  float steps[16], least[16];
  add_bits<2, 32>(b + 16, 256, 0, codes);
  for (int i = 0; i < 16; ++i) steps[i] = half(b + 80) * static_cast<float>(b[i] & 15), least[i] = half(b + 82) * static_cast<float>(b[i] >> 4);
  of_parts<16>(codes, steps, least, 0, x);
}

ZCKPT_INLINE void of_q3_k(const uint8_t* b, float* x) {
  uint8_t codes[256] = {}, scales[16] = {};
  float steps[16];
  add_bits<2, 32>(b + 32, 256, 0, codes);
  add_bits<1, 32>(b, 256, 2, codes);
  add_bits<4, 8>(b + 96, 16, 0, scales);
  add_bits<2, 4>(b + 104, 16, 4, scales);
  for (int i = 0; i < 16; ++i) steps[i] = half(b + 108) * static_cast<float>(scales[i] - 32);
  of_parts<16>(codes, steps, nullptr, 4, x);
}

template <bool kFifth>
ZCKPT_INLINE void of_q45_k(const uint8_t* b, float* x) {
  uint8_t codes[256] = {};
  float steps[8], least[8];
  pairs_of_6(b, steps, least);
  add_bits<4, 32>(b + (kFifth ? 48 : 16), 256, 0, codes);
  if (kFifth) add_bits<1, 32>(b + 16, 256, 4, codes);
  of_parts<32>(codes, steps, least, 0, x);
}

ZCKPT_INLINE void of_q6_k(const uint8_t* b, float* x) {
  uint8_t codes[256] = {};
  float steps[16];
  add_bits<4, 64>(b, 256, 0, codes);
  add_bits<2, 32>(b + 128, 256, 4, codes);
  for (int i = 0; i < 16; ++i) steps[i] = half(b + 208) * static_cast<float>(static_cast<int8_t>(b[192 + i]));
  of_parts<16>(codes, steps, nullptr, 32, x);
}

ZCKPT_INLINE void of_iq4_nl(const uint8_t* b, float* x) { of_table(half(b), b + 2, kIq4Nl, x); }

ZCKPT_INLINE void of_mxfp4(const uint8_t* b, float* x) {
  of_table(from_bits(b[0] < 2 ? 0x00200000U << b[0] : (b[0] - 1U) << 23), b + 1, kTwiceE2M1, x);
}

using Decode = void (*)(const uint8_t* block, float* x);

template <Decode decode>
ZCKPT_INLINE void each(const uint8_t* blocks, size_t count, size_t nbytes, size_t numbers, float* x) {
  for (size_t i = 0; i < count; ++i) decode(blocks + i * nbytes, x + i * numbers);
}

ZCKPT_VECTOR void decoded(GgmlBlocks kind, const uint8_t* blocks, size_t count, float* x) {
  switch (kind) {
    case GgmlBlocks::kQ4_0: return each<of_32<false, false, 8>>(blocks, count, 18, 32, x);
    case GgmlBlocks::kQ4_1: return each<of_32<true, false, 0>>(blocks, count, 20, 32, x);
    case GgmlBlocks::kQ5_0: return each<of_32<false, true, 16>>(blocks, count, 22, 32, x);
    case GgmlBlocks::kQ5_1: return each<of_32<true, true, 0>>(blocks, count, 24, 32, x);
    case GgmlBlocks::kIq4Nl: return each<of_iq4_nl>(blocks, count, 18, 32, x);
    case GgmlBlocks::kMxfp4: return each<of_mxfp4>(blocks, count, 17, 32, x);
    case GgmlBlocks::kQ2K: return each<of_q2_k>(blocks, count, 84, 256, x);
    case GgmlBlocks::kQ3K: return each<of_q3_k>(blocks, count, 110, 256, x);
    case GgmlBlocks::kQ4K: return each<of_q45_k<false>>(blocks, count, 144, 256, x);
    case GgmlBlocks::kQ5K: return each<of_q45_k<true>>(blocks, count, 176, 256, x);
    default: return each<of_q6_k>(blocks, count, 210, 256, x);
  }
}

}  // namespace

void of_ggml(GgmlBlocks kind, const uint8_t* blocks, size_t count, float* x) {
  const PlainFloats floats;
  decoded(kind, blocks, count, x);
}

}  // namespace zckpt
