// How a batch is run.
//  1. Moves into files become pieces: dense runs of the output. Pieces and literals are sorted into windows, a fixed grid
//     over each output file. Moves into memory become windows of their own.
//  2. A thread takes the next window, so reads and writes go through the files in order, and gathers all its pieces in one
//     aligned buffer: the same dtype is read straight into place, anything else goes through a small staging buffer that
//     stays in the processor's cache.
//  3. CRCs of element ranges are taken while the buffer is warm; they are partial, and joined by the caller.
//  4. One positional write: direct I/O when the whole window is there and the file system allows it (no page cache to fill
//     and flush later), otherwise plain. The unaligned tail of a file always goes the plain way.
// Memory: threads x (window + staging), whatever the size of the model. Results do not depend on the number of threads.
#include "mover.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "crc32.h"
#include "io.h"

namespace zckpt {
namespace {

constexpr uint64_t kStaging = 1 << 20;  // fits a second-level cache, and is large enough for a disk's read-ahead
constexpr uint64_t kBlock = 4096;       // what direct I/O wants its offsets, lengths and buffers to be multiples of
constexpr uint64_t kDenseRow = 4096;    // shorter source rows are gathered from a block instead of being read one by one
constexpr uint32_t kLiteral = 1u << 31;

struct Piece {  // `count` elements of a move from `first` on, or a literal (count in bytes), at `offset` of the output
  uint32_t dst, source;
  uint64_t offset, first, count;
};

struct Window {
  uint64_t start;     // of the window in its file; for memory, unused
  size_t first, last;  // of its pieces
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<char, Free>;
Buffer aligned(uint64_t nbytes) { return Buffer(static_cast<char*>(std::aligned_alloc(kBlock, nbytes))); }

struct Stop {};  // unwinds a thread; the failure is already recorded

class Run {
 public:
  Run(const Batch& batch, const Settings& settings) : batch_(batch), settings_(settings) { plan(); }

  Result go(const std::function<bool(uint64_t)>& tick) {
    const auto threads = static_cast<unsigned>(std::min<size_t>(settings_.threads, std::max<size_t>(windows_.size(), 1)));
    std::vector<std::thread> pool;
    running_ = threads;
    for (unsigned i = 0; i < threads; ++i) pool.emplace_back([this] { work(); });
    {
      std::unique_lock lock(mutex_);
      while (!done_.wait_for(lock, std::chrono::milliseconds(50), [this] { return running_ == 0; })) {
        lock.unlock();
        if (!tick(written_)) stop_ = true;
        lock.lock();
      }
    }
    for (auto& thread : pool) thread.join();
    tick(written_);
    return std::move(result_);
  }

 private:
  const Batch& batch_;
  const Settings settings_;
  std::vector<Piece> pieces_;
  std::vector<Window> windows_;
  std::atomic<size_t> next_{0};
  std::atomic<uint64_t> written_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable done_;
  unsigned running_ = 0;
  Result result_;

  bool in_memory(uint32_t store) const { return batch_.stores[store].fd < 0; }

  // ---- planning -----------------------------------------------------------------------------------------------------

  void cut(uint32_t dst, uint32_t source, uint64_t offset, uint64_t first, uint64_t count, uint64_t size) {
    const uint64_t window = settings_.window;
    while (count) {
      // An element that straddles a border belongs to the window it starts in: `reach` below makes room for it.
      const uint64_t border = (offset / window + 1) * window;
      const uint64_t fits = std::min(count, (border - offset + size - 1) / size);
      pieces_.push_back({dst, source, offset, first, fits});
      offset += fits * size;
      first += fits;
      count -= fits;
    }
  }

  void plan() {
    for (uint32_t i = 0; i < batch_.moves.size(); ++i) {
      const Move& m = batch_.moves[i];
      const uint64_t size = kItemSize[m.dst_dtype], dense = static_cast<uint64_t>(m.dst_step) == size;
      if (in_memory(m.dst)) {
        const uint64_t step = std::max<uint64_t>(settings_.window / size, 1);
        for (uint64_t first = 0; first < m.count * m.rows; first += step)
          pieces_.push_back({m.dst, i, 0, first, std::min(step, m.count * m.rows - first)});
      } else if (dense && (m.rows == 1 || static_cast<uint64_t>(m.dst_pitch) == m.count * size)) {
        cut(m.dst, i, m.dst_offset, 0, m.count * m.rows, size);
      } else {
        for (uint64_t row = 0; row < m.rows; ++row) {
          const uint64_t offset = m.dst_offset + row * static_cast<uint64_t>(m.dst_pitch);
          if (dense) {
            cut(m.dst, i, offset, row * m.count, m.count, size);
          } else {
            for (uint64_t k = 0; k < m.count; ++k)
              cut(m.dst, i, offset + k * static_cast<uint64_t>(m.dst_step), row * m.count + k, 1, size);
          }
        }
      }
    }
    for (uint32_t i = 0; i < batch_.literals.size(); ++i) {
      const Literal& l = batch_.literals[i];
      cut(l.dst, i | kLiteral, l.offset, 0, l.length, 1);
    }
    std::stable_sort(pieces_.begin(), pieces_.end(), [](const Piece& a, const Piece& b) {
      return a.dst != b.dst ? a.dst < b.dst : a.offset < b.offset;
    });
    for (size_t i = 0; i < pieces_.size(); ++i) {
      const uint64_t start = pieces_[i].offset / settings_.window * settings_.window;
      const bool joins = i && !in_memory(pieces_[i].dst) && pieces_[i].dst == pieces_[i - 1].dst && windows_.back().start == start;
      if (joins)
        windows_.back().last = i + 1;
      else
        windows_.push_back({start, i, i + 1});
    }
  }

