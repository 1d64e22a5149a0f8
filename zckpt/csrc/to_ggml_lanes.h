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

// Number i of each group, for groups one after the other. Where there are fewer groups than lanes, the last one fills the others.
template <int kNumbers>
ZCKPT_LANED void load_groups(const float* groups, int have, Floats* x) {
  float held[kNumbers * kWide];
  for (int lane = 0; lane < kWide; ++lane) {
    const float* own = groups + (lane < have ? lane : have - 1) * kNumbers;
    for (int i = 0; i < kNumbers; ++i) held[i * kWide + lane] = own[i];
  }
  std::memcpy(x, held, sizeof held);
}

template <int kNumbers>
ZCKPT_LANED void store_codes(const Floats* x, int have, uint8_t* codes) {
  int32_t held[kNumbers * kWide];
  for (int i = 0; i < kNumbers; ++i) {
    const Ints code = (Ints)(x[i] + kRounder) & 0xFF;
    std::memcpy(held + i * kWide, &code, sizeof code);
  }
  for (int lane = 0; lane < have; ++lane)
    for (int i = 0; i < kNumbers; ++i) codes[lane * kNumbers + i] = static_cast<uint8_t>(held[i * kWide + lane]);
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
// trial begins with the least number of the best one before. The error of one is known from its sums to within kDoubt of their terms; it is
// computed only where it may be smaller.
template <class Trials>
ZCKPT_LANED void search_range(const float* groups, const float* weights, int have, float* scales, float* minima, uint8_t* codes) {
  constexpr int kNumbers = 32;
  constexpr float kDoubt = 1e-5F, kFar = 1024;
  Floats x[kNumbers], w[kNumbers], code[kNumbers];
  load_groups<kNumbers>(groups, have, x);
  if (weights) {
    load_groups<kNumbers>(weights, have, w);
  } else {  // the root of the mean square of the group, and the number's size
    Floats sum = {};
    for (const Floats& each : x) sum += each * each;
    const Floats root = roots_of(sum / kNumbers);
    for (int i = 0; i < kNumbers; ++i) w[i] = root + sizes_of(x[i]);
  }
  Floats least = x[0], most = x[0], sum_w = w[0], sum_x = w[0] * x[0], sum_xx = sum_x * x[0];
  for (int i = 1; i < kNumbers; ++i) {
    least = least_of(x[i], least), most = most_of(x[i], most);
    const Floats wx = w[i] * x[i];
    sum_w += w[i], sum_x += wx, sum_xx += wx * x[i];
  }
  least = least > 0 ? all_of(0) : least;
  const Ints flat = most == least;
  most = flat ? least + 1 : most;
  const Floats none = all_of(0), top = all_of(Trials::kTop), range = most - least;
  Ints usual = (range > 1e-9F) & (range < 1e9F) & (most < 1e9F) & (least > -1e9F) & (sum_w > 1e-12F) & (sum_w < 1e12F);

  Floats factor = top / range, scale = 1 / factor, minimum = least, error = {}, best = factor, start = least;
  for (int i = 0; i < kNumbers; ++i) {
    const Floats off = (scale * least_of(whole(factor * (x[i] - least)), top) + least) - x[i];
    error += w[i] * (off * off);
  }
  for (int step = 0; step <= Trials::kSteps; ++step) {
    factor = Trials::at(step) / (most - minimum);
    Floats sum_l = {}, sum_ll = {}, sum_xl = {};
    for (int i = 0; i < kNumbers; ++i) {
      code[i] = most_of(least_of(whole(factor * (x[i] - minimum)), top), none);
      const Floats wl = w[i] * code[i];
      sum_l += wl, sum_ll += wl * code[i], sum_xl += wl * x[i];
    }
    const Floats apart = sum_w * sum_ll - sum_l * sum_l;
    Floats own = (sum_w * sum_xl - sum_x * sum_l) / apart, low = (sum_ll * sum_x - sum_l * sum_xl) / apart;
    const Ints over = low > 0;
    low = over ? none : low, own = over ? sum_xl / sum_ll : own;
    const Floats parts = own * own * sum_ll + low * low * sum_w + sum_xx;
    const Floats about = parts + 2 * (own * low * sum_l - own * sum_xl - low * sum_x);
    Ints better = (apart > 0) & ~(about - kDoubt * parts > error);
    if (!any_of(better)) continue;
    Floats found = {};
    for (int i = 0; i < kNumbers; ++i) {
      const Floats off = (own * code[i] + low) - x[i];
      found += w[i] * (off * off);
    }
    better &= found < error;
    error = better ? found : error, scale = better ? own : scale, best = better ? factor : best, start = better ? minimum : start;
    minimum = better ? low : minimum;
    usual &= ((most - minimum) * kFar > range) & (most - minimum < range * kFar);
  }

  scale = flat ? none : scale, minimum = flat ? least : minimum, best = flat ? none : best;
  store_lanes(scale, have, scales), store_lanes(-minimum, have, minima);
  for (int i = 0; i < kNumbers; ++i) code[i] = most_of(least_of(whole(best * (x[i] - start)), top), none);
  store_codes<kNumbers>(code, have, codes);
  int32_t are[kWide];
  std::memcpy(are, &usual, sizeof are);
  for (int lane = 0; lane < have; ++lane)
    if (!are[lane]) {
      float own[kNumbers], matter[kNumbers];
      for (int i = 0; i < kNumbers; ++i) {
        std::memcpy(own, groups + lane * kNumbers, sizeof own);
        float held[kWide];
        std::memcpy(held, &w[i], sizeof held);
        matter[i] = held[lane];
      }
      search_range_plainly<Trials>(own, matter, scales[lane], minima[lane], codes + lane * kNumbers);
    }
}

// The scale alone, for codes from -kTop to kTop - 1, which are stored kTop higher.
template <int kNumbers, int kTop>
ZCKPT_LANED void search_scale(const float* groups, const float* weights, int have, float* scales, uint8_t* codes) {
  Floats x[kNumbers], w[kNumbers], wx[kNumbers];
  load_groups<kNumbers>(groups, have, x);
  if (weights) load_groups<kNumbers>(weights, have, w);
  Floats largest = {}, size = {};
  for (int i = 0; i < kNumbers; ++i) {
    if (!weights) w[i] = x[i] * x[i];
    wx[i] = w[i] * x[i];
    const Floats own = sizes_of(x[i]);
    const Ints more = own > size;
    size = more ? own : size, largest = more ? x[i] : largest;
  }
  const Ints none = size < kNothing;
  largest = none ? all_of(1) : largest;
  const Floats bottom = all_of(-kTop), top = all_of(kTop - 1);
  Floats scale = {}, best = {}, factor = {};
  for (int trial = 0; trial < 19; ++trial) {
    const int step = trial == 0 ? 0 : trial <= 9 ? trial - 10 : trial - 9;
    const Floats own = -(static_cast<float>(kTop) + 0.1F * static_cast<float>(step)) / largest;
    Floats sum_xl = {}, sum_ll = {};
    for (int i = 0; i < kNumbers; ++i) {
      const Floats code = most_of(least_of(whole(own * x[i]), top), bottom);
      sum_xl += wx[i] * code, sum_ll += w[i] * code * code;
    }
    if (trial == 0) {
      scale = sum_ll != 0 ? sum_xl / sum_ll : all_of(0), best = scale * sum_xl, factor = own;
    } else {
      const Ints better = (sum_ll > 0) & (sum_xl * sum_xl > best * sum_ll);
      scale = better ? sum_xl / sum_ll : scale, best = better ? scale * sum_xl : best, factor = better ? own : factor;
    }
  }
  store_lanes(none ? all_of(0) : scale, have, scales);
  const Floats lifted = none ? all_of(0) : all_of(kTop);
  factor = none ? all_of(0) : factor;
  for (int i = 0; i < kNumbers; ++i) x[i] = most_of(least_of(whole(factor * x[i]), top), bottom) + lifted;
  store_codes<kNumbers>(x, have, codes);
}

// Groups one after the other. `weights` has as many, or is null.
template <class Trials>
ZCKPT_LANES_FOR static void ranges(const float* x, const float* weights, int groups, float* scales, float* minima, uint8_t* codes) {
  for (int at = 0; at < groups; at += kWide)
    search_range<Trials>(x + at * 32, weights ? weights + at * 32 : nullptr, groups - at < kWide ? groups - at : kWide, scales + at, minima + at, codes + at * 32);
}

template <int kNumbers, int kTop>
ZCKPT_LANES_FOR static void scales(const float* x, const float* weights, int groups, float* found, uint8_t* codes) {
  for (int at = 0; at < groups; at += kWide)
    search_scale<kNumbers, kTop>(x + at * kNumbers, weights ? weights + at * kNumbers : nullptr, groups - at < kWide ? groups - at : kWide, found + at,
                                 codes + at * kNumbers);
}

ZCKPT_LANES_FOR static void matrix_weights(const float* x, const float* columns, float square, int count, float* weights) {
  for (int i = 0; i < count; ++i) weights[i] = columns[i] * __builtin_sqrtf(square + x[i] * x[i]);
}

// Numbers plus `more`, divided and rounded, from `least` to `most`, as ggml does it: what is far too large has low bits left.
ZCKPT_LANES_FOR static void divide(const float* x, int count, float more, float divisor, int least, int most, uint8_t* codes) {
  for (int i = 0; i < count; ++i) {
    const float rounded = (x[i] + more) / divisor + kRounder;
    int32_t code;
    std::memcpy(&code, &rounded, 4);
    code = (code & 0x7FFFFF) - 0x400000;
    codes[i] = static_cast<uint8_t>((code < least ? least : code > most ? most : code) - least);
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

constexpr Search kSearch = {ranges<Trials<15, 20>>, ranges<Trials<31, 15>>, ranges<Trials<15, 36>>, ranges<Trials<31, 36>>, scales<16, 32>,
                            scales<32, 8>,          scales<32, 16>,         matrix_weights,         divide,                 encode,
                            encode_e2m1,            largest_bits,           ends_of};

#undef ZCKPT_LANED
