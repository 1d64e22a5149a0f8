// How a confirmation runs.
//  1. The files of the output are cut into windows, each of which is read once, by direct I/O where the file system allows it: so
//     the disk is read, and not the page cache, which keeps what it has. Where it does not, windows fit a processor's cache with
//     the parts that they are held against.
//  2. For each run of elements in a window, the source's pieces are walked for those elements. What the page cache has of them is
//     taken from it in parts that fit a processor's cache; the rest is read past it, in parts as long as a window.
//  3. Each part is judged where it lies, against the window and against its copies, and nothing is kept of it.
//  4. More threads than `settings.threads` are started, for most of them wait for a disk; but only so many compute at once.
// Memory: threads x (window + parts), whatever the size of the model.
#include "confirm.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "crc32.h"
#include "io.h"

namespace zckpt {
namespace {

constexpr uint64_t kWindow = 1 << 20, kCached = 256 << 10, kPart = 128 << 10, kTurned = 4 << 20;
constexpr unsigned kWaiting = 3;  // threads for each one that computes
constexpr uint64_t kShort = 512;  // bytes; shorter rows are read with what lies between them

struct Stretch {  // a piece of an output
  uint32_t store, group, piece;
  bool turned;
  uint64_t begin, end;
};

struct Window {
  uint32_t store;
  bool turned;
  uint64_t begin, end;  // bytes
  uint64_t sum_begin, sum_end;  // of which these take part in CRCs
  uint64_t tail;        // more bytes, of an element that begins in the window
  size_t first, last;   // of the stretches that may touch it
};

class Confirmer : Engine {
 public:
  Confirmer(const Batch& batch, const Confirmation& asked, const Settings& settings, unsigned computing)
      : Engine(batch, settings), asked_(asked), computing_(computing), bytes_(batch.stores.size()), unasked_(batch.stores.size()),
        plain_(batch.stores.size()) {
    pieces_.reserve(asked.pieces.size());
    for (const Fragment& piece : asked.pieces) pieces_.push_back(normal(piece));
    for (const Side& side : asked.sides) {
      const auto first = pieces_.begin() + side.first;
      std::sort(first, first + side.pieces, [](const Fragment& a, const Fragment& b) { return a.start < b.start; });
    }
    reach();
    claim();
    cut();
    found_.resize(asked.sides.size());
  }

  Confirmed go(const std::function<bool(uint64_t)>& tick) {
    work_through(windows_.size(), tick);
    Confirmed confirmed{std::move(result_.failure), std::move(result_.crcs), {}, {}};
    for (uint32_t i = 0; i < found_.size(); ++i)
      if (found_[i].count) confirmed.found.emplace_back(found_[i]).side = i;
    for (const auto& bytes : bytes_) confirmed.bytes.push_back(bytes);
    return confirmed;
  }

 private:
  const Confirmation& asked_;
  const unsigned computing_;
  unsigned busy_ = 0;
  std::vector<Fragment> pieces_;
  std::vector<uint64_t> reach_;  // of each piece: where it and those before it in its side end
  std::vector<bool> summed_;     // pieces of sources and copies whose bytes nobody else gives to the CRCs
  std::vector<Stretch> stretches_;
  std::vector<Window> windows_;
  std::vector<Confirmed::Found> found_;  // of each side
  std::vector<std::atomic<uint64_t>> bytes_;
  std::vector<std::atomic<bool>> unasked_;  // stores of which one cannot ask what the page cache has
  std::vector<std::atomic<bool>> plain_;     // stores that refused a direct read

  // ---- planning -----------------------------------------------------------------------------------------------------

  // As few rows as there can be.
  static Fragment normal(Fragment p) {
    if (p.rows > 1 && p.count == 1 && p.pitch == 1) {
      p.count = p.rows, p.step = p.store_pitch, p.rows = 1;
    } else if (p.rows > 1 && p.pitch == p.count && p.store_pitch == p.count * p.step) {
      p.count *= p.rows, p.rows = 1;
    }
    if (p.count == 1) p.step = 1;
    if (p.rows == 1) p.pitch = p.store_pitch = p.count;
    return p;
  }

  static bool is_dense(const Fragment& p) { return p.step == 1 && (p.rows == 1 || p.store_pitch == p.count); }
  uint64_t size_of(uint32_t side) const { return kItemSize[asked_.sides[side].dtype]; }

