#include "to_ggml.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

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

ZCKPT_INLINE float of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
ZCKPT_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// To nearest even.
ZCKPT_INLINE uint16_t to_half(float x) {
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

ZCKPT_INLINE void put_half(uint8_t* to, uint16_t half) { to[0] = static_cast<uint8_t>(half), to[1] = static_cast<uint8_t>(half >> 8); }
ZCKPT_INLINE bool is_finite(uint16_t half) { return (half & 0x7C00) != 0x7C00; }

// The whole part of the logarithm to base 2, as it is rounded to fp32, of a number with these bits; it is the exponent but near powers of two.
ZCKPT_INLINE int power_of(uint32_t bits) {
  const uint32_t fraction = bits & 0x7FFFFF;
  if (fraction > 0x7FFF00 || fraction < 0x100 || bits < 0x800000) return static_cast<int>(std::floor(std::log2(of_bits(bits))));
  return static_cast<int>(bits >> 23) - 127;
}

uint8_t cut(float x, int most) {  // as compilers for x86 do it
  const bool far = !(x > -2147483648.0F && x < 2147483648.0F);
  const int code = far ? 0 : static_cast<int8_t>(static_cast<int32_t>(x));
  return static_cast<uint8_t>(code < most ? code : most);
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

// What is found for groups: numbers are codes times a scale, less a minimum; codes are (numbers - start) * factor. And sums of weights.
struct Ranges {
  float *scales, *minima, *factors, *starts, *weights;
  Ranges from(int group) const { return {scales + group, minima + group, factors + group, starts + group, weights + group}; }
};
constexpr float kNoCodes = std::numeric_limits<float>::infinity();  // a factor: all codes are 0

// The search for one group, of numbers so small or large that sums say nothing of errors.
template <class Trials>
void search_range_plainly(const float* x, const float* w, const Ranges& found, int group) {
  constexpr int kNumbers = 32, kTop = static_cast<int>(Trials::kTop);
  float least = x[0], most = x[0], sum_w = w[0], sum_x = w[0] * x[0];
  for (int i = 1; i < kNumbers; ++i) {
    if (x[i] < least) least = x[i];
    if (x[i] > most) most = x[i];
    sum_w += w[i], sum_x += w[i] * x[i];
  }
  if (least > 0) least = 0;
  float &scale = found.scales[group], &minimum = found.minima[group], &best = found.factors[group], &start = found.starts[group];
  minimum = -least, scale = 0, best = kNoCodes, start = least;
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
  float factor = Trials::kTop / (most - least);
  scale = 1 / factor, best = factor;
  encode(factor, least);
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
    const float off_by = error_of(own, low);
    if (off_by < error) error = off_by, scale = own, best = factor, start = least, least = low;
  }
  minimum = -least;
}

// A set of instructions' loops.
struct Search {
  using RangesOf = void (*)(const float*, const float*, int, const Ranges&);
  using ScalesOf = void (*)(const float*, const float*, int, float*, float*);
  using Divide = void (*)(const float*, int, const float*, const float*, int, int, uint8_t*);
  RangesOf q4_k, q5_k, to_15, to_31;
  ScalesOf q6_k, to_8, to_16;
  void (*wholes)(const float*, const float*, int, float*, uint8_t*);
  void (*matrix_weights)(const float*, const float*, float, int, float*);
  Divide divide_32, divide_16;
  void (*multiply)(const float*, int, float, float, int, int, uint8_t*);
  void (*pack_q45_k)(const uint8_t*, uint8_t*, uint8_t*);
  void (*pack_q6_k)(const uint8_t*, uint8_t*, uint8_t*);
  void (*put_codes)(const uint8_t*, bool, uint8_t*);
  uint32_t (*largest_bits)(const float*, size_t);
  size_t (*plain)(GgmlBlocks, const float*, size_t, uint8_t*);
};

#if defined(ZCKPT_X86)
using Four = __m128;
ZCKPT_INLINE void turn_four(Four* rows) { _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]); }
#else
struct Four {
  float of[4];
};
ZCKPT_INLINE void turn_four(Four* rows) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < i; ++j) std::swap(rows[i].of[j], rows[j].of[i]);
}
#endif

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

// The scales of eight groups and their least numbers, in 6 bits each.
void put_pairs(const uint8_t* scales, const uint8_t* minima, uint8_t* to) {
  for (int j = 0; j < 4; ++j) {
    const int s = scales[j + 4], m = minima[j + 4];
    to[j] = static_cast<uint8_t>(scales[j] | s >> 4 << 6);
    to[j + 4] = static_cast<uint8_t>(minima[j] | m >> 4 << 6);
    to[j + 8] = static_cast<uint8_t>((s & 15) | (m & 15) << 4);
  }
}