  // ---- working ------------------------------------------------------------------------------------------------------

  struct Buffers {
    Buffer window, staging;
  };

  void work() {
    Buffers buffers{aligned(settings_.window + kBlock), aligned(kStaging)};
    try {
      for (size_t i; !stop_ && (i = next_++) < windows_.size();) {
        if (in_memory(pieces_[windows_[i].first].dst))
          into_memory(pieces_[windows_[i].first], buffers);
        else
          into_file(windows_[i], buffers);
      }
    } catch (const Stop&) {
    }
    std::lock_guard lock(mutex_);
    if (--running_ == 0) done_.notify_all();
  }

  [[noreturn]] void fail(const char* kind, int error, uint32_t store, uint64_t offset) {
    std::lock_guard lock(mutex_);
    if (result_.failure.kind.empty()) result_.failure = {kind, error, store, offset};
    stop_ = true;
    throw Stop{};
  }

  void into_file(const Window& window, Buffers& buffers) {
    const uint32_t dst = pieces_[window.first].dst;
    const Store& store = batch_.stores[dst];
    char* buffer = buffers.window.get();
    uint64_t begin = pieces_[window.first].offset, end = begin;
    for (size_t i = window.first; i < window.last; ++i) {
      const Piece& piece = pieces_[i];
      if (piece.offset != end) {  // a gap: what came before is written by itself
        flush(store, dst, window.start, begin, end, buffer);
        begin = piece.offset;
      }
      char* place = buffer + (piece.offset - window.start);
      if (piece.source & kLiteral) {
        const Literal& literal = batch_.literals[piece.source & ~kLiteral];
        std::memcpy(place, batch_.blob + literal.at + piece.first, piece.count);
        end = piece.offset + piece.count;
      } else {
        const Move& move = batch_.moves[piece.source];
        gather(move, piece.first, piece.count, place, buffers.staging.get());
        end = piece.offset + piece.count * kItemSize[move.dst_dtype];
      }
    }
    flush(store, dst, window.start, begin, end, buffer);
  }

  void flush(const Store& store, uint32_t dst, uint64_t start, uint64_t begin, uint64_t end, const char* buffer) {
    if (begin == end) return;
    take_crcs(dst, begin, end, buffer + (begin - start));
    uint64_t done = begin;
    if (store.direct_fd >= 0 && begin == start) {
      const uint64_t whole = (end - begin) / kBlock * kBlock;
      if (whole) {
        if (const int error = write_all(static_cast<int>(store.direct_fd), buffer, whole, begin)) fail("write", error, dst, begin);
        done += whole;
      }
    }
    if (done < end)
      if (const int error = write_all(static_cast<int>(store.fd), buffer + (done - start), end - done, done)) fail("write", error, dst, done);
    written_ += end - begin;
  }

  void take_crcs(uint32_t dst, uint64_t begin, uint64_t end, const char* data) {
    const auto before = [](const Range& r, const std::pair<uint32_t, uint64_t>& key) {
      return r.dst != key.first ? r.dst < key.first : r.start + r.length <= key.second;
    };
    auto range = std::lower_bound(batch_.ranges.begin(), batch_.ranges.end(), std::pair(dst, begin), before);
    for (; range != batch_.ranges.end() && range->dst == dst && range->start < end; ++range) {
      const uint64_t low = std::max(begin, range->start), high = std::min(end, range->start + range->length);
      const PartialCrc partial{range->number, crc32(0, data + (low - begin), high - low), low, high - low};
      std::lock_guard lock(mutex_);
      result_.crcs.push_back(partial);
    }
  }

