// Vector instructions: which ones this processor has. A function that uses them is compiled for them by itself
// (ZCKPT_FOR), so that everything around it runs on any processor, and is called only where `has` says so.
#pragma once
#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>

#include "intrinsics.h"
#define ZCKPT_X86 1
#define ZCKPT_FOR(features) __attribute__((target(features)))
#endif

// For loops that the compiler makes vector code of: it makes two versions, and the loader chooses.
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(ZCKPT_SANITIZED)
#define ZCKPT_VECTOR __attribute__((target_clones("avx2", "default")))
#else
#define ZCKPT_VECTOR
#endif

// What such a function calls must become a part of it, or it would be compiled for any processor.
#if defined(__GNUC__)
#define ZCKPT_INLINE inline __attribute__((always_inline))
#else
#define ZCKPT_INLINE inline
#endif

#define ZCKPT_PART __attribute__((always_inline))  // the same for what has no name

namespace zckpt {

// AVX2 with F16C; carry-less multiplication, also in AVX2; AVX2 with FMA and BMI2; AVX-512; AVX-512 that moves single bytes
enum class Unit { kHalves, kFolding, kWideFolding, kMultiplyAdd, kWideLanes, kWideBytes };

#ifdef ZCKPT_TESTING
inline std::atomic<bool> vector_paths{true}, wide_paths{true};  // tests switch them off
#else
constexpr bool vector_paths = true, wide_paths = true;
#endif

#if defined(ZCKPT_X86)
// Asked of the processor itself: older clangs do not know __builtin_cpu_supports("f16c").
inline bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

inline bool has(Unit unit) {
#if defined(ZCKPT_X86)
  static const bool halves = __builtin_cpu_supports("avx2") && has_f16c();
  static const bool folding = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  static const bool wide_folding = folding && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2");
  static const bool multiply_add = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  static const bool wide_lanes = multiply_add && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                                 __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("popcnt");
  static const bool wide_bytes = wide_lanes && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
  if (!vector_paths) return false;
  switch (unit) {
    case Unit::kHalves: return halves;
    case Unit::kFolding: return folding;
    case Unit::kWideFolding: return wide_folding;
    case Unit::kWideLanes: return wide_lanes && wide_paths;
    case Unit::kWideBytes: return wide_bytes && wide_paths;
    default: return multiply_add;
  }
#else
  (void)unit;
  return false;
#endif
}

}  // namespace zckpt