// Sums of squares of so many runs of numbers at once, of kRuns at most, as each sum waits for its terms; runs lie one after the other.
constexpr size_t kRuns = 8;
void squares_of(const float* x, size_t runs, size_t count, float* sums) {
  const float* own[kRuns];
  for (size_t run = 0; run < kRuns; ++run) own[run] = x + (run < runs ? run : 0) * count;
  float found[kRuns] = {};
  for (size_t i = 0; i < count; ++i)
    for (size_t run = 0; run < kRuns; ++run) found[run] += own[run][i] * own[run][i];
  std::memcpy(sums, found, runs * sizeof *sums);
}

void codes_of_range(const Search& search, const Ranges& found, size_t group, const float* x, int top, uint8_t* codes) {
  if (found.factors[group] == kNoCodes)
    std::memset(codes, 0, 32);
  else
    search.multiply(x, 32, found.starts[group], found.factors[group], 0, top, codes);
}

// Q4_K and Q5_K: 256 numbers, of which groups of 32 have a scale and a least number. A row has `across` blocks.
void put_q45_k(const Search& search, bool fifth, const float* x, size_t blocks, const float* columns, size_t across, uint8_t* to) {
  constexpr size_t kAtOnce = kRuns, kNumbers = 256, kGroups = kAtOnce * 8;
  const int top = fifth ? 31 : 15;
  float weights[kAtOnce * kNumbers], found[5][kGroups], steps[kAtOnce], leasts[kAtOnce], squares[kAtOnce];
  uint8_t wholes_s[kGroups], wholes_m[kGroups], codes[kNumbers];
  const Ranges ranges{found[0], found[1], found[2], found[3], found[4]};
  for (size_t first = 0; first < blocks; first += kAtOnce) {
    const size_t count = blocks - first < kAtOnce ? blocks - first : kAtOnce;
    const float* own = x + first * kNumbers;
    if (columns) squares_of(own, count, kNumbers, squares);
    for (size_t b = 0; columns && b < count; ++b)
      search.matrix_weights(own + b * kNumbers, columns + (first + b) % across * kNumbers, 2 * squares[b] / kNumbers, kNumbers, weights + b * kNumbers);
    const auto search_all = columns ? (fifth ? search.to_31 : search.to_15) : fifth ? search.q5_k : search.q4_k;
    search_all(own, columns ? weights : nullptr, static_cast<int>(count) * 8, ranges);
    if (columns) {
      search.wholes(ranges.scales, ranges.weights, static_cast<int>(count), steps, wholes_s);
      search.wholes(ranges.minima, ranges.weights, static_cast<int>(count), leasts, wholes_m);
    }
    for (size_t b = 0; b < count; ++b, to += fifth ? 176 : 144) {
      const float *s = ranges.scales + b * 8, *m = ranges.minima + b * 8;
      uint8_t *whole_s = wholes_s + b * 8, *whole_m = wholes_m + b * 8;
      if (columns) {
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
        steps[b] = most_s / 63.0F, leasts[b] = most_m / 63.0F;
      }
      const uint16_t half_s = to_half(steps[b]), half_m = to_half(leasts[b]);
      put_half(to, half_s), put_half(to + 2, half_m);
      put_pairs(whole_s, whole_m, to + 4);
      float by[8], more[8];
      for (int j = 0; j < 8; ++j) by[j] = of_half(half_s) * static_cast<float>(whole_s[j]), more[j] = of_half(half_m) * static_cast<float>(whole_m[j]);
      search.divide_32(own + b * kNumbers, 8, more, by, 0, top, codes);
      for (size_t j = 0; j < 8; ++j)
        if (by[j] == 0) codes_of_range(search, ranges, b * 8 + j, own + b * kNumbers + j * 32, top, codes + j * 32);
      search.pack_q45_k(codes, to + (fifth ? 48 : 16), fifth ? to + 16 : nullptr);
    }
  }
}

void codes_of_scale(const Search& search, const float* x, int count, float factor, int half, uint8_t* codes) {
  if (factor == kNoCodes)
    std::memset(codes, 0, static_cast<size_t>(count));
  else
    search.multiply(x, count, 0, factor, -half, half - 1, codes);
}

// Q6_K: 256 numbers, of which groups of 16 have a scale.
void put_q6_k(const Search& search, const float* x, const float* scales, const float* factors, uint8_t* to) {
  uint8_t codes[256];
  float size = 0, largest = 0;
  for (int j = 0; j < 16; ++j)
    if (std::fabs(scales[j]) > size) size = std::fabs(scales[j]), largest = scales[j];
  if (size < kNothing) {
    std::memset(to, 0, 210);
    return;
  }
  const float factor = -128.0F / largest;
  const uint16_t half = to_half(1 / factor);
  float by[16];
  for (int j = 0; j < 16; ++j) {
    const int whole = nearest(factor * scales[j]);
    const int8_t held = static_cast<int8_t>(whole < 127 ? whole : 127);
    to[192 + j] = static_cast<uint8_t>(held);
    by[j] = of_half(half) * static_cast<float>(held);
  }
  search.divide_16(x, 16, nullptr, by, -32, 31, codes);
  for (int j = 0; j < 16; ++j)
    if (by[j] == 0) codes_of_scale(search, x + j * 16, 16, factors[j], 32, codes + j * 16);
  put_half(to + 208, half);
  search.pack_q6_k(codes, to, to + 128);
}

