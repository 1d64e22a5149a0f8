// Differences from a base, thinned out and added: TIES and DARE.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "floats.h"
#include "kernels.h"
#include "simd.h"

namespace zckpt {
namespace {

constexpr size_t kPart = 512;  // elements whose terms are in a near cache together
constexpr int32_t kMagnitude = 0x7FFFFFFF;
constexpr int64_t kDraws = 1 << 24;  // what is drawn for an element is less
constexpr float kNothing = 1e-8F;    // sums of weights below are no divisors

ZCKPT_INLINE int32_t magnitude_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & kMagnitude;
}

// splitmix64
ZCKPT_VECTOR void keep_drawn_numbers(float* __restrict kept, size_t n, uint64_t first, uint64_t key, int64_t draws) {
  for (size_t i = 0; i < n; ++i) {
    uint64_t x = (first + i + 1) * 0x9E3779B97F4A7C15U + key;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    kept[i] = static_cast<int64_t>((x ^ (x >> 31)) >> 40) < draws ? kept[i] : 0.0F;
  }
}

#ifdef ZCKPT_X86
// The same for processors that multiply numbers of 64 bits, eight at a time; returns how many it did.
ZCKPT_FOR("avx512f,avx512dq,avx512vl") size_t keep_drawn_eights(float* kept, size_t n, uint64_t first, uint64_t key, int64_t draws) {
  const __m512i step = _mm512_set1_epi64(static_cast<int64_t>(0x9E3779B97F4A7C15U)), most = _mm512_set1_epi64(draws);
  const __m512i second = _mm512_set1_epi64(static_cast<int64_t>(0xBF58476D1CE4E5B9U)), third = _mm512_set1_epi64(static_cast<int64_t>(0x94D049BB133111EBU));
  const __m512i places = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(first + 1)), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
  __m512i seed = _mm512_add_epi64(_mm512_mullo_epi64(places, step), _mm512_set1_epi64(static_cast<int64_t>(key)));
  const __m512i further = _mm512_slli_epi64(step, 3);
  size_t i = 0;
  for (; i + 8 <= n; i += 8, seed = _mm512_add_epi64(seed, further)) {
    __m512i x = _mm512_mullo_epi64(_mm512_xor_si512(seed, _mm512_srli_epi64(seed, 30)), second);
    x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), third);
    const __mmask8 stays = _mm512_cmplt_epi64_mask(_mm512_srli_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 31)), 40), most);
    _mm256_storeu_ps(kept + i, _mm256_maskz_loadu_ps(stays, kept + i));
  }
  return i;
}
#endif

void keep_drawn(float* kept, size_t n, uint64_t first, uint64_t key, int64_t draws) {
  size_t done = 0;
#ifdef ZCKPT_X86
  if (has(Unit::kWideLanes)) done = keep_drawn_eights(kept, n, first, key, draws);
#endif
  keep_drawn_numbers(kept + done, n - done, first + done, key, draws);
}

// 1 for each difference above `least`, and for `early` ones equal to it, else 0
ZCKPT_VECTOR void keep_large(float* __restrict kept, const float* __restrict x, const float* __restrict base, size_t n, int32_t least, size_t early) {
  for (size_t i = 0; i < early; ++i) kept[i] = magnitude_of(x[i] - base[i]) >= least ? 1.0F : 0.0F;
  for (size_t i = early; i < n; ++i) kept[i] = magnitude_of(x[i] - base[i]) > least ? 1.0F : 0.0F;
}

ZCKPT_VECTOR void weigh(float* __restrict term, const float* __restrict x, const float* __restrict base, size_t n, float scale, float weight) {
  for (size_t i = 0; i < n; ++i) term[i] = (x[i] - base[i]) * term[i] * scale * weight;
}

ZCKPT_VECTOR void add(float* __restrict total, const float* __restrict x, size_t n) {
  for (size_t i = 0; i < n; ++i) total[i] += x[i];
}

// What has the sign of the sum is added, and its weight.
ZCKPT_VECTOR void elect(float* __restrict moved, float* __restrict divisor, const float* __restrict term, const float* __restrict sum, size_t n, float weight) {
  for (size_t i = 0; i < n; ++i) {
    const float own = sum[i] >= 0 ? (term[i] > 0 ? 1.0F : 0.0F) : (term[i] < 0 ? 1.0F : 0.0F);
    divisor[i] += weight * own;
    moved[i] += term[i] * own;
  }
}

ZCKPT_VECTOR void divide(float* __restrict moved, const float* __restrict divisor, size_t n) {
  for (size_t i = 0; i < n; ++i) moved[i] /= divisor[i] == 0 ? 1.0F : divisor[i];
}

ZCKPT_VECTOR void add_times(float* __restrict total, const float* __restrict moved, size_t n, float factor) {
  for (size_t i = 0; i < n; ++i) total[i] += moved[i] * factor;
}

constexpr size_t kLanes = 16;  // sums that are taken side by side

struct LengthSums {
  double all[kLanes], kept[kLanes];
};

