// Casts between element types.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dtypes.h"

namespace zckpt {

// Finite numbers that became infinite, and the largest of them.
struct Overflow {
  uint64_t count = 0;
  double largest = 0;
};

// Casts `n` elements, once and to nearest even, by whole-number arithmetic: no setting of the processor changes it. NaN stays NaN (bf16: 0x7FC0, as torch's scalar path gives). With `clamp`, finite
// numbers that would become infinite become the largest finite number instead; they are counted either way.
// False when there is no such cast. The vector paths give the same bits as the portable one for every input.
bool cast(DType from, DType to, const void* src, void* dst, size_t n, bool clamp, Overflow& overflow);

// Reverses the bytes of `n` numbers of 2, 4 or 8 bytes in place.
void swap_bytes(void* data, size_t n, unsigned size);

// cast_avx2.cpp (where `has(Unit::kHalves)`): casts as many elements as it can from the front and returns how many; it stops before a block of 8 in
// which something overflows, which the portable code then counts.
size_t f32_to_f16_avx2(const float* src, uint16_t* dst, size_t n);
size_t f32_to_bf16_avx2(const float* src, uint16_t* dst, size_t n);
size_t f16_to_f32_avx2(const uint16_t* src, float* dst, size_t n);

}  // namespace zckpt
