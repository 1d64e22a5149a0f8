#include "codes.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "floats.h"
#include "number_grids.h"
#include "simd.h"

namespace zckpt {
namespace {

ZCKPT_VECTOR void split_halves(const uint8_t* __restrict raw, size_t bytes, unsigned first, uint8_t* __restrict codes) {
  for (size_t i = 0; i < bytes; ++i) {
    codes[2 * i] = static_cast<uint8_t>(raw[i] >> first & 15);
    codes[2 * i + 1] = static_cast<uint8_t>(raw[i] >> (4 - first) & 15);
  }
}

template <typename Word>
ZCKPT_INLINE void masked(const uint8_t* __restrict raw, size_t n, unsigned shift, Word mask, uint8_t* __restrict codes) {
  for (size_t i = 0; i < n; ++i) {
    Word word;
    std::memcpy(&word, raw + i * sizeof word, sizeof word);
    codes[i] = static_cast<uint8_t>(word >> shift & mask);
  }
}

ZCKPT_VECTOR void masked_words(const uint8_t* raw, unsigned word, size_t n, unsigned shift, unsigned mask, uint8_t* codes) {
  switch (word) {
    case 1: return masked<uint8_t>(raw, n, shift, static_cast<uint8_t>(mask), codes);
    case 2: return masked<uint16_t>(raw, n, shift, static_cast<uint16_t>(mask), codes);
    case 4: return masked<uint32_t>(raw, n, shift, mask, codes);
    default: return masked<uint64_t>(raw, n, shift, mask, codes);
  }
}

ZCKPT_VECTOR void join_halves(const uint8_t* __restrict codes, size_t bytes, uint8_t* __restrict out) {
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<uint8_t>((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
}

// Runs of one block, whose zero point and factor are one number each.
ZCKPT_VECTOR void of_run(const uint8_t* __restrict codes, size_t n, const float* __restrict table, float factor, float* __restrict x) {
  for (size_t i = 0; i < n; ++i) x[i] = table[codes[i]] * factor;
}

ZCKPT_VECTOR void of_run_from(const uint8_t* __restrict codes, size_t n, const float* __restrict table, float zero, float factor, float* __restrict x) {
  for (size_t i = 0; i < n; ++i) x[i] = (table[codes[i]] - zero) * factor;
}

// The same for blocks of one column, which have one each.
ZCKPT_VECTOR void of_columns(const uint8_t* __restrict codes, size_t n, const float* __restrict table, const float* __restrict zeros,
                             const float* __restrict factors, float* __restrict x) {
  for (size_t i = 0; i < n; ++i) x[i] = (table[codes[i]] - (zeros ? zeros[i] : 0.0F)) * factors[i];
}

#ifdef ZCKPT_X86
// Of codes below 16: the table is two registers, and eight numbers are chosen at once.
ZCKPT_FOR("avx2") void of_few(const uint8_t* codes, size_t n, const float* table, float zero, bool has_zero, float factor, float* x) {
  __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
  const __m256 f = _mm256_set1_ps(factor), z = _mm256_set1_ps(zero);
  if (has_zero) low = _mm256_sub_ps(low, z), high = _mm256_sub_ps(high, z);
  low = _mm256_mul_ps(low, f), high = _mm256_mul_ps(high, f);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(c, 28));
    _mm256_storeu_ps(x + i, _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, c), _mm256_permutevar8x32_ps(high, c), upper));
  }
  for (; i < n; ++i) x[i] = has_zero ? (table[codes[i]] - zero) * factor : table[codes[i]] * factor;
}
#endif

// ---- numbers to codes ----------------------------------------------------------------------------------------------------------

struct Losses {
  uint32_t saturated, underflowed, error;
};


// All bits set where it is so, none where not: choices between numbers without a branch, of which compilers make vector code.
ZCKPT_INLINE uint32_t mask(bool is) { return 0U - static_cast<uint32_t>(is); }
ZCKPT_INLINE uint32_t chosen(uint32_t mask, uint32_t yes, uint32_t no) { return (yes & mask) | (no & ~mask); }


