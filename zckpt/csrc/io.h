// Whole reads and writes: short counts and EINTR are handled here and nowhere else.
#pragma once
#include <cstddef>
#include <cstdint>

namespace zckpt {

// Each returns 0, an errno, or kEndOfFile when the file ends before `nbytes` are read.
constexpr int kEndOfFile = -1;
int read_all(int fd, void* to, size_t nbytes, uint64_t offset);
int write_all(int fd, const void* from, size_t nbytes, uint64_t offset);

// Reads what the page cache has of these bytes, from the first on, without waiting for a disk: how many there were. -1 where one
// cannot ask; then it is a plain read's matter, as all errors are.
int64_t read_cached(int fd, void* to, size_t nbytes, uint64_t offset);

// Lets the page cache forget whole pages of these bytes; `nbytes` of 0 means to the end of the file.
void forget(int fd, uint64_t offset, uint64_t nbytes);

// Lets the disk begin to read these bytes into the page cache, without a wait for them.
void will_need(int fd, uint64_t offset, uint64_t nbytes);

// Whether the page cache has the byte at `offset`, as far as the system says it without a wait.
bool is_at_hand(int fd, uint64_t offset);

// Lets two files share blocks: `nbytes` at `offset` of `to` become those at `at` of `from`, and are copied when either is written
// to. All three are multiples of the file system's block. 0, or an errno (EOPNOTSUPP, EXDEV, EINVAL: not here).
int clone(int from, uint64_t at, int to, uint64_t offset, uint64_t nbytes);

// Two paths change names, at once and for all to see. 0, or an errno (ENOSYS, EINVAL: not here).
int exchange(const char* a, const char* b);

// Whether a file lies on a file system that is memory and has no disk (tmpfs, ramfs).
bool is_in_memory(int fd);

// Only in builds for tests (ZCKPT_TESTING): the n-th call (from 1) of read or write misbehaves. `kind` is an errno, kShort for a short count, or
// kKill, which ends the process as SIGKILL would.
constexpr int kShort = -2, kKill = -3;
void inject(bool write, long nth, int kind);
long calls(bool write);  // since the last `inject`

}  // namespace zckpt
