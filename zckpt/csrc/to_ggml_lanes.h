// Searches for the scales of several groups of numbers at the same time, one in each lane of a vector. Sums are taken in ggml's order, so
// no group can be spread over lanes. Included by to_ggml.cpp for each set of instructions: ZCKPT_LANES of them, ZCKPT_LANES_FOR.

#if defined(__clang__)
using Floats = float __attribute__((ext_vector_type(ZCKPT_LANES)));
using Ints = int32_t __attribute__((ext_vector_type(ZCKPT_LANES)));
#else
typedef float Floats __attribute__((vector_size(4 * ZCKPT_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * ZCKPT_LANES)));
#endif
constexpr int kWide = ZCKPT_LANES;

#define ZCKPT_LANED static inline __attribute__((always_inline)) ZCKPT_LANES_FOR

ZCKPT_LANED Floats all_of(float x) { return Floats{} + x; }
ZCKPT_LANED Floats least_of(Floats a, Floats b) { return ZCKPT_LANES_MIN; }
ZCKPT_LANED Floats most_of(Floats a, Floats b) { return ZCKPT_LANES_MAX; }
ZCKPT_LANED Floats sizes_of(Floats x) { return (Floats)((Ints)x & 0x7FFFFFFF); }

ZCKPT_LANED Floats roots_of(Floats x) {
#if ZCKPT_LANES == 16
  return (Floats)_mm512_sqrt_ps((__m512)x);
#else
  float held[kWide];
  std::memcpy(held, &x, sizeof held);
  for (float& each : held) each = __builtin_sqrtf(each);
  std::memcpy(&x, held, sizeof held);
  return x;
#endif
}

// A sum by a multiplication by 1, so that units which only multiply share the work of those that add.
ZCKPT_LANED Floats unit() {
  Floats one = all_of(1);
#if ZCKPT_LANES == 16
  __asm__("" : "+v"(one));  // or it would become an addition again
#endif
  return one;
}
ZCKPT_LANED Floats plus(Floats a, Floats b, [[maybe_unused]] Floats one) {
#if ZCKPT_LANES == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)one, (__m512)b);
#else
  return a + b;
#endif
}

