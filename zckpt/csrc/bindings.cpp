// The module zckpt._core: argument checks and the GIL; no logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "aside.h"
#include "blocks.h"
#include "codes.h"
#include "confirm.h"
#include "crc32.h"
#include "described.h"
#include "difference.h"
#include "early.h"
#include "floats.h"
#include "io.h"
#include "kernels.h"
#include "lent.h"
#include "mover.h"
#include "optimizers.h"
#include "records.h"
#include "renew.h"
#include "scan.h"
#include "simd.h"
#include "swapping.h"
#include "to_ggml.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Of anything that lies in one piece of memory.
uint32_t crc32_of(nb::handle data, uint32_t crc) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE)) throw nb::python_error();
  {
    nb::gil_scoped_release release;
    crc = zckpt::crc32(crc, view.buf, static_cast<size_t>(view.len));
  }
  PyBuffer_Release(&view);
  return crc;
}

template <typename T>
std::vector<T> structs(const nb::bytes& packed) {
  if (packed.size() % sizeof(T)) throw std::invalid_argument("an array of structs of another size");
  std::vector<T> out(packed.size() / sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), packed.c_str(), packed.size());
  return out;
}

// Calls `progress` on the caller's thread, and remembers what it, or a signal, threw.
class Ticker {
 public:
  explicit Ticker(nb::object progress) : progress_(std::move(progress)) {}

  bool operator()(uint64_t done) {
    nb::gil_scoped_acquire acquire;
    if (interrupted_) return false;
    if (PyErr_CheckSignals()) {
      interrupted_ = true;
    } else if (!progress_.is_none()) {
      interrupted_ = !nb::steal(PyObject_CallFunction(progress_.ptr(), "K", static_cast<unsigned long long>(done))).is_valid();
    }
    return !interrupted_;
  }

  void rethrow() const {
    if (interrupted_) throw nb::python_error();
  }

 private:
  nb::object progress_;
  bool interrupted_ = false;
};

uint64_t numel_of(const zckpt::Batch& batch, const zckpt::Term& t) {
  const auto& last = batch.pieces.at(size_t{t.first} + t.count - 1);
  return last.start + last.count;
}

// A product comes as its two factors behind the matrix that it is added to.
void check_products(const zckpt::Batch& batch, const zckpt::Store& store) {
  const auto is = [](const zckpt::Term& t, zckpt::Fold fold) { return t.fold == static_cast<uint32_t>(fold); };
  const zckpt::Term* begin = batch.terms.data() + store.address;
  const auto of_product = [&](const zckpt::Term& t) { return is(t, zckpt::Fold::kLowRank) || is(t, zckpt::Fold::kFactor); };
  if (std::none_of(begin, begin + store.size, of_product)) return;
  bool sound = is(*begin, zckpt::Fold::kSet) && store.size % 2;
  for (uint64_t i = 1; sound && i < store.size; i += 2) {
    const auto &a = begin[i], &b = begin[i + 1];
    const uint64_t each = uint64_t{a.rank} * a.experts;
    sound = is(a, zckpt::Fold::kLowRank) && is(b, zckpt::Fold::kFactor) && each && a.rows && a.columns && a.count && b.count && begin->count &&
            numel_of(batch, *begin) == a.rows * a.columns * a.experts && numel_of(batch, a) == each * (a.turned ? a.rows : a.columns) &&
            numel_of(batch, b) == each * (a.turned ? a.columns : a.rows);
  }
  if (!sound) throw std::invalid_argument("a product with impossible numbers");
}

void check(const zckpt::Batch& batch, unsigned threads, uint64_t window) {
  if (threads < 1 || threads > 1 << 16 || window < 4096 || window > 1ull << 40 || window % 4096) throw std::invalid_argument("threads or window");
  for (const auto& m : batch.moves)
    if (m.src >= batch.stores.size() || m.dst >= batch.stores.size() || m.src_dtype >= zckpt::kDTypes ||
        m.dst_dtype >= zckpt::kDTypes || !m.count || !m.rows || batch.stores[m.dst].fd == zckpt::kFolded ||
        (batch.stores[m.src].fd == zckpt::kFolded && (m.src_dtype != zckpt::F32 || m.swap)))
      throw std::invalid_argument("a move with impossible numbers");
  for (const auto& s : batch.stores)
    if (s.fd == zckpt::kFolded && (!s.size || s.address > batch.terms.size() || s.size > batch.terms.size() - s.address))
      throw std::invalid_argument("a folded store without terms");
    else if (s.fd == zckpt::kFolded)
      check_products(batch, s);
  for (const auto& t : batch.terms) {
    uint64_t at = 0;
    if (t.fold >= zckpt::kFolds || !t.count || t.first > batch.pieces.size() || t.count > batch.pieces.size() - t.first)
      throw std::invalid_argument("a term with impossible numbers");
    for (const auto* p = &batch.pieces[t.first]; p != batch.pieces.data() + t.first + t.count; at += p->count, ++p)
      if (p->start != at || !p->count || p->store >= batch.stores.size() || batch.stores[p->store].fd == zckpt::kFolded ||
          p->dtype >= zckpt::kDTypes || zckpt::kItemSize[p->dtype] > sizeof(float) || (p->swap && p->swap != zckpt::kItemSize[p->dtype]))
        throw std::invalid_argument("a piece with impossible numbers");
  }
}

nb::tuple as_tuple(const zckpt::Failure& f) { return nb::make_tuple(f.kind, f.error, f.store, f.offset, f.text); }

nb::list as_list(const std::vector<zckpt::PartialCrc>& crcs) {
  nb::list list;
  for (const auto& c : crcs) list.append(nb::make_tuple(c.number, c.crc, c.offset, c.length));
  return list;
}

