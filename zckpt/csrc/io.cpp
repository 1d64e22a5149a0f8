#include "io.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace zckpt {
namespace {

struct Fault {
  std::atomic<long> countdown{0};  // 0: off
  std::atomic<int> kind{0};
  // The kind of misbehaviour for this call, or 0.
  int next() {
    if (countdown.load(std::memory_order_relaxed) == 0) return 0;
    return countdown.fetch_sub(1) == 1 ? kind.load() : 0;
  }
};
Fault faults[2];

template <typename Call>
int whole(Fault& fault, size_t nbytes, Call call) {
  size_t done = 0;
  while (done < nbytes) {
    size_t want = nbytes - done;
    const int bad = fault.next();
    if (bad == EINTR) continue;
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

void inject(bool write, long nth, int kind) {
  faults[write].kind = kind;
  faults[write].countdown = nth;
}

}  // namespace zckpt
