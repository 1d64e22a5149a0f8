// Element types. The numbers are those of zckpt/core/dtypes.py.
#pragma once
#include <cstdint>

namespace zckpt {

enum DType : uint8_t {
  F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U8, U16, U32, U64, BOOL, C64, C128, F8_E4M3FNUZ, F8_E5M2FNUZ,
  F8_E8M0,  // powers of two, which are never cast
  kDTypes
};
constexpr uint8_t kItemSize[kDTypes] = {8, 4, 2, 2, 1, 1, 8, 4, 2, 1, 1, 2, 4, 8, 1, 8, 16, 1, 1, 1};

}  // namespace zckpt
