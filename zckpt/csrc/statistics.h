// What can be learned from numbers: of one array, and of two that should be the same.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cast.h"

namespace zckpt {

// Complex numbers count as two. Sums and maxima are taken where both numbers are finite; a number that is finite or NaN on
// one side only is infinitely different.
struct Statistics {
  uint64_t count = 0;
  uint64_t nan = 0, inf = 0, nonzero = 0;  // of the first array
  uint64_t other_nan = 0, other_inf = 0;   // of the second
  uint64_t differ = 0;                     // numbers that are not the same
  uint64_t first = UINT64_MAX;             // the first of them
  double max_abs = 0, max_rel = 0;         // |a - b|, and that divided by the larger of |a| and |b|
  double dot = 0, square = 0, other_square = 0;

  void add(const Statistics& later);
};

// How many pairs of finite numbers that are not equal are 2^e to 2^(e+1) apart: the first count is that of the least exponent e
// and of all below, the last one that of the largest and of all above.
struct Spread {
  static constexpr int kLeast = -128, kLargest = 127;
  uint64_t counts[kLargest - kLeast + 1];

  bool is_empty() const;
  void add(const Spread& other);
};

struct Relation {
  bool rounded = false;         // the second array should be the first, rounded to its dtype; otherwise:
  double atol = -1, rtol = -1;  // |a - b| <= atol + rtol |b| is the same; negative: only what is the same bit for bit is
};

// Counts what is not finite and what is not zero.
void count(DType dtype, const void* data, size_t n, Statistics& statistics);

// Compares `n` numbers; `start` is the number of the first. All but `rounded` comparisons also count as `count` does.
// `spread`, if there is one, gets their distances; of a `rounded` comparison none. False when the two dtypes cannot be compared.
bool compare(const Relation& relation, DType a_dtype, const void* a, DType b_dtype, const void* b, size_t n, uint64_t start, Statistics& statistics,
             Spread* spread = nullptr);

}  // namespace zckpt
