#include "engine.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <thread>
#include <tuple>
#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

#include "crc32.h"
#include "floats.h"
#include "io.h"
#include "turn.h"

namespace zckpt {
namespace {

constexpr uint64_t kDenseRow = 4096;  // shorter rows are gathered from a block instead of being read one by one
constexpr uint64_t kBridge = 16384;   // a hole between two runs that is cheaper to read than a second call
constexpr int64_t kMostApart = 4;     // elements from one to the next in rows that are turned
constexpr uint64_t kStrips = 512 << 10;  // bytes of rows that are turned at once: a second-level cache has room for what they become, too
constexpr uint64_t kHeld = 32;        // of such rows at least: as numbers of 2 bytes they fill a line of a cache
constexpr uint64_t kTile = 64;        // rows and columns of a tile: two of them fit a first-level cache
constexpr uint64_t kLine = 64;        // of a cache: rows an odd number of them apart do not compete for the same places in it

// `count` elements that are `step` bytes apart, side by side.
template <typename T>
void pack(const char* from, int64_t step, uint64_t count, char* out) {
  for (uint64_t i = 0; i < count; ++i, from += step) std::memcpy(out + i * sizeof(T), from, sizeof(T));
}

using Element = std::array<uint64_t, 2>;  // of 16 bytes

// Column after column of a tile whose rows are `pitch` apart; of column c the rows from rows[c][0] on, those before rows[c][1].
template <typename T>
void turn(const char* tile, uint64_t pitch, uint64_t columns, const uint64_t (*rows)[2], char* out, int64_t step) {
  for (uint64_t c = 0; c < columns; ++c, out += step)
    for (uint64_t r = rows[c][0]; r < rows[c][1]; ++r) std::memcpy(out + r * sizeof(T), tile + r * pitch + c * sizeof(T), sizeof(T));
}

constexpr size_t kMostKept = 16;

struct Kept {
  std::mutex mutex;
  std::vector<std::pair<uint64_t, Bytes>> buffers;
};

Kept& kept() {
  static Kept all;
  return all;
}

}  // namespace

Bytes taken(uint64_t nbytes) {
  {
    std::lock_guard lock(kept().mutex);
    auto& all = kept().buffers;
    const auto fits = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.first == nbytes; });
    if (fits != all.end()) {
      Bytes found = std::move(fits->second);
      all.erase(fits);
      return found;
    }
  }
  return aligned(nbytes);
}

void keep(Bytes& buffer, uint64_t nbytes) {
  if (!buffer) return;
  std::lock_guard lock(kept().mutex);
  if (kept().buffers.size() < kMostKept) kept().buffers.emplace_back(nbytes, std::move(buffer));
}

void let_go() {
  std::lock_guard lock(kept().mutex);
  kept().buffers.clear();
}

Engine::Engine(const Batch& batch, const Settings& settings) : batch_(batch), settings_(settings) {}

void Engine::work_through(size_t count, const std::function<bool(uint64_t)>& tick) {
  jobs_ = count;
  if (settings_.here) {
    running_ = 1;
    thread();
  } else {
    on_threads(tick);
  }
  join_crcs();
  tick(done_bytes_);
}

void Engine::on_threads(const std::function<bool(uint64_t)>& tick) {
  const auto threads = static_cast<unsigned>(std::min<size_t>(settings_.threads, std::max<size_t>(jobs_, 1)));
  struct Pool : std::vector<std::thread> {
    Engine& engine;
    explicit Pool(Engine& e) : engine(e) {}
    ~Pool() {  // also where `tick` throws
      {
        std::lock_guard lock(engine.mutex_);
        if (engine.running_) engine.stop();
      }
      for (auto& thread : *this) thread.join();
    }
  };
  Pool pool(*this);
  pool.reserve(threads);
  for (unsigned i = 0; i < threads; ++i) {
    std::unique_lock lock(mutex_);  // a thread that has started waits for it to be counted
    try {
      pool.emplace_back([this] { thread(); });
      ++running_;
    } catch (const std::system_error& error) {
      lock.unlock();
      if (pool.empty()) end("threads", error.what());
      break;
    }
  }
  std::unique_lock lock(mutex_);
  while (!idle_.wait_for(lock, std::chrono::milliseconds(50), [this] { return running_ == 0; })) {
    lock.unlock();
    const bool on = tick(done_bytes_);
    lock.lock();
    if (!on) stop();
  }
}

