// Sources whose numbers are computed from others while they are read: each part goes through all terms while it is in the
// processor's cache.
#include <algorithm>
#include <cstring>

#include "engine.h"
#include "io.h"
#include "kernels.h"

namespace zckpt {
namespace {

constexpr uint64_t kPart = 1 << 16;  // elements: those of all buffers together fit a second-level cache

struct Scratch {  // of one thread
  float total[kPart], base[kPart], numbers[kPart];
  char raw[kPart * sizeof(float)];
};

Scratch& scratch() {
  thread_local std::unique_ptr<Scratch> own;
  if (!own) own.reset(new Scratch);  // NOLINT: make_unique would fill it with zeros
  return *own;
}

// The piece with an element; one past the last if there is none.
const Piece* piece_with(const Piece* first, const Piece* last, uint64_t element) {
  const Piece* next = std::upper_bound(first, last, element, [](uint64_t e, const Piece& p) { return e < p.start; });
  return next != first && element < next[-1].start + next[-1].count ? next - 1 : last;
}

}  // namespace

void Engine::fold(uint32_t src, char* to, uint64_t count, uint64_t first, bool again) {
  const Store& store = batch_.stores[src];
  const Term *begin = batch_.terms.data() + store.address, *end = begin + store.size;
  const bool differs = std::any_of(begin, end, [](const Term& t) { return t.fold == static_cast<uint32_t>(Fold::kDiffer); });
  Scratch& own = scratch();
  for (uint64_t done = 0; done < count; done += kPart) {
    if (stop_) throw Stop{};
    const uint64_t n = std::min(kPart, count - done);
    char* out = to + done * sizeof(float);
    const bool direct = reinterpret_cast<uintptr_t>(out) % alignof(float) == 0;
    float* total = direct ? reinterpret_cast<float*>(out) : own.total;
    if (begin->fold != static_cast<uint32_t>(Fold::kSet)) std::fill_n(total, n, 0.0f);
    for (const Term* term = begin; term != end; ++term) {
      const auto how = static_cast<Fold>(term->fold);
      float* numbers = how == Fold::kSet ? total : own.numbers;
      floats_of(*term, numbers, first + done, n, again);
      const auto a = static_cast<float>(term->a), b = static_cast<float>(term->b);
      switch (how) {
        case Fold::kSet:
          if (differs) std::copy_n(total, n, own.base);
          break;
        case Fold::kAdd: accumulate(total, numbers, n, a); break;
        case Fold::kApproach: approach(total, numbers, n, a); break;
        case Fold::kBlend: blend(total, numbers, n, a, b); break;
        case Fold::kDiffer:
          accumulate(numbers, own.base, n, -1.0f);
          accumulate(total, numbers, n, a);
      }
    }
    if (!direct) std::memcpy(out, total, n * sizeof(float));
  }
}

void Engine::floats_of(const Term& term, float* to, uint64_t first, uint64_t count, bool again) {
  const Piece *begin = batch_.pieces.data() + term.first, *end = begin + term.count;
  for (const Piece* piece = piece_with(begin, end, first); count; ++piece) {
    if (piece == end) fail("read", kEndOfFile, end[-1].store, end[-1].offset);
    const uint64_t skipped = first - piece->start, n = std::min(count, piece->count - skipped), size = kItemSize[piece->dtype];
    const bool plain = piece->dtype == F32;
    char* raw = plain ? reinterpret_cast<char*>(to) : scratch().raw;
    read(piece->store, raw, n * size, piece->offset + skipped * size, again);
    if (piece->swap) swap_bytes(raw, n, piece->swap);
    Overflow overflow;
    if (!plain && !cast(static_cast<DType>(piece->dtype), F32, raw, to, n, false, overflow)) fail("cast", 0, piece->store, piece->offset);
    to += n;
    first += n;
    count -= n;
  }
}

void Engine::read_ahead(uint32_t src, uint64_t first, uint64_t count) {
  const Store& store = batch_.stores[src];
  if (store.fd != kFolded) return;
  for (const Term *term = batch_.terms.data() + store.address, *last = term + store.size; term != last; ++term) {
    const Piece *begin = batch_.pieces.data() + term->first, *end = begin + term->count;
    for (const Piece* piece = piece_with(begin, end, first); piece != end && piece->start < first + count; ++piece) {
      if (in_memory(piece->store)) continue;
      const uint64_t size = kItemSize[piece->dtype], low = std::max(first, piece->start) - piece->start;
      const uint64_t high = std::min(first + count - piece->start, piece->count), stop = piece->offset + high * size;
      if (low < high) will_need(static_cast<int>(batch_.stores[piece->store].fd), piece->offset + low * size, stop - (piece->offset + low * size));
    }
  }
}

}  // namespace zckpt
