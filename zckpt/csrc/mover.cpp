// How a batch is run.
//  1. Moves into files become pieces: dense runs of the output. Pieces and literals are sorted into windows, a fixed grid
//     over each output file. Moves into memory become windows of their own.
//  2. A thread takes the next window, so reads and writes go through the files in order, and gathers all its pieces in one
//     aligned buffer. Their sources are read file by file, each in its own order, and neighbours together: a window of many
//     small parameters cut over many ranks is one read per rank. The same dtype is read straight into place, anything else
//     goes through a small staging buffer that stays in the processor's cache.
//  3. CRCs of element ranges are taken while the buffer is warm; they are partial, and joined by the caller.
//  4. One positional write: direct I/O when the whole window is there and the file system allows it (no page cache to fill
//     and flush later), otherwise plain. The unaligned tail of a file always goes the plain way.
// Memory: threads x (window + staging), whatever the size of the model. Results do not depend on the number of threads.
#include "mover.h"

#include <algorithm>
#include <cstring>

#include "engine.h"
#include "io.h"

namespace zckpt {
namespace {

constexpr uint32_t kLiteral = 1u << 31;

struct Piece {  // `count` elements of a move from `first` on, or a literal (count in bytes), at `offset` of the output
  uint32_t dst, source;
  uint64_t offset, first, count;
};

struct Window {
  uint64_t start;     // of the window in its file; for memory, unused
  size_t first, last;  // of its pieces
};

class Run : Engine {
 public:
  Run(const Batch& batch, const Settings& settings) : Engine(batch, settings) { plan(); }

  Result go(const std::function<bool(uint64_t)>& tick) {
    work_through(windows_.size(), tick);
    return std::move(result_);
  }

 private:
  std::vector<Piece> pieces_;
  std::vector<Window> windows_;

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

  Buffers buffers() const override { return {aligned(settings_.window + kBlock), aligned(kStaging), nullptr}; }

  void work(size_t job, Buffers& buffers) override {
    const Window& window = windows_[job];
    if (in_memory(pieces_[window.first].dst))
      into_memory(pieces_[window.first], buffers);
    else
      into_file(window, buffers);
  }

  void into_file(const Window& window, Buffers& buffers) {
    const uint32_t dst = pieces_[window.first].dst;
    char* buffer = buffers.window.get();
    std::vector<Segment> segments;
    for (size_t i = window.first; i < window.last; ++i) {
      const Piece& piece = pieces_[i];
      char* to = buffer + (piece.offset - window.start);
      if (piece.source & kLiteral) {
        const Literal& literal = batch_.literals[piece.source & ~kLiteral];
        std::memcpy(to, batch_.blob + literal.at + piece.first, piece.count);
      } else {
        gather(piece.source, piece.first, piece.count, to, buffers.staging.get(), segments);
      }
    }
    read_segments(segments, buffers.staging.get());
    uint64_t begin = pieces_[window.first].offset, end = begin;
    for (size_t i = window.first; i < window.last; ++i) {
      const Piece& piece = pieces_[i];
      if (piece.offset != end) {  // a gap: what came before is written by itself
        flush(dst, window.start, begin, end, buffer);
        begin = piece.offset;
      }
      end = piece.offset + piece.count * (piece.source & kLiteral ? 1 : kItemSize[batch_.moves[piece.source].dst_dtype]);
    }
    flush(dst, window.start, begin, end, buffer);
  }

  void flush(uint32_t dst, uint64_t start, uint64_t begin, uint64_t end, const char* buffer) {
    if (begin == end) return;
    const Store& store = batch_.stores[dst];
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
    done_bytes_ += end - begin;
    spend(end - begin);
  }

  void into_memory(const Piece& piece, Buffers& buffers) {
    const Move& m = batch_.moves[piece.source];
    const auto size = static_cast<int64_t>(kItemSize[m.dst_dtype]);
    char* base = reinterpret_cast<char*>(batch_.stores[m.dst].address + m.dst_offset);
    const bool dense = m.dst_step == size && (m.rows == 1 || m.dst_pitch == static_cast<int64_t>(m.count) * size);
    std::vector<Segment> segments;
    gather(piece.source, piece.first, piece.count, dense ? base + static_cast<int64_t>(piece.first) * size : buffers.window.get(),
           buffers.staging.get(), segments);
    read_segments(segments, buffers.staging.get());
    for (uint64_t i = 0; i < piece.count && !dense; ++i) {
      const uint64_t e = piece.first + i;
      std::memcpy(base + static_cast<int64_t>(e / m.count) * m.dst_pitch + static_cast<int64_t>(e % m.count) * m.dst_step,
                  buffers.window.get() + i * static_cast<uint64_t>(size), static_cast<size_t>(size));
    }
    done_bytes_ += piece.count * static_cast<uint64_t>(size);
  }
};

}  // namespace

Result run(const Batch& batch, const Settings& settings, const std::function<bool(uint64_t)>& tick) {
  return Run(batch, settings).go(tick);
}

}  // namespace zckpt