// The quotient is rounded to odd: cut off, and its last bit set if that left something. So rounding it to fewer bits is as if it had not
// been rounded. What is left is exact in one rounding, as a fused multiply-add or in doubles. It needs numbers that are neither tiny nor huge,
// so `scale` brings both there.
template <typename G>
void round_run(const float* __restrict x, size_t n, float factor, uint8_t* __restrict out, Losses* __restrict losses) {
  constexpr int kBelow = 23 - G::kDigits;
  constexpr float kSteps = power(23 + G::kLeast - G::kDigits), kFar = 1 << 20;
  constexpr uint32_t kNone = (127 - 1 + static_cast<uint32_t>(G::kLeast)) << G::kDigits;
  const float scale = scale_for(factor), divisor = factor * scale;
  uint32_t saturated = 0, underflowed = 0, error = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = as<uint32_t>(x[i]), size = bits & 0x7FFFFFFF, negative = bits >> 31, none = mask(size > 0x7F800000);
    const float dividend = as<float>(size) * scale, quotient = dividend / divisor, near = quotient < kFar ? quotient : kFar;
    const float left = static_cast<float>(static_cast<double>(dividend) - static_cast<double>(near) * static_cast<double>(divisor));
    const uint32_t q = (as<uint32_t>(near) - (as<uint32_t>(left) >> 31 & static_cast<uint32_t>(left != 0))) | static_cast<uint32_t>(left != 0);
    const float a = as<float>(q), steps = a + kSteps;
    uint32_t code = as<uint32_t>(steps) - as<uint32_t>(kSteps), value = as<uint32_t>(steps - kSteps);
    if constexpr (G::kDigits > 0) {
      const uint32_t rounded = (q + ((1U << (kBelow - 1)) - 1) + (q >> kBelow & 1)) >> kBelow, small = mask(a < power(G::kLeast));
      code = chosen(small, code, rounded - kNone);
      value = chosen(small, value, rounded << kBelow);
    }
    const uint32_t more = G::kMore * negative, most = G::kLargest + more, top = as<uint32_t>(G::kTop + static_cast<float>(static_cast<int32_t>(more)));
    code = code < most ? code : most;
    value = value < top ? value : top;
    out[i] = static_cast<uint8_t>(G::with_sign(chosen(none, G::kNan, code), negative));
    const float scaled = as<float>(value) * factor;
    const uint32_t off = as<uint32_t>(as<float>(size) - scaled) & 0x7FFFFFFF;
    const uint32_t here = chosen(none | mask(off > 0x7F800000), 0x7FC00000, off);
    error = error > here ? error : here;
    saturated -= mask(a > G::kHalfway + static_cast<float>(static_cast<int32_t>(more))) & ~none;
    underflowed -= mask(code == 0) & mask(size != 0) & ~none;
  }
  *losses = {saturated, underflowed, error};
}

// Numbers as fp32, at most so many of them: those of bf16 are widened beside.
constexpr size_t kWidened = 2048;
ZCKPT_INLINE const float* as_floats(const float* x, size_t, float*) { return x; }
ZCKPT_INLINE const float* as_floats(const Bf16* x, size_t n, float* beside) {
  for (size_t i = 0; i < n; ++i) beside[i] = as<float>(static_cast<uint32_t>(x[i]) << 16);
  return beside;
}

template <typename G, typename X>
Rounded round_anywhere(const X* x, const Blocks& blocks, const float* factors, uint8_t* out) {
  Rounded rounded;
  uint32_t error = 0;
  float widened[kWidened];
  for_each_run(blocks, [&](size_t at, size_t n, size_t block) {
    constexpr size_t kMost = sizeof(X) == sizeof(float) ? size_t{1} << 30 : kWidened;  // counts of so many fit
    for (size_t done = 0; done < n; done += kMost) {
      Losses losses{};
      const size_t here = std::min(kMost, n - done);
      round_run<G>(as_floats(x + at + done, here, widened), here, factors[block], out + at + done, &losses);
      rounded.saturated += losses.saturated;
      rounded.underflowed += losses.underflowed;
      error = std::max(error, losses.error);
    }
  });
  rounded.error = as<float>(error);
  return rounded;
}

template <typename X>
using Round = Rounded (*)(const X*, const Blocks&, const float*, uint8_t*);
template <typename X>
constexpr Round<X> kAnywhere[] = {round_anywhere<E4M3, X>, round_anywhere<E2M1, X>, round_anywhere<Whole<8, 0>, X>, round_anywhere<Whole<4, 8>, X>};

