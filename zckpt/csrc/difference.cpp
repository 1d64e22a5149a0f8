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
#include "lengths.h"
#include "simd.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace zckpt {
namespace {

constexpr size_t kLeastCoded = 64;  // fewer literals are left as they are
// Where more than such a part of all bytes differs, short runs of zeros are literals, which takes fewer bits; or all bytes are, if few
// groups of 64 are zeros.
constexpr size_t kDense = 20, kDenser = 28, kWhole = 100, kFew = 32;
constexpr size_t kGroups = kDifferenceBlock / 64, kMostRuns = kDifferenceBlock / 5 + 1;  // each of four zeros, and a byte between

struct Scratch {  // of one thread
  uint8_t bytes[kDifferenceBlock + 64], changed[kDifferenceBlock + 64], literals[kDifferenceBlock + 64];
  uint64_t masks[kGroups + 2];  // of each 64 bytes, which are not zero
  uint64_t begins[kGroups + 2], zeros[kGroups + 2];  // where runs of zeros begin, and which bytes are in one; behind the first, which has none
  // Of each run of zeros that becomes a match. Every array has room for a vector behind its end.
  uint32_t starts[kMostRuns + 16], ends[kMostRuns + 17], rest[kMostRuns + 16];
  uint8_t codes[2][kMostRuns + 16], of_rest[kMostRuns + 16];
  uint8_t out[4 * kDifferenceBlock];
};

Scratch& scratch() {
  thread_local std::unique_ptr<Scratch> own;
  if (!own) {
    own.reset(new Scratch);  // NOLINT: make_unique would fill it with zeros
    own->ends[0] = 0;
    own->begins[0] = own->zeros[0] = 0;
  }
  return *own;
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

// What differs in a block.
struct Found {
  uint64_t elements = 0;
  size_t bytes = 0, runs = 0, literals = 0;
  const uint8_t* literal = nullptr;
};

// Puts `before` XOR `after` to `difference`, 64 bytes of each; returns one bit for each byte that is not zero.
ZCKPT_INLINE uint64_t differ(const uint8_t* before, const uint8_t* after, uint8_t* difference) {
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

// Finds which bytes are among at least `least` zeros in a row, 4 or 8.
template <unsigned least>
ZCKPT_INLINE void find_zeros(size_t groups, Scratch& own) {
  for (size_t i = 0; i < groups; ++i) {
    uint64_t zeros = ~own.masks[i], next = ~own.masks[i + 1];
    for (unsigned shift = 1; shift < least; shift *= 2) {  // where so many begin
      zeros &= zeros >> shift | next << (64 - shift);
      next &= next >> shift;
    }
    own.begins[i + 1] = zeros;
  }
  for (size_t i = 0; i < groups; ++i) {
    uint64_t zeros = own.begins[i + 1], before = own.begins[i];
    for (unsigned shift = 1; shift < least; shift *= 2) {
      zeros |= zeros << shift | before >> (64 - shift);
      before |= before << shift;
    }
    own.zeros[i + 1] = zeros;
  }
}

// Where runs of zeros start, and where they have ended, among 64 bytes: a bit for each.
struct Edges {
  uint64_t starts, ends;

  Edges(const Scratch& own, size_t group) {
    const uint64_t zeros = own.zeros[group + 1], before = zeros << 1 | own.zeros[group] >> 63;
    starts = zeros & ~before, ends = before & ~zeros;
  }
};

size_t groups_of(size_t nbytes) { return nbytes / 64 + 1; }  // the last one has no byte, or some

template <unsigned least>
ZCKPT_INLINE void find_runs(size_t nbytes, Scratch& own, Found& found) {
  find_zeros<least>(groups_of(nbytes), own);
  size_t starts = 0, ends = 1;
  for (size_t group = 0; group < groups_of(nbytes); ++group) {
    const Edges edges(own, group);
    const auto at = static_cast<uint32_t>(64 * group);
    for (uint64_t bits = edges.starts; bits; bits &= bits - 1) own.starts[starts++] = at + static_cast<uint32_t>(std::countr_zero(bits));
    for (uint64_t bits = edges.ends; bits; bits &= bits - 1) own.ends[ends++] = at + static_cast<uint32_t>(std::countr_zero(bits));
  }
  found.runs = starts;
  uint8_t* literal = own.literals;
  for (size_t i = 0; i <= starts; ++i) {  // and what is left behind the last run
    const size_t begin = own.ends[i], count = (i < starts ? own.starts[i] + 1 : nbytes) - begin;
    std::memcpy(literal, own.bytes + begin, 16);
    if (count > 16) std::memcpy(literal + 16, own.bytes + begin + 16, count - 16);
    literal += count;
  }
  found.literals = static_cast<size_t>(literal - own.literals);
}

#ifdef ZCKPT_X86
#define ZCKPT_BYTES ZCKPT_FOR("avx512f,avx512bw,avx512cd,avx512vl,avx512vbmi,avx512vbmi2,bmi,bmi2,lzcnt,popcnt")

constexpr auto kPlaces = [] {
  std::array<uint8_t, 64> made{};
  for (unsigned i = 0; i < 64; ++i) made[i] = static_cast<uint8_t>(i);
  return made;
}();

// Whole groups of 64 bytes; returns how many.
ZCKPT_BYTES
size_t differ_wide(const uint8_t* before, const uint8_t* after, size_t nbytes, const Elements& elements, Scratch& own, Found& found) {
  uint8_t* changed = own.changed;
  for (size_t at = 0; at + 64 <= nbytes; at += 64) {
    const __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(before + at), _mm512_loadu_si512(after + at));
    const uint64_t bits = _mm512_test_epi8_mask(bytes, bytes);
    own.masks[at / 64] = bits;
    _mm512_storeu_si512(own.bytes + at, bytes);
    _mm512_storeu_si512(changed, _mm512_maskz_compress_epi8(bits, bytes));
    changed += std::popcount(bits);
    found.elements += elements(bits);
  }
  found.bytes = static_cast<size_t>(changed - own.changed);
  return nbytes / 64;
}

template <unsigned least>
ZCKPT_BYTES
void find_runs_wide(size_t nbytes, Scratch& own, Found& found, const uint8_t* next_before, const uint8_t* next_after) {
  find_zeros<least>(groups_of(nbytes), own);
  uint32_t *starts = own.starts, *ends = own.ends + 1;
  uint8_t* literal = own.literals;
  const __m512i places = _mm512_loadu_si512(kPlaces.data());
  const auto add = [&](uint64_t bits, size_t at, uint32_t*& to) ZCKPT_BYTES ZCKPT_PART {  // at most thirteen
    const __m128i found_places = _mm512_castsi512_si128(_mm512_maskz_compress_epi8(bits, places));
    _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_cvtepu8_epi32(found_places), _mm512_set1_epi32(static_cast<int>(at))));
    to += std::popcount(bits);
  };
  for (size_t at = 0; at <= nbytes; at += 64) {
    __builtin_prefetch(next_before + at);  // now and then, not all at once
    __builtin_prefetch(next_after + at);
    const Edges edges(own, at / 64);
    add(edges.starts, at, starts);
    add(edges.ends, at, ends);
    const uint64_t inside = nbytes - at >= 64 ? ~uint64_t{0} : (uint64_t{1} << (nbytes - at)) - 1;
    const uint64_t literals = (~own.zeros[at / 64 + 1] | edges.starts) & inside;
    _mm512_storeu_si512(literal, _mm512_maskz_compress_epi8(literals, _mm512_loadu_si512(own.bytes + at)));
    literal += std::popcount(literals);
  }
  found.runs = static_cast<size_t>(starts - own.starts);
  found.literals = static_cast<size_t>(literal - own.literals);
}
#endif