nb::tuple run(nb::bytes stores, nb::bytes moves, nb::bytes literals, nb::bytes ranges, nb::bytes blob, nb::bytes terms, nb::bytes pieces,
              unsigned threads, uint64_t window, bool clamp, bool give_back, uint64_t bytes_per_s, nb::object progress, nb::list consumers) {
  const zckpt::Batch batch{structs<zckpt::Store>(stores), structs<zckpt::Move>(moves), structs<zckpt::Literal>(literals),
                           structs<zckpt::Range>(ranges), blob.c_str(), structs<zckpt::Term>(terms), structs<zckpt::Piece>(pieces)};
  check(batch, threads, window);
  for (const auto& l : batch.literals)
    if (l.dst >= batch.stores.size() || l.at + l.length > blob.size()) throw std::invalid_argument("a literal with impossible numbers");
  if (consumers.size() && consumers.size() != batch.stores.size()) throw std::invalid_argument("a consumer or None for each store");
  std::vector<bool> ordered;
  for (nb::handle consumer : consumers) ordered.push_back(!consumer.is_none());
  const bool here = threads == 1 && progress.is_none();
  Ticker ticker(std::move(progress));
  std::optional<nb::python_error> refused;  // by a consumer; the first of them
  const auto consume = [&](uint32_t store, uint64_t offset, zckpt::Bytes& buffer, uint64_t from, uint64_t length) {
    nb::gil_scoped_acquire acquire;
    try {
      zckpt::lend(consumers[store], buffer, from, length, offset);
    } catch (nb::python_error& error) {
      if (!refused) refused.emplace(std::move(error));
      return zckpt::Handed::kRefused;
    }
    return buffer ? zckpt::Handed::kTaken : zckpt::Handed::kKept;
  };
  zckpt::Result result;
  {
    nb::gil_scoped_release release;
    result = zckpt::run(batch, {threads, window, clamp, give_back, bytes_per_s, ordered, here}, std::ref(ticker), consume);
  }
  ticker.rethrow();
  if (refused) throw std::move(*refused);
  nb::list overflows;
  for (const auto& [tensor, o] : result.overflows) overflows.append(nb::make_tuple(tensor, o.count, o.largest));
  return nb::make_tuple(as_tuple(result.failure), as_list(result.crcs), overflows, result.cloned);
}

nb::tuple scan(nb::bytes stores, nb::bytes moves, nb::bytes requests, nb::bytes ranges, bool rounded, double atol, double rtol,
               bool spreads, unsigned threads, bool give_back, uint64_t bytes_per_s, nb::object progress) {
  const zckpt::Batch batch{structs<zckpt::Store>(stores), structs<zckpt::Move>(moves), {}, structs<zckpt::Range>(ranges), nullptr};
  const auto how = structs<zckpt::Request>(requests);
  check(batch, threads, 4096);
  if (how.size() != batch.moves.size()) throw std::invalid_argument("a request for each move");
  Ticker ticker(std::move(progress));
  zckpt::Scanned scanned;
  {
    nb::gil_scoped_release release;
    scanned = zckpt::scan(batch, how, {rounded, atol, rtol}, spreads, {threads, 4096, false, give_back, bytes_per_s, {}, false}, std::ref(ticker));
  }
  ticker.rethrow();
  nb::list statistics;
  for (const auto& [tensor, t] : scanned.statistics) {
    const nb::object first = t.differ ? nb::cast(t.first) : nb::none();
    statistics.append(nb::make_tuple(tensor, t.count, t.nan, t.inf, t.nonzero, t.other_nan, t.other_inf, t.differ, first, t.max_abs, t.max_rel,
                                  t.dot, t.square, t.other_square));
  }
  nb::list found;
  for (const auto& [tensor, spread] : scanned.spreads) {
    nb::list counts;
    for (size_t i = 0; i < std::size(spread.counts); ++i)
      if (spread.counts[i]) counts.append(nb::make_tuple(static_cast<int>(i) + zckpt::Spread::kLeast, spread.counts[i]));
    found.append(nb::make_tuple(tensor, counts));
  }
  return nb::make_tuple(as_tuple(scanned.failure), as_list(scanned.crcs), statistics, found);
}

nb::tuple confirm(nb::bytes stores, nb::bytes ranges, nb::bytes pieces, nb::bytes sides, nb::bytes groups, nb::bytes zones, unsigned threads,
                  bool give_back, uint64_t bytes_per_s, nb::object progress) {
  const zckpt::Batch batch{structs<zckpt::Store>(stores), {}, {}, structs<zckpt::Range>(ranges), nullptr};
  const zckpt::Confirmation asked{structs<zckpt::Fragment>(pieces), structs<zckpt::Side>(sides), structs<zckpt::Group>(groups), structs<zckpt::Zone>(zones)};
  check(batch, threads, 4096);
  for (const auto& p : asked.pieces)
    if (p.store >= batch.stores.size() || !p.count || !p.rows || (p.rows > 1 && !p.pitch)) throw std::invalid_argument("a piece with impossible numbers");
  for (const auto& s : asked.sides)
    if (s.dtype >= zckpt::kDTypes || uint64_t{s.first} + s.pieces > asked.pieces.size()) throw std::invalid_argument("a side with impossible numbers");
  for (const auto& g : asked.groups) {
    if (g.sides < 2 || uint64_t{g.first} + g.sides > asked.sides.size() || g.likeness > 2) throw std::invalid_argument("a group with impossible numbers");
    for (uint32_t s = g.first + 1; s < g.first + g.sides; ++s)
      if (!zckpt::can_judge(static_cast<zckpt::DType>(asked.sides[g.first].dtype), static_cast<zckpt::DType>(asked.sides[s].dtype)))
        throw std::invalid_argument("dtypes that nothing is known of");
  }
  Ticker ticker(std::move(progress));
  zckpt::Confirmed confirmed;
  {
    nb::gil_scoped_release release;
    confirmed = zckpt::confirm(batch, asked, {threads, 4096, false, give_back, bytes_per_s}, std::ref(ticker));
  }
  ticker.rethrow();
  nb::list found, bytes;
  for (const auto& one : confirmed.found) found.append(nb::make_tuple(one.side, one.count, one.first));
  for (const uint64_t one : confirmed.bytes) bytes.append(one);
  return nb::make_tuple(as_tuple(confirmed.failure), as_list(confirmed.crcs), found, bytes);
}

