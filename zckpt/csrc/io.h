// Whole reads and writes: short counts and EINTR are handled here and nowhere else.
#pragma once
#include <cstddef>
#include <cstdint>

namespace zckpt {

// Each returns 0, an errno, or kEndOfFile when the file ends before `nbytes` are read.
constexpr int kEndOfFile = -1;
int read_all(int fd, void* to, size_t nbytes, uint64_t offset);
int write_all(int fd, const void* from, size_t nbytes, uint64_t offset);

// For tests: the n-th call (from 1) of read or write misbehaves. `kind` is an errno, or kShort for a short count.
constexpr int kShort = -2;
void inject(bool write, long nth, int kind);

}  // namespace zckpt
