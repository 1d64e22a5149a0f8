#include "cast.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "simd.h"

namespace zckpt {
namespace {

uint32_t bits_of(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}
float from_bits(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 31) return from_bits(sign | 0x7F800000 | (mantissa << 13) | (mantissa ? 0x400000 : 0));
  if (exponent) return from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  return from_bits(bits_of(std::ldexp(static_cast<float>(mantissa), -24)) | sign);
}

// The bits of a binary float (of `kFrom` mantissa bits, exponents with `kFromBias`) in a narrower form, to nearest even. NaN
// becomes quiet and keeps the bits of its payload that there is room for.
template <typename To, int kFrom, int kFromBias, int kTo, int kToBias, typename From>
To narrowed(From bits) {
  constexpr int kSign = 8 * sizeof(From) - 1, kShift = kFrom - kTo, kRebias = kFromBias - kToBias;
  constexpr From kOne = 1, kInfinity = From{2 * kFromBias + 1} << kFrom, kTarget = From{2 * kToBias + 1} << kTo;
  const From a = bits & ((kOne << kSign) - 1);
  const auto sign = static_cast<To>((bits >> kSign) << (8 * sizeof(To) - 1));
  if (a > kInfinity) return static_cast<To>(sign | kTarget | (kOne << (kTo - 1)) | ((a >> kShift) & ((kOne << kTo) - 1)));
  if (a >= From{kRebias + 1} << kFrom) {
    const From x = a - (From{kRebias} << kFrom), y = (x + (kOne << (kShift - 1)) - 1 + ((x >> kShift) & 1)) >> kShift;
    return static_cast<To>(sign | (y < kTarget ? y : kTarget));
  }
  // Subnormal there: a mantissa in units of the smallest number.
  const int exponent = static_cast<int>(a >> kFrom), right = kShift + kRebias + 1 - (exponent ? exponent : 1);
  if (right > kFrom + 1) return sign;  // less than half of it
  const From mantissa = (a & ((kOne << kFrom) - 1)) | (exponent ? kOne << kFrom : 0), y = mantissa >> right;
  const From rest = mantissa & ((kOne << right) - 1), half = kOne << (right - 1);
  return static_cast<To>(sign | (y + (rest > half || (rest == half && (y & 1)))));
}

uint64_t bits_of(double x) {
  uint64_t b;
  std::memcpy(&b, &x, 8);
  return b;
}

uint16_t to_half(float x) { return narrowed<uint16_t, 23, 127, 10, 15>(bits_of(x)); }
uint16_t to_half(double x) { return narrowed<uint16_t, 52, 1023, 10, 15>(bits_of(x)); }
uint16_t to_bf16(float x) { return std::isnan(x) ? 0x7FC0 : narrowed<uint16_t, 23, 127, 7, 127>(bits_of(x)); }
uint16_t to_bf16(double x) { return std::isnan(x) ? 0x7FC0 : narrowed<uint16_t, 52, 1023, 7, 127>(bits_of(x)); }
float to_single(float x) { return x; }
float to_single(double x) { return from_bits(narrowed<uint32_t, 52, 1023, 23, 127>(bits_of(x))); }

float bf16_to_float(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }

using Table = std::array<float, 256>;
Table float8_table(int exponent_bits, int bias, bool fnuz) {
  Table table{};
  const int mantissa_bits = 7 - exponent_bits;
  for (int i = 0; i < 256; ++i) {
    const int exponent = (i & 127) >> mantissa_bits, mantissa = i & ((1 << mantissa_bits) - 1);
    const int one = exponent ? 1 << mantissa_bits : 0;
    float x = std::ldexp(static_cast<float>(one + mantissa), (exponent ? exponent : 1) - bias - mantissa_bits);
    if (fnuz) {
      if (i == 128) x = std::numeric_limits<float>::quiet_NaN();
    } else if (exponent_bits == 5 && exponent == 31) {
      x = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    } else if (exponent_bits == 4 && (i & 127) == 127) {
      x = std::numeric_limits<float>::quiet_NaN();
    }
    table[static_cast<size_t>(i)] = (i & 128) && !(fnuz && i == 128) ? -x : x;
  }
  return table;
}

struct FromF64 { static double load(const void* p, size_t i) { double x; std::memcpy(&x, static_cast<const char*>(p) + 8 * i, 8); return x; } };
uint16_t load16(const void* p, size_t i) { uint16_t h; std::memcpy(&h, static_cast<const char*>(p) + 2 * i, 2); return h; }

template <typename Load>
void cast_all(Load load, DType to, void* dst, size_t n, bool clamp, Overflow& overflow) {
  const auto note = [&](double x, bool became_infinite) {
    if (!became_infinite || !std::isfinite(x)) return false;
    ++overflow.count;
    overflow.largest = std::fmax(overflow.largest, std::fabs(x));
    return clamp;
  };
  char* out = static_cast<char*>(dst);
  for (size_t i = 0; i < n; ++i) {
    const auto x = load(i);  // a double for F64, so that it is rounded once
    if (to == F32) {
      const float f = to_single(x), y = note(x, std::isinf(f)) ? std::copysign(std::numeric_limits<float>::max(), f) : f;
      std::memcpy(out + 4 * i, &y, 4);
    } else {
      uint16_t h = to == F16 ? to_half(x) : to_bf16(x);
      const uint16_t inf = to == F16 ? 0x7C00 : 0x7F80;
      if (note(x, (h & 0x7FFF) == inf)) h = static_cast<uint16_t>((h & 0x8000) | (inf - 1));
      std::memcpy(out + 2 * i, &h, 2);
    }
  }
}

// To fp32 from what is narrower: nothing is rounded.
template <typename From, typename Widen>
ZCKPT_INLINE void widen_all(const void* src, void* dst, size_t n, Widen widen) {
  const auto* from = static_cast<const char*>(src);
  auto* to = static_cast<char*>(dst);
  for (size_t i = 0; i < n; ++i) {
    From x;
    std::memcpy(&x, from + sizeof(From) * i, sizeof(From));
    const uint32_t y = widen(x);
    std::memcpy(to + 4 * i, &y, 4);
  }
}

ZCKPT_VECTOR void widen_bf16(const void* src, void* dst, size_t n) {
  widen_all<uint16_t>(src, dst, n, [](uint16_t x) { return static_cast<uint32_t>(x) << 16; });
}

void widen_float8(const Table& table, const void* src, void* dst, size_t n) {
  widen_all<uint8_t>(src, dst, n, [&](uint8_t x) { return bits_of(table[x]); });
}

}  // namespace