// To whole numbers, halves to even, of numbers below 2^22.
ZCKPT_LANED Floats whole(Floats x) {
#if ZCKPT_LANES == 16
  return (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  return (x + kRounder) - kRounder;
#endif
}

// Number i of each group, for groups one after the other, from group `first` on. Where there are fewer groups than lanes, the last one fills
// the others. Four numbers of each group are turned at a time.
template <int kNumbers>
ZCKPT_LANED void load_groups(const float* groups, int first, int have, Floats* x) {
  float padded[kWide * kNumbers];
  const float* own = groups + first * kNumbers;
  if (have - first < kWide) {
    for (int lane = 0; lane < kWide; ++lane)
      std::memcpy(padded + lane * kNumbers, groups + (first + lane < have ? first + lane : have - 1) * kNumbers, kNumbers * sizeof *padded);
    own = padded;
  }
  for (int i = 0; i < kNumbers; i += 4) {
#if ZCKPT_LANES == 16
    __m512 rows[4];
    for (int j = 0; j < 4; ++j) {
      const float* row = own + j * kNumbers + i;
      rows[j] = _mm512_castps128_ps512(_mm_loadu_ps(row));
      rows[j] = _mm512_insertf32x4(rows[j], _mm_loadu_ps(row + 4 * kNumbers), 1);
      rows[j] = _mm512_insertf32x4(rows[j], _mm_loadu_ps(row + 8 * kNumbers), 2);
      rows[j] = _mm512_insertf32x4(rows[j], _mm_loadu_ps(row + 12 * kNumbers), 3);
    }
    const __m512d low_01 = (__m512d)_mm512_unpacklo_ps(rows[0], rows[1]), high_01 = (__m512d)_mm512_unpackhi_ps(rows[0], rows[1]);
    const __m512d low_23 = (__m512d)_mm512_unpacklo_ps(rows[2], rows[3]), high_23 = (__m512d)_mm512_unpackhi_ps(rows[2], rows[3]);
    x[i] = (Floats)_mm512_unpacklo_pd(low_01, low_23), x[i + 1] = (Floats)_mm512_unpackhi_pd(low_01, low_23);
    x[i + 2] = (Floats)_mm512_unpacklo_pd(high_01, high_23), x[i + 3] = (Floats)_mm512_unpackhi_pd(high_01, high_23);
#else
    for (int lane = 0; lane < kWide; lane += 4) {
      Four rows[4];
      for (int j = 0; j < 4; ++j) std::memcpy(&rows[j], own + (lane + j) * kNumbers + i, sizeof rows[j]);
      turn_four(rows);
      for (int j = 0; j < 4; ++j) std::memcpy(reinterpret_cast<char*>(x + i + j) + lane * 4, &rows[j], sizeof rows[j]);
    }
#endif
  }
}

ZCKPT_LANED bool any_of(Ints is) {
#if ZCKPT_LANES == 16
  return _mm512_movepi32_mask((__m512i)is) != 0;
#else
  int64_t held[kWide / 2], found = 0;
  std::memcpy(held, &is, sizeof held);
  for (const int64_t each : held) found |= each;
  return found != 0;
#endif
}

ZCKPT_LANED void store_lanes(Floats x, int have, float* to) {
  float held[kWide];
  std::memcpy(held, &x, sizeof held);
  for (int lane = 0; lane < have; ++lane) to[lane] = held[lane];
}

// Scale and least number, by which codes become numbers, for the smallest weighted error over trials of scales: `Trials` says how many. Each
// trial begins with the least number of the best one before. What the error of one is at least is known from its sums, to within kDoubt of
// their terms; it is computed only where it may be smaller. A sum waits for each of its terms, so the trials of kSets vectors of groups go side by side.
template <class Trials>
ZCKPT_LANED void search_ranges(const float* groups, const float* weights, int have, const Ranges& found) {
  constexpr int kNumbers = 32, kSets = 2;
  constexpr float kDoubt = 5e-5F, kFar = 1024;
  Floats x[kSets][kNumbers + 5], w[kSets][kNumbers + 9], code[kSets][kNumbers + 3];
  Floats least[kSets], most[kSets], sum_w[kSets], sum_x[kSets], sum_xx[kSets], range[kSets], scale[kSets], minimum[kSets], error[kSets], best[kSets], start[kSets];
  Ints flat[kSets], usual[kSets];
  const Floats none = all_of(0), top = all_of(Trials::kTop), one = unit();
  for (int s = 0; s < kSets; ++s) {
    load_groups<kNumbers>(groups, s * kWide, have, x[s]);
    if (weights) {
      load_groups<kNumbers>(weights, s * kWide, have, w[s]);
    } else {  // the root of the mean square of the group, and the number's size
      Floats sum = {};
      for (int i = 0; i < kNumbers; ++i) sum += x[s][i] * x[s][i];
      const Floats root = roots_of(sum / kNumbers);
      for (int i = 0; i < kNumbers; ++i) w[s][i] = root + sizes_of(x[s][i]);
    }
    least[s] = x[s][0], most[s] = x[s][0], sum_w[s] = w[s][0], sum_x[s] = w[s][0] * x[s][0], sum_xx[s] = sum_x[s] * x[s][0];
    for (int i = 1; i < kNumbers; ++i) {
      least[s] = least_of(x[s][i], least[s]), most[s] = most_of(x[s][i], most[s]);
      const Floats wx = w[s][i] * x[s][i];
      sum_w[s] += w[s][i], sum_x[s] += wx, sum_xx[s] += wx * x[s][i];
    }
    least[s] = least[s] > 0 ? none : least[s];
    flat[s] = most[s] == least[s];
    most[s] = flat[s] ? least[s] + 1 : most[s];
    range[s] = most[s] - least[s];
    usual[s] = (range[s] > 1e-9F) & (range[s] < 1e9F) & (most[s] < 1e9F) & (least[s] > -1e9F) & (sum_w[s] > 1e-12F) & (sum_w[s] < 1e12F);
    const Floats factor = top / range[s];
    scale[s] = 1 / factor, minimum[s] = least[s], error[s] = none, best[s] = factor, start[s] = least[s];
    for (int i = 0; i < kNumbers; ++i) {
      const Floats off = (scale[s] * least_of(whole(factor * (x[s][i] - least[s])), top) + least[s]) - x[s][i];
      error[s] += w[s][i] * (off * off);
    }
  }
  for (int step = 0; step <= Trials::kSteps; ++step) {
    Floats factor[kSets], sum_l[kSets] = {}, sum_ll[kSets] = {}, sum_xl[kSets] = {};
    Ints outside = {};  // some codes would be below 0 or above the top
    for (int s = 0; s < kSets; ++s) {
      factor[s] = Trials::at(step) / (most[s] - minimum[s]);
      outside |= (factor[s] * (least[s] - minimum[s]) < -0.5F) | (factor[s] * (most[s] - minimum[s]) >= Trials::kTop + 0.5F);
    }
    const auto add = [&](int s, int i, Floats own) ZCKPT_LANES_FOR ZCKPT_PART {
      code[s][i] = own;
      const Floats wl = w[s][i] * own;
      sum_l[s] += wl, sum_ll[s] += wl * own, sum_xl[s] += wl * x[s][i];
    };
    if (any_of(outside)) {
      for (int i = 0; i < kNumbers; ++i)
        for (int s = 0; s < kSets; ++s) add(s, i, most_of(least_of(whole(factor[s] * plus(x[s][i], -minimum[s], one)), top), none));
    } else {
      for (int i = 0; i < kNumbers; ++i)
        for (int s = 0; s < kSets; ++s) add(s, i, whole(factor[s] * plus(x[s][i], -minimum[s], one)));
    }
    Floats apart[kSets], own[kSets], low[kSets], off_by[kSets] = {};
    Ints better[kSets], wanted = {};
    for (int s = 0; s < kSets; ++s) {
      apart[s] = sum_w[s] * sum_ll[s] - sum_l[s] * sum_l[s];
      const Floats fitted = (sum_w[s] * sum_xl[s] - 2 * sum_x[s] * sum_l[s]) * sum_xl[s] + sum_ll[s] * sum_x[s] * sum_x[s];
      better[s] = (apart[s] > 0) & ~((sum_xx[s] - error[s]) * apart[s] - fitted > kDoubt * (sum_w[s] * sum_ll[s] * sum_xx[s]));
      wanted |= better[s];
    }
    if (!any_of(wanted)) continue;
    for (int s = 0; s < kSets; ++s) {
      own[s] = (sum_w[s] * sum_xl[s] - sum_x[s] * sum_l[s]) / apart[s], low[s] = (sum_ll[s] * sum_x[s] - sum_l[s] * sum_xl[s]) / apart[s];
      const Ints over = low[s] > 0;
      if (any_of(over)) low[s] = over ? none : low[s], own[s] = over ? sum_xl[s] / sum_ll[s] : own[s];
    }
    for (int i = 0; i < kNumbers; ++i)
      for (int s = 0; s < kSets; ++s) {
        const Floats off = (own[s] * code[s][i] + low[s]) - x[s][i];
        off_by[s] += w[s][i] * (off * off);
      }
    for (int s = 0; s < kSets; ++s) {
      better[s] &= off_by[s] < error[s];
      error[s] = better[s] ? off_by[s] : error[s], scale[s] = better[s] ? own[s] : scale[s], best[s] = better[s] ? factor[s] : best[s];
      start[s] = better[s] ? minimum[s] : start[s], minimum[s] = better[s] ? low[s] : minimum[s];
      usual[s] &= ((most[s] - minimum[s]) * kFar > range[s]) & (most[s] - minimum[s] < range[s] * kFar);
    }
  }

  for (int s = 0; s < kSets; ++s) {
    const int first = s * kWide, here = have - first < kWide ? have - first : kWide;
    store_lanes(flat[s] ? none : scale[s], here, found.scales + first), store_lanes(flat[s] ? -least[s] : -minimum[s], here, found.minima + first);
    store_lanes(flat[s] ? none : best[s], here, found.factors + first), store_lanes(start[s], here, found.starts + first);
    store_lanes(sum_w[s], here, found.weights + first);
    int32_t are[kWide];
    std::memcpy(are, &usual[s], sizeof are);
    for (int lane = 0; lane < here; ++lane)
      if (!are[lane]) {
        float own[kNumbers], matter[kNumbers];
        for (int i = 0; i < kNumbers; ++i) {
          std::memcpy(own, groups + (first + lane) * kNumbers, sizeof own);
          float held[kWide];
          std::memcpy(held, &w[s][i], sizeof held);
          matter[i] = held[lane];
        }
        search_range_plainly<Trials>(own, matter, found, first + lane);
      }
  }
}

// The scale alone, for codes from -kTop to kTop - 1.
template <int kNumbers, int kTop>
ZCKPT_LANED void search_scales(const float* groups, const float* weights, int have, float* scales, float* factors) {
  constexpr int kSets = 2;
  Floats x[kSets][kNumbers], w[kSets][kNumbers], wx[kSets][kNumbers], largest[kSets], scale[kSets], best[kSets], factor[kSets];
  Ints none[kSets];
  const Floats bottom = all_of(-kTop), top = all_of(kTop - 1), zero = all_of(0);
  for (int s = 0; s < kSets; ++s) {
    load_groups<kNumbers>(groups, s * kWide, have, x[s]);
    if (weights) load_groups<kNumbers>(weights, s * kWide, have, w[s]);
    Floats size = {};
    largest[s] = zero;
    for (int i = 0; i < kNumbers; ++i) {
      if (!weights) w[s][i] = x[s][i] * x[s][i];
      wx[s][i] = w[s][i] * x[s][i];
      const Floats own = sizes_of(x[s][i]);
      const Ints more = own > size;
      size = more ? own : size, largest[s] = more ? x[s][i] : largest[s];
    }
    none[s] = size < kNothing;
    largest[s] = none[s] ? all_of(1) : largest[s];
    scale[s] = best[s] = factor[s] = zero;
  }
  for (int trial = 0; trial < 19; ++trial) {
    const int step = trial == 0 ? 0 : trial <= 9 ? trial - 10 : trial - 9;
    Floats own[kSets], sum_xl[kSets] = {}, sum_ll[kSets] = {};
    for (int s = 0; s < kSets; ++s) own[s] = -(static_cast<float>(kTop) + 0.1F * static_cast<float>(step)) / largest[s];
    const auto add = [&](auto cut) ZCKPT_LANES_FOR ZCKPT_PART {
      for (int i = 0; i < kNumbers; ++i)
        for (int s = 0; s < kSets; ++s) {
          const Floats code = cut(whole(own[s] * x[s][i]));
          sum_xl[s] += wx[s][i] * code, sum_ll[s] += w[s][i] * code * code;
        }
    };
    // No number is larger than the largest, so that small steps lead to no code that must be cut off below, or at all.
    if (step < -5)
      add([](Floats code) ZCKPT_LANES_FOR ZCKPT_PART { return code; });
    else if (step < 5)
      add([&](Floats code) ZCKPT_LANES_FOR ZCKPT_PART { return least_of(code, top); });
    else
      add([&](Floats code) ZCKPT_LANES_FOR ZCKPT_PART { return most_of(least_of(code, top), bottom); });
    for (int s = 0; s < kSets; ++s) {
      if (trial == 0) {
        scale[s] = sum_ll[s] != 0 ? sum_xl[s] / sum_ll[s] : zero, best[s] = scale[s] * sum_xl[s], factor[s] = own[s];
      } else {
        const Ints better = (sum_ll[s] > 0) & (sum_xl[s] * sum_xl[s] > best[s] * sum_ll[s]);
        if (!any_of(better)) continue;
        scale[s] = better ? sum_xl[s] / sum_ll[s] : scale[s], best[s] = better ? scale[s] * sum_xl[s] : best[s], factor[s] = better ? own[s] : factor[s];
      }
    }
  }
  for (int s = 0; s < kSets; ++s) {
    const int first = s * kWide, here = have - first < kWide ? have - first : kWide;
    store_lanes(none[s] ? zero : scale[s], here, scales + first);
    store_lanes(none[s] ? all_of(kNoCodes) : factor[s], here, factors + first);
  }
}

// Scales of eight groups as whole numbers to 63 times one number, which has the smallest weighted error; a lane has one block. `codes`, and
// that number for each.
ZCKPT_LANED void search_wholes(const float* scales, const float* weights, int have, float* found, uint8_t* codes) {
  constexpr int kGroups = 8, kTop = 63;
  Floats x[kGroups], w[kGroups];
  load_groups<kGroups>(scales, 0, have, x), load_groups<kGroups>(weights, 0, have, w);
  const auto nearest_of = [](Floats each) ZCKPT_LANES_FOR ZCKPT_PART { return ((Ints)(each + kRounder) & 0x7FFFFF) - 0x400000; };
  const auto number_of = [](Ints each) ZCKPT_LANES_FOR ZCKPT_PART { return __builtin_convertvector(each, Floats); };
  const Floats none = all_of(0);
  const Ints most_code = Ints{} + kTop;
  Floats most = none;
  for (const Floats& each : x) most = most > each ? most : each;
  const Ints nothing = most < kNothing;
  Floats factor = kTop / most, error = none;
  for (int trial = 0; trial < 9; ++trial) {
    const int step = trial == 0 ? 0 : trial <= 4 ? trial - 5 : trial - 4;
    const Floats own = trial == 0 ? factor : (0.1F * static_cast<float>(step) + kTop) / most, scale = 1 / own;
    Floats here = none;
    for (int i = 0; i < kGroups; ++i) {
      const Ints code = nearest_of(own * x[i]), held = trial != 0 ? (code > most_code ? most_code : code) : code;
      const Floats off = x[i] - scale * number_of(held & 0xFF);
      here += w[i] * off * off;
    }
    const Ints better = here < error;
    error = trial == 0 ? here : better ? here : error, factor = trial != 0 ? (better ? own : factor) : factor;
  }
  Floats sum_xl = none, sum_ll = none;
  Ints code[kGroups];
  for (int i = 0; i < kGroups; ++i) {
    const Ints own = nearest_of(factor * x[i]), held = own < most_code ? own : most_code;
    code[i] = held & 0xFF;
    const Floats l = number_of(held);
    sum_xl += w[i] * x[i] * l, sum_ll += w[i] * l * l;
  }
  for (int turn = 0; turn < 5; ++turn) {
    Ints changed = {};
    for (int i = 0; i < kGroups; ++i) {
      const Floats l = number_of(code[i]);
      Floats xl = sum_xl - w[i] * x[i] * l, ll = sum_ll - w[i] * l * l;
      const Ints own = nearest_of(x[i] * ll / xl), held = own < most_code ? own : most_code;
      const Floats to = number_of(held);
      Ints better = (xl > 0) & (ll > 0) & (held != code[i]);
      xl += w[i] * x[i] * to, ll += w[i] * to * to;
      better &= xl * xl * sum_ll > sum_xl * sum_xl * ll;
      code[i] = better ? held & 0xFF : code[i], sum_xl = better ? xl : sum_xl, sum_ll = better ? ll : sum_ll;
      changed |= better;
    }
    if (!any_of(changed)) break;
  }
  store_lanes(~nothing & (sum_ll > 0) ? sum_xl / sum_ll : none, have, found);
  for (int i = 0; i < kGroups; ++i) {
    int32_t held[kWide];
    const Ints own = nothing ? Ints{} : code[i];
    std::memcpy(held, &own, sizeof held);
    for (int lane = 0; lane < have; ++lane) codes[lane * kGroups + i] = static_cast<uint8_t>(held[lane]);
  }
}

// Groups one after the other. `weights` has as many, or is null.
template <class Trials>
ZCKPT_LANES_FOR static void ranges(const float* x, const float* weights, int groups, const Ranges& found) {
  for (int at = 0; at < groups; at += 2 * kWide)
    search_ranges<Trials>(x + at * 32, weights ? weights + at * 32 : nullptr, groups - at < 2 * kWide ? groups - at : 2 * kWide, found.from(at));
}

template <int kNumbers, int kTop>
ZCKPT_LANES_FOR static void scales(const float* x, const float* weights, int groups, float* found, float* factors) {
  for (int at = 0; at < groups; at += 2 * kWide)
    search_scales<kNumbers, kTop>(x + at * kNumbers, weights ? weights + at * kNumbers : nullptr, groups - at < 2 * kWide ? groups - at : 2 * kWide,
                                  found + at, factors + at);
}

ZCKPT_LANES_FOR static void wholes(const float* scales, const float* weights, int blocks, float* found, uint8_t* codes) {
  for (int at = 0; at < blocks; at += kWide)
    search_wholes(scales + at * 8, weights + at * 8, blocks - at < kWide ? blocks - at : kWide, found + at, codes + at * 8);
}

ZCKPT_LANES_FOR static void matrix_weights(const float* x, const float* columns, float square, int count, float* weights) {
  for (int i = 0; i < count; ++i) weights[i] = columns[i] * __builtin_sqrtf(square + x[i] * x[i]);
}

// To whole numbers from `least` to `most`, as ggml does it: what is far too large has low bits left.
ZCKPT_LANED uint8_t code_of(float x, int least, int most) {
  const float rounded = x + kRounder;
  int32_t code;
  std::memcpy(&code, &rounded, 4);
  code = (code & 0x7FFFFF) - 0x400000;
  return static_cast<uint8_t>((code < least ? least : code > most ? most : code) - least);
}

// Numbers of groups plus `more`, by the group's divisor; without `more` where that is null.
template <int kCount>
ZCKPT_LANES_FOR static void divide(const float* __restrict x, int groups, const float* __restrict more, const float* __restrict divisors, int least, int most,
                                   uint8_t* __restrict codes) {
  for (int group = 0; group < groups; ++group, x += kCount, codes += kCount) {
    const float lift = more ? more[group] : 0, divisor = divisors[group];
    for (int i = 0; i < kCount; ++i) codes[i] = code_of((x[i] + lift) / divisor, least, most);
  }
}

// Numbers less `start` by a factor.
ZCKPT_LANES_FOR static void multiply(const float* __restrict x, int count, float start, float factor, int least, int most, uint8_t* __restrict codes) {
  for (int i = 0; i < count; ++i) codes[i] = code_of(factor * (x[i] - start), least, most);
}

// Codes of 256 numbers: the lowest four bits of two groups of 32 in a byte, and the fifth ones, where `fifths` is not null.
ZCKPT_LANES_FOR static void pack_q45_k(const uint8_t* __restrict codes, uint8_t* __restrict low, uint8_t* __restrict fifths) {
  for (int part = 0; part < 4; ++part)
    for (int l = 0; l < 32; ++l) low[part * 32 + l] = static_cast<uint8_t>((codes[part * 64 + l] & 15) | codes[part * 64 + 32 + l] << 4);
  for (int l = 0; fifths && l < 32; ++l) {
    int bits = 0;
    for (int group = 0; group < 8; ++group) bits |= codes[group * 32 + l] >> 4 << group;
    fifths[l] = static_cast<uint8_t>(bits);
  }
}

// Codes of 256 numbers: the lowest four bits of two in a byte, and the fifth and sixth ones of four.
ZCKPT_LANES_FOR static void pack_q6_k(const uint8_t* __restrict codes, uint8_t* __restrict low, uint8_t* __restrict high) {
  for (int part = 0; part < 2; ++part, codes += 128, low += 64, high += 32) {
    for (int l = 0; l < 64; ++l) low[l] = static_cast<uint8_t>((codes[l] & 15) | codes[l + 64] << 4);
    for (int l = 0; l < 32; ++l)
      high[l] = static_cast<uint8_t>(codes[l] >> 4 | codes[l + 32] >> 4 << 2 | codes[l + 64] >> 4 << 4 | codes[l + 96] >> 4 << 6);
  }
}

// The bits of the largest magnitude.
ZCKPT_LANED uint32_t largest_bits(const float* x, size_t count) {
  uint32_t top = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &x[i], 4);
    bits &= 0x7FFFFFFF;
    top = bits > top ? bits : top;
  }
  return top;
}

