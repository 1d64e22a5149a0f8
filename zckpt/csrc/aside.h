// Copies of what is not looked at again soon, past the caches: a store into a cache would first read what it replaces, and would
// drive out what others work with.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace zckpt {

inline void copy_aside(char* to, const char* from, size_t nbytes) {
#if defined(ZCKPT_X86)
  constexpr size_t kLine = 64, kAhead = 1024;
  const size_t head = std::min(nbytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  std::memcpy(to, from, head);
  to += head, from += head, nbytes -= head;
  for (; nbytes >= kLine; to += kLine, from += kLine, nbytes -= kLine) {
    _mm_prefetch(from + kAhead, _MM_HINT_NTA);
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1), c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a), _mm_stream_si128(target + 1, b), _mm_stream_si128(target + 2, c), _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();
#endif
  std::memcpy(to, from, nbytes);
}

}  // namespace zckpt