  void reach() {
    reach_.resize(pieces_.size());
    for (const Side& side : asked_.sides) {
      uint64_t end = 0;
      for (uint32_t i = side.first; i < side.first + side.pieces; ++i) {
        const Fragment& p = pieces_[i];
        reach_[i] = end = std::max(end, p.start + (p.rows - 1) * p.pitch + p.count);
      }
    }
  }

  // Bytes that several pieces have are summed with the first one.
  void claim() {
    struct Claim {
      uint32_t store, piece;
      uint64_t begin, end;
    };
    std::vector<Claim> claims;
    for (const Group& group : asked_.groups) {
      for (uint32_t i = group.first; i < group.first + group.sides; ++i) {
        if (i == group.first + 1) continue;
        const Side& side = asked_.sides[i];
        for (uint32_t n = side.first; n < side.first + side.pieces; ++n) {
          const Fragment& p = pieces_[n];
          if (is_dense(p) && !p.apart) claims.push_back({p.store, n, p.offset, p.offset + p.rows * p.count * size_of(i)});
        }
      }
    }
    std::sort(claims.begin(), claims.end(), [](const Claim& a, const Claim& b) { return std::tie(a.store, a.begin, a.piece) < std::tie(b.store, b.begin, b.piece); });
    summed_.resize(pieces_.size());
    for (size_t i = 0, last = 0; i < claims.size(); ++i) {
      if (i && claims[last].store == claims[i].store && claims[i].begin < claims[last].end) continue;
      last = i;
      summed_[claims[i].piece] = true;
    }
  }

  void cut() {
    for (uint32_t g = 0; g < asked_.groups.size(); ++g) {
      const uint32_t output = asked_.groups[g].first + 1;
      const Side &source = asked_.sides[output - 1], &side = asked_.sides[output];
      bool turned = false;
      for (uint32_t i = source.first; i < source.first + source.pieces; ++i) turned = turned || pieces_[i].step != 1;
      for (uint32_t i = side.first; i < side.first + side.pieces; ++i) {
        const Fragment& p = pieces_[i];
        stretches_.push_back({p.store, g, i, turned, p.offset, p.offset + p.rows * p.count * size_of(output)});
      }
    }
    std::sort(stretches_.begin(), stretches_.end(), [](const Stretch& a, const Stretch& b) { return std::tie(a.store, a.begin, a.group) < std::tie(b.store, b.begin, b.group); });
    for (size_t first = 0, last; first < stretches_.size(); first = last) {
      for (last = first; last < stretches_.size() && stretches_[last].store == stretches_[first].store;) ++last;
      const uint32_t store = stretches_[first].store;
      Zone zone{store, 0, 0, 0};
      for (const Zone& one : asked_.zones)
        if (one.store == store) zone = one;
      uint64_t at = zone.begin < zone.end ? std::min(zone.begin, stretches_[first].begin) : stretches_[first].begin, end = zone.end;
      for (size_t i = first; i < last; ++i) {
        const Stretch& s = stretches_[i];
        end = std::max(end, s.end);
        if (!s.turned || s.begin < at) continue;
        cut(store, at, s.begin, 0, zone, first, last);
        cut(store, s.begin, s.end, row_bytes(s), zone, first, last);
        at = s.end;
      }
      cut(store, at, end, 0, zone, first, last);
    }
  }

  // Bytes of the output in a row of the transposed matrix that a stretch is of.
  uint64_t row_bytes(const Stretch& s) const {
    const uint32_t output = asked_.groups[s.group].first + 1;
    const Side& source = asked_.sides[output - 1];
    uint64_t row = 1;
    for (uint32_t i = source.first; i < source.first + source.pieces; ++i)
      if (pieces_[i].step != 1) row = std::max(row, pieces_[i].pitch);
    return row * size_of(output);
  }