// The least and the largest of 32 numbers; of two zeros it may be any.
ZCKPT_LANED void ends_of(const float* x, float& least, float& most) {
#if ZCKPT_LANES > 4
  __m256 low = _mm256_loadu_ps(x), high = low;
  for (int i = 8; i < 32; i += 8) low = _mm256_min_ps(_mm256_loadu_ps(x + i), low), high = _mm256_max_ps(_mm256_loadu_ps(x + i), high);
  __m128 own = _mm_min_ps(_mm256_castps256_ps128(low), _mm256_extractf128_ps(low, 1)), other = _mm_max_ps(_mm256_castps256_ps128(high), _mm256_extractf128_ps(high, 1));
  own = _mm_min_ps(own, _mm_movehl_ps(own, own)), other = _mm_max_ps(other, _mm_movehl_ps(other, other));
  least = _mm_cvtss_f32(_mm_min_ss(own, _mm_movehdup_ps(own))), most = _mm_cvtss_f32(_mm_max_ss(other, _mm_movehdup_ps(other)));
#else
  least = most = x[0];
  for (int i = 1; i < 32; ++i) least = x[i] < least ? x[i] : least, most = x[i] > most ? x[i] : most;
#endif
}

// Codes of 32 numbers: the lowest four bits of two in a byte, 16 elements apart, and the fifth ones in a word before them.
#if ZCKPT_LANES > 4
ZCKPT_LANED void put_codes(__m256i codes, bool fifth, uint8_t* to) {
  if (fifth) {
    const int bits = _mm256_movemask_epi8(_mm256_slli_epi16(codes, 3));
    std::memcpy(to, &bits, 4);
    to += 4;
    codes = _mm256_and_si256(codes, _mm256_set1_epi8(15));
  }
  const __m128i both = _mm_or_si128(_mm256_castsi256_si128(codes), _mm_slli_epi16(_mm256_extracti128_si256(codes, 1), 4));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), both);
}

