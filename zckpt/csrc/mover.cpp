// How a batch is run.
//  1. Each output file is cut into windows; a window knows which moves and literals may touch it. What they put there is worked
//     out when its turn comes, so a plan of millions of rows takes no memory. Moves into memory become windows of their own.
//  2. A thread takes the next window, so reads and writes go through the files in order, and gathers all its elements in one
//     aligned buffer. (Without direct I/O as many files take turns as there are threads: the kernel lets one at a time write to a
//     file.) Their sources are read file by file, each in its own order, and neighbours together: a window of many
//     small parameters cut over many ranks is one read per rank. The same dtype is read straight into place; a cast, or rows
//     too short to be read one by one, go through a small staging buffer that stays in the processor's cache.
//     A matrix that is transposed is turned in squares that fit registers (turn.cpp), or in tiles that fit the cache: its rows are
//     read in their order, in strips as wide as the window has columns. Each strip costs a read: such a matrix has windows of its
//     own, few and alike, which may be a few times as long as others.
//     Sources may be folded from several others (fold.cpp). While a window is made, the page cache fetches what windows after it
//     will read.
//  3. CRCs of element ranges are taken while the buffer is warm; they are partial, and joined by the caller.
//  4. One positional write: direct I/O where there is enough of the window and the file system allows it (no page cache to fill
//     and flush later), otherwise plain. Parts of blocks at its ends always go the plain way, and so does the rest of a file
//     once a direct write of it was refused as such (FUSE, disks of larger blocks).
//     Where the file system lets files share blocks (XFS, Btrfs), whole blocks that are the same in a source, and lie there as
//     they will lie here, are cloned instead of written. They were read all the same, for the CRCs.
//  5. A file that a consumer wants (to hash it, or to send it elsewhere) is handed over window by window: the thread with window k
//     waits for the thread with k - 1. Windows are taken in order, so the one whose turn it is never waits.
// Memory: threads x (window + staging), with turned rows up to five times that, whatever the size of the model. Results do not depend
// on the number of threads.
#include "mover.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "engine.h"
#include "io.h"

namespace zckpt {
namespace {

constexpr uint32_t kLiteral = 1u << 31;
constexpr uint64_t kLeastDirect = 256 << 10;  // of a window that others fill too: less is cheaper by way of the page cache
constexpr uint64_t kWide = 5;                 // windows that one with turned rows may be as long as
constexpr size_t kAhead = 2;                  // windows of each thread whose sources are asked for early
constexpr uint64_t kWish = 65536;             // bytes of a window that are asked for early at least
constexpr uint64_t kClone = 65536;            // bytes that are cloned at least: fewer are written as soon
constexpr uint64_t kStrip = 8192;             // bytes of a row that are read at once, of rows that are turned

using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;  // [begin, end) of bytes, as they come

struct Item {  // a move or literal, and the bytes of the output between its first and its last
  uint32_t dst, source;
  uint64_t begin, end;
};

struct Clone {  // bytes [begin, end) of an output, which are those of a source from `at` on
  uint64_t begin, end, at;
  uint32_t src;
};

struct Window {
  uint64_t start;      // of the window in its file; for memory, the first element of the move
  size_t first, last;  // of the items that may touch it; for memory, the number of the move and that of the elements
  bool memory;
  size_t turn;      // among the windows of its file
  uint64_t length;  // of a file's; one with turned rows may be longer than `Settings::window`
};

class Run : Engine {
 public:
  Run(const Batch& batch, const Settings& settings, const Consumer& consumer)
      : Engine(batch, settings), consumer_(consumer), plain_(batch.stores.size()), apart_(batch.stores.size()) {
    plan();
  }

  Result go(const std::function<bool(uint64_t)>& tick) {
    work_through(windows_.size(), tick);
    result_.cloned = cloned_;
    return std::move(result_);
  }

 private:
  const Consumer& consumer_;
  std::atomic<uint64_t> cloned_{0};
  std::vector<Item> items_;
  std::vector<Window> windows_;
  uint64_t longest_ = settings_.window;  // of them
  std::vector<std::atomic<bool>> plain_;  // stores that refused a direct write
  std::vector<std::atomic<bool>> apart_;  // sources that share no blocks with outputs
  bool folds_ = false;                    // a source is folded
  std::vector<size_t> turns_;             // store -> the turn of the window that is next to be handed to its consumer

