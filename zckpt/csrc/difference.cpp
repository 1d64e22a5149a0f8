// A step of training leaves most bytes of a bf16 weight as they are: the difference is single bytes with zeros between them. A
// compressor that looks for repeats finds the zeros, and codes how far each lies behind others of the kind. Here each run of zeros
// is a repeat of the byte before it, so its distance costs nothing: what remains are the bytes that changed and the lengths of the
// runs, each in a code that fits their counts in this block.
// Source: RFC 8878, sections 3.1.1.2 and 3.1.1.3 (blocks, literals, sequences).
#include "difference.h"

#include <algorithm>
#include <array>
#include <memory>

#include "entropy.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace zckpt {
namespace {

constexpr size_t kLeastRun = 4;      // of zeros: the first is a literal, and a match has three bytes at least
constexpr size_t kLeastCoded = 64;   // fewer literals are left as they are
constexpr unsigned kLengthCodes = 36, kMatchCodes = 53, kLeastMatch = 3;

struct Sequence {
  uint32_t literals, match;
};

struct Scratch {  // of one thread
  uint8_t bytes[kDifferenceBlock + 64], literals[kDifferenceBlock + 64];
  Sequence sequences[kDifferenceBlock / kLeastRun + 1];
  uint8_t codes[2][kDifferenceBlock / kLeastRun + 1];
  uint8_t out[4 * kDifferenceBlock];
};

Scratch& scratch() {
  thread_local std::unique_ptr<Scratch> own;
  if (!own) own.reset(new Scratch);  // NOLINT: make_unique would fill it with zeros
  return *own;
}

// How the lengths of literals, and those of matches less `kLeastMatch`, are told: a code, and its lowest bits beside it.
struct Lengths {
  uint8_t code[128];
  uint8_t bits[kMatchCodes];
  unsigned plain;           // lengths below have no bits beside their code
  unsigned direct, beyond;  // lengths below `direct` have their code above; others that of their highest bit, and `beyond`

  unsigned of(uint32_t length) const { return length < direct ? code[length] : static_cast<unsigned>(std::bit_width(length)) - 1 + beyond; }
  Bits rest(unsigned of, uint32_t length) const { return {length & ((1u << bits[of]) - 1), bits[of]}; }
};

constexpr Lengths lengths_of(std::array<uint8_t, kMatchCodes> bits, unsigned direct, unsigned beyond) {
  Lengths made{};
  std::copy(bits.begin(), bits.end(), made.bits);
  made.plain = static_cast<unsigned>(std::find_if(bits.begin(), bits.end(), [](uint8_t b) { return b != 0; }) - bits.begin());
  made.direct = direct;
  made.beyond = beyond;
  for (unsigned length = 0, code = 0; length < direct; ++code)
    for (unsigned i = 0; i < 1u << bits[code] && length < direct; ++i) made.code[length++] = static_cast<uint8_t>(code);
  return made;
}

constexpr Lengths kOfLiterals = lengths_of({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, 64, 19);
constexpr Lengths kOfMatches =
    lengths_of({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, 128, 36);

// The bytes that differ, and the lengths between them.
struct Parsed {
  size_t literals, sequences;
  uint64_t changed;
};

// Puts `before` XOR `after` to `difference`, 64 bytes of each; returns one bit for each byte that is not zero.
uint64_t differ(const uint8_t* before, const uint8_t* after, uint8_t* difference) {
  uint64_t bits = 0;
#if defined(__SSE2__)
  for (int i = 3; i >= 0; --i) {
    const auto at = [i](const uint8_t* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes) + i); };
    const __m128i found = _mm_xor_si128(at(before), at(after));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(difference) + i, found);
    bits = bits << 16 | static_cast<uint16_t>(~_mm_movemask_epi8(_mm_cmpeq_epi8(found, _mm_setzero_si128())));
  }
#else
  for (int i = 0; i < 64; ++i) bits |= uint64_t{(difference[i] = before[i] ^ after[i]) != 0} << i;
#endif
  return bits;
}

// How many elements of `width` bytes have a bit among these.
uint64_t elements(uint64_t bits, unsigned width) {
  for (unsigned shift = 1; shift < width; shift *= 2) bits |= bits >> shift;
  return static_cast<uint64_t>(std::popcount(bits & (~uint64_t{0} / ((uint64_t{1} << width) - 1))));
}