ZCKPT_VECTOR void add_lengths(const float* __restrict x, const float* __restrict base, const float* __restrict kept, size_t n, LengthSums* __restrict sums) {
  LengthSums own = *sums;
  for (size_t i = 0; i < n; i += kLanes)
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double length = std::fabs(x[i + lane] - base[i + lane]);
      own.all[lane] += length;
      // Bits, not a choice: what is drawn cannot be foretold, and infinity times zero is no zero.
      const uint64_t bits = std::bit_cast<uint64_t>(length) & (kept[i + lane] != 0 ? ~uint64_t{0} : uint64_t{0});
      own.kept[lane] += std::bit_cast<double>(bits);
    }
  *sums = own;
}

// 1 for each difference that stays, else 0
void keep(float* kept, const float* x, const float* base, size_t n, uint64_t first, const Thinned& one) {
  const int64_t early = std::clamp<int64_t>(one.last - static_cast<int64_t>(first), 0, static_cast<int64_t>(n));
  if (one.least < 0)
    std::fill_n(kept, n, 1.0F);  // every magnitude is above
  else
    keep_large(kept, x, base, n, static_cast<int32_t>(one.least), static_cast<size_t>(early));
  if (one.draws < kDraws) keep_drawn(kept, n, first, one.key, one.draws);
}

#ifdef ZCKPT_X86
ZCKPT_FOR("avx2") size_t select_eights(const float* x, const float* base, size_t n, uint32_t low, uint32_t high, uint32_t* found, Selected& selected) {
  // Magnitudes are less than 2**31, so signed comparisons do.
  const __m256i all = _mm256_set1_epi32(kMagnitude), most = _mm256_set1_epi32(static_cast<int>(high)), least = _mm256_set1_epi32(static_cast<int>(low));
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(_mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(base + i))), all);
    const auto above = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, most))));
    const auto below = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(least, bits))));
    selected.above += static_cast<size_t>(__builtin_popcount(above));
    unsigned near = 0xFF & ~(above | below);
    if (!near) continue;
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), bits);
    for (; near; near &= near - 1) found[selected.near++] = lanes[__builtin_ctz(near)];
  }
  return i;
}
#endif

}  // namespace

void move_sparsely(float* total, size_t n, uint64_t first, const Thinned* kept, size_t count, const Sparsely& how) {
  const PlainFloats floats;
  std::vector<float> terms(count * kPart);
  float sum[kPart], moved[kPart], divisor[kPart], weights = 0;
  for (size_t k = 0; k < count; ++k) weights += kept[k].weight;
  if (std::fabs(weights) < kNothing) weights = 1;
  for (size_t at = 0; at < n; at += kPart, total += kPart, first += kPart) {
    const size_t m = std::min(kPart, n - at);
    for (size_t k = 0; k < count; ++k) {
      const Thinned& one = kept[k];
      float* term = terms.data() + k * kPart;
      const float* x = reinterpret_cast<const float*>(one.numbers) + at;  // NOLINT
      keep(term, x, total, m, first, one);
      weigh(term, x, total, m, one.scale, one.weight);
      if (!k)
        std::copy_n(term, m, sum);
      else
        add(sum, term, m);
    }
    float* out = sum;
    if (how.elects) {
      std::fill_n(moved, m, 0.0F);
      std::fill_n(divisor, m, 0.0F);
      for (size_t k = 0; k < count; ++k) elect(moved, divisor, terms.data() + k * kPart, sum, m, kept[k].weight);
      out = moved;
    } else {
      std::fill_n(divisor, m, weights);
    }
    if (how.normalises) divide(out, divisor, m);
    add_times(total, out, m, how.factor);
  }
}

Lengths lengths(const float* base, size_t n, uint64_t first, const Thinned& one) {
  const PlainFloats floats;
  const float* x = reinterpret_cast<const float*>(one.numbers);  // NOLINT
  LengthSums sums{};
  float kept[kPart];
  for (size_t at = 0; at < n; at += kPart) {
    const size_t m = std::min(kPart, n - at), whole = m / kLanes * kLanes;
    keep(kept, x + at, base + at, m, first + at, one);
    add_lengths(x + at, base + at, kept, whole, &sums);
    for (size_t i = whole; i < m; ++i) {
      const double length = std::fabs(x[at + i] - base[at + i]);
      sums.all[i - whole] += length;
      if (kept[i] != 0) sums.kept[i - whole] += length;
    }
  }
  Lengths found{};
  for (size_t lane = 0; lane < kLanes; ++lane) found = {found.all + sums.all[lane], found.kept + sums.kept[lane]};
  return found;
}

Selected select_near(const float* x, const float* base, size_t n, uint32_t low, uint32_t high, uint32_t* found) {
  const PlainFloats floats;
  Selected selected{};
  size_t i = 0;
#ifdef ZCKPT_X86
  if (has(Unit::kMultiplyAdd)) i = select_eights(x, base, n, low, high, found, selected);
#endif
  for (; i < n; ++i) {
    const auto bits = static_cast<uint32_t>(magnitude_of(x[i] - base[i]));
    found[selected.near] = bits;
    selected.near += bits >= low && bits <= high;
    selected.above += bits > high;
  }
  return selected;
}

}  // namespace zckpt
