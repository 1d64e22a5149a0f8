// The codes of zstd's sequences: how many literals there are, and how long the match behind them is.
// Source: RFC 8878, section 3.1.1.3.2.1.1.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace zckpt {

constexpr unsigned kLengthCodes = 36, kMatchCodes = 53;
constexpr uint32_t kLeastMatch = 3;

// How the lengths of literals, and those of matches less `kLeastMatch`, are told: a code, and its lowest bits beside it.
struct Lengths {
  uint8_t code[128];
  uint8_t bits[64];
  uint32_t least[kMatchCodes];  // the length without these bits
  unsigned direct, beyond;  // lengths below `direct` have their code above; others that of their highest bit, and `beyond`

  unsigned of(uint32_t length) const { return length < direct ? code[length] : static_cast<unsigned>(std::bit_width(length)) - 1 + beyond; }
};

constexpr Lengths lengths_of(std::array<uint8_t, kMatchCodes> bits, unsigned direct, unsigned beyond) {
  Lengths made{};
  std::copy(bits.begin(), bits.end(), made.bits);
  made.direct = direct;
  made.beyond = beyond;
  for (unsigned code = 1; code < kMatchCodes; ++code) made.least[code] = made.least[code - 1] + (1u << bits[code - 1]);
  for (unsigned length = 0, code = 0; length < direct; ++code)
    for (unsigned i = 0; i < 1u << bits[code] && length < direct; ++i) made.code[length++] = static_cast<uint8_t>(code);
  return made;
}

constexpr Lengths kOfLiterals = lengths_of({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, 64, 19);
constexpr Lengths kOfMatches =
    lengths_of({0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, 128, 36);

}  // namespace zckpt
