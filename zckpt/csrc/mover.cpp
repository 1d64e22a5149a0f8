// How a batch is run.
//  1. Each output file is cut into windows of a fixed grid; a window knows which moves and literals may touch it. What they
//     put there is worked out when its turn comes, so a plan of millions of rows takes no memory. Moves into memory become
//     windows of their own.
//  2. A thread takes the next window, so reads and writes go through the files in order, and gathers all its elements in one
//     aligned buffer: the same dtype is read straight into place; a cast, or rows too short to be read one by one, go through
//     a small staging buffer that stays in the processor's cache.
//  3. CRCs of element ranges are taken while the buffer is warm; they are partial, and joined by the caller.
//  4. One positional write: direct I/O when the whole window is there and the file system allows it (no page cache to fill
//     and flush later), otherwise plain. The unaligned tail of a file always goes the plain way.
//  5. A file that a sink wants (to hash it, or to send it elsewhere) is handed over window by window: whoever holds window k
//     waits for the holder of k - 1. Windows are taken in order, so the one whose turn it is never waits.
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

struct Item {  // a move or literal, and the bytes of the output between its first and its last
  uint32_t dst, source;
  uint64_t begin, end;
};

struct Window {
  uint64_t start;      // of the window in its file; for memory, the first element of the move
  size_t first, last;  // of the items that may touch it; for memory, the number of the move and that of the elements
  bool memory;
};

struct Target {  // where element (row, column) of a move goes: base + row * pitch + column * step
  char* base;
  int64_t pitch, step;
  char* at(uint64_t row, uint64_t column) const { return base + static_cast<int64_t>(row) * pitch + static_cast<int64_t>(column) * step; }
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<char, Free>;
Buffer aligned(uint64_t nbytes) { return Buffer(static_cast<char*>(std::aligned_alloc(kBlock, nbytes))); }

struct Stop {};  // unwinds a thread; the failure is already recorded

class Run {
 public:
  Run(const Batch& batch, const Settings& settings, const Sink& sink) : batch_(batch), settings_(settings), sink_(sink) { plan(); }

  Result go(const std::function<bool(uint64_t)>& tick) {
    const auto threads = static_cast<unsigned>(std::min<size_t>(settings_.threads, std::max<size_t>(windows_.size(), 1)));
    std::vector<std::thread> pool;
    running_ = threads;
    for (unsigned i = 0; i < threads; ++i) pool.emplace_back([this] { work(); });
    {
      std::unique_lock lock(mutex_);
      while (!done_.wait_for(lock, std::chrono::milliseconds(50), [this] { return running_ == 0; })) {
        lock.unlock();
        const bool on = tick(written_);
        lock.lock();
        if (!on) stop();
      }
    }
    for (auto& thread : pool) thread.join();
    tick(written_);
    return std::move(result_);
  }

 private:
  const Batch& batch_;
  const Settings settings_;
  const Sink& sink_;
  std::vector<size_t> turns_;  // store -> the window that is next to be handed to its sink
  std::condition_variable passed_;
  std::vector<Item> items_;
  std::vector<Window> windows_;
  std::atomic<size_t> next_{0};
  std::atomic<uint64_t> written_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable done_;
  unsigned running_ = 0;
  Result result_;

  bool in_memory(uint32_t store) const { return batch_.stores[store].fd < 0; }
  bool ordered(uint32_t store) const { return !settings_.ordered.empty() && settings_.ordered[store]; }

  void stop() {  // with the lock held, so that nobody who is about to wait misses it
    stop_ = true;
    passed_.notify_all();
  }

  // ---- planning -----------------------------------------------------------------------------------------------------

