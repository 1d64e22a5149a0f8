"""Loops over codes that stand for numbers, and over matrices with factors for blocks, in numpy: the reference for the C++.

For `kernels`. `csrc/codes.cpp` and `csrc/kernels_blocks.cpp` must equal it.
Source: OCP 8-bit floating point specification (OFP8), E4M3: bias 7, no infinities, largest number 448, NaN S.1111.111; OCP
Microscaling formats 1.0, E2M1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from zckpt.core.folds import MatrixBlocks, NumberGrid, Rounded

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes, Floats, Halves, Matrix


_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000


def check(numbers: Floats | Halves, blocks: MatrixBlocks, of_blocks: Floats, out: Bytes | None = None) -> None:
    """Makes sure that arrays have the sizes that blocks say; raises ValueError."""
    across, down = _shape(blocks)
    if len(numbers) != blocks.rows * blocks.columns or len(of_blocks) < down * across:
        raise ValueError(f"{len(numbers)} numbers and {len(of_blocks)} blocks for {blocks}")
    if out is not None and len(out) != len(numbers):
        raise ValueError(f"{len(out)} bytes for {len(numbers)} numbers")


def as_floats(numbers: Floats | Halves) -> Floats:
    """As fp32: whole numbers of 16 bits are those of bf16."""
    import numpy as np

    is_bf16 = numbers.dtype.itemsize == 2
    return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32) if is_bf16 else numbers  # type: ignore[return-value]


def largest(numbers: Floats | Halves, blocks: MatrixBlocks, found: Floats) -> None:
    import numpy as np

    check(numbers, blocks, found)
    across, down = _shape(blocks)
    rows = as_floats(numbers).reshape(blocks.rows, blocks.columns).view(np.uint32) & np.uint32(_MAGNITUDE)
    bits = found.view(np.uint32)
    bits[: down * across] = 0
    if rows.size:
        runs = np.maximum.reduceat(rows, np.arange(0, blocks.columns, blocks.block_columns), axis=1)
        np.maximum.at(bits[: down * across].reshape(down, across), _block_rows(blocks), runs)
    bits[bits > _INFINITY] = _NAN


def multiply_blocks(numbers: Floats, blocks: MatrixBlocks, factors: Floats) -> None:
    import numpy as np

    check(numbers, blocks, factors)
    with np.errstate(all="ignore"):
        numbers *= spread_scales(factors, blocks)


def _shape(blocks: MatrixBlocks) -> tuple[int, int]:
    """Blocks across, and blocks down from the matrix's first one to the last at hand."""
    return -(-blocks.columns // blocks.block_columns), -(-(blocks.first + blocks.rows) // blocks.block_rows)


def _block_rows(blocks: MatrixBlocks) -> Any:
    """For each row at hand, which row of blocks it is in."""
    import numpy as np

    return (blocks.first + np.arange(blocks.rows)) // blocks.block_rows


def spread_scales(factors: Floats, blocks: MatrixBlocks) -> Any:
    """The factor of each number."""
    import numpy as np

    across, down = _shape(blocks)
    rows = factors[: down * across].reshape(down, across)[_block_rows(blocks)]
    return np.repeat(rows, blocks.block_columns, axis=1)[:, : blocks.columns].reshape(-1)


class _Shape(NamedTuple):
    """A grid: its numbers from zero up, the middle between the last one and where the next would be, and the sign's place."""

    numbers: tuple[float, ...]
    beyond: float
    sign: int
    nan: int = 0


_E4M3 = (*(n / 512 for n in range(8)), *((8 + n) * 2.0**power for power in range(-9, 6) for n in range(8)))[:-1]
_SHAPES = {
    NumberGrid.E4M3: _Shape(_E4M3, 464, 7, 0x7F),
    NumberGrid.E2M1: _Shape((0, 0.5, 1, 1.5, 2, 3, 4, 6), 7, 3),
    NumberGrid.INT8: _Shape(tuple(range(128)), 127.5, 0),
    NumberGrid.INT4: _Shape(tuple(range(8)), 7.5, 0),
}


def check_codes(
    codes: Bytes, table: Floats, blocks: MatrixBlocks, zeros: Floats | None, factors: Floats, numbers: Floats
) -> None:
    """Makes sure that arrays have the sizes that blocks say; raises ValueError."""
    check(numbers, blocks, factors, codes)
    if zeros is not None:
        check(numbers, blocks, zeros)
    if len(table) != 256:
        raise ValueError(f"a table of {len(table)} numbers")


def pitch_of(raw: Bytes, bits: int, codes: Matrix) -> int:
    """The bytes of a row of codes; raises ValueError if they are not so many rows."""
    rows, columns = codes.shape
    pitch: int = len(raw) // max(1, rows)
    if pitch * rows != len(raw) or pitch * 8 < columns * bits:
        raise ValueError(f"{len(raw)} bytes for {rows} rows of {columns} codes of {bits} bits")
    return pitch


def check_down(words: Matrix, shifts: tuple[int, ...], first: int, codes: Matrix) -> None:
    """Makes sure that there are words for all codes; raises ValueError."""
    if words.shape[1:] != codes.shape[1:] or len(words) * len(shifts) < first + len(codes):
        raise ValueError(f"{words.shape} words of {len(shifts)} codes for {codes.shape} from row {first} on")


def check_joined(codes: Matrix, out: Matrix) -> None:
    """Makes sure that there is room for all codes; raises ValueError."""
    if len(codes) != len(out) or out.shape[1] * 2 < codes.shape[1]:
        raise ValueError(f"{codes.shape} codes of 4 bits for {out.shape} bytes")


def check_affine(numbers: Floats, size: int, bits: int, packed: Bytes, scales: Floats, biases: Floats) -> int:
    """The number of groups; raises ValueError if arrays have other sizes than they need."""
    groups: int = len(scales)
    if (groups * size, groups * size * bits // 8, groups) != (len(numbers), len(packed), len(biases)):
        raise ValueError(f"{len(numbers)} numbers and {len(packed)} bytes for {groups} groups of {size}, {bits} bits")
    return groups


def split_codes(raw: Bytes, bits: int, codes: Matrix, *, high_first: bool) -> None:
    import numpy as np

    pitch = pitch_of(raw, bits, codes)
    spread = np.unpackbits(raw.reshape(-1, pitch) if pitch else raw.reshape(len(codes), 0), axis=1, bitorder="little")
    if high_first:
        spread = spread.reshape(len(codes), -1, 2, 4)[:, :, ::-1].reshape(len(codes), -1)
    own = spread[:, : codes.shape[1] * bits].reshape(*codes.shape, bits)
    codes[...] = np.packbits(own, axis=2, bitorder="little").reshape(codes.shape)


def to_affine(numbers: Floats, size: int, bits: int, packed: Bytes, scales: Floats, biases: Floats) -> int:
    """As `Kernels.to_affine`.

    Source: mlx 0.32, backend/cpu/quantized.cpp `quantize`.
    """
    import numpy as np

    x, most = (
        numbers.reshape(check_affine(numbers, size, bits, packed, scales, biases), size),
        np.float32((1 << bits) - 1),
    )
    low, high = x.min(axis=1), x.max(axis=1)
    with np.errstate(all="ignore"):
        is_low = np.abs(low) > np.abs(high)
        edge = np.where(is_low, low, high)
        step = np.maximum((high - low) / most, np.float32(1e-7))
        step = np.where(is_low, step, -step)
        first = np.rint(edge / step)
        scales[:] = np.where(first != 0, edge / first, step)
        biases[:] = np.where(first != 0, edge, np.float32(0))
        codes = np.clip(np.rint((x - biases[:, None]) / scales[:, None]), 0, most)
        spread = np.nan_to_num(codes).astype(np.uint8)[:, :, None]
    packed[:] = np.packbits(
        np.unpackbits(spread, axis=2, bitorder="little")[:, :, :bits].reshape(-1), bitorder="little"
    )
    return int((~np.isfinite(x).all(axis=1) | (scales == 0) | ~np.isfinite(scales)).sum())


def split_down(words: Matrix, bits: int, shifts: tuple[int, ...], first: int, codes: Matrix) -> None:
    import numpy as np

    check_down(words, shifts, first, codes)
    row = first + np.arange(len(codes))
    places = np.array(shifts, np.uint64)[row % len(shifts)].reshape(-1, 1)
    codes[...] = words.astype(np.uint64)[row // len(shifts)] >> places & np.uint64((1 << bits) - 1)


def join_codes(codes: Matrix, rest: int, out: Matrix) -> None:
    import numpy as np

    check_joined(codes, out)
    halves = np.empty((len(out), out.shape[1] * 2), np.uint8)
    halves[:, ::2], halves[:, 1::2] = rest & 15, rest >> 4
    halves[:, : codes.shape[1]] = codes
    out[...] = halves[:, ::2] & 15 | halves[:, 1::2] << np.uint8(4)


def of_codes(
    codes: Bytes, table: Floats, blocks: MatrixBlocks, zeros: Floats | None, factors: Floats, numbers: Floats
) -> None:
    import numpy as np

    check_codes(codes, table, blocks, zeros, factors, numbers)
    np.take(table, codes, out=numbers, mode="clip")
    with np.errstate(all="ignore"):
        if zeros is not None:
            numbers -= spread_scales(zeros, blocks)
    multiply_blocks(numbers, blocks, factors)


def to_codes(grid: NumberGrid, numbers: Floats | Halves, blocks: MatrixBlocks, factors: Floats, out: Bytes) -> Rounded:
    """As `Kernels.to_codes`: quotients are doubles, which lie halfway between two numbers only where the exact
    quotients do.
    """
    import numpy as np

    check(numbers, blocks, factors, out)
    numbers = as_floats(numbers)
    if not len(numbers):
        return Rounded(0, 0, 0.0)
    shape = _SHAPES[grid]
    known, factor, size = np.array(shape.numbers), spread_scales(factors, blocks), np.abs(numbers)
    negative = np.signbit(numbers)
    none = np.isnan(numbers)
    with np.errstate(all="ignore"):
        y = np.where(none, 0, size).astype(np.float64) / factor
        middles = (known[1:] + known[:-1]) / 2
        code = np.searchsorted(middles, y)  # the lower of two equally near numbers
        code += (code < len(middles)) & (code % 2 == 1) & (y == middles[np.minimum(code, len(middles) - 1)])
        value = known[code].astype(np.float32)
        beyond = y > shape.beyond
        if not shape.sign:
            lowest = negative & (y >= shape.beyond)  # where the code is even
            code, value = np.where(lowest, len(known), code), np.where(lowest, np.float32(len(known)), value)
            beyond = y > shape.beyond + negative
        off = np.abs(size - value * factor)
    if shape.sign:
        out[:] = np.where(none, shape.nan, code) | negative << shape.sign
    else:
        out[:] = (
            (np.where(negative, -code, code) * ~none + (8 if grid == NumberGrid.INT4 else 0))
            .astype(np.int8)
            .view(np.uint8)
        )
    off[none] = np.nan
    error = np.float32("nan") if np.isnan(off).any() else off.max()
    return Rounded(int((beyond & ~none).sum()), int(((code == 0) & (size != 0) & ~none).sum()), float(error))
