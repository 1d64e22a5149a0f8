// Loops over elements that are computed on their way; zckpt/engine/kernels.py has the reference in numpy that each equals, bit for bit.
#pragma once
#include <cstddef>

namespace zckpt {

// Adds weight * x[i] to total[i]; product and sum are rounded to fp32, never fused.
void accumulate(float* total, const float* x, size_t n, float weight);

// Divides each number.
void divide(float* x, size_t n, float divisor);

// The sums of a * b, a * a and b * b in fp64, of every 16th element in order, then of these 16 sums in order.
struct Products {
  double ab, aa, bb;
};
Products products(const float* a, const float* b, size_t n);

}  // namespace zckpt