  bool ordered(uint32_t store) const { return !settings_.ordered.empty() && settings_.ordered[store]; }

  // ---- planning -----------------------------------------------------------------------------------------------------

  void plan() {
    for (uint32_t i = 0; i < batch_.moves.size(); ++i) {
      const Move& m = batch_.moves[i];
      const uint64_t size = kItemSize[m.dst_dtype];
      if (in_memory(m.dst)) {
        const uint64_t step = std::max<uint64_t>(settings_.window / size, 1), numel = m.count * m.rows;
        for (uint64_t first = 0; first < numel; first += step) windows_.push_back({first, i, std::min(step, numel - first), true, 0, 0});
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
    folds_ = !batch_.terms.empty();
    turns_.resize(batch_.stores.size());
    interleave_files();
  }

  // Deals the windows of files that are written without direct I/O, of as many as there are threads: one that is done makes room
  // for the next.
  void interleave_files() {
    std::vector<Window> dealt;
    dealt.reserve(windows_.size());
    std::vector<std::pair<size_t, size_t>> open;  // [next, end) of the windows of a file
    size_t next = 0;
    for (; next < windows_.size() && windows_[next].memory; ++next) dealt.push_back(windows_[next]);
    for (size_t at = 0; next < windows_.size() || !open.empty();) {
      while (next < windows_.size() && open.size() < (batch_.stores[dst_of(windows_[next])].direct_fd < 0 ? settings_.threads : 1)) {
        const size_t first = next;
        while (next < windows_.size() && dst_of(windows_[next]) == dst_of(windows_[first])) ++next;
        open.emplace_back(first, next);
      }
      at %= open.size();
      dealt.push_back(windows_[open[at].first++]);
      if (open[at].first == open[at].second)
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
      else
        ++at;
    }
    windows_ = std::move(dealt);
  }

  uint32_t dst_of(const Window& window) const { return items_[window.first].dst; }

  // The windows of one file. Items are sorted by their begin, and may be long: one reaches into a window when it begins
  // before the window's end, and it or an earlier one ends after the window's start.
  void cut(size_t first, size_t last) {
    uint64_t reach = 0;
    size_t from = first, to = first, turn = 0;
    for (uint64_t start = items_[first].begin / settings_.window * settings_.window, border;; start = border) {
      uint64_t turned = 0;
      border = start + settings_.window;
      while (from < to && items_[from].end <= start) ++from;
      for (size_t i = from; i < to; ++i) turned = std::max(turned, share(items_[i], start));
      for (; to < last && items_[to].begin < std::max(border, start + turned); ++to) {
        const uint64_t begin = items_[to].begin / kBlock * kBlock, own = share(items_[to], start);
        if (own && !turned && reach <= begin && start + settings_.window / 8 <= begin) {
          border = begin;  // all of it is another window's
          break;
        }
        turned = std::max(turned, own);
        reach = std::max(reach, items_[to].end);
      }
      if (turned) border = start + turned;
      longest_ = std::max(longest_, border - start);
      if (from < to) windows_.push_back({start, from, to, false, turn++, border - start});
      if (to == last && reach <= border) return;
      if (reach <= border) border = std::max(border, items_[to].begin / settings_.window * settings_.window);  // skips a hole
    }
  }

  // How much of an item a window should hold that begins at `start`, if its rows become columns and it does not fit; 0 for others.
  // It is cut into equal parts: as many as leave strips of some size, or more if they would be longer than `kWide` windows.
  uint64_t share(const Item& item, uint64_t start) const {
    if (item.source & kLiteral || item.end <= start + settings_.window) return 0;
    const Move& m = batch_.moves[item.source];
    if (!is_across(m)) return 0;
    const uint64_t columns = kStrip / static_cast<uint64_t>(m.src_step) + 1, want = columns * static_cast<uint64_t>(m.dst_step);
    const uint64_t rest = item.end - start, most = kWide * settings_.window;
    const uint64_t parts = std::max((rest + most - 1) / most, rest / std::max(want, settings_.window));
    return (rest / parts / kBlock + 1) * kBlock;
  }

  // Whether a move's rows become columns, which lie together in the output.
  static bool is_across(const Move& m) {
    const uint64_t size = kItemSize[m.dst_dtype], step = static_cast<uint64_t>(m.dst_step);
    return m.rows > 1 && step != size && static_cast<uint64_t>(m.dst_pitch) == size && step >= m.rows * size && can_turn(m);
  }

  // ---- working ------------------------------------------------------------------------------------------------------

  Buffers buffers() const override {
    const bool files = !windows_.empty() && !windows_.back().memory;  // those of memory come first
    return {files ? taken(longest_ + kBlock) : nullptr, taken(kStaging), nullptr};
  }

  void leave(Buffers& buffers) const override {
    if (longest_ == settings_.window) keep(buffers.window, longest_ + kBlock);
    keep(buffers.staging, kStaging);
  }

  void work(size_t job, Buffers& buffers) override {
    const Window& window = windows_[job];
    look_ahead(job);
    if (window.memory)
      into_memory(window, buffers);
    else
      into_file(window, buffers);
  }

  // Lets the page cache fetch the sources of the windows that come after those that all threads work on: a disk has something
  // to read while something is written, and answers several requests at once.
  void look_ahead(size_t job) {
    if (folds_) {  // of many sources each: nearer
      if (job < settings_.threads) expect_folded(windows_[job]);
      if (job + settings_.threads < windows_.size()) expect_folded(windows_[job + settings_.threads]);
    }
    const size_t ahead = kAhead * settings_.threads;  // the first thread asks for all that lies so far ahead of it
    for (size_t i = job ? job + ahead : 1; i <= job + ahead && i < windows_.size(); ++i)
      if (!windows_[i].memory) expect_sources(windows_[i]);
  }

  void expect_folded(const Window& window) {
    for (size_t i = window.first; i < (window.memory ? window.first + 1 : window.last); ++i) {
      const uint32_t number = window.memory ? static_cast<uint32_t>(window.first) : items_[i].source;
      if (number & kLiteral) continue;
      const Move& m = batch_.moves[number];
      const uint64_t size = kItemSize[m.dst_dtype], base = m.src_offset / sizeof(float);
      if (window.memory) {
        read_ahead(m.src, base + window.start, window.last);
      } else if (m.rows == 1 && static_cast<uint64_t>(m.dst_step) == size) {
        const uint64_t begin = std::max(items_[i].begin, window.start), end = std::min(items_[i].end, window.start + window.length);
        if (begin < end) read_ahead(m.src, base + (begin - m.dst_offset) / size, (end - begin + size - 1) / size);
      }
    }
  }

  void expect_sources(const Window& window) {
    for (size_t i = window.first; i < window.last; ++i) {
      const Item& item = items_[i];
      const uint64_t begin = std::max(item.begin, window.start), end = std::min(item.end, window.start + window.length);
      if (item.source & kLiteral || begin >= end || end - begin < kWish) continue;
      const Move& m = batch_.moves[item.source];
      const uint64_t size = kItemSize[m.dst_dtype], src_size = kItemSize[m.src_dtype];
      const bool dense = m.dst_step == static_cast<int64_t>(size) && (m.rows == 1 || m.dst_pitch == static_cast<int64_t>(m.count * size));
      if (!dense || in_memory(m.src)) continue;
      const uint64_t first = place(m, (begin - m.dst_offset) / size), last = place(m, (end - m.dst_offset - 1) / size) + src_size;
      if (last <= first || last - first > 4 * (end - begin) / size * src_size) continue;  // mostly what is not wanted
      const auto fd = static_cast<int>(batch_.stores[m.src].fd);
      if (!is_at_hand(fd, last - 1) || !is_at_hand(fd, first)) will_need(fd, first, last - first);
    }
  }

  void into_file(const Window& window, Buffers& buffers) {
    const uint32_t dst = dst_of(window);
    char* buffer = buffers.window.get();
    Ranges filled;
    std::vector<Segment> segments;
    for (size_t i = window.first; i < window.last; ++i) {
      const Item& item = items_[i];
      if (item.source & kLiteral) {
        const Literal& literal = batch_.literals[item.source & ~kLiteral];
        const uint64_t begin = std::max(item.begin, window.start), end = std::min(item.end, window.start + window.length);
        if (begin >= end) continue;
        std::memcpy(buffer + (begin - window.start), batch_.blob + literal.at + (begin - literal.offset), end - begin);
        fill(filled, begin, end);
      } else {
        fill_from(item.source, window, buffer, buffers.staging.get(), segments, filled);
      }
    }
    const std::vector<Clone> clones = cloneable(segments, window, buffer);
    read_segments(segments, buffers.staging.get());
    join(filled);
    for (const auto& [begin, end] : filled) flush(dst, window.start, begin, end, buffer, clones);
    if (ordered(dst)) hand_over(window, dst, filled, buffers.window);
  }

  void hand_over(const Window& window, uint32_t dst, const Ranges& filled, Bytes& buffer) {
    {
      std::unique_lock lock(mutex_);
      passed_.wait(lock, [&] { return stop_ || turns_[dst] == window.turn; });
      if (stop_) throw Stop{};
    }
    for (const auto& [begin, end] : filled) {
      const Handed handed = consumer_(dst, begin, buffer, begin - window.start, end - begin);
      if (handed != Handed::kTaken) fail(handed == Handed::kKept ? "kept" : "consumer", 0, dst, begin);
    }
    std::lock_guard lock(mutex_);
    ++turns_[dst];
    passed_.notify_all();
  }

  // Joins ranges that follow each other. Rows of several moves may interleave; together they are usually one range, which shows
  // without sorting them, since nothing is filled twice.
  static void join(Ranges& filled) {
    uint64_t low = UINT64_MAX, high = 0, nbytes = 0;
    for (const auto& [begin, end] : filled) low = std::min(low, begin), high = std::max(high, end), nbytes += end - begin;
    if (filled.size() > 1 && nbytes == high - low) {
      filled = {{low, high}};
      return;
    }
    if (!std::is_sorted(filled.begin(), filled.end())) std::sort(filled.begin(), filled.end());
    size_t ranges = 0;
    for (const auto& [begin, end] : filled) {
      if (ranges && filled[ranges - 1].second == begin)
        filled[ranges - 1].second = end;
      else
        filled[ranges++] = {begin, end};
    }
    filled.resize(ranges);
  }

  static void fill(Ranges& filled, uint64_t begin, uint64_t end) {
    if (!filled.empty() && filled.back().second == begin)
      filled.back().second = end;
    else
      filled.emplace_back(begin, end);
  }

  // What a move puts into a window. An element that straddles a border belongs to the window it
  // starts in: the buffer has room for it.
  void fill_from(uint32_t number, const Window& window, char* buffer, char* staging, std::vector<Segment>& segments, Ranges& filled) {
    const Move& m = batch_.moves[number];
    const uint64_t size = kItemSize[m.dst_dtype], start = window.start, border = start + window.length;
    const auto step = static_cast<uint64_t>(m.dst_step);
    uint64_t rows = m.rows, count = m.count, pitch = static_cast<uint64_t>(m.dst_pitch);
    if (is_across(m)) return fill_across(number, window, buffer, staging, filled);
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
        gather(number, first, n, target, staging, segments);
        n = 0;
      }
      if (!n) first = at;
      n += high - low;
    }
    if (n) gather(number, first, n, target, staging, segments);
  }