void put_all_q6_k(const Search& search, const float* x, size_t blocks, const float* columns, size_t across, uint8_t* to) {
  constexpr size_t kAtOnce = 2, kNumbers = 256;
  float weights[kAtOnce * kNumbers], scales[kAtOnce * 16], factors[kAtOnce * 16];
  for (size_t first = 0; first < blocks; first += kAtOnce, x += kAtOnce * kNumbers) {
    const size_t count = blocks - first < kAtOnce ? blocks - first : kAtOnce;
    for (size_t b = 0; columns && b < count; ++b) std::memcpy(weights + b * kNumbers, columns + (first + b) % across * kNumbers, kNumbers * sizeof *weights);
    search.q6_k(x, columns ? weights : nullptr, static_cast<int>(count) * 16, scales, factors);
    for (size_t b = 0; b < count; ++b, to += 210) put_q6_k(search, x + b * kNumbers, scales + b * 16, factors + b * 16, to);
  }
}

// Blocks of 32 of one row, with an importance matrix; `square`: the mean of the squares of its numbers.
void put_weighted(const Search& search, GgmlBlocks kind, const float* x, float square, size_t blocks, const float* columns, size_t nbytes, uint8_t* to) {
  constexpr size_t kAtOnce = 32;
  const bool fifth = kind == GgmlBlocks::kQ5_0 || kind == GgmlBlocks::kQ5_1, ranged = kind == GgmlBlocks::kQ4_1 || kind == GgmlBlocks::kQ5_1;
  float weights[kAtOnce * 32], found_of[5][kAtOnce];
  const Ranges found{found_of[0], found_of[1], found_of[2], found_of[3], found_of[4]};
  uint8_t codes[32];
  for (size_t first = 0; first < blocks; first += kAtOnce) {
    const int count = static_cast<int>(blocks - first < kAtOnce ? blocks - first : kAtOnce);
    const float* own = x + first * 32;
    search.matrix_weights(own, columns + first * 32, square, count * 32, weights);
    if (ranged)
      (fifth ? search.to_31 : search.to_15)(own, weights, count, found);
    else
      (fifth ? search.to_16 : search.to_8)(own, weights, count, found.scales, found.factors);
    for (int b = 0; b < count; ++b, to += nbytes) {
      put_half(to, to_half(found.scales[b]));
      if (ranged) {
        put_half(to + 2, to_half(-found.minima[b]));
        codes_of_range(search, found, static_cast<size_t>(b), own + b * 32, fifth ? 31 : 15, codes);
      } else {
        codes_of_scale(search, own + b * 32, 32, found.factors[b], fifth ? 16 : 8, codes);
      }
      search.put_codes(codes, fifth, to + (ranged ? 4 : 2));
    }
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
  if (!large && (!weights || kind == GgmlBlocks::kMxfp4)) return search.plain(kind, x, rows * across, blocks);
  float squares[kRuns];
  if (kind == GgmlBlocks::kQ6K)
    put_all_q6_k(search, x, rows * across, weights, across, blocks);
  else if (large)
    put_q45_k(search, kind == GgmlBlocks::kQ5K, x, rows * across, weights, across, blocks);
  const size_t first = kind == GgmlBlocks::kQ6K ? 208 : 0, second = kind == GgmlBlocks::kQ6K || kind == GgmlBlocks::kQ4_0 || kind == GgmlBlocks::kQ5_0 ? first : 2;  // halves of a block
  for (size_t row = 0; row < rows; ++row, x += columns, blocks += across * nbytes) {
    if (!large) {
      if (row % kRuns == 0) squares_of(x, rows - row < kRuns ? rows - row : kRuns, columns, squares);
      put_weighted(search, kind, x, squares[row % kRuns] / static_cast<float>(columns), across, weights, nbytes, blocks);
    }
    for (size_t b = 0; b < across; ++b) {
      const uint8_t* own = blocks + b * nbytes;
      const auto is_half = [&](size_t at) { return is_finite(static_cast<uint16_t>(own[at] | own[at + 1] << 8)); };
      unsound += search.largest_bits(x + b * numbers, numbers) >= kHuge || !is_half(first) || !is_half(second);
    }
  }
  return unsound;
}

}  // namespace zckpt
