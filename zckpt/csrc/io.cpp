#include "io.h"

#include <fcntl.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#elif defined(__APPLE__)
#include <cstdio>
#endif

#include <atomic>
#include <cerrno>
#include <csignal>

namespace zckpt {
namespace {

#ifdef ZCKPT_TESTING
struct Fault {
  std::atomic<long> calls{0}, nth{0};  // nth 0: off
  std::atomic<int> kind{0};
  // The kind of misbehaviour for this call, or 0.
  bool armed() const { return nth != 0; }
  int next() { return calls.fetch_add(1, std::memory_order_relaxed) + 1 == nth.load(std::memory_order_relaxed) ? kind.load() : 0; }
};
#else
struct Fault {
  static constexpr bool armed() { return false; }
  static constexpr int next() { return 0; }
};
#endif
Fault faults[2];

template <typename Call>
int whole(Fault& fault, size_t nbytes, Call call) {
  size_t done = 0;
  while (done < nbytes) {
    size_t want = nbytes - done;
    const int bad = fault.next();
    if (bad == EINTR) continue;
    if (bad == kKill) ::raise(SIGKILL);
    if (bad > 0) return bad;
    if (bad == kShort && want > 1) want /= 2;
    const ssize_t n = call(done, want);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return kEndOfFile;
    done += static_cast<size_t>(n);
  }
  return 0;
}

}  // namespace

int read_all(int fd, void* to, size_t nbytes, uint64_t offset) {
  return whole(faults[0], nbytes, [&](size_t done, size_t want) {
    return ::pread(fd, static_cast<char*>(to) + done, want, static_cast<off_t>(offset + done));
  });
}

int write_all(int fd, const void* from, size_t nbytes, uint64_t offset) {
  return whole(faults[1], nbytes, [&](size_t done, size_t want) {
    return ::pwrite(fd, static_cast<const char*>(from) + done, want, static_cast<off_t>(offset + done));
  });
}

int64_t read_cached(int fd, void* to, size_t nbytes, uint64_t offset) {
#if defined(RWF_NOWAIT)
  if (faults[0].armed()) return -1;
  const iovec part{to, nbytes};
  const ssize_t got = ::preadv2(fd, &part, 1, static_cast<off_t>(offset), RWF_NOWAIT);
  return got < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : got;
#else
  (void)fd, (void)to, (void)nbytes, (void)offset;
  return -1;
#endif
}

void forget(int fd, uint64_t offset, uint64_t nbytes) {
#if defined(POSIX_FADV_DONTNEED)
  ::posix_fadvise(fd, static_cast<off_t>(offset), static_cast<off_t>(nbytes), POSIX_FADV_DONTNEED);
#else
  (void)fd, (void)offset, (void)nbytes;
#endif
}

void will_need(int fd, uint64_t offset, uint64_t nbytes) {
#if defined(POSIX_FADV_WILLNEED)
  constexpr uint64_t kWish = 512 << 10;  // Linux cuts a longer one to the size of one request
  for (const uint64_t end = offset + nbytes; offset < end; offset += kWish)
    ::posix_fadvise(fd, static_cast<off_t>(offset), static_cast<off_t>(end - offset < kWish ? end - offset : kWish), POSIX_FADV_WILLNEED);
#else
  (void)fd, (void)offset, (void)nbytes;
#endif
}

bool is_at_hand(int fd, uint64_t offset) {
  char byte;
  return read_cached(fd, &byte, 1, offset) == 1;
}

int clone(int from, uint64_t at, int to, uint64_t offset, uint64_t nbytes) {
#if defined(FICLONERANGE)
  const int bad = faults[1].next();
  if (bad == kKill) ::raise(SIGKILL);
  if (bad > 0) return bad;
  struct file_clone_range range = {from, at, nbytes, offset};
  return ::ioctl(to, FICLONERANGE, &range) ? errno : 0;
#else
  (void)from, (void)at, (void)to, (void)offset, (void)nbytes;
  return ENOTSUP;
#endif
}

int exchange(const char* a, const char* b) {
#if defined(__APPLE__)
  return ::renamex_np(a, b, RENAME_SWAP) ? errno : 0;
#elif defined(SYS_renameat2)
  constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE, which older headers lack
  return ::syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, kExchange) ? errno : 0;
#else
  (void)a, (void)b;
  return ENOSYS;
#endif
}

bool is_in_memory(int fd) {
#if defined(__linux__)
  constexpr unsigned long kTmpfs = 0x01021994, kRamfs = 0x858458F6;  // of linux/magic.h
  struct statfs system;
  if (::fstatfs(fd, &system)) return false;
  const auto type = static_cast<unsigned long>(system.f_type) & 0xFFFFFFFF;
  return type == kTmpfs || type == kRamfs;
#else
  (void)fd;
  return false;
#endif
}

#ifdef ZCKPT_TESTING
void inject(bool write, long nth, int kind) {
  faults[write].kind = kind;
  faults[write].calls = 0;
  faults[write].nth = nth;
}

long calls(bool write) { return faults[write].calls; }
#endif

}  // namespace zckpt