ZCKPT_LANED void put_codes(const uint8_t* codes, bool fifth, uint8_t* to) {
  put_codes(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), fifth, to);
}

// As bytes, of whole numbers to 255 each.
ZCKPT_LANED __m256i bytes_of(const __m256i* four) {
  const __m256i first = _mm256_packs_epi32(four[0], four[1]), second = _mm256_packs_epi32(four[2], four[3]);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#else
ZCKPT_LANED void put_codes(const uint8_t* codes, bool fifth, uint8_t* to) {
  if (fifth) {
    uint32_t bits = 0;
    for (int j = 0; j < 32; ++j) bits |= static_cast<uint32_t>(codes[j] >> 4 & 1) << j;
    for (int j = 0; j < 4; ++j) *to++ = static_cast<uint8_t>(bits >> 8 * j);
  }
  for (int j = 0; j < 16; ++j) to[j] = static_cast<uint8_t>((codes[j] & 15) | codes[j + 16] << 4);
}
#endif

// Numbers less one, divided by a step, cut to whole ones after `lift` is added.
ZCKPT_LANED void put_encoded(const float* x, float less, float step, float lift, int top, bool fifth, uint8_t* to) {
  const float factor = step != 0 ? 1.0F / step : 0.0F;
  uint8_t codes[32];
  if (!(__builtin_fabsf(factor) < kNoCodes)) {  // some may be too large for an integer
    for (int i = 0; i < 32; ++i) codes[i] = cut((x[i] - less) * factor + lift, top);
    return put_codes(codes, fifth, to);
  }
#if ZCKPT_LANES > 4
  __m256i four[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 scaled = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(less)), _mm256_set1_ps(factor));
    four[i] = _mm256_min_epi32(_mm256_cvttps_epi32(_mm256_add_ps(scaled, _mm256_set1_ps(lift))), _mm256_set1_epi32(top));
  }
  put_codes(bytes_of(four), fifth, to);
