// The entropy codes of zstd: bits, Huffman codes of bytes, and FSE codes of small numbers.
// Source: RFC 8878, sections 4.1 and 4.2.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

namespace zckpt {

// Some bits, and how many they are.
struct Bits {
  uint64_t value;
  unsigned count;

  // These, and others behind them.
  Bits operator+(Bits later) const { return {value | later.value << count, count + later.count}; }
};

// Puts bits into bytes, the lowest first. What it writes to has room for eight bytes more.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* to) : to_(to) {}

  // At most 57 bits between two calls of `flush`.
  void add(Bits bits) {
    bits_ |= bits.value << used_;
    used_ += bits.count;
  }

  void flush() {
    static_assert(std::endian::native == std::endian::little);
    std::memcpy(to_, &bits_, sizeof bits_);
    to_ += used_ / 8;
    bits_ >>= used_ / 8 * 8;
    used_ %= 8;
  }

  // Ends with a bit that is set: readers begin at the end, and find it. Returns the byte behind the last.
  uint8_t* finish() {
    add({1, 1});
    return end();
  }

  // Returns the byte behind the last, without a bit for readers.
  uint8_t* end() {
    flush();
    return to_ + (used_ != 0);
  }

 private:
  uint8_t* to_;
  uint64_t bits_ = 0;
  unsigned used_ = 0;
};

// An FSE code of numbers below `kSymbols`. The state of a writer is a number in [1 << log, 2 << log).
class FseCode {
 public:
  static constexpr unsigned kSymbols = 53, kLog = 9;

  // The code of one number: it has no bits.
  FseCode() : log_(0), symbols_(0) {
    for (Step& step : steps_) step = {0, 0};
    next_[0] = 0;
  }

  // The code for numbers with these counts, at least two of them not zero, with 1 << log states.
  FseCode(const uint32_t* counts, unsigned symbols, unsigned log);

  // Writes what a reader needs to make the same code; returns the byte behind it.
  uint8_t* describe(uint8_t* to) const;

  // The state before any other number; that number costs no bits.
  uint32_t begin(unsigned symbol) const {
    const Step& step = steps_[symbol];
    const uint32_t bits = (step.bits + (1 << 15)) >> 16;
    return next_[(((bits << 16) - step.bits) >> bits) + step.first];
  }

  // Takes a symbol into the state; returns the bits to be written for it.
  Bits take(uint32_t& state, unsigned symbol) const {
    const Step& step = steps_[symbol];
    const uint32_t count = (state + step.bits) >> 16;
    const Bits out{state & ((1u << count) - 1), count};
    state = next_[(state >> count) + step.first];
    return out;
  }

  void finish(BitWriter& bits, uint32_t state) const { bits.add({state & ((1u << log_) - 1), log_}); }

 private:
  struct Step {
    uint32_t bits;  // how many are written in a state, in the upper half of a sum with it
    int32_t first;  // of the symbol's states in `next_`
  };

  unsigned log_, symbols_;
  uint16_t shares_[kSymbols] = {};  // states of each symbol
  uint16_t next_[1 << kLog];
  Step steps_[kSymbols];
};

// A Huffman code of bytes with at most eleven bits for each.
class HuffmanCode {
 public:
  static constexpr unsigned kBits = 11;

  // The code for bytes with these counts, at least two of them not zero.
  explicit HuffmanCode(const uint32_t counts[256]);

  // Writes what a reader needs to make the same code; returns the byte behind it, or null if that cannot be written.
  uint8_t* describe(uint8_t* to) const;

  // Writes bytes as one stream; returns the byte behind it.
  uint8_t* write(const uint8_t* bytes, size_t count, uint8_t* to) const;

 private:
  size_t write_wide(const uint8_t* bytes, size_t count, BitWriter& writer) const;

  uint8_t last_ = 0;          // the largest byte that occurs
  uint8_t longest_ = 0;       // bits of the longest code
  uint8_t lengths_[256] = {};
  struct {
    uint16_t value, count;
  } codes_[256];
};

// How often each of `kinds` numbers occurs. Eight counters take turns: adding to one twice at once is slow.
template <unsigned kinds>
void count_bytes(const uint8_t* bytes, size_t count, uint32_t* counts) {
  uint32_t lanes[8][kinds] = {};
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, bytes + i, 8);
    for (size_t lane = 0; lane < 8; ++lane) ++lanes[lane][eight >> 8 * lane & 0xff];
  }
  for (; i < count; ++i) ++lanes[0][bytes[i]];
  for (unsigned kind = 0; kind < kinds; ++kind) {
    counts[kind] = 0;
    for (const auto& lane : lanes) counts[kind] += lane[kind];
  }
}

}  // namespace zckpt