  void into_memory(const Piece& piece, Buffers& buffers) {
    const Move& m = batch_.moves[piece.source];
    const auto size = static_cast<int64_t>(kItemSize[m.dst_dtype]);
    char* base = reinterpret_cast<char*>(batch_.stores[m.dst].address + m.dst_offset);
    if (m.dst_step == size && (m.rows == 1 || m.dst_pitch == static_cast<int64_t>(m.count) * size)) {
      gather(m, piece.first, piece.count, base + static_cast<int64_t>(piece.first) * size, buffers.staging.get());
    } else {
      gather(m, piece.first, piece.count, buffers.window.get(), buffers.staging.get());
      for (uint64_t i = 0; i < piece.count; ++i) {
        const uint64_t e = piece.first + i;
        std::memcpy(base + static_cast<int64_t>(e / m.count) * m.dst_pitch + static_cast<int64_t>(e % m.count) * m.dst_step,
                    buffers.window.get() + i * static_cast<uint64_t>(size), static_cast<size_t>(size));
      }
    }
    written_ += piece.count * static_cast<uint64_t>(size);
  }

  // Elements [first, first + count) of a move, dense and in the destination's dtype, to `out`.
  void gather(const Move& m, uint64_t first, uint64_t count, char* out, char* staging) {
    const uint64_t size = kItemSize[m.src_dtype], out_size = kItemSize[m.dst_dtype];
    const bool dense_row = static_cast<uint64_t>(m.src_step) == size;
    const bool dense = dense_row && (m.rows == 1 || static_cast<uint64_t>(m.src_pitch) == m.count * size);
    while (count && !stop_) {
      uint64_t n = count;
      if (dense || (dense_row && m.count * size >= kDenseRow)) {
        if (!dense) n = std::min(n, m.count - first % m.count);
        dense_run(m, place(m, first), n, out, staging);
      } else {
        n = scattered_run(m, first, n, out, staging);
      }
      first += n;
      count -= n;
      out += n * out_size;
    }
    if (stop_) throw Stop{};
  }

  static uint64_t place(const Move& m, uint64_t e) {
    return m.src_offset + static_cast<uint64_t>(static_cast<int64_t>(e / m.count) * m.src_pitch + static_cast<int64_t>(e % m.count) * m.src_step);
  }

  void dense_run(const Move& m, uint64_t offset, uint64_t count, char* out, char* staging) {
    const uint64_t size = kItemSize[m.src_dtype], out_size = kItemSize[m.dst_dtype];
    if (m.src_dtype == m.dst_dtype && !m.swap) {
      read(m.src, out, count * size, offset);
      return;
    }
    for (uint64_t done = 0; done < count;) {
      if (stop_) throw Stop{};
      const uint64_t n = std::min(count - done, kStaging / size);
      read(m.src, staging, n * size, offset + done * size);
      convert(m, staging, n, out + done * out_size);
      done += n;
    }
  }

  // As many elements as one block of the source holds, at most `count`; returns how many.
  uint64_t scattered_run(const Move& m, uint64_t first, uint64_t count, char* out, char* staging) {
    const uint64_t size = kItemSize[m.src_dtype], out_size = kItemSize[m.dst_dtype], base = place(m, first);
    uint64_t n = 1, reach = base + size;
    while (n < count) {
      const uint64_t at = place(m, first + n);
      if (at < base || at + size > base + kStaging) break;
      reach = std::max(reach, at + size);
      ++n;
    }
    read(m.src, staging, reach - base, base);
    char element[16];
    for (uint64_t i = 0; i < n; ++i) {
      std::memcpy(element, staging + (place(m, first + i) - base), size);
      convert(m, element, 1, out + i * out_size);
    }
    return n;
  }

  void read(uint32_t src, char* to, uint64_t nbytes, uint64_t offset) {
    const Store& store = batch_.stores[src];
    if (store.fd < 0)
      std::memcpy(to, reinterpret_cast<const char*>(store.address + offset), nbytes);
    else if (const int error = read_all(static_cast<int>(store.fd), to, nbytes, offset))
      fail("read", error, src, offset);
  }

  void convert(const Move& m, char* from, uint64_t count, char* out) {
    if (m.swap) swap_bytes(from, count * kItemSize[m.src_dtype] / m.swap, m.swap);
    if (m.src_dtype == m.dst_dtype) {
      std::memcpy(out, from, count * kItemSize[m.src_dtype]);
      return;
    }
    Overflow overflow;
    if (!cast(static_cast<DType>(m.src_dtype), static_cast<DType>(m.dst_dtype), from, out, count, settings_.clamp, overflow))
      fail("cast", 0, m.src, m.src_offset);
    if (!overflow.count) return;
    std::lock_guard lock(mutex_);
    Overflow& total = result_.overflows[m.tensor];
    total.count += overflow.count;
    total.largest = std::max(total.largest, overflow.largest);
  }
};

}  // namespace

Result run(const Batch& batch, const Settings& settings, const std::function<bool(uint64_t)>& tick) {
  return Run(batch, settings).go(tick);
}

}  // namespace zckpt