#ifdef ZCKPT_X86
// The same for eight numbers at once; what was lost is counted in each lane. Codes become bytes of 16 or 32 numbers at a time.
template <typename G, typename X>
struct RoundEight {
  __m256i saturated, underflowed, error;
  __m256 factor, scale, divisor;

  ZCKPT_FOR("avx2,fma") ZCKPT_INLINE void begin(float own) {
    const float lift = scale_for(own);
    factor = _mm256_set1_ps(own), scale = _mm256_set1_ps(lift), divisor = _mm256_set1_ps(own * lift);
  }

  ZCKPT_FOR("avx2,fma") ZCKPT_INLINE __m256i eight(const X* from) {
    constexpr bool kWhole = G::kDigits == 0;
    const __m256 x = eight_from(from), none = _mm256_cmp_ps(x, x, _CMP_UNORD_Q), zero = _mm256_setzero_ps();
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x), dividend = _mm256_mul_ps(size, scale);
    const __m256 near = _mm256_min_ps(_mm256_div_ps(dividend, divisor), _mm256_set1_ps(1 << 20)), left = _mm256_fnmadd_ps(near, divisor, dividend);
    const __m256i cut = _mm256_add_epi32(_mm256_castps_si256(near), _mm256_castps_si256(_mm256_cmp_ps(left, zero, _CMP_LT_OQ)));
    const __m256i q = _mm256_or_si256(cut, _mm256_srli_epi32(_mm256_castps_si256(_mm256_cmp_ps(left, zero, _CMP_NEQ_UQ)), 31));
    const __m256i negative = _mm256_srai_epi32(_mm256_castps_si256(x), 31);
    // the power of two below, but for small ones, so much larger that the sum's last bit is a step of the grid
    const __m256i below = _mm256_max_epi32(_mm256_and_si256(q, _mm256_set1_epi32(0x7F800000)), _mm256_set1_epi32((127 + G::kLeast) << 23));
    const __m256i lift = kWhole ? _mm256_set1_epi32((127 + 23) << 23) : _mm256_add_epi32(below, _mm256_set1_epi32((23 - G::kDigits) << 23));
    const __m256 a = _mm256_castsi256_ps(q), sum = _mm256_add_ps(a, _mm256_castsi256_ps(lift));
    __m256i code = _mm256_sub_epi32(_mm256_castps_si256(sum), lift);
    if (!kWhole) code = _mm256_add_epi32(code, _mm256_sub_epi32(_mm256_srli_epi32(below, 23 - G::kDigits), _mm256_set1_epi32((127 + G::kLeast) << G::kDigits)));
    __m256 top = _mm256_set1_ps(G::kTop), halfway = _mm256_set1_ps(G::kHalfway);
    __m256i most = _mm256_set1_epi32(G::kLargest);
    if (kWhole) {
      const __m256 more = _mm256_and_ps(_mm256_castsi256_ps(negative), _mm256_set1_ps(1));
      top = _mm256_add_ps(top, more), halfway = _mm256_add_ps(halfway, more), most = _mm256_sub_epi32(most, negative);
    }
    code = _mm256_min_epi32(code, most);
    const __m256 value = _mm256_min_ps(_mm256_sub_ps(sum, _mm256_castsi256_ps(lift)), top);
    const __m256 off = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), _mm256_sub_ps(size, _mm256_mul_ps(value, factor)));
    error = _mm256_max_epu32(error, _mm256_castps_si256(off));
    const __m256i is_zero = _mm256_setzero_si256(), over = _mm256_castps_si256(_mm256_andnot_ps(none, _mm256_cmp_ps(a, halfway, _CMP_GT_OQ)));
    saturated = _mm256_sub_epi32(saturated, over);
    underflowed = _mm256_sub_epi32(underflowed, _mm256_andnot_si256(_mm256_cmpeq_epi32(_mm256_castps_si256(size), is_zero), _mm256_cmpeq_epi32(code, is_zero)));
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(G::kNan), _mm256_castps_si256(none));
    return G::with_signs(code, negative);
  }

  ZCKPT_FOR("avx2,fma") ZCKPT_INLINE void run(const X* x, size_t n, uint8_t* out) {
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
      const __m256i first = _mm256_packs_epi32(eight(x + i), eight(x + i + 8)), second = _mm256_packs_epi32(eight(x + i + 16), eight(x + i + 24));
      const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), packed);
    }
    for (; i < n; i += 16) {
      X rest[16] = {};
      const size_t here = std::min<size_t>(16, n - i);
      const X* from = x + i;
      if (here < 16) from = static_cast<const X*>(std::memcpy(rest, from, here * sizeof *from));
      const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(eight(from), eight(from + 8)), 0xD8);
      const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
      if (here == 16)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), bytes);
      else
        std::memcpy(out + i, &bytes, here);
    }
  }
};

