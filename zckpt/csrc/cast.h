// Element types and casts between them. The numbers are those of zckpt/dtypes.py.
#pragma once
#include <cstddef>
#include <cstdint>

namespace zckpt {

enum DType : uint8_t {
  F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U8, U16, U32, U64, BOOL, C64, C128, F8_E4M3FNUZ, F8_E5M2FNUZ,
  kDTypes
};
constexpr uint8_t kItemSize[kDTypes] = {8, 4, 2, 2, 1, 1, 8, 4, 2, 1, 1, 2, 4, 8, 1, 8, 16, 1, 1};

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
