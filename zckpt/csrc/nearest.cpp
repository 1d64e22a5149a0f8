// Blocks are first looked at by loops that the compiler makes vector code of, and that may take right numbers for wrong ones, but
// never the reverse. Blocks with a doubtful number are then judged one by one.
#include "nearest.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "simd.h"

namespace zckpt {
namespace {

constexpr size_t kBlockNumbers = 1024;

template <typename T>
T load(const void* p, size_t i) {
  T x;
  std::memcpy(&x, static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
  return x;
}

// ---- one by one -----------------------------------------------------------------------------------------------------

struct Form {  // of a binary float
  int exponent, mantissa;  // bits
  int bias;
  enum { kUsual, kNoInfinity, kOneNan } special;  // E4M3 has no infinity, and NaN where all bits are set; fnuz: NaN is minus zero
};

constexpr Form form_of(DType dtype) {
  switch (dtype) {
    case F64: return {11, 52, 1023, Form::kUsual};
    case F32: return {8, 23, 127, Form::kUsual};
    case F16: return {5, 10, 15, Form::kUsual};
    case BF16: return {8, 7, 127, Form::kUsual};
    case F8_E4M3: return {4, 3, 7, Form::kNoInfinity};
    case F8_E5M2: return {5, 2, 15, Form::kUsual};
    case F8_E4M3FNUZ: return {4, 3, 8, Form::kOneNan};
    case F8_E5M2FNUZ: return {5, 2, 16, Form::kOneNan};
    default: return {0, 0, 0, Form::kUsual};
  }
}

bool is_float(DType dtype) { return form_of(dtype).exponent; }

uint64_t bits_of(DType dtype, const void* p, size_t i) {
  switch (kItemSize[dtype]) {
    case 8: return load<uint64_t>(p, i);
    case 4: return load<uint32_t>(p, i);
    case 2: return load<uint16_t>(p, i);
    default: return load<uint8_t>(p, i);
  }
}

struct Number {  // significand * 2^power, or something special
  bool negative, nan, infinite;
  uint64_t significand;
  int power;
};

// Of a magnitude that is no NaN; that of infinity is the number which would follow the largest one.
Number magnitude(const Form& form, uint64_t bits) {
  const uint64_t fraction = bits & ((1ull << form.mantissa) - 1), exponent = bits >> form.mantissa;
  return {false, false, false, exponent ? fraction | 1ull << form.mantissa : fraction,
          static_cast<int>(exponent ? exponent : 1) - form.bias - form.mantissa};
}

Number number(const Form& form, uint64_t bits) {
  const int width = form.exponent + form.mantissa;
  const uint64_t sign = bits >> width, rest = bits & ((1ull << width) - 1), infinity = ((1ull << form.exponent) - 1) << form.mantissa;
  Number x = magnitude(form, rest);
  x.negative = sign;
  if (form.special == Form::kOneNan) {
    x.nan = sign && !rest;
  } else if (form.special == Form::kNoInfinity) {
    x.nan = rest == (1ull << width) - 1;
  } else {
    x.nan = rest > infinity;
    x.infinite = rest == infinity;
  }
  return x;
}

// -1, 0 or 1: whether a magnitude is less than another one, equal or larger.
int order(uint64_t a, int a_power, uint64_t b, int b_power) {
  if (!a || !b) return (a != 0) - (b != 0);
  const int a_zeros = std::countl_zero(a), b_zeros = std::countl_zero(b), a_top = a_power - a_zeros, b_top = b_power - b_zeros;
  if (a_top != b_top) return a_top < b_top ? -1 : 1;
  a <<= a_zeros, b <<= b_zeros;
  return a < b ? -1 : a > b;
}

// How a magnitude lies to the middle between the number of these bits and the next one.
int order_to_middle(const Number& x, const Form& form, uint64_t bits) {
  const Number low = magnitude(form, bits), high = magnitude(form, bits + 1);
  return order(x.significand, x.power, low.significand + (high.significand << (high.power - low.power)), low.power - 1);
}

// The bits that a NaN becomes. On its way from anything narrower than F64 it is one of F32.
uint64_t nan_in(DType from, DType to, uint64_t bits) {
  if (to == BF16) return 0x7FC0;
  const Form source = form_of(from), target = form_of(to);
  const int width = source.exponent + source.mantissa;
  uint64_t sign = bits >> width, payload = bits & ((1ull << source.mantissa) - 1);
  int held = source.mantissa;
  if (kItemSize[from] == 1) {  // whose payload says nothing
    payload = 1ull << (held - 1);
    sign = sign && source.special != Form::kOneNan;
  }
  const uint64_t quiet = from == BF16 && to == F32 ? 0 : 1ull << (target.mantissa - 1);
  payload = held > target.mantissa ? payload >> (held - target.mantissa) : payload << (target.mantissa - held);
  return sign << (target.exponent + target.mantissa) | ((1ull << target.exponent) - 1) << target.mantissa | quiet | payload;
}

bool is_right(Likeness likeness, DType from, DType to, uint64_t a, uint64_t b) {
  const Form target = form_of(to);
  const Number x = number(form_of(from), a), y = number(target, b);
  if (x.nan != y.nan) return false;
  if (x.nan) return likeness == Likeness::kSame || b == (from == to ? a : nan_in(from, to, a));
  if (from == to) return a == b || (likeness == Likeness::kSame && !x.significand && !y.significand);
  const int width = target.exponent + target.mantissa;
  const uint64_t found = b & ((1ull << width) - 1), infinity = ((1ull << target.exponent) - 1) << target.mantissa;
  if (x.negative != y.negative && (found || likeness != Likeness::kSame)) return false;
  if (x.infinite) return y.infinite;
  const bool even = !(found & 1), clamped = likeness == Likeness::kClamped;
  if (clamped && y.infinite) return false;
  if (found) {
    const int below = order_to_middle(x, target, found - 1);
    if (below < 0 || (!below && !even)) return false;
  }
  if (y.infinite || (clamped && found == infinity - 1)) return true;
  const int above = order_to_middle(x, target, found);
  return above < 0 || (!above && even);
}

// What every number of a small dtype is in F32.
template <size_t kCount>
std::array<uint32_t, kCount> table_of(DType from) {
  std::array<uint32_t, kCount> table;
  for (size_t i = 0; i < kCount; ++i) {
    const Number x = number(form_of(from), i);
    if (x.nan) {
      table[i] = static_cast<uint32_t>(nan_in(from, F32, i));
    } else if (x.infinite) {
      table[i] = 0x7F800000;
    } else {
      const int top = std::bit_width(x.significand);  // every one is normal there
      table[i] = x.significand ? static_cast<uint32_t>(x.significand << (24 - top) & 0x7FFFFF) | static_cast<uint32_t>(x.power + top - 1 + 127) << 23 : 0;
    }
    table[i] |= x.negative && !x.nan ? 0x80000000u : 0;
  }
  return table;
}

// ---- many at once ---------------------------------------------------------------------------------------------------

// Each returns 0 where all `n` are right.

ZCKPT_VECTOR uint32_t doubts_bf16_in_f32(const char* a, const char* b, size_t n) {
  uint32_t doubts = 0;
  for (size_t i = 0; i < n; ++i) doubts |= (static_cast<uint32_t>(load<uint16_t>(a, i)) << 16) ^ load<uint32_t>(b, i);
  return doubts;
}

// Once their bits stand at the same place, a half is as far from a single as these are from each other, in units of the single's
// last bit; of another sign, it is farther than any.
ZCKPT_VECTOR uint32_t doubts_f32_in_bf16(const char* a, const char* b, size_t n, uint32_t least_doubtful) {
  uint32_t furthest = 0, largest = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t x = load<uint32_t>(a, i), y = load<uint16_t>(b, i), apart = x - (y << 16);
    furthest = std::max(furthest, std::min(apart, 0 - apart) + (y & 1));  // in the middle the even one is right
    largest = std::max(largest, x & 0x7FFFFFFF);
  }
  return furthest > 0x8000 || largest >= least_doubtful;
}

// Below the smallest normal half, a half is a whole number of 2^-24: the single's significand is held against it there.
ZCKPT_VECTOR uint32_t doubts_f32_in_f16(const char* a, const char* b, size_t n, uint32_t least_doubtful) {
  uint32_t doubts = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t x = load<uint32_t>(a, i), y = load<uint16_t>(b, i), odd = y & 1, size = x & 0x7FFFFFFF, half = y & 0x7FFF;
    const bool is_small = size < 113u << 23;
    const uint32_t capped = size < 0x47800000 ? size : 0x47800000;
    const uint32_t exponent = size >> 23, right = exponent < 101 ? 25 : exponent > 113 ? 13 : 126 - exponent;
    const uint32_t unit = is_small ? right : 13;
    const uint32_t place = is_small ? (size & 0x7FFFFF) | 0x800000 : capped;
    const uint32_t wanted = is_small ? (half < 0x401 ? half : 0) << unit : (half << 13) + (112u << 23);
    const uint32_t middle = (1u << unit) >> 1;
    const uint32_t distance = place - wanted + middle - odd;
    doubts |= static_cast<uint32_t>(distance > 2 * (middle - odd)) | (x >> 31 ^ y >> 15) | static_cast<uint32_t>(size >= least_doubtful) |
              static_cast<uint32_t>(is_small && half > 0x400);
  }
  return doubts;
}

template <typename From, size_t kCount>
uint32_t doubts_in_table(const std::array<uint32_t, kCount>& table, const char* a, const char* b, size_t n) {
  uint32_t doubts = 0;
  for (size_t i = 0; i < n; ++i) doubts |= table[load<From>(a, i)] ^ load<uint32_t>(b, i);
  return doubts;
}

}  // namespace

