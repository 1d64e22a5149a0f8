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
#include "simd.h"
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
  unsigned direct, beyond;  // lengths below `direct` have their code above; others that of their highest bit, and `beyond`

  unsigned of(uint32_t length) const { return length < direct ? code[length] : static_cast<unsigned>(std::bit_width(length)) - 1 + beyond; }
  Bits rest(unsigned of, uint32_t length) const { return {length & ((1u << bits[of]) - 1), bits[of]}; }
};

constexpr Lengths lengths_of(std::array<uint8_t, kMatchCodes> bits, unsigned direct, unsigned beyond) {
  Lengths made{};
  std::copy(bits.begin(), bits.end(), made.bits);
  made.direct = direct;
  made.beyond = beyond;
  for (unsigned length = 0, code = 0; length < direct; ++code)
    for (unsigned i = 0; i < 1u << bits[code] && length < direct; ++i) made.code[length++] = static_cast<uint8_t>(code);
  return made;
}

constexpr Lengths kOfLiterals = lengths_of({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, 64, 19);
constexpr Lengths kOfMatches =
    lengths_of({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, 128, 36);

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

// How many elements have a bit among these.
struct Elements {
  unsigned width;  // in bytes
  uint64_t firsts = ~uint64_t{0} / ((uint64_t{1} << width) - 1);

  ZCKPT_INLINE uint64_t operator()(uint64_t bits) const {
    for (unsigned shift = 1; shift < width; shift *= 2) bits |= bits >> shift;
    return static_cast<uint64_t>(std::popcount(bits & firsts));
  }
};

// The bytes that differ, and the lengths between them, as far as the difference was taken apart. Nothing but the number of changes, or
// of runs, in 64 bytes decides what is done next: a processor cannot foresee where they are.
struct Parsed {
  uint8_t* literal;     // behind the last one
  const uint8_t* from;  // behind the last match
  Sequence* next;
  size_t at = 0;  // behind the last byte that differs
  uint64_t changed = 0;

  explicit Parsed(Scratch& own) : literal(own.literals), from(own.literals), next(own.sequences) {}

  // What lies before the next byte that differs, or before the end.
  ZCKPT_INLINE void zeros(size_t stop) {
    const size_t run = stop - at, is_match = run >= kLeastRun;
    std::memset(literal, 0, 4);
    literal += is_match | (run & (is_match - 1));
    *next = {static_cast<uint32_t>(literal - from), static_cast<uint32_t>(run - 1)};
    next += is_match;
    from += (literal - from) & -static_cast<ptrdiff_t>(is_match);
  }

  // The 64 bytes from `group` on.
  void add(const uint8_t* bytes, size_t group, uint64_t bits, const Elements& elements) {
    changed += elements(bits);
    for (; bits; bits &= bits - 1) {
      const size_t stop = group + static_cast<size_t>(std::countr_zero(bits));
      zeros(stop);
      *literal++ = bytes[stop];
      at = stop + 1;
    }
  }

#ifdef ZCKPT_X86
  // The same where a bit of `bits` is set, by whole runs; returns which bytes are literals from the first that differs to the last.
  // They are to be put where `literal` was.
  ZCKPT_INLINE uint64_t add_runs(size_t group, uint64_t bits, const Elements& elements) {
    changed += elements(bits);
    const auto first = static_cast<unsigned>(std::countr_zero(bits)), last = 63 - static_cast<unsigned>(std::countl_zero(bits));
    zeros(group + first);
    const uint64_t within = ((uint64_t{2} << last) - 1) & (~uint64_t{0} << first), zero = within & ~bits;
    const uint64_t four = zero & zero >> 1 & zero >> 2 & zero >> 3;  // as many lie from here on
    static_assert(kLeastRun == 4);
    uint64_t starts = four & ~(four << 1);
    const uint64_t literals = within & ~((four | four << 1 | four << 2 | four << 3) & ~starts);
    do {
      for (int i = 0; i < 4; ++i, starts &= starts - 1) {  // also those that are not there, which cost less than a wrong guess
        const auto start = static_cast<unsigned>(std::countr_zero(starts)) & 63;
        const uint8_t* const behind = literal + std::popcount(literals & ((uint64_t{2} << start) - 1));
        *next = {static_cast<uint32_t>(behind - from), static_cast<uint32_t>(std::countr_zero(bits >> start)) - 1};
        next += starts != 0;
        from += (behind - from) & -static_cast<ptrdiff_t>(starts != 0);
      }
    } while (starts);
    at = group + last + 1;
    return literals;
  }
#endif
};

#ifdef ZCKPT_X86
// Whole groups of 64 bytes; returns where they end.
ZCKPT_FOR("avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,bmi,bmi2,lzcnt,popcnt")
size_t parse_wide(const uint8_t* before, const uint8_t* after, size_t nbytes, const Elements& elements, Scratch& own, Parsed& found) {
  size_t group = 0;
  for (; group + 64 <= nbytes; group += 64) {
    const __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(before + group), _mm512_loadu_si512(after + group));
    _mm512_storeu_si512(own.bytes + group, bytes);
    const uint64_t bits = _mm512_test_epi8_mask(bytes, bytes);
    if (!bits) continue;
    const uint64_t literals = found.add_runs(group, bits, elements);
    _mm512_storeu_si512(found.literal, _mm512_maskz_compress_epi8(literals, bytes));
    found.literal += std::popcount(literals);
  }
  return group;
}

// Which of eight bytes are taken, first those with a bit in the index.
constexpr auto kTaken = [] {
  std::array<std::array<uint8_t, 8>, 256> made{};
  for (unsigned bits = 0; bits < 256; ++bits)
    for (unsigned i = 0, count = 0; i < 8; ++i)
      if (bits >> i & 1) made[bits][count++] = static_cast<uint8_t>(i);
  return made;
}();

ZCKPT_FOR("avx2,bmi,bmi2,lzcnt,popcnt")
size_t parse_eights(const uint8_t* before, const uint8_t* after, size_t nbytes, const Elements& elements, Scratch& own, Parsed& found) {
  size_t group = 0;
  for (; group + 64 <= nbytes; group += 64) {
    uint64_t bits = 0;
    for (int half = 1; half >= 0; --half) {
      const size_t at = group + 32 * static_cast<size_t>(half);
      const __m256i bytes = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(before + at)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(after + at)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(own.bytes + at), bytes);
      bits = bits << 32 | static_cast<uint32_t>(~_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_setzero_si256())));
    }
    if (!bits) continue;
    uint64_t literals = found.add_runs(group, bits, elements);
    for (const uint8_t* eight = own.bytes + group; literals; literals >>= 8, eight += 8) {
      const auto taken = static_cast<uint8_t>(literals);
      const __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kTaken[taken].data()));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(found.literal), _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(eight)), order));
      found.literal += std::popcount(taken);
    }
  }
  return group;
}
#endif