  // The same of a move whose rows become columns: what was a column lies together here.
  void fill_across(uint32_t number, const Window& window, char* buffer, char* staging, Ranges& filled) {
    const Move& m = batch_.moves[number];
    const uint64_t size = kItemSize[m.dst_dtype], start = window.start, border = start + window.length, step = static_cast<uint64_t>(m.dst_step);
    const auto before = [](uint64_t from, uint64_t to, uint64_t by) { return to <= from ? 0 : (to - from + by - 1) / by; };
    const uint64_t tail = (m.rows - 1) * size;  // from the first to the last element of a column
    Across part{start > m.dst_offset + tail ? before(m.dst_offset + tail, start, step) : 0, std::min(m.count, before(m.dst_offset, border, step)), 0, 0};
    if (part.first >= part.last) return;
    const auto bound = [&](uint64_t column, uint64_t at) { return std::min(m.rows, before(m.dst_offset + column * step, at, size)); };
    part.low = bound(part.first, start), part.high = bound(part.last - 1, border);
    for (uint64_t column = part.first; column < part.last; ++column) {
      const uint64_t low = column == part.first ? part.low : 0, high = column + 1 == part.last ? part.high : m.rows;
      const uint64_t offset = m.dst_offset + column * step;
      if (low < high) fill(filled, offset + low * size, offset + high * size);
    }
    const Target target{buffer + (static_cast<int64_t>(m.dst_offset) - static_cast<int64_t>(start)), m.dst_pitch, m.dst_step};
    gather_across(number, part, target, staging);
  }

