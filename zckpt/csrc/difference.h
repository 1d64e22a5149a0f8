// The difference of two versions of some bytes, as blocks of a zstd frame.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace zckpt {

// Adds blocks to `out` that hold `before` XOR `after`; none refers to another, and with `ends` the last is a frame's last. A reader's
// window is at least `kDifferenceBlock`. Returns how many elements of `width` bytes differ.
constexpr size_t kDifferenceBlock = 128 << 10;
uint64_t add_difference(const uint8_t* before, const uint8_t* after, size_t nbytes, unsigned width, bool ends, std::string& out);

}  // namespace zckpt
