// New bytes of a tensor: its old ones, and the difference that `difference.h` made of both.
#pragma once
#include <cstddef>
#include <cstdint>

namespace zckpt {

struct Renewed {
  size_t used;   // bytes of the blocks that were read
  size_t bytes;  // that are new
  bool ended;    // the last block of the frame was one of them
};

// Reads blocks of a zstd frame as far as they are whole, as `add_difference` makes them, and no longer than the bytes that are left; puts
// what they hold XOR `data` to `data`. All blocks of the frame before these were such blocks too. Any other block, and a damaged one, is
// left for a reader of all of zstd.
Renewed renew(const uint8_t* blocks, size_t size, uint8_t* data, size_t nbytes);

}  // namespace zckpt