template <typename G, typename X>
ZCKPT_FOR("avx2,fma") Rounded round_with_vectors(const X* x, const Blocks& b, const float* factors, uint8_t* out) {
  RoundEight<G, X> all;
  all.saturated = all.underflowed = all.error = _mm256_setzero_si256();
  const size_t across = (b.columns + b.block_columns - 1) / b.block_columns;
  for (size_t row = 0; row < b.rows; ++row, x += b.columns, out += b.columns) {
    const float* factor = factors + (b.first + row) / b.block_rows * across;
    for (size_t at = 0; at < b.columns; at += b.block_columns) {
      all.begin(*factor++);
      all.run(x + at, std::min(b.block_columns, b.columns - at), out + at);
    }
  }
  Rounded rounded;
  uint32_t counts[3][8], error = 0;
  std::memcpy(counts[0], &all.saturated, 32), std::memcpy(counts[1], &all.underflowed, 32), std::memcpy(counts[2], &all.error, 32);
  for (int lane = 0; lane < 8; ++lane) {
    rounded.saturated += counts[0][lane], rounded.underflowed += counts[1][lane];
    error = std::max(error, counts[2][lane]);
  }
  rounded.error = as<float>(error > 0x7F800000 ? 0x7FC00000 : error);
  return rounded;
}
template <typename X>
constexpr Round<X> kWithVectors[] = {round_with_vectors<E4M3, X>, round_with_vectors<E2M1, X>, round_with_vectors<Whole<8, 0>, X>,
                                     round_with_vectors<Whole<4, 8>, X>};
#endif

// ---- groups with a scale and a bias --------------------------------------------------------------------------------------------

// One group. The edge is its number of larger magnitude, which gets a code of its own: the scale is the edge by that code. Every step is
// rounded to fp32.
// Source: mlx 0.32, backend/cpu/quantized.cpp `quantize`.
struct Edges {
  float low, high;
  uint32_t largest;
};

ZCKPT_INLINE Edges edges_of(const float* x, size_t n) {
  Edges found{x[0], x[0], 0};
  for (size_t i = 0; i < n; ++i) {
    found.low = x[i] < found.low ? x[i] : found.low;
    found.high = x[i] > found.high ? x[i] : found.high;
    found.largest = std::max(found.largest, as<uint32_t>(x[i]) & 0x7FFFFFFF);
  }
  return found;
}

ZCKPT_INLINE bool line_of(const Edges& edges, float most, float* scale, float* bias) {
  const bool is_low = std::fabs(edges.low) > std::fabs(edges.high);
  const float edge = is_low ? edges.low : edges.high, step = std::max((edges.high - edges.low) / most, 1e-7F);
  float s = is_low ? step : -step, b = 0;
  const float first = std::rint(edge / s);
  if (first != 0) s = edge / first, b = edge;
  *scale = s, *bias = b;
  return edges.largest < 0x7F800000 && s != 0 && std::fabs(s) <= FLT_MAX;
}

size_t affine_anywhere(const float* x, size_t groups, size_t size, unsigned bits, uint8_t* codes, float* scales, float* biases) {
  size_t bad = 0;
  const float most = static_cast<float>((1U << bits) - 1);
  for (size_t g = 0; g < groups; ++g, x += size, codes += size) {
    bad += !line_of(edges_of(x, size), most, scales + g, biases + g);
    for (size_t i = 0; i < size; ++i) {
      float q = (x[i] - biases[g]) / scales[g];
      q = q > 0 ? q : 0;
      q = q < most ? q : most;
      codes[i] = static_cast<uint8_t>(as<uint32_t>(q + 8388608.0F));
    }
  }
  return bad;
}