#else
  for (int i = 0; i < 32; ++i) {
    const int32_t code = static_cast<int32_t>((x[i] - less) * factor + lift);
    codes[i] = static_cast<uint8_t>(code < top ? code : top);
  }
  put_codes(codes, fifth, to);
#endif
}

// Q4_0 and Q5_0: a step, from the first number of the largest magnitude; it becomes the lowest code.
ZCKPT_LANED bool put_symmetric(uint32_t size, const float* x, int half, uint8_t* to) {
  int first = 31;
  for (int i = 0; i < 32; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    const int own = (bits & 0x7FFFFFFF) == size ? i : 31;
    first = own < first ? own : first;
  }
  const float step = (size ? x[first] : 0.0F) / static_cast<float>(-half);
  const uint16_t held = to_half(step);
  put_half(to, held);
  put_encoded(x, 0, step, static_cast<float>(half) + 0.5F, 2 * half - 1, half == 16, to + 2);
  return is_finite(held);
}

// Q4_1 and Q5_1: a step and the least number.
ZCKPT_LANED bool put_ranged(const float* x, int top, uint8_t* to) {
  float least = 0, most = 0;
  ends_of(x, least, most);
  for (int i = 0; least == 0 && i < 32; ++i)
    if (x[i] == 0) {  // the first zero's sign
      most = most == 0 ? x[i] : most, least = x[i];
      break;
    }
  const float step = (most - least) / static_cast<float>(top);
  const uint16_t held = to_half(step), from = to_half(least);
  put_half(to, held), put_half(to + 2, from);
  put_encoded(x, least, step, 0.5F, top, top == 31, to + 4);
  return is_finite(held) && is_finite(from);
}

