// A reader of all of zstd copies a repeat byte by byte from where it was, which it has to for any distance. Here each repeat is zeros,
// which are there already: for a run, only its length is read, and the bytes that changed are put behind it.
// Source: RFC 8878, sections 3.1.1.2 and 3.1.1.3 (blocks, literals, sequences), 4.1 and 4.2 (FSE and Huffman codes).
#include "renew.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>

#include "difference.h"
#include "lengths.h"
#include "simd.h"

namespace zckpt {
namespace {

constexpr size_t kTurns = 16;       // between two looks at where the reader is
constexpr size_t kSlack = 8 * (kTurns + 2);  // bytes that may be read or written around what counts
constexpr unsigned kMostBits = 11, kMostLog = 9, kWeightLog = 6;
constexpr unsigned kWindow = 10;  // bits of a Huffman code that are looked up at once, for up to eight bytes

ZCKPT_INLINE uint64_t eight(const uint8_t* at) {
  static_assert(std::endian::native == std::endian::little);
  uint64_t value;
  std::memcpy(&value, at, 8);
  return value;
}

ZCKPT_INLINE uint64_t lowest(uint64_t value, unsigned bits) { return value & ((uint64_t{1} << bits) - 1); }

// Bits that are read from their end: `left` of them, from `from` on, are unread. What is before them may be read too.
struct BitReader {
  const uint8_t* from;
  ptrdiff_t left;

  // Begins behind the mark in the last byte; false if there is none.
  bool begin(const uint8_t* at, const uint8_t* end) {
    if (at >= end || !end[-1]) return false;
    from = at;
    left = 8 * (end - at) - 1 - std::countl_zero(end[-1]);
    return true;
  }

  // The next bits, 57 or more, the first one at the top. Nothing is read of what is more than 64 bits before.
  ZCKPT_INLINE uint64_t top() const {
    const ptrdiff_t bytes = (left + 7) >> 3;
    return eight(from + bytes - 8) << (8 * bytes - left);
  }

  uint64_t take(unsigned bits) {  // at most 32
    const uint64_t value = bits ? top() >> (64 - bits) : 0;
    left -= bits;
    return value;
  }
};

// A state of an FSE code, in one word that stays in a register: the next one is `next` and some bits, and the number that it stands
// for is `base` and some more. A processor shifts by the lowest six bits alone, so that numbers of bits need not be cut out.
class State {
 public:
  State() = default;
  State(unsigned next, unsigned bits, unsigned more, uint32_t base) : all_(more | bits << 8 | next << 16 | uint64_t{base} << 32) {}

  ZCKPT_INLINE unsigned next() const { return all_ >> 16 & 0xffff; }
  ZCKPT_INLINE unsigned bits() const { return all_ >> 8 & 63; }
  ZCKPT_INLINE unsigned more() const { return all_ & 63; }
  ZCKPT_INLINE uint32_t base() const { return static_cast<uint32_t>(all_ >> 32); }

