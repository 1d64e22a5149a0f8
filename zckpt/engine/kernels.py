"""Loops over elements for recipes (`core.recipes`): those of the C++ engine, and the reference in numpy that they must equal.

For `bringing` and `elements`. Both give the same bits; of a NaN, that it is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any

from zckpt.core import task_vectors
from zckpt.core.folds import Kernels, MatrixBlocks, NumberGrid, Rounded
from zckpt.engine import kernels_codes, kernels_ggml, kernels_to_ggml

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes, Floats, Halves, Matrix, Sparsity, Thinned, Whole

try:
    from zckpt import _core
except ImportError:  # pragma: no cover - depends on the build
    _core = None  # type: ignore[assignment]


_KEPT = Struct("<QqqQqff")
_LANES = 16
"""Sums that `products` takes side by side, in `csrc/kernels.cpp` too."""


class NativeKernels:
    """The loops of `csrc/kernels.cpp`; each lets other threads of Python run."""

    def accumulate(self, total: Floats, numbers: Floats, weight: float) -> None:
        _core.accumulate(_address(total), _address(numbers), len(total), weight)

    def approach(self, total: Floats, numbers: Floats, divisor: float) -> None:
        _core.approach(_address(total), _address(numbers), len(total), divisor)

    def blend(self, total: Floats, numbers: Floats, keep: float, weight: float) -> None:
        _core.blend(_address(total), _address(numbers), len(total), keep, weight)

    def products(self, a: Floats, b: Floats) -> tuple[float, float, float]:
        return _core.products(_address(a), _address(b), len(a))

    def add_low_rank(self, total: Floats, left: Floats, right: Floats, rank: int, scaling: float) -> None:
        rows, columns = _shape(total, left, right, rank)
        _core.add_low_rank(_address(total), _address(left), _address(right), rows, columns, rank, scaling)

    def move_sparsely(
        self, total: Floats, others: Sequence[Floats], kept: Sequence[Thinned], start: int, how: Sparsity
    ) -> None:
        packed = b"".join(_KEPT.pack(_address(other), *one) for other, one in zip(others, kept, strict=True))
        if any(len(other) != len(total) for other in others):
            raise ValueError("tensors of different lengths")
        _core.move_sparsely(_address(total), len(total), start, packed, how.elects, how.normalises, how.factor)

    def select_near(self, numbers: Floats, base: Floats, low: int, high: int, found: Whole) -> tuple[int, int]:
        if not len(numbers) == len(base) <= len(found):
            raise ValueError("arrays of different lengths")
        return _core.select_near(_address(numbers), _address(base), len(numbers), low, high, _address(found))

    def lengths(self, numbers: Floats, base: Floats, kept: Thinned, start: int) -> tuple[float, float]:
        if len(numbers) != len(base):
            raise ValueError("arrays of different lengths")
        return _core.lengths(_address(base), len(base), start, _KEPT.pack(_address(numbers), *kept))

    def largest(self, numbers: Floats | Halves, blocks: MatrixBlocks, found: Floats) -> None:
        kernels_codes.check(numbers, blocks, found)
        _core.largest(_address(numbers), _is_bf16(numbers), blocks, _address(found))

    def multiply_blocks(self, numbers: Floats, blocks: MatrixBlocks, factors: Floats) -> None:
        kernels_codes.check(numbers, blocks, factors)
        _core.multiply_blocks(_address(numbers), blocks, _address(factors))

    def to_codes(
        self, grid: NumberGrid, numbers: Floats | Halves, blocks: MatrixBlocks, factors: Floats, out: Bytes
    ) -> Rounded:
        kernels_codes.check(numbers, blocks, factors, out)
        own = _address(numbers), _is_bf16(numbers)
        return Rounded(*_core.to_codes(int(grid), *own, blocks, _address(factors), _address(out)))

    def to_affine(self, numbers: Floats, size: int, bits: int, packed: Bytes, scales: Floats, biases: Floats) -> int:
        """As `Kernels.to_affine`."""
        groups = kernels_codes.check_affine(numbers, size, bits, packed, scales, biases)
        addresses = _address(packed), _address(scales), _address(biases)
        return _core.to_affine(_address(numbers), groups, size, bits, *addresses)

    def split_codes(self, raw: Bytes, bits: int, codes: Matrix, *, high_first: bool) -> None:
        pitch = kernels_codes.pitch_of(raw, bits, codes)
        rows, columns = codes.shape
        _core.split_codes(_address(raw), pitch, rows, columns, bits, high_first, _address(codes))

    def split_down(self, words: Matrix, bits: int, shifts: tuple[int, ...], first: int, codes: Matrix) -> None:
        kernels_codes.check_down(words, shifts, first, codes)
        size, pitch = words.itemsize, words.shape[1]
        _core.split_down(_address(words), size, pitch, bits, bytes(shifts), first, len(codes), _address(codes))

    def join_codes(self, codes: Matrix, rest: int, out: Matrix) -> None:
        kernels_codes.check_joined(codes, out)
        rows, columns = codes.shape
        _core.join_codes(_address(codes), rows, columns, out.shape[1], rest, _address(out))

    def of_codes(
        self, codes: Bytes, table: Floats, blocks: MatrixBlocks, zeros: Floats | None, factors: Floats, numbers: Floats
    ) -> None:
        kernels_codes.check_codes(codes, table, blocks, zeros, factors, numbers)
        at = 0 if zeros is None else _address(zeros)
        _core.of_codes(_address(codes), _address(table), blocks, at, _address(factors), _address(numbers))

    def to_q8_0(self, numbers: Floats | Halves, blocks: Bytes) -> None:
        _core.to_q8_0(_address(numbers), _is_bf16(numbers), _address(blocks), _blocks(numbers, blocks))

    def of_ggml(self, kind: str, blocks: Bytes, numbers: Floats) -> None:
        number, count = kernels_ggml.check(kind, blocks, numbers)
        _core.of_ggml(number, _address(blocks), count, _address(numbers))

    def to_ggml(self, kind: str, numbers: Floats, columns: int, weights: Floats | None, blocks: Bytes) -> int:
        number, rows = kernels_to_ggml.check(kind, numbers, columns, weights, blocks)
        at = 0 if weights is None else _address(weights)
        return _core.to_ggml(number, _address(numbers), rows, columns, at, _address(blocks))

    def of_q8_0(self, blocks: Bytes, numbers: Floats) -> None:
        _core.of_q8_0(_address(blocks), _address(numbers), _blocks(numbers, blocks))


class ReferenceKernels:
    """The same loops in numpy."""

    move_sparsely = staticmethod(task_vectors.move_sparsely)
    select_near = staticmethod(task_vectors.select_near)
    lengths = staticmethod(task_vectors.lengths)
    largest = staticmethod(kernels_codes.largest)
    multiply_blocks = staticmethod(kernels_codes.multiply_blocks)
    to_codes = staticmethod(kernels_codes.to_codes)
    to_affine = staticmethod(kernels_codes.to_affine)
    split_codes = staticmethod(kernels_codes.split_codes)
    split_down = staticmethod(kernels_codes.split_down)
    join_codes = staticmethod(kernels_codes.join_codes)
    of_codes = staticmethod(kernels_codes.of_codes)
    of_ggml = staticmethod(kernels_ggml.of_ggml)
    to_ggml = staticmethod(kernels_to_ggml.to_ggml)

    def accumulate(self, total: Floats, numbers: Floats, weight: float) -> None:
        import numpy as np

        with np.errstate(all="ignore"):
            total += np.float32(weight) * numbers

    def approach(self, total: Floats, numbers: Floats, divisor: float) -> None:
        import numpy as np

        with np.errstate(all="ignore"):
            total += (numbers - total) / np.float32(divisor)

    def blend(self, total: Floats, numbers: Floats, keep: float, weight: float) -> None:
        import numpy as np

        with np.errstate(all="ignore"):
            total *= np.float32(keep)
            total += np.float32(weight) * numbers

    def products(self, a: Floats, b: Floats) -> tuple[float, float, float]:
        import numpy as np

        found = []
        for x, y in ((a, b), (a, a), (b, b)):
            with np.errstate(all="ignore"):
                rows = np.zeros(-(-len(x) // _LANES) * _LANES)
                rows[: len(x)] = x.astype(np.float64) * y.astype(np.float64)
                lanes = rows.reshape(-1, _LANES).cumsum(axis=0)[-1:].ravel() if len(x) else np.zeros(_LANES)
                found.append(float(lanes.cumsum()[-1]))
        return found[0], found[1], found[2]

    def add_low_rank(self, total: Floats, left: Floats, right: Floats, rank: int, scaling: float) -> None:
        import numpy as np

        rows, columns = _shape(total, left, right, rank)
        with np.errstate(all="ignore"):
            product = np.zeros((rows, columns), np.float32)
            for k in range(rank):
                product = _multiply_add(left[k::rank, None], right[None, k * columns : (k + 1) * columns], product)
            total += (product * np.float32(scaling)).reshape(-1)

    def to_q8_0(self, numbers: Floats | Halves, blocks: Bytes) -> None:
        import numpy as np

        count = _blocks(numbers, blocks)
        rows, out = kernels_codes.as_floats(numbers).reshape(count, 32), blocks.reshape(count, 34)
        with np.errstate(all="ignore"):
            sound = np.isfinite(rows).all(axis=1, keepdims=True)
            scale = np.where(
                sound, np.abs(rows).max(axis=1, keepdims=True, initial=0) / np.float32(127), np.float32("nan")
            )
            scaled = np.where(sound, rows, np.float32(0)) * np.where(scale > 0, np.float32(1) / scale, np.float32(0))
            size = np.abs(scaled)
            whole = np.floor(size)
            whole += np.floor(np.float32(2) * (size - whole))
            out[:, :2] = np.where(sound, scale.astype(np.float16).view(np.uint16), 0x7E00).astype("<u2").view(np.uint8)
            out[:, 2:] = (
                np.copysign(np.where(np.isfinite(whole), np.minimum(whole, 128), 0), scaled)
                .astype(np.int8)
                .view(np.uint8)
            )

    def of_q8_0(self, blocks: Bytes, numbers: Floats) -> None:
        import numpy as np

        count = _blocks(numbers, blocks)
        held = blocks.reshape(count, 34)
        scale = np.ascontiguousarray(held[:, :2]).view("<f2").astype(np.float32)
        with np.errstate(all="ignore"):
            numbers.reshape(count, 32)[...] = held[:, 2:].view(np.int8).astype(np.float32) * scale


def _multiply_add(a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` in fp32, rounded once.

    The product is exact in double precision. The sum is rounded there to odd, which does not matter to the second rounding, since
    a double has more than twice the digits.
    Source: Boldo and Melquiond, Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd, 2008.
    """
    import numpy as np

    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error) & (bits & 1 == 0)
    return (bits + inexact * np.where((error > 0) == (total > 0), 1, -1)).view(np.float64).astype(np.float32)


def kernels_of(engine: str) -> Kernels:
    """The loops of the engine that works: "native" or "reference"."""
    return NativeKernels() if engine == "native" else ReferenceKernels()


def _shape(total: Floats, left: Floats, right: Floats, rank: int) -> tuple[int, int]:
    """The rows and columns of a matrix product that is added to `total`."""
    rows, columns = len(left) // rank, len(right) // rank
    if (rows * rank, columns * rank, rows * columns) != (len(left), len(right), len(total)):
        raise ValueError(f"no product of {len(left)} and {len(right)} numbers of rank {rank} has {len(total)}")
    return rows, columns


def _blocks(numbers: Floats | Halves, blocks: Bytes) -> int:
    """How many blocks of Q8_0 two arrays hold."""
    if numbers.size * 34 != blocks.size * 32 or numbers.size % 32:
        raise ValueError(f"{numbers.size} numbers are no {blocks.size} bytes of blocks")
    return numbers.size // 32


def _is_bf16(numbers: Floats | Halves) -> bool:
    return bool(numbers.dtype.itemsize == 2)


def _address(array: Any) -> int:
    """The address of the first byte of a dense array."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not dense")
    return int(array.ctypes.data)
