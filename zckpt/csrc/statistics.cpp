// Blocks of numbers are widened to doubles and looked at twice: a quick pass for what is finite, written so that the
// compiler makes vector code of it, and a careful one for the rest. Sums run in eight lanes of a fixed order, so that every
// machine gets the same last bit.
#include "statistics.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

#include "nearest.h"
#include "simd.h"

namespace zckpt {
namespace {

constexpr size_t kBlockNumbers = 2048, kLanes = 8;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename T>
T load(const void* p, size_t i) {
  T x;
  std::memcpy(&x, static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
  return x;
}

bool is_float(DType d) { return d <= F8_E5M2 || d == F8_E4M3FNUZ || d == F8_E5M2FNUZ; }

// A complex array as twice as many real numbers.
DType real(DType d) { return d == C64 ? F32 : d == C128 ? F64 : d; }

// ---- one array ------------------------------------------------------------------------------------------------------

struct Counts {  // without a constructor: clang makes none for functions of two versions, and the library would not load
  uint64_t nan, inf, nonzero;
};

template <typename U>
inline Counts count_plain(const char* data, size_t n, U magnitude, U infinity) {
  Counts total{};
  for (size_t i = 0; i < n;) {
    const size_t first = i, stop = std::min<size_t>(n, first + kBlockNumbers);
    U largest = 0, nonzero = 0;  // as wide as the numbers, so that vectors keep their width
    for (; i < stop; ++i) {
      const U x = load<U>(data, i) & magnitude;
      largest = x > largest ? x : largest;
      nonzero = static_cast<U>(nonzero + (x != 0));
    }
    total.nonzero += nonzero;
    for (size_t j = largest < infinity ? stop : first; j < stop; ++j) {
      const U x = load<U>(data, j) & magnitude;
      total.nan += x > infinity;
      total.inf += x == infinity;
    }
  }
  return total;
}

ZCKPT_VECTOR Counts count16(const char* data, size_t n, uint16_t magnitude, uint16_t infinity) { return count_plain<uint16_t>(data, n, magnitude, infinity); }
ZCKPT_VECTOR Counts count32(const char* data, size_t n, uint32_t magnitude, uint32_t infinity) { return count_plain<uint32_t>(data, n, magnitude, infinity); }
ZCKPT_VECTOR Counts count64(const char* data, size_t n, uint64_t magnitude, uint64_t infinity) { return count_plain<uint64_t>(data, n, magnitude, infinity); }

Counts count_float8(DType dtype, const uint8_t* data, size_t n) {
  std::array<uint8_t, 256> codes;
  for (size_t i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
  std::array<float, 256> values;
  Overflow unused;
  cast(dtype, F32, codes.data(), values.data(), 256, false, unused);
  Counts c{};
  for (size_t i = 0; i < n; ++i) {
    const float x = values[data[i]];
    c.nan += std::isnan(x);
    c.inf += std::isinf(x);
    c.nonzero += x != 0;
  }
  return c;
}

Counts count_any(DType dtype, const void* data, size_t n) {
  const auto* p = static_cast<const char*>(data);
  switch (dtype) {
    case F64: return count64(p, n, ~(1ull << 63), 0x7FFull << 52);
    case F32: return count32(p, n, 0x7FFFFFFF, 0x7F800000);
    case F16: return count16(p, n, 0x7FFF, 0x7C00);
    case BF16: return count16(p, n, 0x7FFF, 0x7F80);
    default: break;
  }
  if (dtype == F8_E8M0) return {static_cast<uint64_t>(std::count(p, p + n, '\xFF')), 0, n};
  if (is_float(dtype)) return count_float8(dtype, static_cast<const uint8_t*>(data), n);
  Counts c{};  // whole numbers
  const size_t size = kItemSize[dtype];
  for (size_t i = 0; i < n * size; i += size) c.nonzero += std::any_of(p + i, p + i + size, [](char x) { return x != 0; });
  return c;
}

// ---- two arrays -----------------------------------------------------------------------------------------------------

ZCKPT_VECTOR void widen_bf16(const char* data, size_t n, double* out) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(load<uint16_t>(data, i)) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    out[i] = x;
  }
}

ZCKPT_VECTOR void widen_singles(const char* data, size_t n, double* out) {
  for (size_t i = 0; i < n; ++i) out[i] = load<float>(data, i);
}

void widen(DType dtype, const void* p, size_t first, size_t n, double* out) {
  const char* data = static_cast<const char*>(p) + first * kItemSize[dtype];
  const auto whole = [&](auto zero) {
    for (size_t i = 0; i < n; ++i) out[i] = static_cast<double>(load<decltype(zero)>(data, i));
  };
  switch (dtype) {
    case F64: std::memcpy(out, data, n * 8); return;
    case F32: widen_singles(data, n, out); return;
    case BF16: widen_bf16(data, n, out); return;
    case I64: whole(int64_t{}); return;
    case I32: whole(int32_t{}); return;
    case I16: whole(int16_t{}); return;
    case I8: whole(int8_t{}); return;
    case U8: case BOOL: whole(uint8_t{}); return;
    case U16: whole(uint16_t{}); return;
    case U32: whole(uint32_t{}); return;
    case U64: whole(uint64_t{}); return;
    case F8_E8M0:
      for (size_t i = 0; i < n; ++i) {
        const auto power = load<uint8_t>(data, i);
        out[i] = power == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, power - 127);
      }
      return;
    default: break;
  }
  float singles[kBlockNumbers];
  Overflow unused;
  cast(dtype, F32, data, singles, n, false, unused);
  widen_singles(reinterpret_cast<const char*>(singles), n, out);
}

struct Lanes {
  double max_abs[kLanes] = {}, max_rel[kLanes] = {}, dot[kLanes] = {}, square[kLanes] = {}, other[kLanes] = {};
};

// Whole groups of eight numbers, all finite.
ZCKPT_VECTOR void measure(const double* a, const double* b, size_t n, Lanes& l) {
  for (size_t i = 0; i < n; i += kLanes)
    for (size_t j = 0; j < kLanes; ++j) {
      const double x = a[i + j], y = b[i + j], d = std::fabs(x - y), ax = std::fabs(x), ay = std::fabs(y), m = ax > ay ? ax : ay;
      const double r = d / (m > 0 ? m : 1);
      l.max_abs[j] = d > l.max_abs[j] ? d : l.max_abs[j];
      l.max_rel[j] = r > l.max_rel[j] ? r : l.max_rel[j];
      l.dot[j] += x * y;
      l.square[j] += x * x;
      l.other[j] += y * y;
    }
}

ZCKPT_VECTOR void measure_same(const double* a, size_t n, Lanes& l) {
  for (size_t i = 0; i < n; i += kLanes)
    for (size_t j = 0; j < kLanes; ++j) l.square[j] += a[i + j] * a[i + j];
}

double sum(const double* lanes) {
  double total = 0;
  for (size_t j = 0; j < kLanes; ++j) total += lanes[j];
  return total;
}

ZCKPT_VECTOR uint64_t count_beyond(const double* a, const double* b, size_t n, double atol, double rtol) {
  uint64_t beyond = 0;
  for (size_t i = 0; i < n; ++i) beyond += std::fabs(a[i] - b[i]) > atol + rtol * std::fabs(b[i]);
  return beyond;
}

template <typename U>
inline uint64_t count_unequal_plain(const char* a, const char* b, size_t n) {
  uint64_t unequal = 0;
  for (size_t i = 0; i < n; ++i) unequal += load<U>(a, i) != load<U>(b, i);
  return unequal;
}

ZCKPT_VECTOR uint64_t count_unequal16(const char* a, const char* b, size_t n) { return count_unequal_plain<uint16_t>(a, b, n); }
ZCKPT_VECTOR uint64_t count_unequal32(const char* a, const char* b, size_t n) { return count_unequal_plain<uint32_t>(a, b, n); }
ZCKPT_VECTOR uint64_t count_unequal64(const char* a, const char* b, size_t n) { return count_unequal_plain<uint64_t>(a, b, n); }

uint64_t count_unequal(size_t size, const void* x, const void* y, size_t n) {
  const auto *a = static_cast<const char*>(x), *b = static_cast<const char*>(y);
  return size == 8 ? count_unequal64(a, b, n) : size == 4 ? count_unequal32(a, b, n) : size == 2 ? count_unequal16(a, b, n) : count_unequal_plain<uint8_t>(a, b, n);
}

// Numbers [first, first + n) of two arrays as doubles, and how to tell whether two of them are the same.
struct Block {
  const Relation& relation;
  DType a_dtype, b_dtype;
  const void *a_data, *b_data;
  size_t first;
  const double *a, *b;