 private:
  uint64_t all_;
};

// Reads how many states each of at most `symbols` numbers has; returns what follows, or null.
const uint8_t* read_shares(const uint8_t* at, const uint8_t* end, unsigned symbols, unsigned most_log, uint16_t* shares, unsigned& log) {
  std::fill_n(shares, symbols, uint16_t{0});
  size_t bit = 0;
  const auto peek = [&](unsigned bits) { return static_cast<unsigned>(lowest(eight(at + bit / 8) >> bit % 8, bits)); };
  log = peek(4) + 5;
  bit = 4;
  if (log > most_log) return nullptr;
  unsigned left = (1u << log) + 1, threshold = 1u << log, width = log + 1, symbol = 0;
  while (left > 1) {
    if (symbol >= symbols || at + bit / 8 >= end) return nullptr;
    const unsigned spare = 2 * threshold - 1 - left;
    unsigned value = peek(width);
    if ((value & (threshold - 1)) < spare) value &= threshold - 1, bit += width - 1;
    else value -= value >= threshold ? spare : 0, bit += width;
    if (!value || value - 1 >= left) return nullptr;  // a share below one is none of ours
    shares[symbol++] = static_cast<uint16_t>(value - 1);
    left -= value - 1;
    for (; left < threshold; threshold >>= 1) --width;
    if (value != 1 || left <= 1) continue;
    for (unsigned zeros = 3; zeros == 3; bit += 2) {
      if (at + bit / 8 >= end) return nullptr;
      symbol += zeros = peek(2);
    }
  }
  at += (bit + 7) / 8;
  return at > end ? nullptr : at;
}

// The states of a code of numbers that have so many each.
template <typename Make>
void make_states(const uint16_t* shares, unsigned symbols, unsigned log, State* states, const Make& make) {
  uint8_t spread[1 << kMostLog];
  const unsigned count = 1u << log;
  unsigned at = 0;
  for (unsigned s = 0; s < symbols; ++s)
    for (unsigned i = 0; i < shares[s]; ++i) {
      spread[at] = static_cast<uint8_t>(s);
      at = (at + (count >> 1) + (count >> 3) + 3) & (count - 1);
    }
  uint16_t nexts[kMatchCodes];
  std::copy_n(shares, symbols, nexts);
  for (unsigned i = 0; i < count; ++i) {
    const unsigned next = nexts[spread[i]]++, bits = log + 1 - static_cast<unsigned>(std::bit_width(next));
    states[i] = make(spread[i], (next << bits) - count, bits);
  }
}

struct Sequence {
  uint32_t literals, match;
};

constexpr size_t kMostSequences = kDifferenceBlock / (1 + kLeastMatch);

struct Scratch {  // of one thread
  uint8_t before[kSlack], block[kDifferenceBlock + kSlack];
  uint8_t literals[kDifferenceBlock + kSlack];
  uint8_t difference[kDifferenceBlock + kSlack];  // zeros between two calls
  State states[2][1 << kMostLog];
  Sequence sequences[kMostSequences];
  struct {
    uint8_t byte, bits;
  } one[1 << kMostBits];  // the first byte of so many bits
  // What so many bits begin with: up to eight bytes, how many they are, and their bits. For windows of all sizes, each behind the last.
  uint64_t bytes[2 << kWindow];
  struct {
    uint8_t count, bits;
  } sizes[2 << kWindow];
};

Scratch& scratch() {
  thread_local std::unique_ptr<Scratch> own;
  if (!own) {
    own.reset(new Scratch);  // NOLINT: make_unique would fill all of it with zeros
    std::fill_n(own->difference, sizeof own->difference, uint8_t{0});
  }
  return *own;
}

// Reads a Huffman code; returns what follows, or null. `longest`: of its codes, in bits.
const uint8_t* read_code(const uint8_t* at, const uint8_t* end, Scratch& own, unsigned& longest) {
  uint8_t weights[256];
  unsigned count = 0;
  const unsigned first = *at++;
  if (first < 128) {
    const uint8_t* const stop = at + first;
    if (stop > end) return nullptr;
    uint16_t shares[kMostBits + 1];
    unsigned log;
    const uint8_t* const bits = read_shares(at, stop, kMostBits + 1, kWeightLog, shares, log);
    if (!bits) return nullptr;
    State states[1 << kWeightLog];
    make_states(shares, kMostBits + 1, log, states, [](unsigned symbol, unsigned next, unsigned bits) { return State(next, bits, 0, symbol); });
    BitReader reader;
    if (!reader.begin(bits, stop) || reader.left < 2 * static_cast<ptrdiff_t>(log)) return nullptr;
    State now[2];
    for (State& state : now) state = states[reader.take(log)];
    for (unsigned turn = 0;; turn ^= 1) {
      if (count >= 254) return nullptr;
      weights[count++] = static_cast<uint8_t>(now[turn].base());
      if (reader.left < now[turn].bits()) {
        weights[count++] = static_cast<uint8_t>(now[turn ^ 1].base());
        break;
      }
      now[turn] = states[now[turn].next() + reader.take(now[turn].bits())];
    }
    at = stop;
  } else {
    count = first - 127;
    if (at + (count + 1) / 2 > end) return nullptr;
    for (unsigned i = 0; i < count; ++i) weights[i] = i % 2 ? at[i / 2] & 15 : at[i / 2] >> 4;
    at += (count + 1) / 2;
  }
  uint32_t total = 0, of_weight[kMostBits + 2] = {};
  for (unsigned i = 0; i < count; ++i) {
    if (weights[i] > kMostBits) return nullptr;
    total += 1u << weights[i] >> 1;
  }
  longest = static_cast<unsigned>(std::bit_width(total));
  const uint32_t rest = (1u << longest) - total;
  if (!total || longest > kMostBits || !std::has_single_bit(rest)) return nullptr;
  weights[count++] = static_cast<uint8_t>(std::bit_width(rest));
  uint32_t place[kMostBits + 2] = {};
  for (unsigned i = 0; i < count; ++i) ++of_weight[weights[i]];
  for (unsigned weight = 1; weight <= kMostBits; ++weight) place[weight + 1] = place[weight] + (of_weight[weight] << (weight - 1));
  for (unsigned i = 0; i < count; ++i)
    if (const unsigned weight = weights[i]; weight) {
      const unsigned wide = 1u << (weight - 1);
      std::fill_n(own.one + place[weight], wide, std::remove_extent_t<decltype(own.one)>{static_cast<uint8_t>(i), static_cast<uint8_t>(longest + 1 - weight)});
      place[weight] += wide;
    }
  return at;
}

// What windows of up to `kWindow` bits begin with: a byte, and what the bits behind it begin with, which is known by then.
ZCKPT_INLINE void find_windows(Scratch& own, unsigned longest) {
  own.bytes[1] = 0;  // of no bits
  own.sizes[1] = {0, 0};
  for (unsigned width = 1; width <= kWindow; ++width)
    for (unsigned window = 0; window < 1u << width; ++window) {
      const auto one = own.one[width < longest ? window << (longest - width) : window >> (width - longest)];
      const unsigned place = (1u << width) + window;
      own.bytes[place] = 0;
      own.sizes[place] = {0, 0};
      if (one.bits > width) continue;
      const auto behind = static_cast<size_t>((1u << (width - one.bits)) + lowest(window, width - one.bits));
      const auto more = own.sizes[behind];
      own.bytes[place] = own.bytes[behind] << 8 | one.byte;
      if (more.count < 8) own.sizes[place] = {static_cast<uint8_t>(more.count + 1), static_cast<uint8_t>(more.bits + one.bits)};
      else {  // the first eight of nine
        unsigned left = width;
        for (int i = 0; i < 8; ++i) {
          const auto rest = static_cast<unsigned>(lowest(window, left));
          left -= own.one[left < longest ? rest << (longest - left) : rest >> (left - longest)].bits;
        }
        own.sizes[place] = {8, static_cast<uint8_t>(width - left)};
      }
    }
}

// Some bytes in a Huffman code.
struct Stream {
  BitReader bits;
  uint8_t *to, *end;
  uint64_t now = 0;

