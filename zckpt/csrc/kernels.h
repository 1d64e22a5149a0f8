// Loops over elements that are computed on their way; zckpt/engine/kernels.py has the reference in numpy that each equals, bit for bit.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace zckpt {

// Adds weight * x[i] to total[i]; product and sum are rounded to fp32, never fused.
void accumulate(float* total, const float* x, size_t n, float weight);

// Moves total[i] by (x[i] - total[i]) / divisor.
void approach(float* total, const float* x, size_t n, float divisor);

// Makes total[i] keep * total[i] + weight * x[i], never fused.
void blend(float* total, const float* x, size_t n, float keep, float weight);

// The sums of a * b, a * a and b * b in fp64, of every 16th element in order, then of these 16 sums in order.
struct Products {
  double ab, aa, bb;
};
Products products(const float* a, const float* b, size_t n);

// Adds scaling * (left @ right) to a matrix of rows x columns; left has rows x rank numbers, right rank x columns. Each element of the
// product is a sum of fused multiply-adds in fp32, in the order of the ranks: so torch's matrix product computes it on processors with
// AVX2, but for very small matrices and for ranks of 256 and more. It is multiplied by scaling and added, each time rounded to fp32.
void add_low_rank(float* total, const float* left, const float* right, size_t rows, size_t columns, size_t rank, float scaling);

// What stays of the difference of `numbers` from a base, and what it counts: `Thinned` of zckpt/core/folds.py, behind an address.
struct Thinned {
  uint64_t numbers;
  int64_t least, last;
  uint64_t key;
  int64_t draws;
  float scale, weight;
};

// How differences that are thinned out are added.
struct Sparsely {
  bool elects, normalises;
  float factor;
};

// Moves n numbers, of which `first` is the number of the first one in its tensor, by what stays of others' differences from them.
void move_sparsely(float* total, size_t n, uint64_t first, const Thinned* kept, size_t count, const Sparsely& how);

// The sums of |numbers - base| in fp64, of all and of those that stay: of every 16th element in order, then of these 16 sums in order.
struct Lengths {
  double all, kept;
};
Lengths lengths(const float* base, size_t n, uint64_t first, const Thinned& kept);

// Of the magnitudes of x - base, as bits: how many are above `high`, and how many from `low` on to it; the latter go into `found`.
struct Selected {
  size_t above, near;
};
Selected select_near(const float* x, const float* base, size_t n, uint32_t low, uint32_t high, uint32_t* found);

// How blocks lie over a matrix of which `rows` rows, from number `first` on, are at hand. Blocks are numbered row by row.
struct Blocks {
  size_t rows, columns, block_rows, block_columns, first;
};

// The largest magnitude in each block. Infinity is larger than any number, and NaN (0x7FC00000) than infinity. Whole
// numbers of 16 bits are those of bf16.
void largest(const float* x, const Blocks& blocks, float* found);
void largest(const uint16_t* x, const Blocks& blocks, float* found);

// Multiplies the elements of each block by its factor, rounded to fp32.
void multiply_blocks(float* x, const Blocks& blocks, const float* factors);

// What became of numbers that were rounded.
struct Rounded {
  uint64_t saturated = 0;    // beyond the largest number by half a step: nearer to the next step, if there were one, than to the largest number
  uint64_t underflowed = 0;  // became zero and were not
  float error = 0;           // the largest |x - rounded x|; NaN if an element is NaN
};

// Calls `each(first element, elements, block)` for every part of a row that is in one block.
template <typename Each>
void for_each_run(const Blocks& b, const Each& each) {
  const size_t across = (b.columns + b.block_columns - 1) / b.block_columns;
  for (size_t row = 0; row < b.rows; ++row)
    for (size_t block = (b.first + row) / b.block_rows * across, at = 0; at < b.columns; ++block, at += b.block_columns)
      each(row * b.columns + at, std::min(b.block_columns, b.columns - at), block);
}

}  // namespace zckpt