// Takes the difference apart, and leaves it in `own.bytes`. Nothing but the number of changes in 64 bytes decides what is done
// next: a processor cannot foresee where they are.
Parsed parse(const uint8_t* before, const uint8_t* after, size_t nbytes, unsigned width, Scratch& own) {
  uint8_t* literal = own.literals;
  const uint8_t* from = literal;  // behind the last match
  Sequence* next = own.sequences;
  uint64_t changed = 0;
  size_t at = 0;  // behind the last byte that differs
  const auto zeros = [&](size_t stop) {
    const size_t run = stop - at, is_match = run >= kLeastRun;
    std::memset(literal, 0, 4);
    literal += is_match | (run & (is_match - 1));
    *next = {static_cast<uint32_t>(literal - from), static_cast<uint32_t>(run - 1)};
    next += is_match;
    from += (literal - from) & -static_cast<ptrdiff_t>(is_match);
  };
  uint8_t rest[2][64] = {};  // what is left behind the last whole group
  if (const size_t last = nbytes % 64) {
    std::memcpy(rest[0], before + nbytes - last, last);
    std::memcpy(rest[1], after + nbytes - last, last);
  }
  for (size_t group = 0; group < nbytes; group += 64) {
    const bool is_whole = group + 64 <= nbytes;
    uint64_t bits = differ(is_whole ? before + group : rest[0], is_whole ? after + group : rest[1], own.bytes + group);
    changed += elements(bits, width);
    for (; bits; bits &= bits - 1) {
      const size_t stop = group + static_cast<size_t>(std::countr_zero(bits));
      zeros(stop);
      *literal++ = own.bytes[stop];
      at = stop + 1;
    }
  }
  if (changed && at < nbytes) zeros(nbytes);
  return {static_cast<size_t>(literal - own.literals), static_cast<size_t>(next - own.sequences), changed};
}

uint8_t* put(uint8_t* to, uint64_t value, unsigned nbytes) {
  for (; nbytes; --nbytes, value >>= 8) *to++ = static_cast<uint8_t>(value);
  return to;
}

// The literals as they are, or the only byte that they all are.
uint8_t* plain_literals(const uint8_t* bytes, size_t count, bool is_one, uint8_t* to) {
  if (count < 32) to = put(to, (is_one ? 1 : 0) | count << 3, 1);
  else if (count < 4096) to = put(to, (is_one ? 5 : 4) | count << 4, 2);
  else to = put(to, (is_one ? 13 : 12) | count << 4, 3);
  const size_t nbytes = is_one ? 1 : count;
  std::memcpy(to, bytes, nbytes);
  return to + nbytes;
}

uint8_t* add_literals(const uint8_t* bytes, size_t count, uint8_t* to) {
  if (count < kLeastCoded) return plain_literals(bytes, count, false, to);
  uint32_t counts[256];
  count_bytes(bytes, count, 256, counts);
  if (counts[bytes[0]] == count) return plain_literals(bytes, count, true, to);
  const HuffmanCode code(counts);
  const unsigned format = count < 1 << 10 ? 1 : count < 1 << 14 ? 2 : 3, width = 6 + 4 * format;
  uint8_t* const begin = to + 2 + format;
  uint8_t* at = code.describe(begin);
  if (!at) return plain_literals(bytes, count, false, to);
  uint8_t* const sizes = at;
  at += 6;
  const size_t part = (count + 3) / 4;
  for (size_t stream = 0; stream < 4; ++stream) {
    uint8_t* const end = code.write(bytes + stream * part, std::min(part, count - stream * part), at);
    if (stream < 3) put(sizes + 2 * stream, static_cast<uint64_t>(end - at), 2);
    at = end;
  }
  const auto coded = static_cast<uint64_t>(at - begin);
  if (coded >= count) return plain_literals(bytes, count, false, to);
  put(to, 2 | format << 2 | count << 4 | coded << (4 + width), 2 + format);
  return at;
}

