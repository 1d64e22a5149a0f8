// Quantised elements: bits to codes, codes to numbers, and numbers to codes; zckpt/engine/kernels_codes.py has the reference in numpy
// that these equal, bit for bit.
#pragma once
#include "kernels.h"

namespace zckpt {

// Rows of codes of 1 to 8 bits, least significant first; each row begins a byte. A row has `pitch` bytes and gives `columns` codes of a
// byte each. `high_first`: of codes of 4 bits, the high half of a byte comes first.
void split_codes(const uint8_t* raw, size_t pitch, size_t rows, size_t columns, unsigned bits, bool high_first, uint8_t* codes);

// The same where an element of `word` bytes (1, 2, 4 or 8) holds codes of several rows: row `first` + i of `count` has the codes that are
// `shifts[(first + i) % each]` bits above the bottom of the elements of row (first + i) / each. Rows have `pitch` elements.
void split_down(const uint8_t* raw, unsigned word, size_t pitch, unsigned bits, const uint8_t* shifts, size_t each, size_t first, size_t count,
                uint8_t* codes);

// The other way, for codes of 4 bits: two in a byte, the first one below. Rows have `pitch` bytes; what is left of them becomes `rest`.
void join_codes(const uint8_t* codes, size_t rows, size_t columns, size_t pitch, uint8_t rest, uint8_t* out);

// (number of the table - zero point) * factor; without zero points where `zeros` is null. Difference and product are rounded.
void of_codes(const uint8_t* codes, const float* table, const Blocks& blocks, const float* zeros, const float* factors, float* x);

// Numbers that codes stand for, before they are multiplied.
enum class NumberGrid { kE4M3, kE2M1, kInt8, kInt4, kGrids };

// The code of the number of a grid that is nearest to each element divided by its block's factor, which is positive; of two that are as
// near, the even one. The quotient is not rounded before. What is larger than the largest number becomes that; NaN stays it in E4M3, and is 0
// elsewhere. Codes of int4 begin with 0 for -8. Whole numbers of 16 bits are those of bf16.
Rounded to_codes(NumberGrid grid, const float* x, const Blocks& blocks, const float* factors, uint8_t* out);
Rounded to_codes(NumberGrid grid, const uint16_t* x, const Blocks& blocks, const float* factors, uint8_t* out);

// Groups of `size` numbers, a multiple of 32, as MLX quantises them: codes of 2 to 8 bits in one stream, least significant bits first, and
// a scale and a bias for each group; code * scale + bias is the number. Returns how many groups have no such numbers: they hold NaN or
// infinity, or are so large that a scale is none.
size_t to_affine(const float* x, size_t groups, size_t size, unsigned bits, uint8_t* packed, float* scales, float* biases);

}  // namespace zckpt
