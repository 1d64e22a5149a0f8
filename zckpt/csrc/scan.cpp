// How a scan runs.
//  1. Requests are cut into parts of at most a window. Dense parts are sorted by file and place; parts that follow each other
//     without a hole make one job, which is one read. So a file of many small tensors is still read in large runs.
//  2. A thread takes the next job, takes the CRCs of what it read, and counts each part; what a part is to be compared
//     with is read part by part.
//  3. Every part has statistics of its own. They are added up in the order of the tensors at the end, so that sums do not
//     depend on the threads.
#include "scan.h"

#include <algorithm>
#include <mutex>

#include "crc32.h"
#include "engine.h"
#include "floats.h"
#include "io.h"

namespace zckpt {
namespace {

constexpr uint64_t kWindow = 1 << 20;  // fixed, since the last bits of sums depend on it

struct Part {  // `count` elements of a request from `first` on; dense ones lie at `offset` of the first array's store
  uint32_t request;
  bool dense;
  uint64_t first, count, offset, nbytes;
};

struct Job {
  size_t first, last;  // of its parts
};

class Scan : Engine {
 public:
  // `batch` holds each move twice: the first array to be gathered, then the second.
  Scan(const Batch& batch, const std::vector<Request>& requests, const Relation& relation, bool spreads, const Settings& settings)
      : Engine(batch, settings), requests_(requests), relation_(relation), wants_spreads_(spreads) {
    plan();
  }

  Scanned go(const std::function<bool(uint64_t)>& tick) {
    work_through(jobs_.size(), tick);
    std::vector<size_t> order(parts_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) {
      const uint32_t x = first(a).tensor, y = first(b).tensor;
      return x != y ? x < y : parts_[a].request != parts_[b].request ? parts_[a].request < parts_[b].request : parts_[a].first < parts_[b].first;
    });
    const PlainFloats floats;  // of the caller
    Scanned scanned{std::move(result_.failure), std::move(result_.crcs), {}, std::move(spreads_)};
    for (const size_t i : order) {
      if (!statistics_[i].count) continue;
      if (scanned.statistics.empty() || scanned.statistics.back().first != first(i).tensor) scanned.statistics.emplace_back(first(i).tensor, Statistics{});
      scanned.statistics.back().second.add(statistics_[i]);
    }
    return scanned;
  }

 private:
  const std::vector<Request>& requests_;
  const Relation relation_;
  const bool wants_spreads_;
  std::vector<Part> parts_;
  std::vector<Job> jobs_;
  std::vector<Statistics> statistics_;
  std::map<uint32_t, Spread> spreads_;  // whole numbers, whose sums do not depend on the order
  std::mutex spreads_lock_;

  uint64_t end_of(size_t part) const { return parts_[part].offset + parts_[part].nbytes; }
  uint32_t how(size_t part) const { return requests_[parts_[part].request].how; }
  const Move& first(size_t part) const { return batch_.moves[parts_[part].request]; }
  const Move& second(size_t part) const { return batch_.moves[requests_.size() + parts_[part].request]; }

  void plan() {
    for (uint32_t i = 0; i < requests_.size(); ++i) {
      const Move &a = batch_.moves[i], &b = batch_.moves[requests_.size() + i];
      const uint64_t size = kItemSize[a.src_dtype], step = kWindow / std::max<uint64_t>(size, kItemSize[b.src_dtype]);
      const bool dense = static_cast<uint64_t>(a.src_step) == size && (a.rows == 1 || static_cast<uint64_t>(a.src_pitch) == a.count * size);
      for (uint64_t at = 0, total = a.count * a.rows; at < total; at += step) {
        const uint64_t n = std::min(step, total - at);
        parts_.push_back({i, dense, at, n, dense ? a.src_offset + at * size : 0, n * size});
      }
    }
    std::stable_sort(parts_.begin(), parts_.end(), [this](const Part& x, const Part& y) {
      const uint32_t a = batch_.moves[x.request].src, b = batch_.moves[y.request].src;
      return a != b ? a < b : x.dense != y.dense ? y.dense : x.offset < y.offset;
    });
    statistics_.resize(parts_.size());
    uint64_t end = 0, length = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      const bool joins = i && part.dense && parts_[i - 1].dense && first(i).src == first(i - 1).src && part.offset == end && length + part.nbytes <= kWindow;
      if (joins)
        jobs_.back().last = i + 1;
      else
        jobs_.push_back({i, i + 1}), length = 0;
      length += part.nbytes;
      end = part.offset + part.nbytes;
    }
  }

  Buffers buffers() const override { return {aligned(kWindow), aligned(kStaging), aligned(kWindow)}; }

  void work(size_t number, Buffers& buffers) override {
    const Job& job = jobs_[number];
    char* window = buffers.window.get();
    if (!parts_[job.first].dense) {
      std::vector<Segment> segments;
      const Part& part = parts_[job.first];
      gather(part.request, part.first, part.count, packed(first(job.first), part.first, window), buffers.staging.get(), segments);
      read_segments(segments, buffers.staging.get());
      examine(job.first, window, buffers);
      return;
    }
    look(job, window);
    for (size_t i = job.first; i < job.last; ++i)
      if (how(i) & kAgainst) examine(i, window + (parts_[i].offset - parts_[job.first].offset), buffers);
  }