bool cast(DType from, DType to, const void* src, void* dst, size_t n, bool clamp, Overflow& overflow) {
  static const Table e4m3 = float8_table(4, 7, false), e5m2 = float8_table(5, 15, false);
  static const Table e4m3fnuz = float8_table(4, 8, true), e5m2fnuz = float8_table(5, 16, true);
  if (to != F32 && to != F16 && to != BF16) return false;
  const auto* bytes = static_cast<const uint8_t*>(src);
  if (to == F32) {
    switch (from) {
      case BF16: widen_bf16(src, dst, n); return true;
      case F8_E4M3: widen_float8(e4m3, src, dst, n); return true;
      case F8_E5M2: widen_float8(e5m2, src, dst, n); return true;
      case F8_E4M3FNUZ: widen_float8(e4m3fnuz, src, dst, n); return true;
      case F8_E5M2FNUZ: widen_float8(e5m2fnuz, src, dst, n); return true;
      default: break;
    }
  }
  const auto portable = [&](size_t first, size_t count) {
    void* out = static_cast<char*>(dst) + first * kItemSize[to];
    switch (from) {
      case F64: cast_all([&](size_t i) { return FromF64::load(src, first + i); }, to, out, count, clamp, overflow); break;
      case F32: cast_all([&](size_t i) { float x; std::memcpy(&x, bytes + 4 * (first + i), 4); return x; }, to, out, count, clamp, overflow); break;
      case F16: cast_all([&](size_t i) { return half_to_float(load16(src, first + i)); }, to, out, count, clamp, overflow); break;
      case BF16: cast_all([&](size_t i) { return bf16_to_float(load16(src, first + i)); }, to, out, count, clamp, overflow); break;
      case F8_E4M3: cast_all([&](size_t i) { return e4m3[bytes[first + i]]; }, to, out, count, clamp, overflow); break;
      case F8_E5M2: cast_all([&](size_t i) { return e5m2[bytes[first + i]]; }, to, out, count, clamp, overflow); break;
      case F8_E4M3FNUZ: cast_all([&](size_t i) { return e4m3fnuz[bytes[first + i]]; }, to, out, count, clamp, overflow); break;
      case F8_E5M2FNUZ: cast_all([&](size_t i) { return e5m2fnuz[bytes[first + i]]; }, to, out, count, clamp, overflow); break;
      default: return false;
    }
    return true;
  };
#if defined(ZCKPT_X86)
  if (has(Unit::kHalves)) {
    size_t done = 0;
    const auto vector = [&](auto run) {
      while (done < n) {
        done += run(done, n - done);
        const size_t rest = n - done < 8 ? n - done : 8;
        portable(done, rest);
        done += rest;
      }
      return true;
    };
    if (from == F32 && to == F16)
      return vector([&](size_t i, size_t m) { return f32_to_f16_avx2(reinterpret_cast<const float*>(bytes + 4 * i), static_cast<uint16_t*>(dst) + i, m); });
    if (from == F32 && to == BF16)
      return vector([&](size_t i, size_t m) { return f32_to_bf16_avx2(reinterpret_cast<const float*>(bytes + 4 * i), static_cast<uint16_t*>(dst) + i, m); });
    if (from == F16 && to == F32)
      return vector([&](size_t i, size_t m) { return f16_to_f32_avx2(reinterpret_cast<const uint16_t*>(bytes + 2 * i), static_cast<float*>(dst) + i, m); });
  }
#endif
  return portable(0, n);
}

void swap_bytes(void* data, size_t n, unsigned size) {
  auto* p = static_cast<uint8_t*>(data);
  for (size_t i = 0; i < n; ++i, p += size)
    for (unsigned a = 0, b = size - 1; a < b; ++a, --b) {
      const uint8_t t = p[a];
      p[a] = p[b];
      p[b] = t;
    }
}

}  // namespace zckpt