// Those that follow each other become one: whoever gets them has few to look at.
void Engine::join_crcs() {
  auto& all = result_.crcs;
  std::sort(all.begin(), all.end(), [](const PartialCrc& a, const PartialCrc& b) { return std::tie(a.number, a.offset) < std::tie(b.number, b.offset); });
  size_t joined = 0;
  for (const PartialCrc& one : all) {
    PartialCrc* const before = joined ? &all[joined - 1] : nullptr;
    if (before && before->number == one.number && before->offset + before->length == one.offset) {
      before->crc = crc32_combine(before->crc, one.crc, one.length);
      before->length += one.length;
    } else {
      all[joined++] = one;
    }
  }
  all.resize(joined);
}

void Engine::thread() {
  const PlainFloats floats;
  try {
    Buffers own = buffers();
    for (size_t i; !stop_ && (i = next_++) < jobs_;) work(i, own);
    leave(own);
  } catch (const Stop&) {
#if defined(__GLIBCXX__)
  } catch (const abi::__forced_unwind&) {  // the interpreter is ending, and this thread with it
    throw;
#endif
  } catch (const std::bad_alloc&) {
    end("memory", "");
  } catch (const std::exception& error) {
    end("engine", error.what());
  } catch (...) {
    end("engine", "an unknown exception");
  }
  std::lock_guard lock(mutex_);
  if (--running_ == 0) idle_.notify_all();
}

void Engine::end(const char* kind, const char* text) noexcept {
  std::lock_guard lock(mutex_);
  if (!*result_.failure.kind) {
    result_.failure.kind = kind;
    std::snprintf(result_.failure.text, sizeof result_.failure.text, "%s", text);
  }
  stop();
}

void Engine::fail(const char* kind, int error, uint32_t store, uint64_t offset) {
  std::lock_guard lock(mutex_);
  if (!*result_.failure.kind) result_.failure = {kind, error, store, offset, ""};
  stop();
  throw Stop{};
}

void Engine::stop() {
  stop_ = true;
  passed_.notify_all();
}

void Engine::spend(uint64_t nbytes) {
  if (!settings_.bytes_per_s) return;
  const double due = static_cast<double>(spent_ += nbytes) / static_cast<double>(settings_.bytes_per_s);
  const auto until = began_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(due));
  for (auto now = std::chrono::steady_clock::now(); now < until; now = std::chrono::steady_clock::now()) {
    if (stop_) throw Stop{};
    std::this_thread::sleep_for(std::min<std::chrono::steady_clock::duration>(until - now, std::chrono::milliseconds(50)));
  }
}

void Engine::read(uint32_t src, char* to, uint64_t nbytes, uint64_t offset, bool again) {
  const Store& store = batch_.stores[src];
  if (store.fd == kFolded) return fold(src, to, nbytes / sizeof(float), offset / sizeof(float), again);
  if (store.fd < 0) {
    std::memcpy(to, reinterpret_cast<const char*>(store.address + offset), nbytes);
    return;
  }
  const auto fd = static_cast<int>(store.fd);
  if (const int error = read_all(fd, to, nbytes, offset)) fail("read", error, src, offset);
  if (settings_.give_back && !again) forget(fd, offset, nbytes);
  spend(nbytes);
}

std::vector<PartialCrc> Engine::wanted_crcs(uint32_t store, uint64_t begin, uint64_t end) const {
  const auto before = [](const Range& r, const std::pair<uint32_t, uint64_t>& key) {
    return r.store != key.first ? r.store < key.first : r.start + r.length <= key.second;
  };
  std::vector<PartialCrc> found;
  auto range = std::lower_bound(batch_.ranges.begin(), batch_.ranges.end(), std::pair(store, begin), before);
  for (; range != batch_.ranges.end() && range->store == store && range->start < end; ++range) {
    const uint64_t low = std::max(begin, range->start), high = std::min(end, range->start + range->length);
    found.push_back({range->number, 0, low, high - low});
  }
  return found;
}

void Engine::take_crcs(uint32_t store, uint64_t begin, uint64_t end, const char* data) {
  auto crcs = wanted_crcs(store, begin, end);
  for (auto& one : crcs) one.crc = crc32(0, data + (one.offset - begin), one.length);
  take(crcs);
}

void Engine::take(const std::vector<PartialCrc>& crcs) {
  if (crcs.empty()) return;
  std::lock_guard lock(mutex_);
  result_.crcs.insert(result_.crcs.end(), crcs.begin(), crcs.end());
}