#ifdef ZCKPT_X86
ZCKPT_FOR("avx2") size_t affine_with_vectors(const float* x, size_t groups, size_t size, unsigned bits, uint8_t* codes, float* scales, float* biases) {
  size_t bad = 0;
  const float most = static_cast<float>((1U << bits) - 1);
  const __m256 top = _mm256_set1_ps(most), zero = _mm256_setzero_ps();
  const __m256i sizes = _mm256_set1_epi32(0x7FFFFFFF), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (size_t g = 0; g < groups; ++g, x += size, codes += size) {
    __m256 low = _mm256_loadu_ps(x), high = low;
    __m256i largest = _mm256_setzero_si256();
    for (size_t i = 0; i < size; i += 8) {
      const __m256 one = _mm256_loadu_ps(x + i);
      low = _mm256_min_ps(one, low), high = _mm256_max_ps(one, high);
      largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(one), sizes));
    }
    float lows[8], highs[8];
    uint32_t all[8];
    _mm256_storeu_ps(lows, low), _mm256_storeu_ps(highs, high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(all), largest);
    Edges edges{lows[0], highs[0], all[0]};
    for (size_t j = 1; j < 8; ++j) {
      edges.low = lows[j] < edges.low ? lows[j] : edges.low;
      edges.high = highs[j] > edges.high ? highs[j] : edges.high;
      edges.largest = std::max(edges.largest, all[j]);
    }
    bad += !line_of(edges, most, scales + g, biases + g);
    const __m256 s = _mm256_set1_ps(scales[g]), b = _mm256_set1_ps(biases[g]);
    const auto eight = [&](size_t i) __attribute__((target("avx2"))) {
      const __m256 q = _mm256_div_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), b), s);
      return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(q, zero), top));
    };
    for (size_t i = 0; i < size; i += 32) {
      const __m256i first = _mm256_packus_epi32(eight(i), eight(i + 8)), second = _mm256_packus_epi32(eight(i + 16), eight(i + 24));
      const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), packed);
    }
  }
  return bad;
}
#endif

void join_stream(const uint8_t* codes, size_t n, unsigned bits, uint8_t* out) {
  for (size_t i = 0; i < n; i += 8, out += bits) {
    uint64_t all = 0;
    for (unsigned j = 0; j < 8; ++j) all |= static_cast<uint64_t>(codes[i + j]) << (j * bits);
    for (unsigned j = 0; j < bits; ++j) out[j] = static_cast<uint8_t>(all >> (8 * j));
  }
}

#ifdef ZCKPT_X86
// Eight bytes are written for each eight codes but the last ones, of which the next ones have their own.
ZCKPT_FOR("bmi2") void join_stream_at_once(const uint8_t* codes, size_t n, unsigned bits, uint8_t* out) {
  const uint64_t low = ((uint64_t{1} << bits) - 1) * 0x0101010101010101;
  for (size_t i = 0; i < n; i += 8, out += bits) {
    uint64_t all;
    std::memcpy(&all, codes + i, 8);
    all = _pext_u64(all, low);
    std::memcpy(out, &all, i + 64 < n ? 8 : bits);
  }
}

// The other way, eight codes at a time as long as eight bytes can be read; how many it has split.
ZCKPT_FOR("bmi2") size_t split_stream_at_once(const uint8_t* raw, size_t pitch, size_t columns, unsigned bits, uint8_t* codes) {
  const uint64_t low = ((uint64_t{1} << bits) - 1) * 0x0101010101010101;
  size_t i = 0;
  for (; i + 8 <= columns && i / 8 * bits + 8 <= pitch; i += 8) {
    uint64_t all;
    std::memcpy(&all, raw + i / 8 * bits, 8);
    all = _pdep_u64(all, low);
    std::memcpy(codes + i, &all, 8);
  }
  return i;
}
#endif

}  // namespace

size_t to_affine(const float* x, size_t groups, size_t size, unsigned bits, uint8_t* packed, float* scales, float* biases) {
  const PlainFloats floats;
  auto quantise = affine_anywhere;
  auto join = join_stream;
#ifdef ZCKPT_X86
  if (has(Unit::kMultiplyAdd)) quantise = affine_with_vectors, join = join_stream_at_once;
#endif
  constexpr size_t kAtOnce = 4096;  // codes of a byte each
  std::array<uint8_t, kAtOnce> codes;
  size_t bad = 0;
  for (size_t done = 0, step = kAtOnce / size; done < groups; done += step) {
    const size_t here = std::min(step, groups - done), n = here * size;
    uint8_t* const out = packed + done * size * bits / 8;
    bad += quantise(x + done * size, here, size, bits, bits == 8 ? out : codes.data(), scales + done, biases + done);
    if (bits == 4)
      join_halves(codes.data(), n / 2, out);
    else if (bits != 8)
      join(codes.data(), n, bits, out);
  }
  return bad;
}