  // Up to eight bytes, of `now`, which has ten bits.
  ZCKPT_INLINE void add_some(const Scratch& own) {
    const size_t place = (1u << kWindow) + (now >> (64 - kWindow));
    std::memcpy(to, own.bytes + place, 8);
    const auto size = own.sizes[place];
    to += size.count;
    now <<= size.bits;
    bits.left -= size.bits;
    alone += !size.count;
  }
  unsigned alone = 0;

  ZCKPT_INLINE void add_one(const Scratch& own, unsigned longest) {
    const auto one = own.one[bits.top() >> (64 - longest)];
    *to++ = one.byte;
    bits.left -= one.bits;
  }

  bool finish(const Scratch& own, unsigned longest) {
    while (to < end && bits.left >= 0) {
      now = bits.top();
      if (end - to >= 8) {
        const uint8_t* const before = to;
        add_some(own);
        if (to != before) continue;
      }
      add_one(own, longest);
    }
    return to == end && !bits.left;
  }
};

// Decodes the literals to `own.literals`, four streams at once.
ZCKPT_INLINE bool decode_literals(const uint8_t* at, const uint8_t* end, size_t count, Scratch& own, unsigned longest) {
  if (end - at < 10 || count < 4) return false;
  find_windows(own, longest);
  Stream streams[4];
  const size_t part = (count + 3) / 4;
  const uint8_t* from = at + 6;
  for (size_t i = 0; i < 4; ++i) {
    const uint8_t* const stop = i < 3 ? from + (at[2 * i] | at[2 * i + 1] << 8) : end;
    if (stop > end || !streams[i].bits.begin(from, stop) || i * part > count) return false;
    streams[i].to = own.literals + i * part;
    streams[i].end = own.literals + std::min(count, (i + 1) * part);
    from = stop;
  }
  constexpr int kSteps = 5;
  static_assert(kSteps * kWindow <= 57);
  Stream a = streams[0], b = streams[1], c = streams[2], d = streams[3];
  while ((a.end - a.to >= 8 * kSteps) & (b.end - b.to >= 8 * kSteps) & (c.end - c.to >= 8 * kSteps) & (d.end - d.to >= 8 * kSteps) &
         ((a.bits.left | b.bits.left | c.bits.left | d.bits.left) >= 0)) {
    a.now = a.bits.top(), b.now = b.bits.top(), c.now = c.bits.top(), d.now = d.bits.top();
    for (int turn = 0; turn < kSteps; ++turn) a.add_some(own), b.add_some(own), c.add_some(own), d.add_some(own);
    if (a.alone | b.alone | c.alone | d.alone) [[unlikely]]  // a code longer than the window
      for (Stream* each : {&a, &b, &c, &d}) {
        if (each->alone && each->bits.left >= 0) each->add_one(own, longest);
        each->alone = 0;
      }
  }
  return a.finish(own, longest) && b.finish(own, longest) && c.finish(own, longest) && d.finish(own, longest);
}

struct Literals {
  const uint8_t* begin;
  size_t count;
};

// Reads the literals of a block; returns what follows, or null.
ZCKPT_INLINE const uint8_t* read_literals(const uint8_t* at, const uint8_t* end, Scratch& own, Literals& found) {
  if (end - at < 3) return nullptr;
  const unsigned kind = at[0] & 3, format = at[0] >> 2 & 3;
  const uint64_t head = eight(at);
  if (kind < 2) {  // as they are, or all the same
    const unsigned nbytes = format % 2 ? format == 1 ? 2 : 3 : 1;
    const size_t count = lowest(head, 8 * nbytes) >> (nbytes == 1 ? 3 : 4);
    at += nbytes;
    if (count > kDifferenceBlock || end - at < static_cast<ptrdiff_t>(kind ? 1 : count)) return nullptr;
    found = {at, count};
    if (!kind) return at + count;
    std::memset(own.literals, *at, count);
    found.begin = own.literals;
    return at + 1;
  }
  if (kind == 3 || !format) return nullptr;
  const unsigned width = 6 + 4 * format;
  const size_t count = lowest(head >> 4, width), coded = lowest(head >> (4 + width), width);
  at += 2 + format;
  if (count > kDifferenceBlock || end - at < static_cast<ptrdiff_t>(coded) || !coded) return nullptr;
  unsigned longest;
  const uint8_t* const streams = read_code(at, at + coded, own, longest);
  if (!streams || !decode_literals(streams, at + coded, count, own, longest)) return nullptr;
  found = {own.literals, count};
  return at + coded;
}

// Reads one of the two codes of lengths; returns what follows, or null.
template <unsigned symbols>
const uint8_t* read_lengths(const uint8_t* at, const uint8_t* end, unsigned mode, const Lengths& lengths, uint32_t least, State* states, unsigned& log) {
  const auto make = [&](unsigned symbol, unsigned next, unsigned bits) { return State(next, bits, lengths.bits[symbol], lengths.least[symbol] + least); };
  log = 0;
  if (mode == 1) {
    if (at >= end || *at >= symbols) return nullptr;
    states[0] = make(*at, 0, 0);
    return at + 1;
  }
  uint16_t shares[symbols];
  if (mode != 2 || !(at = read_shares(at, end, symbols, kMostLog, shares, log))) return nullptr;
  make_states(shares, symbols, log, states, make);
  return at;
}

constexpr auto kFirst = [] {  // masks of the first bytes of sixteen
  std::array<std::array<uint8_t, 16>, 17> made{};
  for (unsigned n = 0; n <= 16; ++n)
    for (unsigned i = 0; i < n; ++i) made[n][i] = 0xff;
  return made;
}();

// The states of both codes, and the bits behind them: `ready` of these or more are at the top of a word, and the word behind them is
// read before it is known how many will be taken.
struct Sequences {
  State of_literals, of_match;
  const uint8_t *from, *behind;
  uint64_t now;
  unsigned ready;
  const State *literal_states, *match_states;

