// Whether numbers are what others become in another dtype: rounded once and to nearest even. Nothing is rounded here. A number is
// right if no other one of its dtype is nearer, which whole numbers tell; so this shares nothing with the casts (cast.cpp) whose
// outputs it judges.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dtypes.h"

namespace zckpt {

enum class Likeness : uint8_t {
  kExact,    // bit for bit what the cast gives; numbers too large become infinite
  kClamped,  // the same, but these become the largest finite number
  kSame,     // the same numbers: zeros of both signs are alike, and so are all NaNs
};

struct Unlike {
  uint64_t count;
  size_t first;  // where there are any
};

// Whether `judge` knows these dtypes: twice the same one, or any float and one of F32, F16, BF16.
bool can_judge(DType from, DType to);

// A quick look at few numbers: true only where all of `b` are what those of `a` become; false may be a mistake.
bool is_beyond_doubt(Likeness likeness, DType from, DType to, const char* a, const char* b, size_t n);

// Which of the `n` numbers of `b` are not what those of `a` become. Neither need be aligned.
Unlike judge(Likeness likeness, DType from, DType to, const void* a, const void* b, size_t n);

}  // namespace zckpt
