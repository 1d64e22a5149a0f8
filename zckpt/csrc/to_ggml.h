// Numbers to blocks of ggml's types: what its quantiser writes, bit for bit. zckpt/engine/kernels_to_ggml.py has the reference in numpy.
// Source: ggml, src/ggml-quants.c (quantize_row_*_ref, and quantize_row_*_impl with an importance matrix).
#pragma once
#include "blocks.h"

namespace zckpt {

// Rows of `columns` numbers, which are whole blocks, as blocks one after the other. `weights`: how much each column matters; null where
// all do the same. How many blocks hold NaN or infinity, or a scale that is too large for fp16.
size_t to_ggml(GgmlBlocks kind, const float* x, size_t rows, size_t columns, const float* weights, uint8_t* blocks);

}  // namespace zckpt