// Rows of an optimizer's step, by their addresses; 0 for no second state.
void step(int rule, nb::bytes rates, uintptr_t weights, uintptr_t gradients, uintptr_t first, uintptr_t second, size_t count, unsigned threads) {
  const auto numbers = structs<zckpt::Rates>(rates);
  if (rule < 0 || rule >= zckpt::kRules || numbers.size() != 1 || threads < 1 || threads > 1 << 16) throw std::invalid_argument("an impossible step");
  const auto which = static_cast<zckpt::Rule>(rule);
  if (count && (!weights || !gradients || !first || (which == zckpt::Rule::kAdam && !second))) throw std::invalid_argument("a step without memory");
  const auto at = [](uintptr_t address) { return reinterpret_cast<float*>(address); };  // NOLINT
  nb::gil_scoped_release release;
  zckpt::step(which, numbers[0], at(weights), at(gradients), at(first), at(second), count, threads);
}

// Of arrays, by their addresses.
void accumulate(uintptr_t total, uintptr_t numbers, size_t count, float weight) {
  nb::gil_scoped_release release;
  zckpt::accumulate(reinterpret_cast<float*>(total), reinterpret_cast<const float*>(numbers), count, weight);  // NOLINT
}

void approach(uintptr_t total, uintptr_t numbers, size_t count, float divisor) {
  nb::gil_scoped_release release;
  zckpt::approach(reinterpret_cast<float*>(total), reinterpret_cast<const float*>(numbers), count, divisor);  // NOLINT
}

void blend(uintptr_t total, uintptr_t numbers, size_t count, float keep, float weight) {
  nb::gil_scoped_release release;
  zckpt::blend(reinterpret_cast<float*>(total), reinterpret_cast<const float*>(numbers), count, keep, weight);  // NOLINT
}

nb::tuple products(uintptr_t a, uintptr_t b, size_t count) {
  zckpt::Products sums{};
  {
    nb::gil_scoped_release release;
    sums = zckpt::products(reinterpret_cast<const float*>(a), reinterpret_cast<const float*>(b), count);  // NOLINT
  }
  return nb::make_tuple(sums.ab, sums.aa, sums.bb);
}

void add_low_rank(uintptr_t total, uintptr_t left, uintptr_t right, size_t rows, size_t columns, size_t rank, float scaling) {
  const auto at = [](uintptr_t address) { return reinterpret_cast<const float*>(address); };  // NOLINT
  nb::gil_scoped_release release;
  zckpt::add_low_rank(const_cast<float*>(at(total)), at(left), at(right), rows, columns, rank, scaling);  // NOLINT
}

void move_sparsely(uintptr_t total, size_t count, uint64_t first, nb::bytes terms, bool elects, bool normalises, float factor) {
  const auto kept = structs<zckpt::Thinned>(terms);
  if (kept.empty()) throw std::invalid_argument("nothing to move by");
  nb::gil_scoped_release release;
  zckpt::move_sparsely(reinterpret_cast<float*>(total), count, first, kept.data(), kept.size(), {elects, normalises, factor});  // NOLINT
}

nb::tuple lengths(uintptr_t base, size_t count, uint64_t first, nb::bytes kept) {
  const auto one = structs<zckpt::Thinned>(kept);
  if (one.size() != 1) throw std::invalid_argument("one difference");
  zckpt::Lengths found{};
  {
    nb::gil_scoped_release release;
    found = zckpt::lengths(reinterpret_cast<const float*>(base), count, first, one[0]);  // NOLINT
  }
  return nb::make_tuple(found.all, found.kept);
}

nb::tuple select_near(uintptr_t x, uintptr_t base, size_t count, uint32_t low, uint32_t high, uintptr_t found) {
  const auto at = [](uintptr_t address) { return reinterpret_cast<const float*>(address); };  // NOLINT
  zckpt::Selected selected{};
  {
    nb::gil_scoped_release release;
    selected = zckpt::select_near(at(x), at(base), count, low, high, reinterpret_cast<uint32_t*>(found));  // NOLINT
  }
  return nb::make_tuple(selected.above, selected.near);
}

zckpt::Blocks blocks_of(const std::array<size_t, 5>& b) {
  if (!b[2] || !b[3]) throw std::invalid_argument("blocks without elements");
  return {b[0], b[1], b[2], b[3], b[4]};
}

void largest(uintptr_t x, bool halves, const std::array<size_t, 5>& blocks, uintptr_t found) {
  const auto own = blocks_of(blocks);
  const auto to = reinterpret_cast<float*>(found);  // NOLINT
  nb::gil_scoped_release release;
  halves ? zckpt::largest(reinterpret_cast<const uint16_t*>(x), own, to) : zckpt::largest(reinterpret_cast<const float*>(x), own, to);  // NOLINT
}