  void plan() {
    for (uint32_t i = 0; i < batch_.moves.size(); ++i) {
      const Move& m = batch_.moves[i];
      const uint64_t size = kItemSize[m.dst_dtype];
      if (in_memory(m.dst)) {
        const uint64_t step = std::max<uint64_t>(settings_.window / size, 1), numel = m.count * m.rows;
        for (uint64_t first = 0; first < numel; first += step) windows_.push_back({first, i, std::min(step, numel - first), true});
      } else {
        const uint64_t reach = (m.rows - 1) * static_cast<uint64_t>(m.dst_pitch) + (m.count - 1) * static_cast<uint64_t>(m.dst_step) + size;
        items_.push_back({m.dst, i, m.dst_offset, m.dst_offset + reach});
      }
    }
    for (uint32_t i = 0; i < batch_.literals.size(); ++i) {
      const Literal& l = batch_.literals[i];
      if (l.length) items_.push_back({l.dst, i | kLiteral, l.offset, l.offset + l.length});
    }
    std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.dst != b.dst ? a.dst < b.dst : a.begin < b.begin; });
    for (size_t first = 0, last; first < items_.size(); first = last) {
      for (last = first; last < items_.size() && items_[last].dst == items_[first].dst;) ++last;
      cut(first, last);
    }
    turns_.resize(batch_.stores.size());
    for (size_t i = windows_.size(); i--;)
      if (!windows_[i].memory) turns_[items_[windows_[i].first].dst] = i;
  }

  // The windows of one file. Items are sorted by their begin, and may be long: one reaches into a window when it begins
  // before the window's end, and it or an earlier one ends after the window's start.
  void cut(size_t first, size_t last) {
    uint64_t reach = 0;
    size_t from = first, to = first;
    for (uint64_t start = items_[first].begin / settings_.window * settings_.window;; start += settings_.window) {
      const uint64_t border = start + settings_.window;
      for (; to < last && items_[to].begin < border; ++to) reach = std::max(reach, items_[to].end);
      while (from < to && items_[from].end <= start) ++from;
      if (from < to) windows_.push_back({start, from, to, false});
      if (to == last && reach <= border) return;
      if (reach <= border) start = items_[to].begin / settings_.window * settings_.window - settings_.window;  // skips a hole
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
        if (windows_[i].memory)
          into_memory(windows_[i], buffers);
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
    stop();
    throw Stop{};
  }

  void into_file(const Window& window, Buffers& buffers) {
    const uint32_t dst = items_[window.first].dst;
    const Store& store = batch_.stores[dst];
    char* buffer = buffers.window.get();
    std::vector<std::pair<uint64_t, uint64_t>> filled;  // byte ranges of the file, as they come
    for (size_t i = window.first; i < window.last; ++i) {
      const Item& item = items_[i];
      if (item.source & kLiteral) {
        const Literal& literal = batch_.literals[item.source & ~kLiteral];
        const uint64_t begin = std::max(item.begin, window.start), end = std::min(item.end, window.start + settings_.window);
        if (begin >= end) continue;
        std::memcpy(buffer + (begin - window.start), batch_.blob + literal.at + (begin - literal.offset), end - begin);
        fill(filled, begin, end);
      } else {
        fill_from(batch_.moves[item.source], window.start, buffer, buffers.staging.get(), filled);
      }
    }
    // Rows of several moves may interleave; together they are usually one range.
    if (!std::is_sorted(filled.begin(), filled.end())) std::sort(filled.begin(), filled.end());
    size_t ranges = 0;
    for (size_t i = 0; i < filled.size(); ++ranges) {
      const uint64_t begin = filled[i].first;
      uint64_t end = filled[i].second;
      for (++i; i < filled.size() && filled[i].first == end; ++i) end = filled[i].second;
      flush(store, dst, window.start, begin, end, buffer);
      filled[ranges] = {begin, end};
    }
    filled.resize(ranges);
    if (ordered(dst)) hand_over(window, dst, filled, buffer);
  }

  void hand_over(const Window& window, uint32_t dst, const std::vector<std::pair<uint64_t, uint64_t>>& filled, const char* buffer) {
    {
      std::unique_lock lock(mutex_);
      passed_.wait(lock, [&] { return stop_ || &windows_[turns_[dst]] == &window; });
      if (stop_) throw Stop{};
    }
    for (const auto& [begin, end] : filled)
      if (!sink_(dst, begin, buffer + (begin - window.start), end - begin)) fail("sink", 0, dst, begin);
    std::lock_guard lock(mutex_);
    ++turns_[dst];
    passed_.notify_all();
  }

  static void fill(std::vector<std::pair<uint64_t, uint64_t>>& filled, uint64_t begin, uint64_t end) {
    if (!filled.empty() && filled.back().second == begin)
      filled.back().second = end;
    else
      filled.emplace_back(begin, end);
  }

  // What a move puts into the window that starts at `start`. An element that straddles a border belongs to the window it
  // starts in: the buffer has room for it.
  void fill_from(const Move& m, uint64_t start, char* buffer, char* staging, std::vector<std::pair<uint64_t, uint64_t>>& filled) {
    const uint64_t size = kItemSize[m.dst_dtype], border = start + settings_.window;
    const auto step = static_cast<uint64_t>(m.dst_step);
    uint64_t rows = m.rows, count = m.count, pitch = static_cast<uint64_t>(m.dst_pitch);
    const bool dense = step == size && (rows == 1 || pitch == count * size);
    if (dense) {  // one long row
      count *= rows;
      rows = 1;
    }
    const Target target{buffer + (static_cast<int64_t>(m.dst_offset) - static_cast<int64_t>(start)),
                        dense ? static_cast<int64_t>(m.count * size) : m.dst_pitch, m.dst_step};
    const auto before = [](uint64_t from, uint64_t to, uint64_t by) { return to <= from ? 0 : (to - from + by - 1) / by; };
    const uint64_t length = (count - 1) * step + 1;  // of a row, to its last start of an element
    uint64_t row = rows > 1 && start > m.dst_offset + length ? (start - m.dst_offset - length) / pitch : 0;
    const uint64_t end = rows > 1 ? std::min(rows, before(m.dst_offset, border, pitch)) : 1;
    uint64_t first = 0, n = 0;  // elements in a row of the move: rows that follow each other are gathered together
    for (; row < end; ++row) {
      const uint64_t offset = m.dst_offset + row * pitch;
      const uint64_t low = std::min(count, before(offset, start, step)), high = std::min(count, before(offset, border, step));
      if (low >= high) continue;
      if (step == size)
        fill(filled, offset + low * size, offset + high * size);
      else
        for (uint64_t i = low; i < high; ++i) fill(filled, offset + i * step, offset + i * step + size);
      const uint64_t at = row * count + low;
      if (n && at != first + n) {
        gather(m, first, n, target, staging);
        n = 0;
      }
      if (!n) first = at;
      n += high - low;
    }
    if (n) gather(m, first, n, target, staging);
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

  void into_memory(const Window& window, Buffers& buffers) {
    const Move& m = batch_.moves[window.first];
    const Target target{reinterpret_cast<char*>(batch_.stores[m.dst].address + m.dst_offset), m.dst_pitch, m.dst_step};
    gather(m, window.start, window.last, target, buffers.staging.get());
    written_ += window.last * kItemSize[m.dst_dtype];
  }

  // Elements [first, first + count) of a move, in order of its rows, to their targets.
  void gather(const Move& m, uint64_t first, uint64_t count, const Target& target, char* staging) {
    const uint64_t size = kItemSize[m.src_dtype], out_size = kItemSize[m.dst_dtype];
    const auto src_step = static_cast<uint64_t>(m.src_step);
    const bool dense_row = src_step == size;
    const bool dense = dense_row && (m.rows == 1 || static_cast<uint64_t>(m.src_pitch) == m.count * size);
    const bool dense_target = target.step == static_cast<int64_t>(out_size) && (m.rows == 1 || target.pitch == static_cast<int64_t>(m.count * out_size));
    const bool as_is = m.src_dtype == m.dst_dtype && !m.swap && dense_row && target.step == static_cast<int64_t>(out_size);
    while (count) {
      if (stop_) throw Stop{};
      const uint64_t column = first % m.count, in_row = std::min(count, m.count - column);
      uint64_t n;
      if (as_is && (dense ? dense_target || in_row * size >= kDenseRow : in_row * size >= kDenseRow)) {
        n = dense && dense_target ? count : in_row;  // straight into place
        read(m.src, target.at(first / m.count, column), n * size, place(m, first));
      } else {
        n = stage(m, first, count, dense, dense_row, staging);
        scatter(m, first, n, target, staging);
      }
      first += n;
      count -= n;
    }
  }

  static uint64_t place(const Move& m, uint64_t e) {
    return m.src_offset + static_cast<uint64_t>(static_cast<int64_t>(e / m.count) * m.src_pitch + static_cast<int64_t>(e % m.count) * m.src_step);
  }

  // Reads the source from element `first` on, as much as the staging buffer takes; returns how many elements that is.
  uint64_t stage(const Move& m, uint64_t first, uint64_t count, bool dense, bool dense_row, char* staging) {
    const uint64_t size = kItemSize[m.src_dtype], base = place(m, first);
    const uint64_t in_row = m.count - first % m.count;
    uint64_t n;
    if (dense) {
      n = std::min(count, kStaging / size);
    } else if (dense_row && m.count * size >= kDenseRow) {
      n = std::min({count, in_row, kStaging / size});
    } else {  // whole short rows, with what lies between them
      const auto fits = [&](uint64_t e) { const uint64_t at = place(m, e); return at >= base && at + size <= base + kStaging; };
      n = std::min(count, in_row);
      while (n > 1 && !fits(first + n - 1)) n /= 2;
      if (n == in_row)
        for (uint64_t row; n < count && (row = std::min(m.count, count - n), fits(first + n) && fits(first + n + row - 1)); n += row) {
        }
    }
    uint64_t last = place(m, first + n - 1);
    const uint64_t tail = (first + n) % m.count;  // rows may overlap: the one before a partial one may reach further
    if (tail && tail < n) last = std::max(last, place(m, first + n - tail - 1));
    read(m.src, staging, last + size - base, base);
    return n;
  }

  // Carries `n` staged elements to their targets, row by row.
  void scatter(const Move& m, uint64_t first, uint64_t n, const Target& target, char* staging) {
    const uint64_t size = kItemSize[m.src_dtype], out_size = kItemSize[m.dst_dtype], base = place(m, first);
    const bool rows = static_cast<uint64_t>(m.src_step) == size && target.step == static_cast<int64_t>(out_size);
    const bool shared = m.rows > 1 && static_cast<uint64_t>(m.src_pitch) < m.count * size;  // must not be swapped in place
    for (uint64_t done = 0; done < n;) {
      const uint64_t e = first + done, column = e % m.count, k = std::min(n - done, m.count - column);
      char* from = staging + (place(m, e) - base);
      if (rows && !(m.swap && shared)) {
        convert(m, from, k, target.at(e / m.count, column));
      } else {
        char element[16];
        for (uint64_t i = 0; i < k; ++i) {
          std::memcpy(element, from + i * static_cast<uint64_t>(m.src_step), size);
          convert(m, element, 1, target.at(e / m.count, column + i));
        }
      }
      done += k;
    }
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

Result run(const Batch& batch, const Settings& settings, const std::function<bool(uint64_t)>& tick, const Sink& sink) {
  return Run(batch, settings, sink).go(tick);
}

}  // namespace zckpt
