// Squares of a matrix that is transposed, cast and turned in registers.
#pragma once
#include <cstdint>

namespace zckpt {

constexpr uint64_t kSide = 8;  // rows and columns of a square

// Turns whole squares: rows are `pitch` bytes apart at `from`, columns go `step` bytes apart to `out`. Numbers are cast as `cast`
// does; false where one would overflow, and then what was written is not complete.
using TurnSquares = bool (*)(const char* from, uint64_t pitch, uint64_t rows, uint64_t columns, char* out, int64_t step);

// What does it for these dtypes on this processor; null if nothing does.
TurnSquares squares_turned(uint8_t from, uint8_t to);

}  // namespace zckpt
