// A thin matrix product that is added to a matrix: what a LoRA does to a weight.
#pragma once
#include <cstddef>

namespace zckpt {

constexpr size_t kPanel = 64;  // columns of the right factor that are packed together

inline size_t packed_size(size_t rank, size_t columns) { return (columns + kPanel - 1) / kPanel * kPanel * rank; }

// Packs a factor of `rank` rows by panels, whose last columns may be zeros: element (k, j) is at right[k * row_step + j * step].
void pack_right(const float* right, size_t row_step, size_t step, size_t rank, size_t columns, float* packed);

// The columns [low, high) of some rows of a product: of `left`, which is rows x rank, and of a factor that was packed.
struct Product {
  const float* left;
  const float* right;
  size_t rank, rows, low, high;
  float scaling;
};

// Adds it to a matrix with rows that are `pitch` numbers apart; column `low` of the first row is at `total`. As `add_low_rank` of
// kernels.h computes it: the bits of an element do not depend on how a matrix is cut.
void add_product(float* total, size_t pitch, const Product& product);

}  // namespace zckpt
