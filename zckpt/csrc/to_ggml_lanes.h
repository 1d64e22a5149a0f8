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
  float held[kWide];
  std::memcpy(held, &x, sizeof held);
  for (float& each : held) each = __builtin_sqrtf(each);
  std::memcpy(&x, held, sizeof held);
  return x;
}

// To whole numbers, halves to even, of numbers below 2^22.
ZCKPT_LANED Floats whole(Floats x) { return (x + kRounder) - kRounder; }

// Number i of each group, for groups one after the other, from group `first` on. Where there are fewer groups than lanes, the last one fills
// the others. Four numbers of four groups are turned at a time.
template <int kNumbers>
ZCKPT_LANED void load_groups(const float* groups, int first, int have, Floats* x) {
  for (int lane = 0; lane < kWide; lane += 4) {
    const float* own[4];
    for (int j = 0; j < 4; ++j) own[j] = groups + (first + lane + j < have ? first + lane + j : have - 1) * kNumbers;
    for (int i = 0; i < kNumbers; i += 4) {
      Four rows[4];
      for (int j = 0; j < 4; ++j) std::memcpy(&rows[j], own[j] + i, sizeof rows[j]);
      turn_four(rows);
      for (int j = 0; j < 4; ++j) std::memcpy(reinterpret_cast<char*>(x + i + j) + lane * 4, &rows[j], sizeof rows[j]);
    }
  }
}

ZCKPT_LANED bool any_of(Ints is) {
  int64_t held[kWide / 2], found = 0;
  std::memcpy(held, &is, sizeof held);
  for (const int64_t each : held) found |= each;
  return found != 0;
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
  const Floats none = all_of(0), top = all_of(Trials::kTop);
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
        for (int s = 0; s < kSets; ++s) add(s, i, most_of(least_of(whole(factor[s] * (x[s][i] - minimum[s])), top), none));
    } else {
      for (int i = 0; i < kNumbers; ++i)
        for (int s = 0; s < kSets; ++s) add(s, i, whole(factor[s] * (x[s][i] - minimum[s])));
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
    for (int i = 0; i < kNumbers; ++i)
      for (int s = 0; s < kSets; ++s) {
        const Floats code = most_of(least_of(whole(own[s] * x[s][i]), top), bottom);
        sum_xl[s] += wx[s][i] * code, sum_ll[s] += w[s][i] * code * code;
      }
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

// Numbers less one, times a factor, cut to whole ones after `lift` is added; none of them is too large for an integer.
ZCKPT_LANES_FOR static void encode(const float* x, float less, float factor, float lift, int top, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) {
    const int32_t code = static_cast<int32_t>((x[i] - less) * factor + lift);
    codes[i] = static_cast<uint8_t>(code < top ? code : top);
  }
}

// Numbers of E2M1, twice as large, times `half`; of two that are as near, the smaller one.
ZCKPT_LANES_FOR static void encode_e2m1(const float* x, float half, uint8_t* codes) {
  const float middles[] = {0.5F * half, 1.5F * half, 2.5F * half, 3.5F * half, 5 * half, 7 * half, 10 * half};
  for (int i = 0; i < 32; ++i) {
    const float size = __builtin_fabsf(x[i]);
    int32_t code = 0, bits;
    for (const float middle : middles) code += size > middle;
    std::memcpy(&bits, &x[i], 4);
    codes[i] = static_cast<uint8_t>(code | (code != 0 ? bits >> 28 & 8 : 0));
  }
}

// The bits of the largest magnitude.
ZCKPT_LANES_FOR static uint32_t largest_bits(const float* x, size_t count) {
  uint32_t top = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &x[i], 4);
    bits &= 0x7FFFFFFF;
    top = bits > top ? bits : top;
  }
  return top;
}

ZCKPT_LANES_FOR static void ends_of(const float* x, float& least, float& most) {
  Floats low = all_of(3.40282347e+38F), high = -low;
  for (int i = 0; i < 32; i += kWide) {
    Floats own;
    std::memcpy(&own, x + i, sizeof own);
    low = least_of(own, low), high = most_of(own, high);
  }
  float lows[kWide], highs[kWide];
  std::memcpy(lows, &low, sizeof low), std::memcpy(highs, &high, sizeof high);
  least = lows[0], most = highs[0];
  for (int i = 1; i < kWide; ++i) least = lows[i] < least ? lows[i] : least, most = highs[i] > most ? highs[i] : most;
}

constexpr Search kSearch = {ranges<Trials<15, 20>>, ranges<Trials<31, 15>>, ranges<Trials<15, 36>>, ranges<Trials<31, 36>>, scales<16, 32>, scales<32, 8>,
                            scales<32, 16>,         wholes,                 matrix_weights,         divide<32>,             divide<16>,     multiply,
                            pack_q45_k,             pack_q6_k,              encode,                 encode_e2m1,            largest_bits,   ends_of};

#undef ZCKPT_LANED
