#include "entropy.h"

#include <algorithm>
#include <numeric>

#include "simd.h"

namespace zckpt {

FseCode::FseCode(const uint32_t* counts, unsigned symbols, unsigned log) : log_(log), symbols_(symbols) {
  const uint64_t total = std::accumulate(counts, counts + symbols, uint64_t{0});
  const int states = 1 << log;
  int left = states;
  for (unsigned s = 0; s < symbols; ++s) {
    if (!counts[s]) continue;
    shares_[s] = static_cast<uint16_t>(std::max<uint64_t>(1, (counts[s] * states + total / 2) / total));
    left -= shares_[s];
  }
  for (; left; left += left < 0 ? 1 : -1) {  // rounding gave away too many, or too few
    auto* largest = std::max_element(shares_, shares_ + symbols);
    *largest = static_cast<uint16_t>(*largest + (left < 0 ? -1 : 1));
  }
  uint8_t spread[1 << kLog];
  unsigned at = 0;
  for (unsigned s = 0; s < symbols; ++s)
    for (unsigned i = 0; i < shares_[s]; ++i) {
      spread[at] = static_cast<uint8_t>(s);
      at = (at + (states >> 1) + (states >> 3) + 3) & (states - 1);
    }
  uint16_t firsts[kSymbols];
  unsigned before = 0;
  for (unsigned s = 0; s < symbols; ++s) {
    firsts[s] = static_cast<uint16_t>(before);
    if (const unsigned share = shares_[s]; share) {
      const unsigned bits = share == 1 ? log : log + 1 - std::bit_width(share - 1);
      steps_[s] = {(bits << 16) - (share << bits), static_cast<int32_t>(before) - static_cast<int32_t>(share)};
      before += share;
    }
  }
  for (int u = 0; u < states; ++u) next_[firsts[spread[u]]++] = static_cast<uint16_t>(states + u);
}

uint8_t* FseCode::describe(uint8_t* to) const {
  BitWriter bits(to);
  bits.add({log_ - 5, 4});
  unsigned left = (1u << log_) + 1, threshold = 1u << log_, width = log_ + 1;
  for (unsigned s = 0; s < symbols_ && left > 1;) {
    const unsigned share = shares_[s++] + 1u, spare = 2 * threshold - 1 - left;
    left -= share - 1;
    const unsigned value = share >= threshold ? share + spare : share;
    bits.add({value, value < spare ? width - 1 : width});
    for (; left < threshold; threshold >>= 1) --width;
    bits.flush();
    if (share != 1 || left <= 1) continue;
    unsigned zeros = 0;  // that follow
    for (; s < symbols_ && !shares_[s]; ++s) ++zeros;
    for (; zeros >= 3; zeros -= 3) {
      bits.add({3, 2});
      bits.flush();
    }
    bits.add({zeros, 2});
  }
  return bits.end();
}

namespace {

// The lengths of an optimal prefix code, without a limit, for symbols in ascending order of their counts.
void measure(const uint32_t* counts, int n, uint8_t* lengths) {
  uint32_t weights[511];
  int parents[511];
  std::copy_n(counts, n, weights);
  int leaf = 0, inner = n;
  for (int node = n; node < 2 * n - 1; ++node) {
    weights[node] = 0;
    for (int side = 0; side < 2; ++side) {
      const int least = leaf < n && (inner == node || weights[leaf] <= weights[inner]) ? leaf++ : inner++;
      weights[node] += weights[least];
      parents[least] = node;
    }
  }
  uint8_t depths[511];
  depths[2 * n - 2] = 0;
  for (int node = 2 * n - 3; node >= 0; --node) depths[node] = static_cast<uint8_t>(depths[parents[node]] + 1);
  std::copy_n(depths, n, lengths);
}

}  // namespace

HuffmanCode::HuffmanCode(const uint32_t counts[256]) {
  std::pair<uint32_t, uint8_t> order[256];
  int n = 0;
  for (int b = 0; b < 256; ++b)
    if (counts[b]) order[n++] = {counts[b], last_ = static_cast<uint8_t>(b)};
  std::sort(order, order + n);
  uint32_t ascending[256];
  uint8_t lengths[256];
  for (int i = 0; i < n; ++i) ascending[i] = order[i].first;
  for (measure(ascending, n, lengths); lengths[0] > kBits; measure(ascending, n, lengths))  // flatter, until it fits
    for (int i = 0; i < n; ++i) ascending[i] = (ascending[i] + 1) / 2;
  longest_ = lengths[0];
  uint16_t of_length[kBits + 2] = {};
  for (int i = 0; i < n; ++i) ++of_length[lengths_[order[i].second] = lengths[i]];
  uint16_t code = 0, first[kBits + 2] = {};
  for (unsigned length = longest_; length; --length) {
    first[length] = code;
    code = static_cast<uint16_t>((code + of_length[length]) >> 1);
  }
  for (int b = 0; b <= last_; ++b)
    codes_[b] = {lengths_[b] ? first[lengths_[b]]++ : uint16_t{0}, lengths_[b]};
}

uint8_t* HuffmanCode::describe(uint8_t* to) const {
  constexpr unsigned kDirect = 128, kWeightLog = 6;
  uint8_t weights[256];
  uint32_t counts[kBits + 1] = {};
  for (int b = 0; b < last_; ++b) ++counts[weights[b] = lengths_[b] ? static_cast<uint8_t>(longest_ + 1 - lengths_[b]) : 0];
  const unsigned direct = last_ <= kDirect ? (last_ + 1u) / 2 : UINT32_MAX;
  const auto distinct = std::count_if(counts, counts + kBits + 1, [](uint32_t c) { return c != 0; });
  if (distinct > 1 && last_ > 2) {  // two states take turns
    const FseCode code(counts, kBits + 1, kWeightLog);
    BitWriter bits(code.describe(to + 1));
    int at = last_ - 1;
    uint32_t states[2];
    states[at % 2] = code.begin(weights[at]);
    --at;
    states[at % 2] = code.begin(weights[at]);
    for (--at; at >= 0; --at) {
      bits.add(code.take(states[at % 2], weights[at]));
      bits.flush();
    }
    code.finish(bits, states[1]);
    code.finish(bits, states[0]);
    uint8_t* const end = bits.finish();
    const auto size = static_cast<unsigned>(end - to - 1);
    if (size < kDirect && size < direct) {
      *to = static_cast<uint8_t>(size);
      return end;
    }
  }
  if (direct == UINT32_MAX) return nullptr;
  *to++ = static_cast<uint8_t>(kDirect - 1 + last_);
  weights[last_] = 0;
  for (int b = 0; b < last_; b += 2) *to++ = static_cast<uint8_t>(weights[b] << 4 | weights[b + 1]);
  return to;
}

#ifdef ZCKPT_X86
// The codes of 64 bytes are found, and joined by fours, at once, or by eights. Returns how many bytes are left: what precedes the last whole 64.
ZCKPT_FOR("avx512f,avx512dq,avx512bw,avx512vl,avx512vbmi,bmi2")
size_t HuffmanCode::write_wide(const uint8_t* bytes, size_t count, BitWriter& writer) const {
  BitWriter bits = writer;  // in registers: for all that a compiler knows, what it writes may be itself
  static_assert(sizeof codes_[0] == 4);
  alignas(64) uint8_t parts[3][256];  // of all codes: their low bits, the others, and how many they are
  for (int i = 0; i < 256; i += 16) {
    const __m512i codes = _mm512_loadu_si512(codes_ + i);
    _mm_store_si128(reinterpret_cast<__m128i*>(parts[0] + i), _mm512_cvtepi32_epi8(codes));
    _mm_store_si128(reinterpret_cast<__m128i*>(parts[1] + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(codes, 8)));
    _mm_store_si128(reinterpret_cast<__m128i*>(parts[2] + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(codes, 16)));
  }
  __m512i tables[3][4];
  for (int part = 0; part < 3; ++part)
    for (int i = 0; i < 4; ++i) tables[part][i] = _mm512_load_si512(parts[part] + 64 * i);
  const __m512i low_half = _mm512_set1_epi32(0xffff), low_word = _mm512_set1_epi64(0xffffffff);
  for (; count >= 64; count -= 64) {
    const __m512i symbols = _mm512_loadu_si512(bytes + count - 64);
    const __mmask64 is_high = _mm512_movepi8_mask(symbols);
    __m512i found[3];
    for (int part = 0; part < 3; ++part) {
      const __m512i* const table = tables[part];
      found[part] = _mm512_mask_blend_epi8(is_high, _mm512_permutex2var_epi8(table[0], symbols, table[1]), _mm512_permutex2var_epi8(table[2], symbols, table[3]));
    }
    __m512i values[2], counts[2];  // of four bytes each
    for (int half = 0; half < 2; ++half) {  // of each 16 bytes
      const __m512i zero = _mm512_setzero_si512();
      const __m512i value = half ? _mm512_unpackhi_epi8(found[0], found[1]) : _mm512_unpacklo_epi8(found[0], found[1]);
      const __m512i each = half ? _mm512_unpackhi_epi8(found[2], zero) : _mm512_unpacklo_epi8(found[2], zero);
      const __m512i later = _mm512_srli_epi32(each, 16);  // a reader begins at the end: the later byte has the lower bits
      const __m512i two = _mm512_or_si512(_mm512_srli_epi32(value, 16), _mm512_sllv_epi32(_mm512_and_si512(value, low_half), later));
      const __m512i of_two = _mm512_add_epi32(_mm512_and_si512(each, low_half), later), of_later = _mm512_srli_epi64(of_two, 32);
      values[half] = _mm512_or_si512(_mm512_srli_epi64(two, 32), _mm512_sllv_epi64(_mm512_and_si512(two, low_word), of_later));
      counts[half] = _mm512_add_epi64(_mm512_and_si512(of_two, low_word), of_later);
    }
    const __m512i first = _mm512_unpacklo_epi64(values[0], values[1]), second = _mm512_unpackhi_epi64(values[0], values[1]);
    const __m512i of_first = _mm512_unpacklo_epi64(counts[0], counts[1]), of_second = _mm512_unpackhi_epi64(counts[0], counts[1]);
    const __m512i of_both = _mm512_add_epi64(of_first, of_second);
    alignas(64) uint64_t value[2][8], size[2][8];
    const __m512i most = _mm512_set1_epi64(56);
    if (!_mm512_cmpgt_epu64_mask(of_both, most)) {  // seldom are eight too long
      const __m512i both = _mm512_or_si512(second, _mm512_sllv_epi64(first, of_second)), later = _mm512_unpackhi_epi64(of_both, of_both);
      const __m512i of_all = _mm512_add_epi64(of_both, later);
      if (!_mm512_mask_cmpgt_epu64_mask(0x55, of_all, most)) {  // nor sixteen, of which most are short
        _mm512_store_si512(value[0], _mm512_or_si512(_mm512_unpackhi_epi64(both, both), _mm512_sllv_epi64(both, later)));
        _mm512_store_si512(size[0], of_all);
        for (int i = 6; i >= 0; i -= 2) {
          bits.add({value[0][i], static_cast<unsigned>(size[0][i])});
          bits.flush();
        }
        continue;
      }
      _mm512_store_si512(value[0], both);
      _mm512_store_si512(size[0], of_both);
      for (int i = 7; i >= 0; --i) {
        bits.add({value[0][i], static_cast<unsigned>(size[0][i])});
        bits.flush();
      }
      continue;
    }
    _mm512_store_si512(value[0], first);
    _mm512_store_si512(value[1], second);
    _mm512_store_si512(size[0], of_first);
    _mm512_store_si512(size[1], of_second);
    for (int i = 7; i >= 0; --i)
      for (int side = 1; side >= 0; --side) {
        bits.add({value[side][i], static_cast<unsigned>(size[side][i])});
        bits.flush();
      }
  }
  writer = bits;
  return count;
}
#endif

uint8_t* HuffmanCode::write(const uint8_t* bytes, size_t count, uint8_t* to) const {
  BitWriter bits(to);
  const auto of = [&](size_t i) { return Bits{codes_[bytes[i]].value, codes_[bytes[i]].count}; };
  size_t at = count;
  for (; at % 4; --at) bits.add(of(at - 1));
  bits.flush();
#ifdef ZCKPT_X86
  if (has(Unit::kWideBytes)) at = write_wide(bytes, at, bits);
#endif
  for (; at; at -= 4) {
    bits.add((of(at - 1) + of(at - 2)) + (of(at - 3) + of(at - 4)));
    bits.flush();
  }
  return bits.finish();
}

}  // namespace zckpt