  // Reads a job's parts, takes the CRCs, and counts what is compared with nothing: chunk by chunk if the page cache has them.
  // What is compared lies in the window at the end.
  void look(const Job& job, char* window) {
    const uint32_t src = first(job.first).src;
    const uint64_t begin = parts_[job.first].offset, end = end_of(job.last - 1);
    bool compares = false;
    std::vector<PartialCrc> crcs;
    for (size_t i = job.first; i < job.last; ++i) compares = compares || how(i) & kAgainst;
    for (size_t i = job.first, next; i < job.last; i = next + 1) {  // parts that count for them and follow each other are taken together
      for (next = i; next < job.last && how(next) & kCrcSource;) ++next;
      if (next == i) continue;
      const auto wanted = wanted_crcs(src, parts_[i].offset, end_of(next - 1));
      crcs.insert(crcs.end(), wanted.begin(), wanted.end());
    }
    // A disk wants large reads.
    const bool near = end - begin > kChunk && (in_memory(src) || is_at_hand(static_cast<int>(batch_.stores[src].fd), begin));
    size_t part = job.first;
    for (uint64_t at = begin, to; at < end; at = to) {
      to = near ? std::min(at + kChunk, end) : end;
      size_t last = part;
      while (end_of(last) < to) ++last;
      to -= (to - parts_[last].offset) % kItemSize[first(last).src_dtype];
      char* data = window + (compares ? at - begin : 0);
      read(src, data, to - at, at);
      for (auto& one : crcs) {
        const uint64_t low = std::max(at, one.offset), high = std::min(to, one.offset + one.length);
        if (low < high) one.crc = crc32(one.crc, data + (low - at), high - low);
      }
      for (; part <= last; ++part) {
        const Move& m = first(part);
        const uint64_t low = std::max(at, parts_[part].offset), high = std::min(to, end_of(part));
        if (m.swap) swap_bytes(data + (low - at), (high - low) / m.swap, m.swap);
        if (!(how(part) & kAgainst)) {
          if (how(part) & kNumbers) count(static_cast<DType>(m.src_dtype), data + (low - at), (high - low) / kItemSize[m.src_dtype], statistics_[part]);
          done_bytes_ += high - low;
        }
        if (end_of(part) > to) break;
      }
    }
    take(crcs);
  }

  void examine(size_t number, const char* data, Buffers& buffers) {
    const Part& part = parts_[number];
    const Request& request = requests_[part.request];
    const Move &a = first(number), &b = second(number);
    uint64_t nbytes = part.nbytes;
    if (request.how & kAgainst) {
      char* other = buffers.other.get();
      std::vector<Segment> segments;
      gather(static_cast<uint32_t>(requests_.size() + part.request), part.first, part.count, packed(b, part.first, other), buffers.staging.get(), segments);
      read_segments(segments, buffers.staging.get());
      const uint64_t size = part.count * kItemSize[b.src_dtype], offset = place(b, part.first);
      if (request.how & kCrcOther) take_crcs(b.src, offset, offset + size, other);
      Spread spread;
      if (wants_spreads_) spread = {};
      const bool rows = a.rows > 1 && request.pitch != a.count;  // whose elements are not numbered through
      for (uint64_t done = 0, n; done < part.count; done += n) {
        const uint64_t e = part.first + done, at = request.start + (rows ? e / a.count * request.pitch + e % a.count : e);
        n = rows ? std::min(part.count - done, a.count - e % a.count) : part.count;
        if (!compare(relation_, static_cast<DType>(a.src_dtype), data + done * kItemSize[a.src_dtype], static_cast<DType>(b.src_dtype),
                     other + done * kItemSize[b.src_dtype], n, at, statistics_[number], wants_spreads_ ? &spread : nullptr))
          fail("cast", 0, a.src, a.src_offset);
      }
      if (wants_spreads_ && !spread.is_empty()) {
        const std::lock_guard<std::mutex> lock(spreads_lock_);
        spreads_.try_emplace(a.tensor).first->second.add(spread);
      }
      nbytes += size;
    } else if (request.how & kNumbers) {
      count(static_cast<DType>(a.src_dtype), data, part.count, statistics_[number]);
    }
    done_bytes_ += nbytes;
  }
};

}  // namespace

Scanned scan(const Batch& batch, const std::vector<Request>& requests, const Relation& relation, bool spreads, const Settings& settings,
             const std::function<bool(uint64_t)>& tick) {
  Batch both{batch.stores, {}, {}, batch.ranges, nullptr};
  for (Move m : batch.moves) {
    m.dst_dtype = m.src_dtype;
    both.moves.push_back(m);
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    Move m = batch.moves[i];
    m.src = m.dst;
    m.src_offset = m.dst_offset;
    m.src_pitch = m.dst_pitch;
    m.src_step = m.dst_step;
    m.src_dtype = m.dst_dtype;
    m.swap = requests[i].dst_swap;
    both.moves.push_back(m);
  }
  return Scan(both, requests, relation, spreads, settings).go(tick);
}

}  // namespace zckpt