void multiply_blocks(uintptr_t x, const std::array<size_t, 5>& blocks, uintptr_t factors) {
  const auto own = blocks_of(blocks);
  nb::gil_scoped_release release;
  zckpt::multiply_blocks(reinterpret_cast<float*>(x), own, reinterpret_cast<const float*>(factors));  // NOLINT
}

const uint8_t* bytes_at(uintptr_t address) { return reinterpret_cast<const uint8_t*>(address); }  // NOLINT

void split_codes(uintptr_t raw, size_t pitch, size_t rows, size_t columns, unsigned bits, bool high_first, uintptr_t codes) {
  if (!bits || bits > 8) throw std::invalid_argument("bits of a code");
  nb::gil_scoped_release release;
  zckpt::split_codes(bytes_at(raw), pitch, rows, columns, bits, high_first, reinterpret_cast<uint8_t*>(codes));  // NOLINT
}

void split_down(uintptr_t raw, unsigned word, size_t pitch, unsigned bits, nb::bytes shifts, size_t first, size_t count, uintptr_t codes) {
  const auto each = structs<uint8_t>(shifts);
  if (!bits || bits > 8 || each.empty()) throw std::invalid_argument("bits of a code");
  nb::gil_scoped_release release;
  zckpt::split_down(bytes_at(raw), word, pitch, bits, each.data(), each.size(), first, count, reinterpret_cast<uint8_t*>(codes));  // NOLINT
}

void join_codes(uintptr_t codes, size_t rows, size_t columns, size_t pitch, uint8_t rest, uintptr_t out) {
  nb::gil_scoped_release release;
  zckpt::join_codes(bytes_at(codes), rows, columns, pitch, rest, reinterpret_cast<uint8_t*>(out));  // NOLINT
}

void of_codes(uintptr_t codes, uintptr_t table, const std::array<size_t, 5>& blocks, uintptr_t zeros, uintptr_t factors, uintptr_t x) {
  const auto own = blocks_of(blocks);
  const auto at = [](uintptr_t address) { return reinterpret_cast<const float*>(address); };  // NOLINT
  nb::gil_scoped_release release;
  zckpt::of_codes(bytes_at(codes), at(table), own, at(zeros), at(factors), reinterpret_cast<float*>(x));  // NOLINT
}

nb::tuple to_codes(int grid, uintptr_t x, bool halves, const std::array<size_t, 5>& blocks, uintptr_t factors, uintptr_t out) {
  const auto own = blocks_of(blocks);
  if (grid < 0 || grid >= static_cast<int>(zckpt::NumberGrid::kGrids)) throw std::invalid_argument("a grid");
  zckpt::Rounded found;
  {
    nb::gil_scoped_release release;
    const auto kind = static_cast<zckpt::NumberGrid>(grid);
    const auto by = reinterpret_cast<const float*>(factors);  // NOLINT
    const auto to = reinterpret_cast<uint8_t*>(out);          // NOLINT
    found = halves ? zckpt::to_codes(kind, reinterpret_cast<const uint16_t*>(x), own, by, to)  // NOLINT
                   : zckpt::to_codes(kind, reinterpret_cast<const float*>(x), own, by, to);    // NOLINT
  }
  return nb::make_tuple(found.saturated, found.underflowed, found.error);
}

size_t to_affine(uintptr_t x, size_t groups, size_t size, unsigned bits, uintptr_t packed, uintptr_t scales, uintptr_t biases) {
  if (!size || size % 32 || size > 1024 || bits < 2 || bits > 8) throw std::invalid_argument("groups or bits");
  nb::gil_scoped_release release;
  return zckpt::to_affine(reinterpret_cast<const float*>(x), groups, size, bits, reinterpret_cast<uint8_t*>(packed),  // NOLINT
                          reinterpret_cast<float*>(scales), reinterpret_cast<float*>(biases));                        // NOLINT
}

void of_ggml(int kind, uintptr_t blocks, size_t count, uintptr_t x) {
  if (kind < 0 || kind >= static_cast<int>(zckpt::GgmlBlocks::kTypes)) throw std::invalid_argument("a type of ggml");
  nb::gil_scoped_release release;
  zckpt::of_ggml(static_cast<zckpt::GgmlBlocks>(kind), bytes_at(blocks), count, reinterpret_cast<float*>(x));  // NOLINT
}

size_t to_ggml(int kind, uintptr_t x, size_t rows, size_t columns, uintptr_t weights, uintptr_t blocks) {
  if (kind < 0 || kind >= static_cast<int>(zckpt::GgmlBlocks::kTypes)) throw std::invalid_argument("a type of ggml");
  const auto at = [](uintptr_t address) { return reinterpret_cast<const float*>(address); };  // NOLINT
  nb::gil_scoped_release release;
  return zckpt::to_ggml(static_cast<zckpt::GgmlBlocks>(kind), at(x), rows, columns, at(weights), reinterpret_cast<uint8_t*>(blocks));  // NOLINT
}

void to_q8_0(uintptr_t numbers, bool halves, uintptr_t blocks, size_t count) {
  const auto to = reinterpret_cast<uint8_t*>(blocks);  // NOLINT
  nb::gil_scoped_release release;
  halves ? zckpt::to_q8_0(reinterpret_cast<const uint16_t*>(numbers), to, count)  // NOLINT
         : zckpt::to_q8_0(reinterpret_cast<const float*>(numbers), to, count);    // NOLINT
}

void of_q8_0(uintptr_t blocks, uintptr_t numbers, size_t count) {
  nb::gil_scoped_release release;
  zckpt::of_q8_0(reinterpret_cast<const uint8_t*>(blocks), reinterpret_cast<float*>(numbers), count);  // NOLINT
}