// A power of two, by which the largest number becomes 4 to 8. (Where that is less than 2^-127, ggml's becomes another one by mistake.) Numbers
// of E2M1, twice as large, are multiplied by `half`; of two that are as near, it is the smaller one.
ZCKPT_LANED bool put_mxfp4(uint32_t size, const float* x, uint8_t* to) {
  const int power = size ? power_of(size) - 2 + 127 : 0;
  const uint32_t e = power > 0 ? static_cast<uint32_t>(power) : 0;
  const float half = e < 2 ? of_bits(0x00200000U << e) : of_bits((e - 1) << 23);
  const float middles[] = {0.5F * half, 1.5F * half, 2.5F * half, 3.5F * half, 5 * half, 7 * half, 10 * half};
  to[0] = static_cast<uint8_t>(e);
#if ZCKPT_LANES > 4
  __m256i four[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 own = _mm256_loadu_ps(x + 8 * i), size_of = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), own);
    __m256i code = _mm256_setzero_si256();
    for (const float middle : middles) code = _mm256_sub_epi32(code, _mm256_castps_si256(_mm256_cmp_ps(size_of, _mm256_set1_ps(middle), _CMP_GT_OQ)));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(own), 28), _mm256_set1_epi32(8));
    four[i] = _mm256_or_si256(code, _mm256_and_si256(sign, _mm256_cmpgt_epi32(code, _mm256_setzero_si256())));
  }
  put_codes(bytes_of(four), false, to + 1);
