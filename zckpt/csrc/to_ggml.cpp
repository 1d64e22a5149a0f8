#include "to_ggml.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "floats.h"
#include "simd.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // no vector is an argument: all such functions become parts of others
#endif

namespace zckpt {
namespace {

constexpr float kRounder = 12582912;  // 1.5 * 2^23: what is added to it loses its fraction
constexpr float kNothing = 1e-15F;
constexpr uint32_t kInfinity = 0x7F800000, kHuge = 0x5D800000;  // 2^60: far more than any block with halves holds, and sums of squares end

float of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// To nearest even.
uint16_t to_half(float x) {
  const uint32_t bits = bits_of(x), size = bits & 0x7FFFFFFF, sign = bits >> 16 & 0x8000;
  if (size > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);
  if (size >= 0x47800000) return static_cast<uint16_t>(sign | 0x7C00);
  if (size < 0x38800000) return static_cast<uint16_t>(sign | (bits_of(of_bits(size) + 0.5F) - 0x3F000000));
  return static_cast<uint16_t>(sign | ((size + 0xFFF + (size >> 13 & 1) - (112U << 23)) >> 13));
}

float of_half(uint16_t half) {
  const uint32_t size = half & 0x7FFF, sign = static_cast<uint32_t>(half) >> 15 << 31;
  if (size >= 0x7C00) return of_bits(sign | 0x7F800000 | (size & 0x3FF) << 13);
  return of_bits(sign | 0x3F800000) * (of_bits(size << 13) * 0x1p112F);
}

int32_t nearest(float x) { return static_cast<int32_t>(bits_of(x + kRounder) & 0x7FFFFF) - 0x400000; }

// What is tried for the scale of a group with a least number: codes to kTop, kSteps + 1 times something around it.
template <int kCodes, int kTimes>
struct Trials {
  static constexpr float kTop = kCodes;
  static constexpr int kSteps = kTimes;
  static constexpr float kFirst = kTimes == 36 ? -0.9F : kTimes == 20 ? -1.F : -0.5F, kApart = kTimes == 36 ? 0.05F : 0.1F;
  static constexpr float at(int step) { return kFirst + kApart * static_cast<float>(step) + kTop; }
};

// The same search for one group, of numbers so small or large that sums say nothing of errors.
template <class Trials>
void search_range_plainly(const float* x, const float* w, float& scale, float& minimum, uint8_t* codes) {
  constexpr int kNumbers = 32, kTop = static_cast<int>(Trials::kTop);
  float least = x[0], most = x[0], sum_w = w[0], sum_x = w[0] * x[0];
  for (int i = 1; i < kNumbers; ++i) {
    if (x[i] < least) least = x[i];
    if (x[i] > most) most = x[i];
    sum_w += w[i], sum_x += w[i] * x[i];
  }
  if (least > 0) least = 0;
  minimum = -least, scale = 0;
  std::memset(codes, 0, kNumbers);
  if (!(most > least)) return;
  float codes_of[kNumbers];
  const auto encode = [&](float factor, float start) {
    for (int i = 0; i < kNumbers; ++i) {
      const int32_t code = nearest(factor * (x[i] - start));
      codes_of[i] = static_cast<float>(code < 0 ? 0 : code > kTop ? kTop : code);
    }
  };
  const auto error_of = [&](float own, float low) {
    float error = 0;
    for (int i = 0; i < kNumbers; ++i) {
      const float off = own * codes_of[i] + low - x[i];
      error += w[i] * (off * off);
    }
    return error;
  };
  const auto keep = [&] {
    for (int i = 0; i < kNumbers; ++i) codes[i] = static_cast<uint8_t>(codes_of[i]);
  };
  float factor = Trials::kTop / (most - least);
  scale = 1 / factor;
  encode(factor, least), keep();
  float error = error_of(scale, least);
  for (int step = 0; step <= Trials::kSteps; ++step) {
    factor = Trials::at(step) / (most - least);
    encode(factor, least);
    float sum_l = 0, sum_ll = 0, sum_xl = 0;
    for (int i = 0; i < kNumbers; ++i) {
      const float wl = w[i] * codes_of[i];
      sum_l += wl, sum_ll += wl * codes_of[i], sum_xl += wl * x[i];
    }
    const float apart = sum_w * sum_ll - sum_l * sum_l;
    if (!(apart > 0)) continue;
    float own = (sum_w * sum_xl - sum_x * sum_l) / apart, low = (sum_ll * sum_x - sum_l * sum_xl) / apart;
    if (low > 0) low = 0, own = sum_xl / sum_ll;
    const float found = error_of(own, low);
    if (found < error) error = found, scale = own, least = low, keep();
  }
  minimum = -least;
}

// A set of instructions' loops.
struct Search {
  using Ranges = void (*)(const float*, const float*, int, float*, float*, uint8_t*);
  using Scales = void (*)(const float*, const float*, int, float*, uint8_t*);
  Ranges q4_k, q5_k, to_15, to_31;
  Scales q6_k, to_8, to_16;
  void (*matrix_weights)(const float*, const float*, float, int, float*);
  void (*divide)(const float*, int, float, float, int, int, uint8_t*);
  void (*encode)(const float*, float, float, float, int, uint8_t*);
  void (*encode_e2m1)(const float*, float, uint8_t*);
  uint32_t (*largest_bits)(const float*, size_t);
  void (*ends_of)(const float*, float&, float&);
};

namespace anywhere {
#define ZCKPT_LANES 4
#define ZCKPT_LANES_FOR
#define ZCKPT_LANES_MIN (a < b ? a : b)
#define ZCKPT_LANES_MAX (a > b ? a : b)
#include "to_ggml_lanes.h"
#undef ZCKPT_LANES
#undef ZCKPT_LANES_FOR
#undef ZCKPT_LANES_MIN
#undef ZCKPT_LANES_MAX
}  // namespace anywhere

#ifdef ZCKPT_X86
namespace with_avx2 {
#define ZCKPT_LANES 8
#define ZCKPT_LANES_FOR ZCKPT_FOR("avx2")
#define ZCKPT_LANES_MIN (Floats)_mm256_min_ps((__m256)a, (__m256)b)
#define ZCKPT_LANES_MAX (Floats)_mm256_max_ps((__m256)a, (__m256)b)
#include "to_ggml_lanes.h"
#undef ZCKPT_LANES
#undef ZCKPT_LANES_FOR
#undef ZCKPT_LANES_MIN
#undef ZCKPT_LANES_MAX
}  // namespace with_avx2

namespace with_avx512 {
#define ZCKPT_LANES 16
#define ZCKPT_LANES_FOR ZCKPT_FOR("avx512f,avx512dq,avx512bw,avx512vl")
#define ZCKPT_LANES_MIN (Floats)_mm512_maskz_min_ps(0xFFFF, (__m512)a, (__m512)b)
#define ZCKPT_LANES_MAX (Floats)_mm512_maskz_max_ps(0xFFFF, (__m512)a, (__m512)b)
#include "to_ggml_lanes.h"
#undef ZCKPT_LANES
#undef ZCKPT_LANES_FOR
#undef ZCKPT_LANES_MIN
#undef ZCKPT_LANES_MAX
}  // namespace with_avx512
#endif

const Search& search_here() {
#ifdef ZCKPT_X86
  if (has(Unit::kWideLanes)) return with_avx512::kSearch;
  if (has(Unit::kMultiplyAdd)) return with_avx2::kSearch;
#endif
  return anywhere::kSearch;
}

void put_half(uint8_t* to, uint16_t half) { to[0] = static_cast<uint8_t>(half), to[1] = static_cast<uint8_t>(half >> 8); }

// Codes of 32 numbers: the lowest four bits of two in a byte, 16 elements apart, and the fifth ones in a word before them.
void put_codes(const uint8_t* codes, bool fifth, uint8_t* to) {
  if (fifth) {
    uint32_t bits = 0;
    for (int j = 0; j < 32; ++j) bits |= static_cast<uint32_t>(codes[j] >> 4 & 1) << j;
    for (int j = 0; j < 4; ++j) *to++ = static_cast<uint8_t>(bits >> 8 * j);
  }
  for (int j = 0; j < 16; ++j) to[j] = static_cast<uint8_t>((codes[j] & 15) | codes[j + 16] << 4);
}

uint8_t cut(float x, int most) {  // as compilers for x86 do it
  const bool far = !(x > -2147483648.0F && x < 2147483648.0F);
  const int code = far ? 0 : static_cast<int8_t>(static_cast<int32_t>(x));
  return static_cast<uint8_t>(code < most ? code : most);
}

void put_encoded(const Search& search, const float* x, float less, float step, float lift, int top, bool fifth, uint8_t* to) {
  const float factor = step != 0 ? 1.0F / step : 0.0F;
  uint8_t codes[32];
  if (std::isfinite(factor))
    search.encode(x, less, factor, lift, top, codes);
  else
    for (int i = 0; i < 32; ++i) codes[i] = cut((x[i] - less) * factor + lift, top);
  put_codes(codes, fifth, to);
}

// Q4_0 and Q5_0: a step, from the first number of the largest magnitude; it becomes the lowest code.
void put_symmetric(const Search& search, uint32_t size, const float* x, int half, uint8_t* to) {
  float largest = 0;
  for (int i = 0; size && i < 32; ++i)
    if ((bits_of(x[i]) & 0x7FFFFFFF) == size) {
      largest = x[i];
      break;
    }
  const float step = largest / static_cast<float>(-half);
  put_half(to, to_half(step));
  put_encoded(search, x, 0, step, static_cast<float>(half) + 0.5F, 2 * half - 1, half == 16, to + 2);
}

// Q4_1 and Q5_1: a step and the least number.
void put_ranged(const Search& search, const float* x, int top, uint8_t* to) {
  float least = 0, most = 0;
  search.ends_of(x, least, most);
  for (int i = 0; least == 0 && i < 32; ++i)
    if (x[i] == 0) {  // the first zero's sign
      least = x[i];
      break;
    }
  const float step = (most - least) / static_cast<float>(top);
  put_half(to, to_half(step));
  put_half(to + 2, to_half(least));
  put_encoded(search, x, least, step, 0.5F, top, top == 31, to + 4);
}

// A power of two, by which the largest number becomes 4 to 8. (Where that is less than 2^-127, ggml's becomes another one by mistake.)
void put_mxfp4(const Search& search, uint32_t size, const float* x, uint8_t* to) {
  const float power = size ? std::floor(std::log2(of_bits(size))) - 2 + 127 : 0;
  const uint32_t e = power > 0 ? static_cast<uint32_t>(power) : 0;
  uint8_t codes[32];
  search.encode_e2m1(x, e < 2 ? of_bits(0x00200000U << e) : of_bits((e - 1) << 23), codes);
  to[0] = static_cast<uint8_t>(e);
  put_codes(codes, false, to + 1);
}

// The scales of eight groups and their least numbers, in 6 bits each.
void put_pairs(const uint8_t* scales, const uint8_t* minima, uint8_t* to) {
  for (int j = 0; j < 4; ++j) {
    const int s = scales[j + 4], m = minima[j + 4];
    to[j] = static_cast<uint8_t>(scales[j] | s >> 4 << 6);
    to[j + 4] = static_cast<uint8_t>(minima[j] | m >> 4 << 6);
    to[j + 8] = static_cast<uint8_t>((s & 15) | (m & 15) << 4);
  }
}

// Scales of groups as whole numbers to 63 times one number, which has the smallest weighted error.
float whole_scales(const float* x, const float* w, uint8_t* codes) {
  constexpr int kGroups = 8, kTop = 63;
  float most = 0;
  for (int i = 0; i < kGroups; ++i) most = most > x[i] ? most : x[i];
  std::memset(codes, 0, kGroups);
  if (most < kNothing) return 0;
  float factor = kTop / most;
  const auto error_of = [&](float times, float scale, int top) {
    float error = 0;
    for (int i = 0; i < kGroups; ++i) {
      const int code = nearest(times * x[i]), held = code < top ? code : top;
      const float off = x[i] - scale * static_cast<float>(static_cast<uint8_t>(held));
      error += w[i] * off * off;
    }
    return error;
  };
  float error = error_of(factor, 1 / factor, 1 << 30);
  for (int step = -4; step <= 4; ++step) {
    if (step == 0) continue;
    const float own = (0.1F * static_cast<float>(step) + kTop) / most, found = error_of(own, 1 / own, kTop);
    if (found < error) error = found, factor = own;
  }
  float sum_xl = 0, sum_ll = 0;
  for (int i = 0; i < kGroups; ++i) {
    const int code = nearest(factor * x[i]), held = code < kTop ? code : kTop;
    codes[i] = static_cast<uint8_t>(held);
    const float l = static_cast<float>(held);
    sum_xl += w[i] * x[i] * l, sum_ll += w[i] * l * l;
  }
  for (int turn = 0; turn < 5; ++turn) {
    bool changed = false;
    for (int i = 0; i < kGroups; ++i) {
      const float l = codes[i];
      float xl = sum_xl - w[i] * x[i] * l, ll = sum_ll - w[i] * l * l;
      if (!(xl > 0 && ll > 0)) continue;
      const int found = nearest(x[i] * ll / xl), code = found < kTop ? found : kTop;
      if (code == codes[i]) continue;
      const float to = static_cast<float>(code);
      xl += w[i] * x[i] * to, ll += w[i] * to * to;
      if (xl * xl * sum_ll > sum_xl * sum_xl * ll) codes[i] = static_cast<uint8_t>(code), sum_xl = xl, sum_ll = ll, changed = true;
    }
    if (!changed) break;
  }
  return sum_ll > 0 ? sum_xl / sum_ll : 0;
}

float square_of(const float* x, size_t count) {
  float sum = 0;
  for (size_t i = 0; i < count; ++i) sum += x[i] * x[i];
  return sum;
}

// Q4_K and Q5_K: 256 numbers, of which groups of 32 have a scale and a least number.
void put_q45_k(const Search& search, bool fifth, const float* x, size_t blocks, const float* columns, uint8_t* to) {
  constexpr size_t kAtOnce = 2, kNumbers = 256;
  const int top = fifth ? 31 : 15;
  float weights[kAtOnce * kNumbers], scales[kAtOnce * 8], minima[kAtOnce * 8];
  uint8_t codes[kAtOnce * kNumbers];
  for (size_t first = 0; first < blocks; first += kAtOnce) {
    const size_t count = blocks - first < kAtOnce ? blocks - first : kAtOnce;
    const float* own = x + first * kNumbers;
    if (columns)
      for (size_t b = 0; b < count; ++b)
        search.matrix_weights(own + b * kNumbers, columns + (first + b) * kNumbers, 2 * square_of(own + b * kNumbers, kNumbers) / kNumbers, kNumbers,
                              weights + b * kNumbers);
    const auto ranges = columns ? (fifth ? search.to_31 : search.to_15) : fifth ? search.q5_k : search.q4_k;
    ranges(own, columns ? weights : nullptr, static_cast<int>(count) * 8, scales, minima, codes);
    for (size_t b = 0; b < count; ++b, to += fifth ? 176 : 144) {
      const float *s = scales + b * 8, *m = minima + b * 8;
      uint8_t whole_s[8], whole_m[8], *own_codes = codes + b * kNumbers;
      float step = 0, least = 0;
      if (columns) {
        float sums[8];
        for (int j = 0; j < 8; ++j) {
          sums[j] = 0;
          for (int i = 0; i < 32; ++i) sums[j] += weights[b * kNumbers + static_cast<size_t>(j) * 32 + static_cast<size_t>(i)];
        }
        step = whole_scales(s, sums, whole_s), least = whole_scales(m, sums, whole_m);
        for (int j = 0; j < 8; ++j) whole_s[j] = whole_s[j] < 63 ? whole_s[j] : 63, whole_m[j] = whole_m[j] < 63 ? whole_m[j] : 63;
      } else {
        float most_s = 0, most_m = 0;
        for (int j = 0; j < 8; ++j) most_s = s[j] > most_s ? s[j] : most_s, most_m = m[j] > most_m ? m[j] : most_m;
        const float by_s = most_s > 0 ? 63.0F / most_s : 0, by_m = most_m > 0 ? 63.0F / most_m : 0;
        for (int j = 0; j < 8; ++j) {
          const auto as_byte = [](float each) { return static_cast<uint8_t>(nearest(each)); };
          const uint8_t one = as_byte(by_s * s[j]), other = as_byte(by_m * m[j]);
          whole_s[j] = one < 63 ? one : 63, whole_m[j] = other < 63 ? other : 63;
        }
        step = most_s / 63.0F, least = most_m / 63.0F;
      }
      const uint16_t half_s = to_half(step), half_m = to_half(least);
      put_half(to, half_s), put_half(to + 2, half_m);
      put_pairs(whole_s, whole_m, to + 4);
      for (int j = 0; j < 8; ++j) {
        const float by = of_half(half_s) * static_cast<float>(whole_s[j]);
        if (by != 0) search.divide(own + b * kNumbers + static_cast<size_t>(j) * 32, 32, of_half(half_m) * static_cast<float>(whole_m[j]), by, 0, top, own_codes + j * 32);
      }
      uint8_t* low = to + (fifth ? 48 : 16);
      if (fifth) std::memset(to + 16, 0, 32);
      for (int part = 0; part < 4; ++part)
        for (int l = 0; l < 32; ++l) {
          const int a = own_codes[part * 64 + l], c = own_codes[part * 64 + 32 + l];
          low[part * 32 + l] = static_cast<uint8_t>((a & 15) | (c & 15) << 4);
          if (fifth) to[16 + l] = static_cast<uint8_t>(to[16 + l] | a >> 4 << 2 * part | c >> 4 << (2 * part + 1));
        }
    }
  }
}

// Q6_K: 256 numbers, of which groups of 16 have a scale.
void put_q6_k(const Search& search, const float* x, const float* columns, uint8_t* to) {
  float scales[16];
  uint8_t codes[256];
  search.q6_k(x, columns, 16, scales, codes);
  float size = 0, largest = 0;
  for (const float scale : scales)
    if (std::fabs(scale) > size) size = std::fabs(scale), largest = scale;
  if (size < kNothing) {
    std::memset(to, 0, 210);
    return;
  }
  const float factor = -128.0F / largest;
  const uint16_t half = to_half(1 / factor);
  for (int j = 0; j < 16; ++j) {
    const int whole = nearest(factor * scales[j]);
    const int8_t held = static_cast<int8_t>(whole < 127 ? whole : 127);
    to[192 + j] = static_cast<uint8_t>(held);
    const float by = of_half(half) * static_cast<float>(held);
    if (by != 0) search.divide(x + j * 16, 16, 0, by, -32, 31, codes + j * 16);
  }
  put_half(to + 208, half);
  for (int part = 0; part < 2; ++part)
    for (int l = 0; l < 32; ++l) {
      const uint8_t* own = codes + part * 128 + l;
      to[part * 64 + l] = static_cast<uint8_t>((own[0] & 15) | (own[64] & 15) << 4);
      to[part * 64 + 32 + l] = static_cast<uint8_t>((own[32] & 15) | (own[96] & 15) << 4);
      to[128 + part * 32 + l] = static_cast<uint8_t>(own[0] >> 4 | own[32] >> 4 << 2 | own[64] >> 4 << 4 | own[96] >> 4 << 6);
    }
}

// Blocks of 32 of one row, with an importance matrix.
void put_weighted(const Search& search, GgmlBlocks kind, const float* x, size_t blocks, const float* columns, size_t nbytes, uint8_t* to) {
  constexpr size_t kAtOnce = 16;
  const bool fifth = kind == GgmlBlocks::kQ5_0 || kind == GgmlBlocks::kQ5_1, ranged = kind == GgmlBlocks::kQ4_1 || kind == GgmlBlocks::kQ5_1;
  const float square = square_of(x, blocks * 32) / static_cast<float>(blocks * 32);
  float weights[kAtOnce * 32], scales[kAtOnce], minima[kAtOnce];
  uint8_t codes[kAtOnce * 32];
  for (size_t first = 0; first < blocks; first += kAtOnce) {
    const int count = static_cast<int>(blocks - first < kAtOnce ? blocks - first : kAtOnce);
    const float* own = x + first * 32;
    search.matrix_weights(own, columns + first * 32, square, count * 32, weights);
    if (ranged)
      (fifth ? search.to_31 : search.to_15)(own, weights, count, scales, minima, codes);
    else
      (fifth ? search.to_16 : search.to_8)(own, weights, count, scales, codes);
    for (int b = 0; b < count; ++b, to += nbytes) {
      put_half(to, to_half(scales[b]));
      if (ranged) put_half(to + 2, to_half(-minima[b]));
      put_codes(codes + b * 32, fifth, to + (ranged ? 4 : 2));
    }
  }
}

bool is_sound(GgmlBlocks kind, const uint8_t* block) {
  const auto is_finite = [&](size_t at) { return (block[at + 1] & 0x7C) != 0x7C; };
  switch (kind) {
    case GgmlBlocks::kMxfp4: return true;
    case GgmlBlocks::kQ6K: return is_finite(208);
    case GgmlBlocks::kQ4_0:
    case GgmlBlocks::kQ5_0: return is_finite(0);
    default: return is_finite(0) && is_finite(2);
  }
}

}  // namespace

size_t to_ggml(GgmlBlocks kind, const float* x, size_t rows, size_t columns, const float* weights, uint8_t* blocks) {
  const PlainFloats floats;
  const Search& search = search_here();
  const bool large = kind == GgmlBlocks::kQ4K || kind == GgmlBlocks::kQ5K || kind == GgmlBlocks::kQ6K;
  const size_t numbers = large ? 256 : 32, across = columns / numbers;
  size_t nbytes = 0, unsound = 0;
  switch (kind) {
    case GgmlBlocks::kQ4_0: nbytes = 18; break;
    case GgmlBlocks::kQ4_1: nbytes = 20; break;
    case GgmlBlocks::kQ5_0: nbytes = 22; break;
    case GgmlBlocks::kQ5_1: nbytes = 24; break;
    case GgmlBlocks::kMxfp4: nbytes = 17; break;
    case GgmlBlocks::kQ4K: nbytes = 144; break;
    case GgmlBlocks::kQ5K: nbytes = 176; break;
    default: nbytes = 210;
  }
  const bool weighted = weights && kind != GgmlBlocks::kMxfp4;
  const uint32_t limit = kind == GgmlBlocks::kMxfp4 ? kInfinity : kHuge;
  for (size_t row = 0; row < rows; ++row, x += columns, blocks += across * nbytes) {
    if (kind == GgmlBlocks::kQ4K || kind == GgmlBlocks::kQ5K)
      put_q45_k(search, kind == GgmlBlocks::kQ5K, x, across, weights, blocks);
    else if (weighted && !large)
      put_weighted(search, kind, x, across, weights, nbytes, blocks);
    for (size_t b = 0; b < across; ++b) {
      const float* own = x + b * numbers;
      uint8_t* to = blocks + b * nbytes;
      const uint32_t size = search.largest_bits(own, numbers);
      if (kind == GgmlBlocks::kQ6K) put_q6_k(search, own, weights ? weights + b * numbers : nullptr, to);
      if (size < limit && !weighted) switch (kind) {
          case GgmlBlocks::kQ4_0: put_symmetric(search, size, own, 8, to); break;
          case GgmlBlocks::kQ5_0: put_symmetric(search, size, own, 16, to); break;
          case GgmlBlocks::kQ4_1: put_ranged(search, own, 15, to); break;
          case GgmlBlocks::kQ5_1: put_ranged(search, own, 31, to); break;
          case GgmlBlocks::kMxfp4: put_mxfp4(search, size, own, to); break;
          default: break;
        }
      unsound += size >= limit || !is_sound(kind, to);
    }
  }
  return unsound;
}

}  // namespace zckpt
