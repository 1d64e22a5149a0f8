// Arithmetic as IEEE 754 has it by default: to nearest even, with subnormal numbers.
#pragma once
#include <cfenv>

#include "intrinsics.h"

namespace zckpt {

// Sets this thread to it, whatever the host process has set (torch.set_flush_denormal, -ffast-math), until it goes out of
// scope; then the thread has its own state again. A new thread begins with that of its maker.
class PlainFloats {
 public:
  PlainFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
#if defined(__x86_64__)
    _mm_setcsr(0x1F80);  // older C libraries leave the flags that flush to zero as they were
#endif
  }
  ~PlainFloats() { std::fesetenv(&before_); }
  PlainFloats(const PlainFloats&) = delete;
  PlainFloats& operator=(const PlainFloats&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace zckpt
