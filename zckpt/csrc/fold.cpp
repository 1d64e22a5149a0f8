// Sources whose numbers are computed from others while they are read: each part goes through all terms while it is in the
// processor's cache.
#include <algorithm>
#include <cstring>

#include "engine.h"
#include "io.h"
#include "kernels.h"
#include "low_rank.h"

namespace zckpt {
namespace {

constexpr uint64_t kPart = 1 << 16;     // elements: those of all buffers together fit a second-level cache
constexpr uint64_t kProduct = 4 * kPart;  // elements to which a product is added at once: its right factor passes by once for all
constexpr uint64_t kFactors = 8 << 20;    // numbers of factors that are kept: those of two matrices, which threads may be in

struct Scratch {  // of one thread
  float total[kPart], base[kPart], numbers[kPart];
  char raw[kPart * sizeof(float)];
};

Scratch& scratch() {
  thread_local std::unique_ptr<Scratch> own;
  if (!own) own.reset(new Scratch);  // NOLINT: make_unique would fill it with zeros
  return *own;
}

// How many numbers the factors of a product are, packed.
uint64_t numel_of(const Term& t) { return t.experts * (packed_size(t.rank, t.columns) + (t.turned || t.experts > 1 ? t.rows * t.rank : 0)); }

// The piece with an element; one past the last if there is none.
const Piece* piece_with(const Piece* first, const Piece* last, uint64_t element) {
  const Piece* next = std::upper_bound(first, last, element, [](uint64_t e, const Piece& p) { return e < p.start; });
  return next != first && element < next[-1].start + next[-1].count ? next - 1 : last;
}

}  // namespace

void Engine::fold(uint32_t src, char* to, uint64_t count, uint64_t first, bool again) {
  const Store& store = batch_.stores[src];
  const Term *begin = batch_.terms.data() + store.address, *end = begin + store.size;
  const auto has = [&](Fold fold) { return std::any_of(begin, end, [=](const Term& t) { return t.fold == static_cast<uint32_t>(fold); }); };
  if (has(Fold::kLowRank)) {
    if (reinterpret_cast<uintptr_t>(to) % alignof(float) == 0) return fold_products(store, reinterpret_cast<float*>(to), count, first, again);
    std::vector<float> total(count);
    fold_products(store, total.data(), count, first, again);
    std::memcpy(to, total.data(), count * sizeof(float));
    return;
  }
  const bool differs = has(Fold::kDiffer);
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
          break;
        case Fold::kLowRank:
        case Fold::kFactor: break;  // elsewhere
      }
    }
    if (!direct) std::memcpy(out, total, n * sizeof(float));
  }
}

void Engine::fold_products(const Store& store, float* total, uint64_t count, uint64_t first, bool again) {
  const Term *begin = batch_.terms.data() + store.address, *end = begin + store.size;
  for (uint64_t n; count; total += n, first += n, count -= n) {
    if (stop_) throw Stop{};
    n = std::min(kProduct, count);
    floats_of(*begin, total, first, n, again);
    for (const Term* term = begin + 1; term != end; term += 2) add_product_of(*term, total, n, first, again);
  }
}

// A matrix's rows follow each other, and so do experts' matrices: only the first and the last row may be wanted in part.
void Engine::add_product_of(const Term& term, float* total, uint64_t count, uint64_t first, bool again) {
  const auto factors = factors_of(term);
  const uint64_t rank = term.rank, columns = term.columns;
  std::vector<float> read;
  while (count) {
    const uint64_t row = first / columns, low = first % columns, expert = row / term.rows;
    uint64_t rows = 1, high = std::min(columns, low + count);
    if (!low && count >= columns) rows = std::min(count / columns, (expert + 1) * term.rows - row);
    const float* left = factors->left.data() + row * rank;
    if (factors->left.empty()) {
      read.resize(rows * rank);
      floats_of((&term)[1], read.data(), row * rank, rows * rank, again);
      left = read.data();
    }
    const float* right = factors->right.data() + expert * packed_size(rank, columns);
    add_product(total, columns, {left, right, rank, rows, low, high, static_cast<float>(term.a)});
    const uint64_t n = rows * (high - low);
    total += n, first += n, count -= n;
  }
}

// The factors of a product. A is experts*rank x inputs, expert after expert, and B outputs x rank*experts, in which the experts'
// columns alternate. A matrix has a row for each output, or, if it is turned, for each input.
std::shared_ptr<const Factors> Engine::factors_of(const Term& term) {
  std::shared_ptr<Factors> found;
  {
    std::lock_guard lock(factors_mutex_);
    const auto known = std::find_if(factors_.begin(), factors_.end(), [&](const auto& one) { return one.first == &term; });
    if (known == factors_.end()) {
      factors_.emplace_back(&term, std::make_shared<Factors>());
      uint64_t numel = 0;
      for (const auto& one : factors_) numel += numel_of(*one.first);
      while (numel > kFactors && factors_.size() > 1) {
        numel -= numel_of(*factors_.front().first);
        factors_.erase(factors_.begin());
      }
    } else {
      std::rotate(known, known + 1, factors_.end());
    }
    found = factors_.back().second;
  }
  std::lock_guard lock(found->mutex);
  if (found->made) return found;
  const uint64_t rank = term.rank, experts = term.experts, rows = term.rows, columns = term.columns, packed = packed_size(rank, columns);
  const uint64_t inputs = term.turned ? rows : columns, outputs = term.turned ? columns : rows;
  std::vector<float> a(experts * rank * inputs), b;
  floats_of(term, a.data(), 0, a.size(), true);
  if (term.turned || experts > 1) {
    b.resize(experts * rank * outputs);
    floats_of((&term)[1], b.data(), 0, b.size(), true);
    found->left.resize(experts * rows * rank);
  }
  found->right.resize(experts * packed);
  for (uint64_t e = 0; e < experts; ++e) {
    float *right = found->right.data() + e * packed, *left = found->left.data() + e * rows * rank;
    const float* of_expert = a.data() + e * rank * inputs;
    if (term.turned) {
      pack_right(b.data() + e, experts, rank * experts, rank, columns, right);
      for (uint64_t k = 0; k < rank; ++k)
        for (uint64_t i = 0; i < rows; ++i) left[i * rank + k] = of_expert[k * inputs + i];
    } else {
      pack_right(of_expert, columns, 1, rank, columns, right);
      for (uint64_t i = 0; !b.empty() && i < rows; ++i)
        for (uint64_t k = 0; k < rank; ++k) left[i * rank + k] = b[(i * rank + k) * experts + e];
    }
  }
  found->made = true;
  return found;
}

void Engine::floats_of(const Term& term, float* to, uint64_t first, uint64_t count, bool again) {
  const Piece *begin = batch_.pieces.data() + term.first, *end = begin + term.count;
  for (const Piece* piece = piece_with(begin, end, first); count; piece += first == piece->start + piece->count) {
    if (piece == end) fail("read", kEndOfFile, end[-1].store, end[-1].offset);
    const uint64_t skipped = first - piece->start, size = kItemSize[piece->dtype];
    const bool plain = piece->dtype == F32;
    const uint64_t n = std::min({count, piece->count - skipped, plain ? count : kPart});
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
    if (term->rank) continue;  // of a product
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