// Takes the difference apart, and leaves it in `own.bytes`.
Parsed parse(const uint8_t* before, const uint8_t* after, size_t nbytes, const Elements& elements, Scratch& own) {
  Parsed found(own);
  size_t group = 0;
#ifdef ZCKPT_X86
  if (has(Unit::kWideBytes)) group = parse_wide(before, after, nbytes, elements, own, found);
  else if (has(Unit::kMultiplyAdd)) group = parse_eights(before, after, nbytes, elements, own, found);
#endif
  for (; group + 64 <= nbytes; group += 64)
    found.add(own.bytes, group, differ(before + group, after + group, own.bytes + group), elements);
  if (const size_t last = nbytes - group) {  // what is left behind the last whole group
    uint8_t rest[2][64] = {};
    std::memcpy(rest[0], before + group, last);
    std::memcpy(rest[1], after + group, last);
    found.add(own.bytes, group, differ(rest[0], rest[1], own.bytes + group), elements);
  }
  if (found.changed && found.at < nbytes) found.zeros(nbytes);
  return found;
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
  uint32_t begin(size_t last) const { return code_ ? code_->begin(codes_[last]) : 0; }
  Bits take(uint32_t& state, size_t at) const { return code_ ? code_->take(state, codes_[at]) : Bits{0, 0}; }
  void finish(BitWriter& bits, uint32_t state) const {
    if (code_) code_->finish(bits, state);
  }

 private:
  const uint8_t* codes_;
  std::unique_ptr<FseCode> code_;
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
  const LengthCode literals(own.codes[0], count, kLengthCodes), matches(own.codes[1], count, kMatchCodes);
  to = put(to, literals.mode() << 6 | 1 << 4 | matches.mode() << 2, 1);
  to = put(literals.describe(to), 0, 1);  // every distance is the one before, which is 1 when a frame begins
  BitWriter bits(matches.describe(to));
  const auto rest = [&](size_t i) {  // no bits for most: that costs less than a wrong guess
    const Sequence& each = own.sequences[i];
    return kOfLiterals.rest(own.codes[0][i], each.literals) + kOfMatches.rest(own.codes[1][i], each.match - kLeastMatch);
  };
  uint32_t of_match = matches.begin(count - 1), of_literals = literals.begin(count - 1);
  bits.add(rest(count - 1));
  bits.flush();
  for (size_t i = count - 1; i-- > 0;) {
    const Bits state = matches.take(of_match, i);
    bits.add((state + literals.take(of_literals, i)) + rest(i));
    bits.flush();
  }
  matches.finish(bits, of_match);
  literals.finish(bits, of_literals);
  return bits.finish();
}

}  // namespace

uint64_t add_difference(const uint8_t* before, const uint8_t* after, size_t nbytes, unsigned width, bool ends, std::string& out) {
  enum Kind { kRaw, kOneByte, kCoded };
  Scratch& own = scratch();
  const Elements elements{width};
  uint64_t changed = 0;
  for (size_t done = 0; done < nbytes; done += kDifferenceBlock) {
    const size_t size = std::min(kDifferenceBlock, nbytes - done);
    const auto add = [&](Kind kind, const uint8_t* data, size_t length, size_t told) {
      uint8_t head[3];
      put(head, (ends && done + size == nbytes) | kind << 1 | told << 3, 3);
      out.append(reinterpret_cast<const char*>(head), 3).append(reinterpret_cast<const char*>(data), length);
    };
    const Parsed found = parse(before + done, after + done, size, elements, own);
    changed += found.changed;
    if (!found.changed) {
      add(kOneByte, own.bytes, 1, size);
      continue;
    }
    uint8_t* const middle = add_literals(own.literals, static_cast<size_t>(found.literal - own.literals), own.out);
    const auto coded = static_cast<size_t>(add_sequences(own, static_cast<size_t>(found.next - own.sequences), middle) - own.out);
    if (coded < size) add(kCoded, own.out, coded, coded);
    else add(kRaw, own.bytes, size, size);
  }
  return changed;
}

}  // namespace zckpt