  // Windows of bytes [at, end) of a file whose stretches are [first, last); on a grid, or of whole rows.
  void cut(uint32_t store, uint64_t at, uint64_t end, uint64_t row, const Zone& zone, size_t first, size_t last) {
    const uint64_t grid = batch_.stores[store].direct_fd < 0 ? kCached : kWindow;
    for (uint64_t next; at < end; at = next) {
      next = std::min(end, row == 0 ? (at / grid + 1) * grid : row > kTurned ? at + kTurned : at + kTurned / row * row);
      Window window{store, row != 0, at, next, std::clamp(zone.begin, at, next), std::clamp(zone.end, at, next), 0, first, first};
      while (first < last && stretches_[first].end <= at) ++first;  // a long one may hide shorter ones: those are looked at in vain
      window.first = first;
      for (window.last = first; window.last < last && stretches_[window.last].begin < next; ++window.last) {
        const Stretch& s = stretches_[window.last];
        const uint64_t size = size_of(asked_.groups[s.group].first + 1);
        if (s.end > next && s.begin < next && (next - s.begin) % size) window.tail = std::max(window.tail, size - (next - s.begin) % size);
      }
      if (window.sum_begin < window.sum_end || is_wanted(window)) windows_.push_back(window);
    }
  }

  // Whether a window has elements of which the source has some: a tensor of very many files comes in parts.
  bool is_wanted(const Window& w) const {
    for (size_t i = w.first; i < w.last; ++i) {
      const Stretch& s = stretches_[i];
      const uint32_t source = asked_.groups[s.group].first;
      const Side& side = asked_.sides[source];
      const Fragment& p = pieces_[s.piece];
      const uint64_t size = size_of(source + 1), low = s.begin > w.begin ? 0 : (w.begin - s.begin) / size, high = (std::min(s.end, w.end) - s.begin + size - 1) / size;
      if (s.end <= w.begin) continue;
      if (p.rows > 1) return true;
      const auto ends = reach_.begin() + side.first;
      const auto next = static_cast<uint32_t>(std::upper_bound(ends, ends + side.pieces, p.start + low) - reach_.begin());
      if (next < side.first + side.pieces && pieces_[next].start < p.start + high) return true;
    }
    return false;
  }

  // ---- reading ------------------------------------------------------------------------------------------------------