void copy_aside(uintptr_t to, uintptr_t from, size_t nbytes) {
  nb::gil_scoped_release release;
  zckpt::copy_aside(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from), nbytes);  // NOLINT
}

nb::tuple difference(uintptr_t before, uintptr_t after, size_t nbytes, unsigned width, bool ends) {
  if (!width || width > 16 || width & (width - 1)) throw std::invalid_argument("bytes of an element");
  std::string blocks;
  uint64_t changed;
  {
    nb::gil_scoped_release release;
    changed = zckpt::add_difference(bytes_at(before), bytes_at(after), nbytes, width, ends, blocks);
  }
  return nb::make_tuple(nb::bytes(blocks.data(), blocks.size()), changed);
}

nb::tuple renew(nb::bytes blocks, uintptr_t data, size_t nbytes) {
  zckpt::Renewed made;
  {
    nb::gil_scoped_release release;
    made = zckpt::renew(reinterpret_cast<const uint8_t*>(blocks.c_str()), blocks.size(), reinterpret_cast<uint8_t*>(data), nbytes);  // NOLINT
  }
  return nb::make_tuple(made.used, made.bytes, made.ended);
}

bool is_beyond_doubt(int from, int to, uintptr_t a, uintptr_t b, size_t count) {
  if (from < 0 || to < 0 || from >= zckpt::kDTypes || to >= zckpt::kDTypes) throw std::invalid_argument("dtype");
  nb::gil_scoped_release release;
  return zckpt::is_beyond_doubt(zckpt::Likeness::kClamped, static_cast<zckpt::DType>(from), static_cast<zckpt::DType>(to),
                                reinterpret_cast<const char*>(a), reinterpret_cast<const char*>(b), count);  // NOLINT
}

uint64_t begin_swap(zckpt::Swapper& swapper, int fd, bool write, nb::bytes stretches) {
  const auto all = structs<zckpt::Stretch>(stretches);
  nb::gil_scoped_release release;
  return swapper.begin(fd, write, all);
}

nb::tuple wait_for_swap(zckpt::Swapper& swapper, uint64_t number) {
  zckpt::Swapper::Outcome outcome;
  {
    nb::gil_scoped_release release;
    outcome = swapper.wait(number);
  }
  return nb::make_tuple(outcome.error, outcome.offset);
}

#ifdef ZCKPT_TESTING
nb::tuple judge(int likeness, int from, int to, nb::bytes a, nb::bytes b) {
  if (from < 0 || to < 0 || from >= zckpt::kDTypes || to >= zckpt::kDTypes || likeness < 0 || likeness > 2) throw std::invalid_argument("dtype");
  const auto source = static_cast<zckpt::DType>(from), target = static_cast<zckpt::DType>(to);
  const size_t n = a.size() / zckpt::kItemSize[from];
  if (!zckpt::can_judge(source, target) || b.size() != n * zckpt::kItemSize[to]) throw std::invalid_argument("nothing to judge");
  const zckpt::Unlike unlike = zckpt::judge(static_cast<zckpt::Likeness>(likeness), source, target, a.c_str(), b.c_str(), n);
  return nb::make_tuple(unlike.count, unlike.first);
}

nb::tuple cast(int from, int to, nb::bytes data, bool clamp) {
  if (from < 0 || to < 0 || from >= zckpt::kDTypes || to >= zckpt::kDTypes) throw std::invalid_argument("dtype");
  const size_t n = data.size() / zckpt::kItemSize[from];
  std::string out(n * zckpt::kItemSize[to], '\0');
  const zckpt::PlainFloats floats;
  zckpt::Overflow overflow;
  if (!zckpt::cast(static_cast<zckpt::DType>(from), static_cast<zckpt::DType>(to), data.c_str(), out.data(), n, clamp, overflow))
    throw std::invalid_argument("no such cast");
  return nb::make_tuple(nb::bytes(out.data(), out.size()), overflow.count, overflow.largest);
}
#endif

// What was read: the CRCs of windows, as numbers of four bytes each, and for each whether it is finite.
nb::tuple stop_early(zckpt::EarlyReader& reader) {
  {
    nb::gil_scoped_release release;
    reader.stop();
  }
  const auto &crcs = reader.crcs();
  const auto &finite = reader.finite();
  return nb::make_tuple(nb::bytes(crcs.data(), crcs.size() * sizeof crcs[0]), nb::bytes(finite.data(), finite.size()));
}

// (kind, column, literal) of each token, and how many objects go into the memo; of each way to write an object.
zckpt::Wordings wordings(const nb::list& ways) {
  zckpt::Wordings made;
  for (nb::handle way : ways) {
    const auto pair = nb::cast<nb::tuple>(way);
    zckpt::Wording wording{{}, nb::cast<uint64_t>(pair[1])};
    for (nb::handle token : nb::cast<nb::list>(pair[0])) {
      const auto said = nb::cast<nb::tuple>(token);
      const int kind = nb::cast<int>(said[0]), column = nb::cast<int>(said[1]);
      if (kind < 0 || kind > zckpt::Token::kText || column >= zckpt::Said::kColumns) throw std::invalid_argument("a token");
      const auto literal = nb::cast<nb::bytes>(said[2]);
      wording.tokens.push_back({static_cast<zckpt::Token::Kind>(kind), column, {literal.c_str(), literal.size()}});
    }
    made.push_back(std::move(wording));
  }
  return made;
}

nb::bytes packed(const std::vector<int64_t>& numbers) {
  return nb::bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));  // NOLINT
}

nb::object read_boxes(const nb::bytes& data, size_t at, const nb::list& ways) {
  std::vector<int64_t> numbers;
  size_t dims = 0;
  uint64_t memoized = 0;
  if (!zckpt::read_boxes({data.c_str(), data.size()}, at, wordings(ways), numbers, dims, memoized)) return nb::none();
  return nb::make_tuple(dims, packed(numbers), memoized, at);
}