void split_codes(const uint8_t* raw, size_t pitch, size_t rows, size_t columns, unsigned bits, bool high_first, uint8_t* codes) {
  for (size_t row = 0; row < rows; ++row, raw += pitch, codes += columns) {
    if (bits == 8) {
      std::memcpy(codes, raw, columns);
    } else if (bits == 4) {
      split_halves(raw, columns / 2, high_first ? 4 : 0, codes);
      if (columns % 2) codes[columns - 1] = raw[columns / 2] >> (high_first ? 4 : 0) & 15;
    } else {
      size_t i = 0;
#ifdef ZCKPT_X86
      if (has(Unit::kMultiplyAdd)) i = split_stream_at_once(raw, pitch, columns, bits, codes);
#endif
      for (; i < columns; ++i) {
        const size_t at = i * bits, byte = at / 8;
        const unsigned both = raw[byte] | (byte + 1 < pitch ? raw[byte + 1] << 8 : 0);
        codes[i] = static_cast<uint8_t>(both >> at % 8 & ((1U << bits) - 1));
      }
    }
  }
}

void split_down(const uint8_t* raw, unsigned word, size_t pitch, unsigned bits, const uint8_t* shifts, size_t each, size_t first, size_t count,
                uint8_t* codes) {
  for (size_t row = first; row < first + count; ++row, codes += pitch)
    masked_words(raw + row / each * pitch * word, word, pitch, shifts[row % each], (1U << bits) - 1, codes);
}

void join_codes(const uint8_t* codes, size_t rows, size_t columns, size_t pitch, uint8_t rest, uint8_t* out) {
  for (size_t row = 0; row < rows; ++row, codes += columns, out += pitch) {
    join_halves(codes, columns / 2, out);
    size_t done = columns / 2;
    if (columns % 2) out[done++] = static_cast<uint8_t>((codes[columns - 1] & 15) | (rest & 0xF0));
    std::memset(out + done, rest, pitch - done);
  }
}

void of_codes(const uint8_t* codes, const float* table, const Blocks& blocks, const float* zeros, const float* factors, float* x) {
  const PlainFloats floats;
  if (blocks.block_columns == 1) {
    for (size_t row = 0; row < blocks.rows; ++row) {
      const size_t at = row * blocks.columns, block = (blocks.first + row) / blocks.block_rows * blocks.columns;
      of_columns(codes + at, blocks.columns, table, zeros ? zeros + block : nullptr, factors + block, x + at);
    }
    return;
  }
#ifdef ZCKPT_X86
  const bool is_few = has(Unit::kMultiplyAdd) && std::all_of(table + 16, table + 256, [](float one) { return as<uint32_t>(one) == 0; });
#endif
  for_each_run(blocks, [&](size_t at, size_t n, size_t block) {
#ifdef ZCKPT_X86
    if (is_few) return of_few(codes + at, n, table, zeros ? zeros[block] : 0.0F, zeros != nullptr, factors[block], x + at);
#endif
    if (!zeros) return of_run(codes + at, n, table, factors[block], x + at);
    of_run_from(codes + at, n, table, zeros[block], factors[block], x + at);
  });
}

template <typename X>
static Rounded rounded(NumberGrid grid, const X* x, const Blocks& blocks, const float* factors, uint8_t* out) {
  const PlainFloats floats;
#ifdef ZCKPT_X86
  if (has(Unit::kWideLanes)) return to_codes_wide(grid, x, blocks, factors, out);
  if (has(Unit::kMultiplyAdd)) return kWithVectors<X>[static_cast<size_t>(grid)](x, blocks, factors, out);
#endif
  return kAnywhere<X>[static_cast<size_t>(grid)](x, blocks, factors, out);
}

Rounded to_codes(NumberGrid grid, const float* x, const Blocks& blocks, const float* factors, uint8_t* out) {
  return rounded(grid, x, blocks, factors, out);
}

Rounded to_codes(NumberGrid grid, const uint16_t* x, const Blocks& blocks, const float* factors, uint8_t* out) {
  return rounded(grid, x, blocks, factors, out);
}

}  // namespace zckpt