void Engine::gather(uint32_t number, uint64_t first, uint64_t count, const Target& target, char* staging, std::vector<Segment>& segments) {
  const Move& m = batch_.moves[number];
  const uint64_t size = kItemSize[m.src_dtype], out_size = kItemSize[m.dst_dtype];
  const bool dense_row = static_cast<uint64_t>(m.src_step) == size;
  const bool dense = dense_row && (m.rows == 1 || static_cast<uint64_t>(m.src_pitch) == m.count * size);
  const bool target_row = target.step == static_cast<int64_t>(out_size);
  const bool dense_target = target_row && (m.rows == 1 || target.pitch == static_cast<int64_t>(m.count * out_size));
  while (count) {
    if (stop_) throw Stop{};
    const uint64_t column = first % m.count, in_row = std::min(count, m.count - column);
    uint64_t n;
    if (target_row && dense_row && ((dense && dense_target) || in_row * size >= kDenseRow)) {
      n = dense && dense_target ? count : in_row;
      segments.push_back({number, place(m, first), n, target.at(first / m.count, column)});
    } else {
      n = stage(m, first, count, dense, dense_row, staging);
      scatter(m, first, n, target, staging);
    }
    first += n;
    count -= n;
  }
}

bool Engine::can_turn(const Move& m) {
  const auto size = static_cast<int64_t>(kItemSize[m.src_dtype]);
  return m.src_step >= size && m.src_step <= kMostApart * size;
}

void Engine::gather_across(uint32_t number, const Across& part, const Target& target, char* staging) {
  const Move& m = batch_.moves[number];
  const uint64_t size = kItemSize[m.src_dtype], step = static_cast<uint64_t>(m.src_step), pitch = static_cast<uint64_t>(m.src_pitch);
  const bool single = part.first + 1 == part.last;
  // Strips are not in the order in which a disk would be read ahead: all rows are asked for when the first columns are wanted.
  if (!part.first && !in_memory(m.src)) will_need(static_cast<int>(batch_.stores[m.src].fd), m.src_offset, (m.rows - 1) * pitch + m.count * step);
  const uint64_t begin = single ? part.low : 0, end = single ? part.high : m.rows;
  const uint64_t most = kStrips / kHeld / step;  // columns
  for (uint64_t column = part.first; column < part.last; column += most) {
    const uint64_t columns = std::min(most, part.last - column), strip = (columns - 1) * step + size;
    const bool bridged = m.src_pitch >= static_cast<int64_t>(strip) && pitch - strip <= kBridge / 4 && pitch <= kStrips / kHeld;
    const uint64_t staged = bridged ? pitch : ((strip / kLine + 1) | 1) * kLine;
    uint64_t held = (kStrips - strip) / staged + 1;
    if (held > kSide) held -= held % kSide;
    for (uint64_t row = begin; row < end; row += held) {
      if (stop_) throw Stop{};
      const uint64_t n = std::min(held, end - row);
      if (bridged) {
        read(m.src, staging, (n - 1) * pitch + strip, place(m, row * m.count + column), true);
      } else {
        for (uint64_t r = 0; r < n; ++r) read(m.src, staging + r * staged, strip, place(m, (row + r) * m.count + column), true);
      }
      turn_block(m, part, {row, column, n, columns, staging, staged}, target);
    }
  }
}

// Squares are turned where they lie, of the columns of which all rows are wanted. What is beside them goes by way of tiles, and so
// does all of a block in which something overflows, which is counted there.
void Engine::turn_block(const Move& m, const Across& part, const Block& from, const Target& target) {
  const uint64_t size = kItemSize[m.src_dtype], width = from.columns, height = from.rows;
  const TurnSquares turned = static_cast<uint64_t>(m.src_step) == size && !m.swap ? squares_turned(m.src_dtype, m.dst_dtype) : nullptr;
  const uint64_t left = from.column == part.first && part.low > from.row;
  const uint64_t right = from.column + width == part.last && part.high < from.row + height;
  const uint64_t columns = width > left + right ? (width - left - right) / kSide * kSide : 0, rows = height / kSide * kSide;
  if (!turned || !turned(from.data + left * size, from.pitch, rows, columns, target.at(from.row, from.column + left), target.step))
    return turn_tiles(m, part, from, target);
  const auto beside = [&](uint64_t row, uint64_t column, uint64_t n, uint64_t of) {
    turn_tiles(m, part, {from.row + row, from.column + column, n, of, from.data + row * from.pitch + column * size, from.pitch}, target);
  };
  beside(0, 0, height, left);
  beside(rows, left, height - rows, columns);
  beside(0, left + columns, height, width - left - columns);
}

void Engine::turn_tiles(const Move& m, const Across& part, const Block& from, const Target& target) {
  const auto step = static_cast<uint64_t>(m.src_step);
  for (uint64_t r = 0; r < from.rows; r += kTile)
    for (uint64_t c = 0; c < from.columns; c += kTile)
      turn_tile(m, part, {from.row + r, from.column + c, std::min(kTile, from.rows - r), std::min(kTile, from.columns - c), from.data + r * from.pitch + c * step, from.pitch}, target);
}