nb::bytes entries_behind(const nb::bytes& data, size_t at) { return packed(zckpt::entries_behind({data.c_str(), data.size()}, at)); }

// Which of these (bytes, before, mask, where the end begins, end, mask) each file is alike, of (offset, bytes); -1 for none.
nb::bytes which_alike(int fd, uint64_t size, const nb::bytes& places, const nb::list& known) {
  std::vector<zckpt::AlikeEnds> likenesses;
  const auto text = [](nb::handle bytes) {
    const auto held = nb::cast<nb::bytes>(bytes);
    return std::string(held.c_str(), held.size());
  };
  for (nb::handle one : known) {
    const auto said = nb::cast<nb::tuple>(one);
    likenesses.push_back({nb::cast<uint64_t>(said[0]), nb::cast<uint64_t>(said[3]), text(said[1]), text(said[2]), text(said[4]), text(said[5])});
    if (const auto& made = likenesses.back(); made.before.size() != made.before_mask.size() || made.behind.size() != made.behind_mask.size())
      throw std::invalid_argument("a mask");
  }
  const auto numbers = structs<std::array<int64_t, 2>>(places);
  std::vector<int64_t> found;
  {
    nb::gil_scoped_release release;
    std::vector<char> buffer;
    for (const auto& [offset, nbytes] : numbers) {
      const auto alike = [&](const zckpt::AlikeEnds& of) {
        return offset >= 0 && nbytes >= 0 && of.nbytes == static_cast<uint64_t>(nbytes) && static_cast<uint64_t>(offset) + static_cast<uint64_t>(nbytes) <= size &&
               zckpt::is_alike(fd, static_cast<uint64_t>(offset), of, buffer);
      };
      const auto which = std::find_if(likenesses.begin(), likenesses.end(), alike);
      found.push_back(which == likenesses.end() ? -1 : which - likenesses.begin());
    }
  }
  return packed(found);
}

// Places of chunks by names and offsets, as `.metadata` lists them: many rows are read at once. Names and files are numbered by
// dicts of the caller.
class Places {
 public:
  Places(nb::dict names, nb::dict files) : names_(std::move(names)), files_(std::move(files)) {}

  void learn(const nb::list& keys, const nb::list& values) {
    keys_ = wordings(keys);
    values_ = wordings(values);
  }

  // (rows, objects in the memo, end) of the rows from `at` on that put nothing into the memo that is needed again.
  nb::tuple read(const nb::bytes& pickle, size_t at, const nb::dict& memo, const nb::bytes& needed, uint64_t number) {
    const std::string_view data(pickle.c_str(), pickle.size());
    const auto* next = reinterpret_cast<const int64_t*>(needed.c_str());  // NOLINT
    const auto* last = next + needed.size() / sizeof(int64_t);
    const auto knows = [&](int64_t entry) { return known_.contains(entry) || PyDict_Contains(memo.ptr(), nb::int_(entry).ptr()) == 1; };
    uint64_t rows = 0, memoized = 0;
    zckpt::Said key, value;
    while (true) {
      size_t end = at;
      const auto* of_key = zckpt::read_object(data, end, keys_, key, knows);
      const auto* of_value = of_key ? zckpt::read_object(data, end, values_, value, knows) : nullptr;
      if (!of_value) break;
      const uint64_t more = of_key->memoized + of_value->memoized;
      next = std::lower_bound(next, last, static_cast<int64_t>(number + memoized));
      if (next != last && static_cast<uint64_t>(*next) < number + memoized + more) break;
      const int64_t name = number_of(names_, of_names_, key, memo), file = number_of(files_, of_files_, value, memo);
      if (name < 0 || file < 0 || value.numbers[1] < 0 || value.numbers[2] < 0) break;
      table_.add(static_cast<uint32_t>(name), key.has_shape[1] ? &key.shapes[1] : nullptr, {file, value.numbers[1], value.numbers[2]});
      at = end;
      memoized += more;
      ++rows;
    }
    return nb::make_tuple(rows, memoized, at);
  }

  void add(uint32_t name, const std::optional<nb::bytes>& offsets, int64_t file, int64_t offset, int64_t length) {
    const auto numbers = offsets ? structs<int64_t>(*offsets) : std::vector<int64_t>();
    table_.add(name, offsets ? &numbers : nullptr, {file, offset, length});
  }

  nb::object find(uint32_t name, const std::optional<nb::bytes>& offsets) {
    const auto numbers = offsets ? structs<int64_t>(*offsets) : std::vector<int64_t>();
    const auto* place = table_.find(name, numbers.data(), numbers.size(), !offsets);
    return place ? nb::object(nb::make_tuple(place->file, place->offset, place->length)) : nb::none();
  }

  nb::bytes find_all(uint32_t name, const nb::bytes& size, const nb::bytes& boxes) {
    return packed(table_.find_all(name, structs<int64_t>(size), structs<int64_t>(boxes)));
  }

  size_t size() const { return table_.size(); }