  // Whole blocks of what is read unchanged, in their order, that lie in their blocks as they do in the source.
  std::vector<Clone> cloneable(const std::vector<Segment>& segments, const Window& window, const char* buffer) {
    std::vector<Clone> found;
    for (const Segment& s : segments) {
      const Move& m = batch_.moves[s.move];
      if (m.src_dtype != m.dst_dtype || m.swap || in_memory(m.src) || apart_[m.src]) continue;
      const uint64_t at = window.start + static_cast<uint64_t>(s.out - buffer), end = at + s.count * kItemSize[m.dst_dtype];
      const uint64_t first = (at + kBlock - 1) / kBlock * kBlock, last = end / kBlock * kBlock;
      if (at % kBlock == s.offset % kBlock && first + kClone <= last) found.push_back({first, last, s.offset + (first - at), m.src});
    }
    std::sort(found.begin(), found.end(), [](const Clone& a, const Clone& b) { return a.begin < b.begin; });
    return found;
  }

  void flush(uint32_t dst, uint64_t start, uint64_t begin, uint64_t end, const char* buffer, const std::vector<Clone>& clones) {
    if (begin == end) return;
    take_crcs(dst, begin, end, buffer + (begin - start));
    uint64_t done = begin;
    for (const Clone& c : clones) {
      if (c.begin < done || c.end > end || apart_[c.src]) continue;
      if (clone(static_cast<int>(batch_.stores[c.src].fd), c.at, static_cast<int>(batch_.stores[dst].fd), c.begin, c.end - c.begin)) {
        apart_[c.src] = true;
        continue;
      }
      write(dst, start, done, c.begin, buffer);
      cloned_ += c.end - c.begin;
      done_bytes_ += c.end - c.begin;
      done = c.end;
    }
    write(dst, start, done, end, buffer);
  }