  bool same(size_t i) const {
    const double x = a[i], y = b[i];
    if (relation.rounded) return x == y || (std::isnan(x) && std::isnan(y));
    if (relation.atol >= 0) {
      if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
      if (std::isinf(x) || std::isinf(y)) return x == y;
      return std::fabs(x - y) <= relation.atol + relation.rtol * std::fabs(y);
    }
    const size_t size = kItemSize[a_dtype];
    if (a_dtype == b_dtype) return !std::memcmp(at(a_data, size, i), at(b_data, size, i), size);
    if (!is_float(a_dtype)) return whole(a_dtype, a_data, i) == whole(b_dtype, b_data, i);
    return std::isnan(x) || std::isnan(y) ? std::isnan(x) && std::isnan(y) : !std::memcmp(&x, &y, 8);
  }

 private:
  const char* at(const void* data, size_t size, size_t i) const { return static_cast<const char*>(data) + (first + i) * size; }

  // Doubles cannot tell all of these apart.
  __extension__ __int128 whole(DType dtype, const void* data, size_t i) const {
    switch (dtype) {
      case I64: return load<int64_t>(data, first + i);
      case U64: return load<uint64_t>(data, first + i);
      default: double x; widen(dtype, data, first + i, 1, &x); return static_cast<int64_t>(x);
    }
  }
};

// How many of a block's numbers are not the same; more than `n` where that must be found out one by one.
uint64_t count_differences(const Block& block, size_t n, bool finite) {
  const Relation& relation = block.relation;
  if (relation.atol >= 0) return finite ? count_beyond(block.a, block.b, n, relation.atol, relation.rtol) : UINT64_MAX;
  const size_t size = kItemSize[block.a_dtype];
  if (block.a_dtype == block.b_dtype && !relation.rounded)
    return count_unequal(size, static_cast<const char*>(block.a_data) + block.first * size, static_cast<const char*>(block.b_data) + block.first * size, n);
  if (finite && is_float(block.a_dtype) && !relation.rounded) return count_unequal(8, block.a, block.b, n);
  return UINT64_MAX;
}

void find_differences(const Block& block, size_t n, bool finite, uint64_t start, Statistics& statistics) {
  const uint64_t known = count_differences(block, n, finite);
  if (known <= n) statistics.differ += known;
  if (known == 0 || (known <= n && statistics.first < start)) return;
  for (size_t i = 0; i < n; ++i) {
    if (block.same(i)) continue;
    statistics.first = std::min(statistics.first, start + i);
    if (known <= n) return;
    ++statistics.differ;
  }
}

void take_lanes(const Lanes& lanes, Statistics& statistics) {
  statistics.max_abs = std::max(statistics.max_abs, *std::max_element(lanes.max_abs, lanes.max_abs + kLanes));
  statistics.max_rel = std::max(statistics.max_rel, *std::max_element(lanes.max_rel, lanes.max_rel + kLanes));
  statistics.dot += sum(lanes.dot);
  statistics.square += sum(lanes.square);
  statistics.other_square += sum(lanes.other);
}

void measure_carefully(double x, double y, Statistics& statistics) {
  if (std::isfinite(x) && std::isfinite(y)) {
    const double d = std::fabs(x - y), m = std::max(std::fabs(x), std::fabs(y));
    statistics.max_abs = std::max(statistics.max_abs, d);
    statistics.max_rel = std::max(statistics.max_rel, d / (m > 0 ? m : 1));
    statistics.dot += x * y;
    statistics.square += x * x;
    statistics.other_square += y * y;
  } else if (x != y && !(std::isnan(x) && std::isnan(y))) {
    statistics.max_abs = statistics.max_rel = kInfinity;
  }
}

void take_distances(const double* a, const double* b, size_t n, Spread& spread) {
  for (size_t i = 0; i < n; ++i) {
    const double distance = std::fabs(a[i] - b[i]);
    if (!(distance > 0) || !std::isfinite(a[i]) || !std::isfinite(b[i])) continue;
    uint64_t bits;
    std::memcpy(&bits, &distance, 8);
    const int exponent = static_cast<int>(bits >> 52) - 1023;  // of subnormal numbers -1023, which is below the least
    ++spread.counts[std::clamp(exponent, Spread::kLeast, Spread::kLargest) - Spread::kLeast];
  }
}

}  // namespace