 private:
  // The number of a text, which is new or an entry of the memo; below zero for what is no text.
  int64_t number_of(nb::dict& all, std::unordered_map<int64_t, int64_t>& of_entries, const zckpt::Said& said, const nb::dict& memo) {
    const int64_t entry = said.entries[0];
    nb::object text;
    if (said.has_text[0]) {
      text = nb::str(said.texts[0].data(), said.texts[0].size());
    } else if (entry < 0) {
      return -1;
    } else {
      if (const auto found = of_entries.find(entry); found != of_entries.end()) return found->second;
      PyObject* object = PyDict_GetItemWithError(memo.ptr(), nb::int_(entry).ptr());
      if (!object || !PyUnicode_CheckExact(object)) return -1;
      text = nb::borrow(object);
      known_.insert(entry);
    }
    int64_t number;
    if (PyObject* known = PyDict_GetItemWithError(all.ptr(), text.ptr())) {
      number = nb::cast<int64_t>(nb::handle(known));
    } else {
      number = static_cast<int64_t>(all.size());
      if (number > std::numeric_limits<uint32_t>::max()) return -1;
      all[text] = number;
    }
    if (!said.has_text[0]) of_entries.emplace(entry, number);
    return number;
  }

  nb::dict names_, files_;
  zckpt::Wordings keys_, values_;
  std::unordered_map<int64_t, int64_t> of_names_, of_files_;
  std::unordered_set<int64_t> known_;
  zckpt::PlaceTable table_;
};

nb::object read_described(int fd, uint64_t nbytes) {
  std::unique_ptr<zckpt::Described> found;
  {
    nb::gil_scoped_release release;
    found = zckpt::read_described(fd, nbytes);
  }
  return found ? nb::cast(found.release(), nb::rv_policy::take_ownership) : nb::none();
}

nb::str text_of(std::string_view text) { return nb::str(text.data(), text.size()); }

nb::list names_of(const zckpt::Described& of, size_t start, size_t stop) {
  nb::list found;
  for (size_t n = start; n < std::min(stop, of.size()); ++n) found.append(text_of(of.name(n)));
  return found;
}

nb::list texts_of(const std::vector<std::string>& texts) {
  nb::list found;
  for (const auto& text : texts) found.append(text_of(text));
  return found;
}

// (dtype, extents) of each.
nb::list forms_of(const zckpt::Described& of) {
  nb::list found;
  for (const auto& form : of.forms) {
    nb::list shape;
    for (int64_t extent : form.shape) shape.append(extent);
    found.append(nb::make_tuple(text_of(form.dtype), nb::tuple(shape)));
  }
  return found;
}