  void write(uint32_t dst, uint64_t start, uint64_t begin, uint64_t end, const char* buffer) {
    if (begin == end) return;
    const Store& store = batch_.stores[dst];
    const auto plainly = [&](uint64_t from, uint64_t to) {
      if (from == to) return;
      if (const int error = write_all(static_cast<int>(store.fd), buffer + (from - start), to - from, from)) fail("write", error, dst, from);
    };
    // Whole blocks go past the page cache: the buffer lies as the file does.
    const uint64_t low = (begin + kBlock - 1) / kBlock * kBlock, high = end / kBlock * kBlock;
    uint64_t done = begin;
    if (store.direct_fd >= 0 && !plain_[dst] && low < high && (low == start || high - low >= kLeastDirect)) {
      const int error = write_all(static_cast<int>(store.direct_fd), buffer + (low - start), high - low, low);
      if (error == EINVAL) {
        plain_[dst] = true;
      } else if (error) {
        fail("write", error, dst, low);
      } else {
        plainly(begin, low);
        done = high;
      }
    }
    plainly(done, end);
    done_bytes_ += end - begin;
    spend(end - begin);
  }

  void into_memory(const Window& window, Buffers& buffers) {
    const auto number = static_cast<uint32_t>(window.first);
    const Move& m = batch_.moves[number];
    const Target target{reinterpret_cast<char*>(batch_.stores[m.dst].address + m.dst_offset), m.dst_pitch, m.dst_step};
    std::vector<Segment> segments;
    gather(number, window.start, window.last, target, buffers.staging.get(), segments);
    read_segments(segments, buffers.staging.get());
    done_bytes_ += window.last * kItemSize[m.dst_dtype];
  }
};

}  // namespace

Result run(const Batch& batch, const Settings& settings, const std::function<bool(uint64_t)>& tick, const Consumer& consumer) {
  return Run(batch, settings, consumer).go(tick);
}

}  // namespace zckpt