// Takes the difference apart, and leaves it in `own.bytes`; the first `group` groups are done.
ZCKPT_INLINE void parse(const uint8_t* before, const uint8_t* after, size_t nbytes, size_t group, const Elements& elements, Scratch& own, Found& found) {
  const auto add = [&](const uint8_t* one, const uint8_t* other) ZCKPT_PART {
    uint64_t bits = own.masks[group] = differ(one, other, own.bytes + 64 * group);
    found.elements += elements(bits);
    for (; bits; bits &= bits - 1) own.changed[found.bytes++] = own.bytes[64 * group + static_cast<size_t>(std::countr_zero(bits))];
  };
  for (; group < nbytes / 64; ++group) add(before + 64 * group, after + 64 * group);
  const size_t last = nbytes % 64;  // what is left behind the last whole group
  uint8_t rest[2][64] = {};
  std::memcpy(rest[0], before + nbytes - last, last);
  std::memcpy(rest[1], after + nbytes - last, last);
  add(rest[0], rest[1]);
  own.masks[group] |= ~uint64_t{0} << last;  // no run goes beyond the end
  own.masks[group + 1] = ~uint64_t{0};
}

// The runs of zeros, as long as they had better be; `find` finds those of at least so many.
template <typename Find>
ZCKPT_INLINE void find_literals(size_t nbytes, Scratch& own, Found& found, const Find& find) {
  const auto part = [&](size_t of) { return found.bytes * kWhole > nbytes * of; };
  found.literal = own.literals;
  if (!part(kDense)) return find(std::integral_constant<unsigned, 4>());
  if (!part(kDenser) || static_cast<size_t>(std::count(own.masks, own.masks + nbytes / 64, 0)) > nbytes / 64 / kFew) return find(std::integral_constant<unsigned, 8>());
  found.literal = own.bytes;
  found.literals = nbytes;
}