void Engine::turn_tile(const Move& m, const Across& part, const Block& from, const Target& target) {
  const uint64_t size = kItemSize[m.src_dtype], out_size = kItemSize[m.dst_dtype], width = from.columns, height = from.rows;
  const bool is_copy = m.src_dtype == m.dst_dtype && !m.swap && static_cast<uint64_t>(m.src_step) == size;  // turned where it lies
  alignas(64) char tile[kTile * kTile * sizeof(Element)], packed[kTile * sizeof(Element)];
  for (uint64_t i = 0; i < height && !is_copy; ++i) {  // each element once, though neighbours may be of another window
    const uint64_t at = from.row + i, low = from.column == part.first && at < part.low;
    const uint64_t high = width - (from.column + width == part.last && at >= part.high);
    if (low >= high) continue;
    char* row = from.data + i * from.pitch + low * static_cast<uint64_t>(m.src_step);
    if (static_cast<uint64_t>(m.src_step) != size) {
      switch (size) {
        case 1: pack<uint8_t>(row, m.src_step, high - low, packed); break;
        case 2: pack<uint16_t>(row, m.src_step, high - low, packed); break;
        case 4: pack<uint32_t>(row, m.src_step, high - low, packed); break;
        case 8: pack<uint64_t>(row, m.src_step, high - low, packed); break;
        default: pack<Element>(row, m.src_step, high - low, packed);
      }
      row = packed;
    }
    convert(m, row, high - low, tile + (i * width + low) * out_size);
  }
  uint64_t rows[kTile][2];
  for (uint64_t i = 0; i < width; ++i) {
    const uint64_t column = from.column + i, low = column == part.first ? part.low : 0, high = column + 1 == part.last ? part.high : m.rows;
    rows[i][0] = low > from.row ? std::min(low - from.row, height) : 0;
    rows[i][1] = high > from.row ? std::min(high - from.row, height) : 0;
  }
  char* out = target.at(from.row, from.column);
  const char* data = is_copy ? from.data : tile;
  const uint64_t pitch = is_copy ? from.pitch : width * out_size;
  switch (out_size) {
    case 1: turn<uint8_t>(data, pitch, width, rows, out, target.step); break;
    case 2: turn<uint16_t>(data, pitch, width, rows, out, target.step); break;
    case 4: turn<uint32_t>(data, pitch, width, rows, out, target.step); break;
    case 8: turn<uint64_t>(data, pitch, width, rows, out, target.step); break;
    default: turn<Element>(data, pitch, width, rows, out, target.step);
  }
}

void Engine::read_segments(std::vector<Segment>& segments, char* staging) {
  const auto move = [&](const Segment& s) -> const Move& { return batch_.moves[s.move]; };
  const auto end_of = [&](const Segment& s) { return s.offset + s.count * kItemSize[move(s).src_dtype]; };
  const auto earlier = [&](const Segment& a, const Segment& b) {
    return move(a).src != move(b).src ? move(a).src < move(b).src : a.offset < b.offset;
  };
  if (!std::is_sorted(segments.begin(), segments.end(), earlier)) std::stable_sort(segments.begin(), segments.end(), earlier);
  for (size_t i = 0, next; i < segments.size(); i = next) {
    const Segment& first = segments[i];
    const Move& m = move(first);
    const uint64_t begin = first.offset;
    uint64_t end = end_of(first);
    for (next = i + 1; next < segments.size(); ++next) {
      const Segment& s = segments[next];
      // Bytes are swapped in place: then no two may share them.
      if (move(s).src != m.src || s.offset > end + kBridge || (s.offset < end && (m.swap || move(s).swap))) break;
      const uint64_t reach = std::max(end, end_of(s));
      if (reach - begin > kStaging || in_memory(m.src)) break;
      end = reach;
    }
    if (next == i + 1) {
      dense_run(m, begin, first.count, first.out, staging);
      continue;
    }
    read(m.src, staging, end - begin, begin);
    for (size_t k = i; k < next; ++k) convert(move(segments[k]), staging + (segments[k].offset - begin), segments[k].count, segments[k].out);
  }
  segments.clear();
}

void Engine::dense_run(const Move& m, uint64_t offset, uint64_t count, char* out, char* staging) {
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

// Reads the source from element `first` on, as much as the staging buffer takes; returns how many elements that is.
uint64_t Engine::stage(const Move& m, uint64_t first, uint64_t count, bool dense, bool dense_row, char* staging) {
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
void Engine::scatter(const Move& m, uint64_t first, uint64_t n, const Target& target, char* staging) {
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

void Engine::convert(const Move& m, char* from, uint64_t count, char* out) {
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

}  // namespace zckpt
