#include "kernels.h"

#include "floats.h"

namespace zckpt {

void accumulate(float* __restrict total, const float* __restrict x, size_t n, float weight) {
  const PlainFloats floats;
  for (size_t i = 0; i < n; ++i) total[i] += weight * x[i];
}

}  // namespace zckpt