// For any processor; for those that count bits; and for those that move single bytes.
Found parse_plain(const uint8_t* before, const uint8_t* after, size_t nbytes, const Elements& elements, Scratch& own) {
  Found found;
  parse(before, after, nbytes, 0, elements, own, found);
  find_literals(nbytes, own, found, [&](auto least) ZCKPT_PART { find_runs<least>(nbytes, own, found); });
  return found;
}

#ifdef ZCKPT_X86
ZCKPT_FOR("avx2,bmi,bmi2,lzcnt,popcnt") Found parse_counted(const uint8_t* before, const uint8_t* after, size_t nbytes, const Elements& elements, Scratch& own) {
  Found found;
  parse(before, after, nbytes, 0, elements, own, found);
  find_literals(nbytes, own, found, [&](auto least) ZCKPT_PART { find_runs<least>(nbytes, own, found); });
  return found;
}

ZCKPT_BYTES Found parse_wide(const uint8_t* before, const uint8_t* after, size_t nbytes, const Elements& elements, Scratch& own) {
  Found found;
  const size_t groups = differ_wide(before, after, nbytes, elements, own, found);
  parse(before, after, nbytes, groups, elements, own, found);
  find_literals(nbytes, own, found, [&](auto least) ZCKPT_PART { find_runs_wide<least>(nbytes, own, found, before + nbytes, after + nbytes); });
  return found;
}

// The codes of the runs, sixteen at once.
ZCKPT_BYTES void find_codes_wide(size_t count, Scratch& own) {
  const __m512i literal_codes = _mm512_loadu_si512(kOfLiterals.code), literal_bits = _mm512_loadu_si512(kOfLiterals.bits);
  const __m512i match_codes[2] = {_mm512_loadu_si512(kOfMatches.code), _mm512_loadu_si512(kOfMatches.code + 64)}, match_bits = _mm512_loadu_si512(kOfMatches.bits);
  const __m512i one = _mm512_set1_epi32(1);
  const auto beyond = [&](__m512i length, unsigned more) ZCKPT_BYTES ZCKPT_PART {
    return _mm512_sub_epi32(_mm512_set1_epi32(31 + static_cast<int>(more)), _mm512_lzcnt_epi32(length));
  };
  for (size_t i = 0; i < count; i += 16) {
    const __m512i start = _mm512_loadu_si512(own.starts + i), end = _mm512_loadu_si512(own.ends + i + 1), before = _mm512_loadu_si512(own.ends + i);
    const __m512i literals = _mm512_sub_epi32(_mm512_add_epi32(start, one), before), match = _mm512_sub_epi32(_mm512_sub_epi32(end, start), _mm512_set1_epi32(1 + kLeastMatch));
    const __m512i of_literals = _mm512_mask_blend_epi32(_mm512_cmplt_epu32_mask(literals, _mm512_set1_epi32(static_cast<int>(kOfLiterals.direct))),
                                                        beyond(literals, kOfLiterals.beyond), _mm512_permutexvar_epi8(literals, literal_codes));
    const __m512i of_match = _mm512_mask_blend_epi32(_mm512_cmplt_epu32_mask(match, _mm512_set1_epi32(static_cast<int>(kOfMatches.direct))),
                                                     beyond(match, kOfMatches.beyond), _mm512_permutex2var_epi8(match_codes[0], match, match_codes[1]));
    const __m512i more = _mm512_permutexvar_epi8(of_literals, literal_bits), of_more = _mm512_permutexvar_epi8(of_match, match_bits);
    const auto lowest = [&](__m512i length, __m512i bits) ZCKPT_BYTES ZCKPT_PART { return _mm512_andnot_si512(_mm512_sllv_epi32(_mm512_set1_epi32(-1), bits), length); };
    _mm512_storeu_si512(own.rest + i, _mm512_or_si512(lowest(literals, more), _mm512_sllv_epi32(lowest(match, of_more), more)));
    const auto put_bytes = [&](uint8_t* to, __m512i values) ZCKPT_BYTES ZCKPT_PART { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(values)); };
    put_bytes(own.of_rest + i, _mm512_add_epi32(more, of_more));
    put_bytes(own.codes[0] + i, of_literals);
    put_bytes(own.codes[1] + i, of_match);
  }
}
#endif