bool is_beyond_doubt(Likeness likeness, DType from, DType to, const char* a, const char* b, size_t n) {
  if (from == to) return !std::memcmp(a, b, n * kItemSize[from]);
  if (from == BF16 && to == F32) return !doubts_bf16_in_f32(a, b, n);
  const bool clamped = likeness == Likeness::kClamped;
  if (from == F32 && to == BF16) return !doubts_f32_in_bf16(a, b, n, clamped ? 0x7F7F8000 : 0x7F800001);
  if (from == F32 && to == F16) return !doubts_f32_in_f16(a, b, n, clamped ? 0x477FF000 : 0x7F800001);
  if (to != F32) return false;
  static const auto halves = table_of<65536>(F16);
  static const auto e4m3 = table_of<256>(F8_E4M3), e5m2 = table_of<256>(F8_E5M2), e4m3fnuz = table_of<256>(F8_E4M3FNUZ), e5m2fnuz = table_of<256>(F8_E5M2FNUZ);
  switch (from) {
    case F16: return !doubts_in_table<uint16_t>(halves, a, b, n);
    case F8_E4M3: return !doubts_in_table<uint8_t>(e4m3, a, b, n);
    case F8_E5M2: return !doubts_in_table<uint8_t>(e5m2, a, b, n);
    case F8_E4M3FNUZ: return !doubts_in_table<uint8_t>(e4m3fnuz, a, b, n);
    case F8_E5M2FNUZ: return !doubts_in_table<uint8_t>(e5m2fnuz, a, b, n);
    default: return false;
  }
}

bool can_judge(DType from, DType to) { return from == to || (is_float(from) && (to == F32 || to == F16 || to == BF16)); }

Unlike judge(Likeness likeness, DType from, DType to, const void* a, const void* b, size_t n) {
  const size_t a_size = kItemSize[from], b_size = kItemSize[to];
  const auto *x = static_cast<const char*>(a), *y = static_cast<const char*>(b);
  Unlike unlike{0, 0};
  if (from == to && !std::memcmp(x, y, n * a_size)) return unlike;
  for (size_t start = 0, m; start < n; start += m, x += m * a_size, y += m * b_size) {
    m = std::min(kBlockNumbers, n - start);
    if (is_beyond_doubt(likeness, from, to, x, y, m)) continue;
    for (size_t i = 0; i < m; ++i) {
      const bool same = !is_float(from) ? !std::memcmp(x + i * a_size, y + i * b_size, a_size)
                                        : is_right(likeness, from, to, bits_of(from, x, i), bits_of(to, y, i));
      if (same) continue;
      if (!unlike.count++) unlike.first = start + i;
    }
  }
  return unlike;
}

}  // namespace zckpt