bool Spread::is_empty() const {
  return std::all_of(std::begin(counts), std::end(counts), [](uint64_t n) { return n == 0; });
}

void Spread::add(const Spread& other) {
  for (size_t i = 0; i < std::size(counts); ++i) counts[i] += other.counts[i];
}

void Statistics::add(const Statistics& later) {
  count += later.count;
  nan += later.nan;
  inf += later.inf;
  nonzero += later.nonzero;
  other_nan += later.other_nan;
  other_inf += later.other_inf;
  differ += later.differ;
  first = std::min(first, later.first);
  max_abs = std::max(max_abs, later.max_abs);
  max_rel = std::max(max_rel, later.max_rel);
  dot += later.dot;
  square += later.square;
  other_square += later.other_square;
}

void count(DType dtype, const void* data, size_t n, Statistics& statistics) {
  if (real(dtype) != dtype) return count(real(dtype), data, 2 * n, statistics);
  const Counts c = count_any(dtype, data, n);
  statistics.count += n;
  statistics.nan += c.nan;
  statistics.inf += c.inf;
  statistics.nonzero += c.nonzero;
}

bool compare(const Relation& relation, DType a_dtype, const void* a, DType b_dtype, const void* b, size_t n, uint64_t start, Statistics& statistics,
             Spread* spread) {
  if (real(a_dtype) != a_dtype && real(b_dtype) != b_dtype)
    return compare(relation, real(a_dtype), a, real(b_dtype), b, 2 * n, 2 * start, statistics, spread);
  if (real(a_dtype) != a_dtype || real(b_dtype) != b_dtype || is_float(a_dtype) != is_float(b_dtype)) return false;
  const size_t a_size = kItemSize[a_dtype], b_size = kItemSize[b_dtype];
  alignas(64) double x[kBlockNumbers], y[kBlockNumbers];
  uint64_t rounded[kBlockNumbers];
  for (size_t first = 0; first < n; first += kBlockNumbers) {
    const size_t m = std::min(kBlockNumbers, n - first), whole = m / kLanes * kLanes;
    const char *a_block = static_cast<const char*>(a) + first * a_size, *b_block = static_cast<const char*>(b) + first * b_size;
    const Counts in_a = count_any(a_dtype, a_block, m);
    statistics.count += m;
    statistics.nan += in_a.nan;
    statistics.inf += in_a.inf;
    statistics.nonzero += in_a.nonzero;
    if (relation.rounded) {
      if (is_beyond_doubt(Likeness::kExact, a_dtype, b_dtype, a_block, b_block, m)) continue;
      const void* expected = a_block;
      if (a_dtype != b_dtype) {
        Overflow unused;
        if (!cast(a_dtype, b_dtype, a_block, rounded, m, false, unused)) return false;
        expected = rounded;
      }
      if (!std::memcmp(expected, b_block, m * b_size)) continue;
      widen(b_dtype, expected, 0, m, x);
      widen(b_dtype, b_block, 0, m, y);
      find_differences({relation, b_dtype, b_dtype, expected, b_block, 0, x, y}, m, false, start + first, statistics);
      continue;
    }
    const bool identical = a_dtype == b_dtype && !std::memcmp(a_block, b_block, m * a_size);
    const Counts in_b = identical ? in_a : count_any(b_dtype, b_block, m);
    statistics.other_nan += in_b.nan;
    statistics.other_inf += in_b.inf;
    const bool finite = !(in_a.nan || in_a.inf || in_b.nan || in_b.inf);
    Lanes lanes;
    widen(a_dtype, a_block, 0, m, x);
    if (identical && finite) {
      measure_same(x, whole, lanes);
      std::copy(lanes.square, lanes.square + kLanes, lanes.dot);
      std::copy(lanes.square, lanes.square + kLanes, lanes.other);
      take_lanes(lanes, statistics);
      for (size_t i = whole; i < m; ++i) measure_carefully(x[i], x[i], statistics);
      continue;
    }
    widen(b_dtype, b_block, 0, m, y);
    if (finite) {
      measure(x, y, whole, lanes);
      take_lanes(lanes, statistics);
    }
    for (size_t i = finite ? whole : 0; i < m; ++i) measure_carefully(x[i], y[i], statistics);
    if (spread) take_distances(x, y, m, *spread);
    if (!identical) find_differences({relation, a_dtype, b_dtype, a, b, first, x, y}, m, finite, start + first, statistics);
  }
  return true;
}

}  // namespace zckpt