Found parse(const uint8_t* before, const uint8_t* after, size_t nbytes, const Elements& elements, Scratch& own) {
#ifdef ZCKPT_X86
  if (has(Unit::kWideBytes)) return parse_wide(before, after, nbytes, elements, own);
  if (has(Unit::kMultiplyAdd)) return parse_counted(before, after, nbytes, elements, own);
#endif
  return parse_plain(before, after, nbytes, elements, own);
}

// Fills `own.codes`, and `own.rest` with the bits beside them.
void find_codes(size_t count, Scratch& own) {
#ifdef ZCKPT_X86
  if (has(Unit::kWideBytes)) return find_codes_wide(count, own);
#endif
  for (size_t i = 0; i < count; ++i) {
    const uint32_t literals = own.starts[i] + 1 - own.ends[i], match = own.ends[i + 1] - own.starts[i] - 1 - kLeastMatch;
    const unsigned of_literals = kOfLiterals.of(literals), of_match = kOfMatches.of(match);
    const unsigned more = kOfLiterals.bits[of_literals], of_more = kOfMatches.bits[of_match];
    own.rest[i] = (literals & ((1u << more) - 1)) | (match & ((1u << of_more) - 1)) << more;
    own.of_rest[i] = static_cast<uint8_t>(more + of_more);
    own.codes[0][i] = static_cast<uint8_t>(of_literals);
    own.codes[1][i] = static_cast<uint8_t>(of_match);
  }
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

uint8_t* add_literals(const Scratch& own, const Found& found, uint8_t* to) {
  const uint8_t* const bytes = found.literal;
  const size_t count = found.literals;
  if (count < kLeastCoded) return plain_literals(bytes, count, false, to);
  uint32_t counts[256];
  count_bytes<256>(own.changed, found.bytes, counts);  // every one is a literal, and the others are zeros
  counts[0] = static_cast<uint32_t>(count - found.bytes);
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

// The code of one side of the sequences: of no bits where all are the same.
template <unsigned symbols>
FseCode code_of(const uint8_t* codes, size_t count, unsigned& mode) {
  uint32_t counts[symbols];
  count_bytes<symbols>(codes, count, counts);
  mode = counts[codes[0]] == count ? 1 : 2;
  if (mode == 1) return {};
  const auto log = static_cast<unsigned>(std::bit_width(count)) - 1;  // few sequences are not worth a long table
  return {counts, symbols, std::clamp(log, 6u, FseCode::kLog)};
}

uint8_t* add_sequences(Scratch& own, size_t count, uint8_t* to) {
  constexpr size_t kTwo = 128, kThree = 0x7f00;
  if (count < kTwo) to = put(to, count, 1);
  else if (count < kThree) to = put(to, (count >> 8 | 0x80) | (count & 0xff) << 8, 2);
  else to = put(to, 0xff | (count - kThree) << 8, 3);
  if (!count) return to;
  find_codes(count, own);
  unsigned modes[2];
  const FseCode literals = code_of<kLengthCodes>(own.codes[0], count, modes[0]), matches = code_of<kMatchCodes>(own.codes[1], count, modes[1]);
  to = put(to, modes[0] << 6 | 1 << 4 | modes[1] << 2, 1);
  to = modes[0] == 2 ? literals.describe(to) : put(to, own.codes[0][0], 1);
  to = put(to, 0, 1);  // every distance is the one before, which is 1 when a frame begins
  BitWriter bits(modes[1] == 2 ? matches.describe(to) : put(to, own.codes[1][0], 1));
  const auto rest = [&](size_t i) { return Bits{own.rest[i], own.of_rest[i]}; };  // no bits for most: that costs less than a wrong guess
  uint32_t of_match = matches.begin(own.codes[1][count - 1]), of_literals = literals.begin(own.codes[0][count - 1]);
  bits.add(rest(count - 1));
  bits.flush();
  for (size_t i = count - 1; i-- > 0;) {
    const Bits state = matches.take(of_match, own.codes[1][i]);
    bits.add((state + literals.take(of_literals, own.codes[0][i])) + rest(i));
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
    const Found found = parse(before + done, after + done, size, elements, own);
    changed += found.elements;
    if (!found.elements) {
      add(kOneByte, own.bytes, 1, size);
      continue;
    }
    const auto coded = static_cast<size_t>(add_sequences(own, found.runs, add_literals(own, found, own.out)) - own.out);
    if (coded < size) add(kCoded, own.out, coded, coded);
    else add(kRaw, own.bytes, size, size);
  }
  return changed;
}

}  // namespace zckpt
