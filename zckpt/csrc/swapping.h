// Bytes between memory and a file, many blocks at a time, while the caller works on.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace zckpt {

// A run of bytes in memory and in a file. Where the file is open for direct I/O, all three are multiples of its block.
struct Stretch {
  uint64_t address, offset, nbytes;
};

class Swapper {
 public:
  // `threads` blocks of at most `block` bytes are on their way at a time.
  Swapper(unsigned threads, uint64_t block);
  ~Swapper();  // waits for everything that was begun
  Swapper(const Swapper&) = delete;
  Swapper& operator=(const Swapper&) = delete;

  // Begins to read or write, and returns a number for `wait`. Memory and file have to stay until then.
  uint64_t begin(int fd, bool write, const std::vector<Stretch>& stretches);

  struct Outcome {
    int error;        // 0, an errno, or kEndOfFile
    uint64_t offset;  // of the block where it happened
  };
  // Waits until all of it is done. Each number can be waited for once.
  Outcome wait(uint64_t number);

 private:
  struct Block {
    uint64_t number;
    int fd;
    bool write;
    Stretch stretch;
  };
  struct Pending {
    uint64_t left;
    Outcome outcome{0, 0};
  };
  void work();

  const uint64_t block_;
  std::mutex mutex_;
  std::condition_variable todo_, done_;
  std::deque<Block> blocks_;
  std::map<uint64_t, Pending> pending_;
  uint64_t next_ = 1;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace zckpt