// The code of one side of the sequences: none where all are the same.
class LengthCode {
 public:
  LengthCode(const uint8_t* codes, size_t count, unsigned symbols) : codes_(codes) {
    uint32_t counts[kMatchCodes];
    count_bytes(codes, count, symbols, counts);
    if (counts[codes[0]] == count) return;
    const auto log = static_cast<unsigned>(std::bit_width(count)) - 1;  // few sequences are not worth a long table
    code_ = std::make_unique<FseCode>(counts, symbols, std::clamp(log, 6u, FseCode::kLog));
  }

  unsigned mode() const { return code_ ? 2 : 1; }
  uint8_t* describe(uint8_t* to) const { return code_ ? code_->describe(to) : put(to, codes_[0], 1); }
  void begin(size_t last) { state_ = code_ ? code_->begin(codes_[last]) : 0; }
  Bits take(size_t at) { return code_ ? code_->take(state_, codes_[at]) : Bits{0, 0}; }
  void finish(BitWriter& bits) const {
    if (code_) code_->finish(bits, state_);
  }

 private:
  const uint8_t* codes_;
  std::unique_ptr<FseCode> code_;
  uint32_t state_ = 0;
};

uint8_t* add_sequences(Scratch& own, size_t count, uint8_t* to) {
  constexpr size_t kTwo = 128, kThree = 0x7f00;
  if (count < kTwo) to = put(to, count, 1);
  else if (count < kThree) to = put(to, (count >> 8 | 0x80) | (count & 0xff) << 8, 2);
  else to = put(to, 0xff | (count - kThree) << 8, 3);
  if (!count) return to;
  for (size_t i = 0; i < count; ++i) {
    own.codes[0][i] = static_cast<uint8_t>(kOfLiterals.of(own.sequences[i].literals));
    own.codes[1][i] = static_cast<uint8_t>(kOfMatches.of(own.sequences[i].match - kLeastMatch));
  }
  LengthCode literals(own.codes[0], count, kLengthCodes), matches(own.codes[1], count, kMatchCodes);
  to = put(to, literals.mode() << 6 | 1 << 4 | matches.mode() << 2, 1);
  to = put(literals.describe(to), 0, 1);  // every distance is the one before, which is 1 when a frame begins
  BitWriter bits(matches.describe(to));
  const auto put_rest = [&](size_t i) {
    const Sequence& each = own.sequences[i];
    if (each.literals >= kOfLiterals.plain) bits.add(kOfLiterals.rest(own.codes[0][i], each.literals));
    if (each.match - kLeastMatch >= kOfMatches.plain) bits.add(kOfMatches.rest(own.codes[1][i], each.match - kLeastMatch));
    bits.flush();
  };
  matches.begin(count - 1);
  literals.begin(count - 1);
  put_rest(count - 1);
  for (size_t i = count - 1; i-- > 0;) {
    const Bits of_match = matches.take(i);
    bits.add(of_match + literals.take(i));
    put_rest(i);
  }
  matches.finish(bits);
  literals.finish(bits);
  return bits.finish();
}

}  // namespace

uint64_t add_difference(const uint8_t* before, const uint8_t* after, size_t nbytes, unsigned width, bool ends, std::string& out) {
  enum Kind { kRaw, kOneByte, kCoded };
  Scratch& own = scratch();
  uint64_t changed = 0;
  for (size_t done = 0; done < nbytes; done += kDifferenceBlock) {
    const size_t size = std::min(kDifferenceBlock, nbytes - done);
    const auto add = [&](Kind kind, const uint8_t* data, size_t length, size_t told) {
      uint8_t head[3];
      put(head, (ends && done + size == nbytes) | kind << 1 | told << 3, 3);
      out.append(reinterpret_cast<const char*>(head), 3).append(reinterpret_cast<const char*>(data), length);
    };
    const Parsed found = parse(before + done, after + done, size, width, own);
    changed += found.changed;
    if (!found.changed) {
      add(kOneByte, own.bytes, 1, size);
      continue;
    }
    uint8_t* const middle = add_literals(own.literals, found.literals, own.out);
    const auto coded = static_cast<size_t>(add_sequences(own, found.sequences, middle) - own.out);
    if (coded < size) add(kCoded, own.out, coded, coded);
    else add(kRaw, own.bytes, size, size);
  }
  return changed;
}

}  // namespace zckpt