  ptrdiff_t left() const { return 8 * (behind - from) + ready; }

  ZCKPT_INLINE void next(Sequence& found, bool last) {
    const auto first = [](uint64_t word, unsigned n) ZCKPT_PART { return word >> 1 >> (63 - n); };  // none are no bits
    now |= eight(behind - 8) >> ready;
    behind -= (63 - ready) >> 3;
    ready |= 56;
    const unsigned both = of_match.more() + of_literals.more();
    found.match = of_match.base() + static_cast<uint32_t>(first(now, of_match.more()));
    found.literals = of_literals.base() + static_cast<uint32_t>(first(now << of_match.more(), of_literals.more()));
    now <<= both & 63;
    ready -= both;
    if (last) return;
    const unsigned n = of_literals.bits(), more = of_match.bits();
    of_literals = literal_states[of_literals.next() + first(now, n)];
    of_match = match_states[of_match.next() + first(now << n, more)];
    now <<= (n + more) & 63;
    ready -= n + more;
  }
};

// Reads how the sequences are told; false if it cannot be done.
bool read_sequences(const uint8_t* at, const uint8_t* end, Scratch& own, Sequences& found) {
  if (at >= end) return false;
  const unsigned modes = *at++;
  unsigned logs[2];
  if ((modes & 0x33) != 0x10) return false;  // distances all alike
  if (!(at = read_lengths<kLengthCodes>(at, end, modes >> 6, kOfLiterals, 0, own.states[0], logs[0]))) return false;
  if (at >= end || *at++) return false;  // the one before
  if (!(at = read_lengths<kMatchCodes>(at, end, modes >> 2 & 3, kOfMatches, kLeastMatch, own.states[1], logs[1]))) return false;
  BitReader bits;
  if (!bits.begin(at, end) || bits.left < logs[0] + logs[1]) return false;
  found.literal_states = own.states[0], found.match_states = own.states[1];
  found.of_literals = own.states[0][bits.take(logs[0])];
  found.of_match = own.states[1][bits.take(logs[1])];
  found.from = at;
  found.behind = at + bits.left / 8;
  found.ready = static_cast<unsigned>(bits.left & 7);
  found.now = found.ready ? static_cast<uint64_t>(*found.behind) << (64 - found.ready) : 0;
  return true;
}

// Decodes all sequences to `own.sequences`; false if their bits are not as many as they take.
ZCKPT_INLINE bool decode_sequences(size_t count, Sequences all, Scratch& own) {
  for (size_t i = 0; i + 1 < count;) {
    if (all.behind < all.from - 8) return false;  // else what is read is within the slack, until it is looked at again
    for (const size_t stop = std::min(count - 1, i + kTurns); i < stop; ++i) all.next(own.sequences[i], false);
  }
  all.next(own.sequences[count - 1], true);
  return !all.left();
}

// Puts literals between zeros, to `own.difference`; returns how many bytes these are together, or 0.
ZCKPT_INLINE size_t place(size_t count, const Literals& literals, Scratch& own) {
  const uint8_t* from = literals.begin;
  uint8_t *to = own.difference, *const most = to + kDifferenceBlock;
  uint32_t wrong = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t length = own.sequences[i].literals, match = own.sequences[i].match;
    uint8_t* const behind = to + length + match;
    if (behind > most) return 0;  // so no more literals are taken than there is room for
    if (length <= 16) [[likely]] {
      uint64_t some[2], mask[2];
      std::memcpy(some, from, 16);
      std::memcpy(mask, kFirst[length].data(), 16);
      some[0] &= mask[0], some[1] &= mask[1];
      std::memcpy(to, some, 16);
    } else {
      std::memcpy(to, from, length);
    }
    from += length;
    wrong |= from[-1] | static_cast<uint32_t>(length - 1) >> 31;  // what is repeated is no zero; or it is another distance
    to = behind;
  }
  const ptrdiff_t last = literals.begin + literals.count - from;
  if (wrong || last < 0 || last > most - to) return 0;
  std::memcpy(to, from, static_cast<size_t>(last));
  return static_cast<size_t>(to + last - own.difference);
}

ZCKPT_INLINE void change(uint8_t* __restrict data, const uint8_t* __restrict by, size_t nbytes) {
  for (size_t i = 0; i < nbytes; ++i) data[i] ^= by[i];
}

// Takes one block apart; returns how many bytes became new, or 0.
ZCKPT_INLINE size_t renew_block(const uint8_t* block, size_t size, uint8_t* data, size_t nbytes) {
  Scratch& own = scratch();
  std::memcpy(own.block, block, size);  // there are bytes around it
  const uint8_t *const end = own.block + size;
  Literals literals;
  const uint8_t* at = read_literals(own.block, end, own, literals);
  if (!at || at >= end) return 0;
  size_t count = *at++;
  if (count >= 128) {
    const size_t wide = count == 255 ? 2 : 1;
    if (end - at < static_cast<ptrdiff_t>(wide)) return 0;
    count = wide == 1 ? (count - 128) << 8 | at[0] : 0x7f00 + (at[0] | at[1] << 8);
    at += wide;
  }
  if (!count) {
    if (at != end || literals.count > nbytes) return 0;
    change(data, literals.begin, literals.count);
    return literals.count;
  }
  Sequences sequences;
  if (count > kMostSequences || !read_sequences(at, end, own, sequences) || !decode_sequences(count, sequences, own)) return 0;
  const size_t found = place(count, literals, own);
  if (found && found <= nbytes) change(data, own.difference, found);
  std::memset(own.difference, 0, found ? found : sizeof own.difference);
  return found <= nbytes ? found : 0;
}

// For any processor, and for those that shift without looking at flags.
size_t renew_plain(const uint8_t* block, size_t size, uint8_t* data, size_t nbytes) { return renew_block(block, size, data, nbytes); }

#ifdef ZCKPT_X86
ZCKPT_FOR("avx2,bmi,bmi2,lzcnt") size_t renew_shifted(const uint8_t* block, size_t size, uint8_t* data, size_t nbytes) {
  return renew_block(block, size, data, nbytes);
}
#endif

size_t renew_any(const uint8_t* block, size_t size, uint8_t* data, size_t nbytes) {
#ifdef ZCKPT_X86
  if (has(Unit::kMultiplyAdd)) return renew_shifted(block, size, data, nbytes);
#endif
  return renew_plain(block, size, data, nbytes);
}

}  // namespace

Renewed renew(const uint8_t* blocks, size_t size, uint8_t* data, size_t nbytes) {
  Renewed made{0, 0, false};
  while (size - made.used >= 3 && !made.ended) {
    const uint8_t* const block = blocks + made.used;
    const size_t head = block[0] | block[1] << 8 | static_cast<size_t>(block[2]) << 16, told = head >> 3, left = nbytes - made.bytes;
    const unsigned kind = head >> 1 & 3;
    const size_t length = kind == 1 ? 1 : told;
    if (kind == 3 || told > kDifferenceBlock || length > size - made.used - 3 || (kind < 2 && told > left) || !told) break;
    uint8_t* const to = data + made.bytes;
    size_t found = told;
    if (!kind) change(to, block + 3, told);
    else if (kind == 2) found = renew_any(block + 3, length, to, left);
    else if (block[3])
      for (size_t i = 0; i < told; ++i) to[i] ^= block[3];
    if (!found) break;
    made = {made.used + 3 + length, made.bytes + found, (head & 1) != 0};
  }
  return made;
}

}  // namespace zckpt