// A column, which is not here any more then.
nb::bytes column_of(zckpt::Described& of, const std::string& name) {
  const auto packed_as = [](auto& column) {
    const auto own = std::move(column);
    return nb::bytes(reinterpret_cast<const char*>(own.data()), own.size() * sizeof(own[0]));  // NOLINT
  };
  if (name == "form") return packed_as(of.form);
  if (name == "prefix") return packed_as(of.prefix);
  if (name == "file") return packed_as(of.file);
  if (name == "offset") return packed_as(of.offset);
  if (name == "length") return packed_as(of.length);
  throw std::invalid_argument("a column");
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // a run may hold its transfers until the process ends
  m.doc() = "The engine of moves and scans; see zckpt/engine.";
  nb::class_<zckpt::Lent>(m, "Lent", nb::type_slots(zckpt::lent_slots));
  m.def("run", &run, "stores"_a, "moves"_a, "literals"_a, "ranges"_a, "blob"_a, "terms"_a, "pieces"_a, "threads"_a, "window"_a, "clamp"_a,
        "give_back"_a, "bytes_per_s"_a, "progress"_a.none(), "consumers"_a);
  m.def("scan", &scan, "stores"_a, "moves"_a, "requests"_a, "ranges"_a, "rounded"_a, "atol"_a, "rtol"_a, "spreads"_a, "threads"_a, "give_back"_a,
        "bytes_per_s"_a, "progress"_a.none());
  m.def("confirm", &confirm, "stores"_a, "ranges"_a, "pieces"_a, "sides"_a, "groups"_a, "zones"_a, "threads"_a, "give_back"_a, "bytes_per_s"_a,
        "progress"_a.none());
  m.def("step", &step, "rule"_a, "rates"_a, "weights"_a, "gradients"_a, "first"_a, "second"_a, "count"_a, "threads"_a);
  m.def("accumulate", &accumulate, "total"_a, "numbers"_a, "count"_a, "weight"_a);
  m.def("approach", &approach, "total"_a, "numbers"_a, "count"_a, "divisor"_a);
  m.def("blend", &blend, "total"_a, "numbers"_a, "count"_a, "keep"_a, "weight"_a);
  m.def("products", &products, "a"_a, "b"_a, "count"_a);
  m.def("add_low_rank", &add_low_rank, "total"_a, "left"_a, "right"_a, "rows"_a, "columns"_a, "rank"_a, "scaling"_a);
  m.def("move_sparsely", &move_sparsely, "total"_a, "count"_a, "first"_a, "terms"_a, "elects"_a, "normalises"_a, "factor"_a);
  m.def("lengths", &lengths, "base"_a, "count"_a, "first"_a, "kept"_a);
  m.def("select_near", &select_near, "numbers"_a, "base"_a, "count"_a, "low"_a, "high"_a, "found"_a);
  m.def("largest", &largest, "x"_a, "halves"_a, "blocks"_a, "found"_a);
  m.def("multiply_blocks", &multiply_blocks, "x"_a, "blocks"_a, "factors"_a);
  m.def("split_codes", &split_codes, "raw"_a, "pitch"_a, "rows"_a, "columns"_a, "bits"_a, "high_first"_a, "codes"_a);
  m.def("split_down", &split_down, "raw"_a, "word"_a, "pitch"_a, "bits"_a, "shifts"_a, "first"_a, "count"_a, "codes"_a);
  m.def("join_codes", &join_codes, "codes"_a, "rows"_a, "columns"_a, "pitch"_a, "rest"_a, "out"_a);
  m.def("of_codes", &of_codes, "codes"_a, "table"_a, "blocks"_a, "zeros"_a, "factors"_a, "numbers"_a);
  m.def("to_codes", &to_codes, "grid"_a, "x"_a, "halves"_a, "blocks"_a, "factors"_a, "out"_a);
  m.def("to_affine", &to_affine, "x"_a, "groups"_a, "size"_a, "bits"_a, "packed"_a, "scales"_a, "biases"_a);
  m.def("of_ggml", &of_ggml, "kind"_a, "blocks"_a, "count"_a, "numbers"_a);
  m.def("to_ggml", &to_ggml, "kind"_a, "numbers"_a, "rows"_a, "columns"_a, "weights"_a, "blocks"_a);
  m.def("to_q8_0", &to_q8_0, "numbers"_a, "halves"_a, "blocks"_a, "count"_a);
  m.def("copy_aside", &copy_aside, "to"_a, "source"_a, "nbytes"_a);
  m.def("is_beyond_doubt", &is_beyond_doubt, "source"_a, "target"_a, "a"_a, "b"_a, "count"_a);
  m.def("difference", &difference, "before"_a, "after"_a, "nbytes"_a, "width"_a, "ends"_a);
  m.def("renew", &renew, "blocks"_a, "data"_a, "nbytes"_a);
  m.def("of_q8_0", &of_q8_0, "blocks"_a, "numbers"_a, "count"_a);
  nb::class_<zckpt::Swapper>(m, "Swapper")
      .def("__init__",
           [](zckpt::Swapper* self, unsigned threads, uint64_t block) {
             if (threads < 1 || threads > 1024 || !block) throw std::invalid_argument("threads or block");
             new (self) zckpt::Swapper(threads, block);
           },
           "threads"_a, "block"_a)
      .def("begin", &begin_swap, "fd"_a, "write"_a, "stretches"_a)
      .def("wait", &wait_for_swap, "number"_a);
  nb::class_<zckpt::EarlyReader>(m, "EarlyReader")
      .def("__init__",
           [](zckpt::EarlyReader* self, nb::bytes files, uint64_t window) {
             if (!window || window > 1ull << 30) throw std::invalid_argument("window");
             new (self) zckpt::EarlyReader(structs<zckpt::EarlyFile>(files), window);
           },
           "files"_a, "window"_a)
      .def("stop", &stop_early);
  m.def("read_boxes", &read_boxes, "data"_a, "at"_a, "ways"_a);
  m.def("entries_behind", &entries_behind, "data"_a, "at"_a);
  m.def("which_alike", &which_alike, "fd"_a, "size"_a, "places"_a, "known"_a);
  m.def("read_described", &read_described, "fd"_a, "nbytes"_a);
  nb::class_<zckpt::Described>(m, "Described")
      .def("names", &names_of, "start"_a, "stop"_a)
      .def("find", [](const zckpt::Described& of, const std::string& name) { return of.find(name); }, "name"_a)
      .def("in_order",
           [](const zckpt::Described& of) {
             const auto numbers = of.in_order();
             return nb::bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(uint32_t));  // NOLINT
           })
      .def("mentions", [](const zckpt::Described& of, const std::string& text) { return of.mentions(text); }, "text"_a)
      .def("take", &column_of, "column"_a)
      .def("forms", &forms_of)
      .def("files", [](const zckpt::Described& of) { return texts_of(of.files); })
      .def("prefixes", [](const zckpt::Described& of) { return texts_of(of.prefixes); })
      .def("version", [](const zckpt::Described& of) { return text_of(of.version); })
      .def("__len__", &zckpt::Described::size);
  nb::class_<Places>(m, "Places")
      .def(nb::init<nb::dict, nb::dict>(), "names"_a, "files"_a)
      .def("learn", &Places::learn, "keys"_a, "values"_a)
      .def("read", &Places::read, "data"_a, "at"_a, "memo"_a, "needed"_a, "number"_a)
      .def("add", &Places::add, "name"_a, "offsets"_a.none(), "file"_a, "offset"_a, "length"_a)
      .def("find", &Places::find, "name"_a, "offsets"_a.none())
      .def("find_all", &Places::find_all, "name"_a, "size"_a, "boxes"_a)
      .def("__len__", &Places::size);
  m.def("crc32", &crc32_of, "data"_a, "crc"_a = 0);
  m.def("crc32_combine", &zckpt::crc32_combine, "a"_a, "b"_a, "nbytes_b"_a);
  m.def("forget", &zckpt::forget, "fd"_a, "offset"_a = 0, "nbytes"_a = 0);
  m.def("let_go", &zckpt::let_go);
  m.def("exchange", [](const std::string& a, const std::string& b) { return zckpt::exchange(a.c_str(), b.c_str()); }, "a"_a, "b"_a);
  m.def("is_in_memory", &zckpt::is_in_memory, "fd"_a);
#ifdef ZCKPT_TESTING
  m.def("judge", &judge, "likeness"_a, "source"_a, "target"_a, "a"_a, "b"_a, "How many of b are not what those of a become, and the first.");
  m.def("cast", &cast, "source"_a, "target"_a, "data"_a, "clamp"_a = false, "Casts bytes.");
  m.def("inject", &zckpt::inject, "write"_a, "nth"_a, "kind"_a, "Makes the n-th read or write misbehave.");
  m.def("calls", &zckpt::calls, "write"_a, "Reads or writes since `inject`.");
  m.def("use_vector_paths", [](bool on, bool wide) { zckpt::vector_paths = on, zckpt::wide_paths = wide; }, "on"_a, "wide"_a = true);
  m.def("has_vector_paths", [] { return zckpt::has(zckpt::Unit::kHalves); });
#endif
}