#else
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) {
    const float own = __builtin_fabsf(x[i]);
    int32_t code = 0, bits;
    for (const float middle : middles) code += own > middle;
    std::memcpy(&bits, &x[i], 4);
    codes[i] = static_cast<uint8_t>(code | (code != 0 ? bits >> 28 & 8 : 0));
  }
  put_codes(codes, false, to + 1);
#endif
  return true;
}

// Blocks of 32 numbers, without an importance matrix. How many are not sound.
template <GgmlBlocks kKind, size_t kBytes>
ZCKPT_LANED size_t put_plain(const float* x, size_t blocks, uint8_t* to) {
  size_t unsound = 0;
  for (size_t b = 0; b < blocks; ++b, x += 32, to += kBytes) {
    const uint32_t size = largest_bits(x, 32);
    bool sound = size < (kKind == GgmlBlocks::kMxfp4 ? kInfinity : kHuge);
    if (sound) switch (kKind) {
        case GgmlBlocks::kQ4_0: sound = put_symmetric(size, x, 8, to); break;
        case GgmlBlocks::kQ5_0: sound = put_symmetric(size, x, 16, to); break;
        case GgmlBlocks::kQ4_1: sound = put_ranged(x, 15, to); break;
        case GgmlBlocks::kQ5_1: sound = put_ranged(x, 31, to); break;
        default: sound = put_mxfp4(size, x, to);
      }
    unsound += !sound;
  }
  return unsound;
}