  // While one lives, its thread may compute.
  class Turn {
   public:
    explicit Turn(Confirmer& of) : of_(of) { take(); }
    ~Turn() { give(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    void take() {
      std::unique_lock lock(of_.mutex_);
      of_.passed_.wait(lock, [this] { return of_.stop_ || of_.busy_ < of_.computing_; });
      if (of_.stop_) throw Stop{};
      ++of_.busy_;
      has_ = true;
    }
    void give() {
      if (!has_) return;
      {
        std::lock_guard lock(of_.mutex_);
        --of_.busy_;
      }
      has_ = false;
      of_.passed_.notify_one();
    }

   private:
    Confirmer& of_;
    bool has_ = false;
  };

  // Bytes of a file, by direct I/O where there is such a descriptor; `past`: never from the page cache. Returns where they are in the
  // buffer, which has room for three blocks more.
  char* fetch(uint32_t number, uint64_t offset, uint64_t nbytes, char* buffer, bool past) {
    const Store& store = batch_.stores[number];
    const auto fd = static_cast<int>(store.fd);
    const uint64_t begin = offset / kBlock * kBlock, stop = offset + nbytes;
    const uint64_t end = std::min((stop + kBlock - 1) / kBlock * kBlock, store.size / kBlock * kBlock);  // a file's last block is read plainly
    uint64_t done = begin;
    if (store.direct_fd >= 0 && !plain_[number] && begin < end) {
      if (!read_all(static_cast<int>(store.direct_fd), buffer, end - begin, begin))
        done = end;
      else if (!plain_[number].exchange(true) && past)  // some file systems refuse; if it is the disk, the plain read fails too
        forget(fd, 0, 0);
    }
    if (done < stop) {
      if (past && done > begin) forget(fd, done, 0);
      if (const int error = read_all(fd, buffer + (done - begin), stop - done, done)) fail("read", error, number, done);
      if (settings_.give_back) forget(fd, done, stop - done);
    }
    return buffer + (offset - begin);
  }

  Buffers buffers() const override {
    bool turns = false;
    for (const Window& w : windows_) turns = turns || w.turned;
    constexpr uint64_t kMore = 3 * kBlock;
    return {aligned((turns ? kTurned : kWindow) + kMore), aligned(turns ? 2 * kTurned + kMore : kWindow + kMore), aligned(kWindow + kMore)};
  }

  // As much of `nbytes` as the page cache has, in whole `unit`s; where it has nothing, `ahead` bytes from the disk. `nbytes` becomes
  // what is there now.
  char* obtain(uint32_t number, uint64_t offset, uint64_t& nbytes, uint64_t unit, uint64_t ahead, char* buffer, Turn& turn) {
    if (stop_) throw Stop{};
    const Store& store = batch_.stores[number];
    if (store.fd < 0) {
      std::memcpy(buffer, reinterpret_cast<const char*>(store.address + offset), nbytes);
      return buffer;
    }
    const auto fd = static_cast<int>(store.fd);
    char* data = buffer;
    uint64_t cached = 0;
    if (!unasked_[number]) {
      const int64_t got = read_cached(fd, buffer, nbytes, offset);
      if (got < 0) unasked_[number] = true;
      cached = got > 0 ? static_cast<uint64_t>(got) / unit * unit : 0;
    }
    if (cached) {
      nbytes = cached;
      if (settings_.give_back) forget(fd, offset, nbytes);
    } else {
      nbytes = ahead;
      turn.give();
      data = fetch(number, offset, nbytes, buffer, false);
      turn.take();
    }
    count_read(number, nbytes);
    return data;
  }

  void count_read(uint32_t store, uint64_t nbytes) {
    bytes_[store] += nbytes;
    done_bytes_ += nbytes;
    spend(nbytes);
  }

  // Calls `each` with some elements that lie together, part by part: (data, number of the first of them, how many).
  template <typename Each>
  void stream(const Side& side, uint32_t piece, uint64_t first, uint64_t n, char* buffer, Turn& turn, Each&& each) {
    const Fragment& p = pieces_[piece];
    const uint64_t size = kItemSize[side.dtype];
    for (uint64_t done = 0, count; done < n; done += count) {
      const uint64_t offset = p.offset + (first + done) * size, rest = (n - done) * size;
      uint64_t nbytes = std::min(kPart, rest);
      char* data = obtain(p.store, offset, nbytes, size, std::min(kWindow, rest), buffer, turn);
      if (summed_[piece]) take_crcs(p.store, offset, offset + nbytes, data);
      if (side.swap) swap(data, nbytes / side.swap, side.swap);
      count = nbytes / size;
      each(data, done, count);
    }
  }

  static void swap(char* data, uint64_t numbers, unsigned width) {
    for (; numbers; --numbers, data += width) std::reverse(data, data + width);
  }

  // ---- judging ------------------------------------------------------------------------------------------------------

  struct Context {
    const Group& group;
    const Side &source, &output;
    uint64_t size, out_size;  // of their elements
    Buffers& buffers;
    Turn& turn;
  };

  void work(size_t number, Buffers& buffers) override {
    const Window& w = windows_[number];
    Turn turn(*this);
    if (!w.turned) turn.give();
    char* data = fetch(w.store, w.begin, w.end + w.tail - w.begin, buffers.window.get(), true);
    count_read(w.store, w.end - w.begin);
    if (!w.turned) turn.take();
    if (w.sum_begin < w.sum_end) take_crcs(w.store, w.sum_begin, w.sum_end, data + (w.sum_begin - w.begin));
    for (size_t i = w.first; i < w.last; ++i) {
      const Stretch& s = stretches_[i];
      const Group& group = asked_.groups[s.group];
      const Side &source = asked_.sides[group.first], &output = asked_.sides[group.first + 1];
      const Context context{group, source, output, kItemSize[source.dtype], kItemSize[output.dtype], buffers, turn};
      const Fragment& p = pieces_[s.piece];
      const auto element = [&](uint64_t at) { return at <= s.begin ? 0 : (at - s.begin + context.out_size - 1) / context.out_size; };
      for (uint64_t k = element(w.begin), end = element(std::min(w.end, s.end)), n; k < end; k += n) {
        n = std::min(end - k, p.count - k % p.count);  // what lies together in the tensor, too
        against(context, p.start + k / p.count * p.pitch + k % p.count, n, data + (s.begin + k * context.out_size - w.begin));
      }
    }
  }

  // Elements [first, first + n) of the output, which lie at `output`, against the source's.
  void against(const Context& c, uint64_t first, uint64_t n, const char* output) {
    const uint64_t stop = first + n;
    const auto ends = reach_.begin() + c.source.first;
    auto i = static_cast<uint32_t>(std::upper_bound(ends, ends + c.source.pieces, first) - reach_.begin());
    for (; i < c.source.first + c.source.pieces && pieces_[i].start < stop; ++i) {
      const Fragment& p = pieces_[i];
      const uint64_t begin = std::max(first, p.start);
      if (p.rows > 1) {
        const uint64_t row = (begin - p.start) / p.pitch, end = std::min(p.rows, (stop - p.start + p.pitch - 1) / p.pitch);
        const Rows rows{i, row, end, first, stop};
        if (p.step == 1)
          in_rows(c, rows, output);
        else
          turned(c, rows, output);
      } else if (begin < p.start + p.count) {
        const uint64_t end = std::min(stop, p.start + p.count);
        in_run(c, i, begin - p.start, begin, end - begin, output + (begin - first) * c.out_size);
      }
    }
  }

  // Elements that lie together in the source, from element `k` of a piece on; `first` is the number of the first in the tensor.
  void in_run(const Context& c, uint32_t piece, uint64_t k, uint64_t first, uint64_t n, const char* output) {
    stream(c.source, piece, k, n, c.buffers.staging.get(), c.turn,
           [&](const char* data, uint64_t at, uint64_t count) { check(c, first + at, count, data, output + at * c.out_size); });
  }

  struct Rows {  // those of a piece that hold some of elements [first, stop)
    uint32_t piece;
    uint64_t row, end, first, stop;

    // The elements of a row that are meant.
    std::pair<uint64_t, uint64_t> of(const Fragment& p, uint64_t number) const {
      const uint64_t low = p.start + number * p.pitch;
      return {std::clamp(first, low, low + p.count), std::clamp(stop, low, low + p.count)};
    }
  };

  void in_rows(const Context& c, const Rows& rows, const char* output) {
    const Fragment& p = pieces_[rows.piece];
    const auto place = [&](uint64_t row, uint64_t element) { return row * p.store_pitch + (element - p.start - row * p.pitch); };
    const bool dense = is_dense(p), together = dense || (p.store_pitch > p.count && p.count * c.size < kShort && p.store_pitch <= 8 * p.count);
    for (uint64_t row = rows.row, last; row < rows.end; row = last) {
      last = row + 1;
      const auto [from, to] = rows.of(p, row);
      if (from >= to) continue;
      const uint64_t begin = place(row, from);
      uint64_t end = place(row, to - 1) + 1;
      for (; together && last < rows.end; ++last) {  // short ones are read together
        const auto [low, high] = rows.of(p, last);
        if (low >= high || (place(last, high - 1) + 1 - begin) * c.size > kPart) break;
        end = place(last, high - 1) + 1;
      }
      if (last == row + 1) {
        in_run(c, rows.piece, begin, from, to - from, output + (from - rows.first) * c.out_size);
        continue;
      }
      uint64_t nbytes = (end - begin) * c.size;
      const uint64_t offset = p.offset + begin * c.size;
      char* data = obtain(p.store, offset, nbytes, nbytes, nbytes, c.buffers.staging.get(), c.turn);
      if (dense && summed_[rows.piece]) take_crcs(p.store, offset, offset + nbytes, data);
      if (c.source.swap) swap(data, nbytes / c.source.swap, c.source.swap);
      for (uint64_t r = row; r < last; ++r) {
        const auto [low, high] = rows.of(p, r);
        check(c, low, high - low, data + (place(r, low) - begin) * c.size, output + (low - rows.first) * c.out_size);
      }
    }
  }

  // Of a matrix that lies transposed: its columns lie together there.
  void turned(const Context& c, const Rows& rows, const char* output) {
    const Fragment& p = pieces_[rows.piece];
    char* buffer = c.buffers.staging.get();
    for (uint64_t row = rows.row, n; row < rows.end; row += n) {
      n = 1;
      const auto [from, to] = rows.of(p, row);
      const auto is_whole = [&](uint64_t r) { return rows.of(p, r).second - rows.of(p, r).first == p.count; };
      if (is_whole(row))
        while (row + n < rows.end && (n + 1) * p.count * c.size <= kTurned && is_whole(row + n)) ++n;
      const uint64_t low = p.start + row * p.pitch;
      for (uint64_t at = from, columns; at < to; at += columns) {
        columns = std::min(to - at, kTurned / c.size);
        strips(c, p, row, n, at - low, columns, buffer);
        for (uint64_t r = 0; r < n; ++r) {
          const uint64_t first = at + r * p.pitch;
          check(c, first, columns, buffer + r * columns * c.size, output + (first - rows.first) * c.out_size);
        }
      }
    }
  }

  // Some rows and columns of a matrix that lies transposed, row after row.
  void strips(const Context& c, const Fragment& p, uint64_t row, uint64_t rows, uint64_t column, uint64_t columns, char* to) {
    char* area = to + kTurned;
    const uint64_t strip = rows * c.size, apart = p.step * c.size;
    const uint64_t held = 4 * strip >= apart && strip < kPart ? (kPart - strip) / apart + 1 : 1;
    for (uint64_t i = 0, n; i < columns; i += n) {
      n = std::min(held, columns - i);
      const uint64_t offset = p.offset + ((column + i) * p.step + row * p.store_pitch) * c.size, nbytes = (n - 1) * apart + strip;
      const Store& store = batch_.stores[p.store];
      if (store.fd < 0)
        std::memcpy(area, reinterpret_cast<const char*>(store.address + offset), nbytes);
      else if (const int error = read_all(static_cast<int>(store.fd), area, nbytes, offset))
        fail("read", error, p.store, offset);
      else
        count_read(p.store, n * strip);
      for (uint64_t j = 0; j < n; ++j) {
        if (c.source.swap) swap(area + j * apart, strip / c.source.swap, c.source.swap);
        char* const out = to + (i + j) * c.size;
        switch (c.size) {
          case 1: turn_over<1>(area + j * apart, rows, out, columns); break;
          case 2: turn_over<2>(area + j * apart, rows, out, columns); break;
          case 4: turn_over<4>(area + j * apart, rows, out, columns); break;
          case 8: turn_over<8>(area + j * apart, rows, out, columns); break;
          default: turn_over<16>(area + j * apart, rows, out, columns);
        }
      }
    }
  }

  template <uint64_t kSize>
  static void turn_over(const char* from, uint64_t n, char* to, uint64_t step) {
    for (uint64_t r = 0; r < n; ++r) std::memcpy(to + r * step * kSize, from + r * kSize, kSize);
  }

  // Elements that lie together on both sides.
  void check(const Context& c, uint64_t first, uint64_t n, const char* source, const char* output) {
    note(c.group.first + 1, first, judge(static_cast<Likeness>(c.group.likeness), static_cast<DType>(c.source.dtype), static_cast<DType>(c.output.dtype), source, output, n));
    for (uint32_t s = c.group.first + 2; s < c.group.first + c.group.sides; ++s) {
      const Side& copy = asked_.sides[s];
      const auto ends = reach_.begin() + copy.first;
      auto i = static_cast<uint32_t>(std::upper_bound(ends, ends + copy.pieces, first) - reach_.begin());
      for (; i < copy.first + copy.pieces && pieces_[i].start < first + n; ++i) {
        const Fragment& p = pieces_[i];
        const uint64_t low = std::max(first, p.start), high = std::min(first + n, p.start + p.count);
        if (low >= high) continue;
        stream(copy, i, low - p.start, high - low, c.buffers.other.get(), c.turn, [&](const char* data, uint64_t at, uint64_t count) {
          const char* own = source + (low + at - first) * c.size;
          note(s, low + at, judge(Likeness::kSame, static_cast<DType>(c.source.dtype), static_cast<DType>(copy.dtype), own, data, count));
        });
      }
    }
  }

  void note(uint32_t side, uint64_t first, Unlike unlike) {
    if (!unlike.count) return;
    std::lock_guard lock(mutex_);
    Confirmed::Found& found = found_[side];
    found.first = found.count ? std::min(found.first, first + unlike.first) : first + unlike.first;
    found.count += unlike.count;
  }
};

}  // namespace

Confirmed confirm(const Batch& batch, const Confirmation& asked, Settings settings, const std::function<bool(uint64_t)>& tick) {
  const unsigned computing = settings.threads;
  settings.threads *= kWaiting;
  return Confirmer(batch, asked, settings, computing).go(tick);
}

}  // namespace zckpt
