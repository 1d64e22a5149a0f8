// Loops over elements that are computed on their way; zckpt/engine/kernels.py has the reference in numpy that each equals, bit for bit.
#pragma once
#include <cstddef>

namespace zckpt {

// Adds weight * x[i] to total[i]; product and sum are rounded to fp32, never fused.
void accumulate(float* total, const float* x, size_t n, float weight);

}  // namespace zckpt
