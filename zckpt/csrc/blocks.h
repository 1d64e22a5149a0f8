// Elements in blocks that share a scale, for recipes; zckpt/engine/kernels.py has the reference in numpy that these equal, bit for bit.
#pragma once
#include <cstddef>
#include <cstdint>

namespace zckpt {

// Writes 32 numbers each as a block of 34 bytes, ggml's Q8_0: the largest absolute one by 127 as fp16, and the numbers by that (before
// it was rounded to fp16), rounded to whole ones, halves away from zero.
void to_q8_0(const float* x, uint8_t* blocks, size_t count);
void to_q8_0(const uint16_t* x, uint8_t* blocks, size_t count);  // of bf16

// The other way: whole numbers times their block's scale.
void of_q8_0(const uint8_t* blocks, float* x, size_t count);

// Others of ggml's types, in the order of zckpt/engine/kernels_ggml.py.
enum class GgmlBlocks { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kIq4Nl, kMxfp4, kQ2K, kQ3K, kQ4K, kQ5K, kQ6K, kTypes };

// The numbers that so many blocks stand for.
void of_ggml(GgmlBlocks kind, const uint8_t* blocks, size_t count, float* x);

}  // namespace zckpt
