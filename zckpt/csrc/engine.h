// What moving and scanning share: threads that can be stopped, reads in the order of the files, casts, and CRCs of what
// passes by.
#pragma once
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "mover.h"

namespace zckpt {

constexpr uint64_t kStaging = 1 << 20;  // fits a second-level cache, and is large enough for a disk's read-ahead
constexpr uint64_t kChunk = 128 << 10;   // is in any second-level cache still, when it is looked at after it was read
constexpr uint64_t kBlock = 4096;       // what direct I/O wants its offsets, lengths and buffers to be multiples of

// Huge pages, where there are any: each write is then one request to the disk, not one for every few pages. Throws
// std::bad_alloc where there is not so much memory.
inline Bytes aligned(uint64_t nbytes) {
  constexpr uint64_t kHuge = 2 << 20;
  const uint64_t unit = nbytes < kHuge ? kBlock : kHuge;
  Bytes bytes(static_cast<char*>(std::aligned_alloc(unit, (nbytes + unit - 1) / unit * unit)));
  if (!bytes) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (unit == kHuge) ::madvise(bytes.get(), nbytes, MADV_HUGEPAGE);
#endif
  return bytes;
}

struct Buffers {  // of one thread
  Bytes window, staging, other;
};

// Buffers that runs of small batches leave to the next run: the first touch of memory costs more than all that is done with it.
Bytes taken(uint64_t nbytes);
void keep(Bytes& buffer, uint64_t nbytes);

struct Target {  // where element (row, column) of a move goes: base + row * pitch + column * step
  char* base;
  int64_t pitch, step;
  char* at(uint64_t row, uint64_t column) const { return base + static_cast<int64_t>(row) * pitch + static_cast<int64_t>(column) * step; }
};

// Where elements of a move go that are wanted side by side, the `first` one at `to`; both in the source's dtype.
inline Target packed(const Move& m, uint64_t first, char* to) {
  const int64_t size = kItemSize[m.src_dtype];
  return {to - static_cast<int64_t>(first) * size, static_cast<int64_t>(m.count) * size, size};
}

// What the rows of a matrix share of the factors of a product; each is made by the thread that wants it first.
struct Factors {
  std::mutex mutex;
  bool made = false;
  std::vector<float> left, right;  // of all experts; `left` is empty where rows of it are read as they come
};

struct Stop {};  // unwinds a thread; the failure is already recorded

class Engine {
 protected:
  Engine(const Batch& batch, const Settings& settings);
  virtual ~Engine() = default;

  // Does jobs 0 .. count - 1, each on one of the threads, in this order; `tick` as in `run`. Where some of the threads
  // cannot start, the others do it all. Nothing that goes wrong on a thread ends the process: it is the result's failure.
  void work_through(size_t count, const std::function<bool(uint64_t)>& tick);
  virtual Buffers buffers() const = 0;
  virtual void leave(Buffers&) const {}  // by a thread that has done its last job
  virtual void work(size_t job, Buffers& buffers) = 0;

  bool in_memory(uint32_t store) const { return batch_.stores[store].fd < 0; }
  [[noreturn]] void fail(const char* kind, int error, uint32_t store, uint64_t offset);

  // Counts bytes that were read or written, and waits where that was faster than it may be.
  void spend(uint64_t nbytes);

  // A whole read of a source; `again`: what was read will be wanted once more.
  void read(uint32_t src, char* to, uint64_t nbytes, uint64_t offset, bool again = false);

  // Lets the disk begin with what a read of a folded source will want: elements [first, first + count).
  void read_ahead(uint32_t src, uint64_t first, uint64_t count);

  // What bytes [begin, end) of a store are of every range that is wanted, as CRCs of nothing yet.
  std::vector<PartialCrc> wanted_crcs(uint32_t store, uint64_t begin, uint64_t end) const;

  // The partial CRCs of bytes [begin, end) of a store, in every range that is wanted.
  void take_crcs(uint32_t store, uint64_t begin, uint64_t end, const char* data);
  void take(const std::vector<PartialCrc>& crcs);

  // Some elements of a move that lie in one dense run at `offset` of the source and go to `out`.
  struct Segment {
    uint32_t move;
    uint64_t offset, count;
    char* out;
  };

  // Elements [first, first + count) of a move, in order of its rows and in the destination's dtype, to their targets. Runs
  // that are dense on both sides are only noted in `segments`; short rows and scattered elements are carried at once.
  void gather(uint32_t move, uint64_t first, uint64_t count, const Target& target, char* staging, std::vector<Segment>& segments);

  // Columns [first, last) of a move's rows: of the first one the rows from `low` on, of the last one those before `high`.
  struct Across {
    uint64_t first, last, low, high;
  };

  // Whether the elements of its rows are near enough to each other for the following.
  static bool can_turn(const Move& m);

  // Carries them to their targets, where each column lies together: by tiles that fit the cache, whose rows are read in order.
  void gather_across(uint32_t move, const Across& part, const Target& target, char* staging);

  // Reads what was noted, file by file and in the order of each file. Neighbours are read together.
  void read_segments(std::vector<Segment>& segments, char* staging);

  const Batch& batch_;
  const Settings settings_;
  std::atomic<uint64_t> done_bytes_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable passed_;  // for threads that wait for one another
  Result result_;

 private:
  void on_threads(const std::function<bool(uint64_t)>& tick);
  void thread();
  void join_crcs();
  void end(const char* kind, const char* text) noexcept;
  void stop();  // with the lock held, so that nobody who is about to wait misses it
  void fold(uint32_t src, char* to, uint64_t count, uint64_t first, bool again);
  void fold_products(const Store& store, float* total, uint64_t count, uint64_t first, bool again);
  void add_product_of(const Term& term, float* total, uint64_t count, uint64_t first, bool again);
  std::shared_ptr<const Factors> factors_of(const Term& term);
  void floats_of(const Term& term, float* to, uint64_t first, uint64_t count, bool again);
  void dense_run(const Move& m, uint64_t offset, uint64_t count, char* out, char* staging);
  uint64_t stage(const Move& m, uint64_t first, uint64_t count, bool dense, bool dense_row, char* staging);
  void scatter(const Move& m, uint64_t first, uint64_t n, const Target& target, char* staging);
  // Some rows and columns of a move, whose rows are `pitch` bytes apart at `data`.
  struct Block {
    uint64_t row, column, rows, columns;
    char* data;
    uint64_t pitch;
  };
  void turn_block(const Move& m, const Across& part, const Block& from, const Target& target);
  void turn_tiles(const Move& m, const Across& part, const Block& from, const Target& target);
  void turn_tile(const Move& m, const Across& part, const Block& from, const Target& target);

  void convert(const Move& m, char* from, uint64_t count, char* out);

  size_t jobs_ = 0;
  std::mutex factors_mutex_;
  std::vector<std::pair<const Term*, std::shared_ptr<Factors>>> factors_;  // used last: at the end
  std::atomic<size_t> next_{0};
  std::condition_variable idle_;
  unsigned running_ = 0;
  std::atomic<uint64_t> spent_{0};
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

// Where element `e` of a move, counted row after row, begins in its source.
inline uint64_t place(const Move& m, uint64_t e) {
  return m.src_offset + static_cast<uint64_t>(static_cast<int64_t>(e / m.count) * m.src_pitch + static_cast<int64_t>(e % m.count) * m.src_step);
}

}  // namespace zckpt