ZCKPT_LANES_FOR static size_t plain(GgmlBlocks kind, const float* x, size_t blocks, uint8_t* to) {
  switch (kind) {
    case GgmlBlocks::kQ4_0: return put_plain<GgmlBlocks::kQ4_0, 18>(x, blocks, to);
    case GgmlBlocks::kQ4_1: return put_plain<GgmlBlocks::kQ4_1, 20>(x, blocks, to);
    case GgmlBlocks::kQ5_0: return put_plain<GgmlBlocks::kQ5_0, 22>(x, blocks, to);
    case GgmlBlocks::kQ5_1: return put_plain<GgmlBlocks::kQ5_1, 24>(x, blocks, to);
    default: return put_plain<GgmlBlocks::kMxfp4, 17>(x, blocks, to);
  }
}

ZCKPT_LANES_FOR static uint32_t largest_of(const float* x, size_t count) { return largest_bits(x, count); }
ZCKPT_LANES_FOR static void put_32(const uint8_t* codes, bool fifth, uint8_t* to) { put_codes(codes, fifth, to); }

constexpr Search kSearch = {ranges<Trials<15, 20>>, ranges<Trials<31, 15>>, ranges<Trials<15, 36>>, ranges<Trials<31, 36>>, scales<16, 32>, scales<32, 8>,
                            scales<32, 16>,         wholes,                 matrix_weights,         divide<32>,             divide<16>,     multiply,
                            pack_q45_k,             pack_q6_k,              put_32,                 largest_of,             plain};

#undef ZCKPT_LANED
