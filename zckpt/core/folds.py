"""Tensors that are taken up one after another, such as the terms of a sum: what recipes (`recipes`) and engines know of it.

The native engine does it while it reads, where the numbers of all tensors lie in files in runs (`csrc/fold.cpp`); elsewhere
`fold_elements` does, with the loops of either engine. All give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F32, DType
from zckpt.core.stores import FileStore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Halves = NDArray[np.uint16]  # bits of bf16
    Whole = NDArray[np.int64 | np.uint32]
    Bytes = NDArray[np.uint8]
    Matrix = NDArray[np.generic]
    Array = NDArray[np.generic]


Part = TypeVar("Part")
Found = TypeVar("Found")


class How(IntEnum):
    """What a fold does with the numbers so far, in fp32, when the next tensor comes; `csrc/mover.h` has the same order."""

    SET = 0
    """The numbers become the tensor."""
    ADD = 1
    """`a` times the tensor is added: product and sum are rounded."""
    APPROACH = 2
    """The numbers move by (tensor - numbers) / `a`; each step is rounded."""
    BLEND = 3
    """The numbers become `a` * numbers + `b` * tensor; products and sum are rounded."""
    DIFFER = 4
    """`a` times (tensor - what was set) is added, each step rounded."""
    LOW_RANK = 5
    """The tensor is a thin factor; `a` times its product with the next one is added (`Kernels.add_low_rank`)."""
    FACTOR = 6
    """The tensor is the other factor of the product before."""


class ThinProduct(NamedTuple):
    """What is added to a matrix, or to experts' matrices that lie one behind the other.

    Attributes:
        rank: of the product.
        rows, columns: of one expert's matrix.
        experts: how many.
        turned: whether rows are the inputs, which the first factor has, and not the outputs.
    """

    rank: int = 0
    rows: int = 0
    columns: int = 0
    experts: int = 0
    turned: bool = False


class Uptake(NamedTuple):
    """How one tensor enters a fold; the factors are rounded to fp32. `product`: that a factor belongs to."""

    how: How
    a: float = 0.0
    b: float = 0.0
    product: ThinProduct = ThinProduct()


DRAWS = 1 << 24
"""What is drawn for an element is less."""


@dataclass(frozen=True, slots=True)
class Sparsity:
    """How differences are thinned out and added.

    Attributes:
        weights: of each tensor's difference.
        densities: the part of it that stays.
        is_random: whether random numbers stay (DARE), and not the largest ones.
        elects: whether only numbers count that have the sign of their sum.
        normalises: whether the sum is divided by the weights that count.
        rescales: whether what stays is multiplied so that the magnitudes add up to what they were.
        factor: of the whole sum.
        seed: of the random choice, which depends on it, on the tensor's name and on its place among the others.
    """

    weights: tuple[float, ...]
    densities: tuple[float, ...]
    is_random: bool = False
    elects: bool = True
    normalises: bool = True
    rescales: bool = False
    factor: float = 1.0
    seed: int = 0

    @property
    def facts(self) -> tuple[object, ...]:
        """As `core.recipes.Recipe.facts`."""
        how = self.is_random, self.elects, self.normalises, self.rescales, self.factor, self.seed
        return ("sparse", self.weights, self.densities, *how)


class Thinned(NamedTuple):
    """What stays of a difference, and what it counts.

    Attributes:
        least: magnitudes above it stay, as the bits of fp32.
        last: those equal to it stay before this element.
        key: of the random choice.
        draws: what is drawn for an element that stays is less than this.
        scale: what the rest is multiplied by.
        weight: of the difference.
    """

    least: int = -1
    last: int = 0
    key: int = 0
    draws: int = DRAWS
    scale: float = 1.0
    weight: float = 1.0


class MatrixBlocks(NamedTuple):
    """How blocks lie over a matrix with some rows at hand. Blocks are numbered row by row, from the matrix's first one.

    Attributes:
        rows: those at hand.
        columns: of the matrix.
        block_rows, block_columns: of a block; the last ones may have fewer.
        first: the number of the first row at hand.
    """

    rows: int
    columns: int
    block_rows: int
    block_columns: int
    first: int = 0


class Rounded(NamedTuple):
    """Counts what rounding did to numbers.

    Attributes:
        saturated: those that became the largest number though another step of the same size would have been nearer.
        underflowed: those that became zero and were not.
        error: the largest difference between a number and what it became; NaN if one is NaN.
    """

    saturated: int
    underflowed: int
    error: float


class NumberGrid(IntEnum):
    """The numbers that codes stand for before they are multiplied; `csrc/codes.h` has the same order."""

    E4M3 = 0
    E2M1 = 1
    INT8 = 2
    """Two's complement."""
    INT4 = 3
    """Code 0 stands for -8."""


class Kernels(Protocol):
    """Loops over elements; the C++ ones and those of the reference give the same bits. Arrays are dense, of one dimension.

    Where numbers may be `Halves`, these are bf16, and mean what they are as fp32.
    """

    def accumulate(self, total: Floats, numbers: Floats, weight: float) -> None:
        """Adds `weight` times each number to `total`, in place: the weight, the product and the sum are rounded to fp32."""

    def approach(self, total: Floats, numbers: Floats, divisor: float) -> None:
        """Moves `total` by (number - total) / divisor, in place; each step is rounded to fp32."""

    def blend(self, total: Floats, numbers: Floats, keep: float, weight: float) -> None:
        """Makes `total` keep * total + weight * number, in place; factors, products and sum are rounded to fp32."""

    def products(self, a: Floats, b: Floats) -> tuple[float, float, float]:
        """The sums of a * b, a * a and b * b, in fp64: of every 16th element in order, then these 16 sums in order."""

    def add_low_rank(self, total: Floats, left: Floats, right: Floats, rank: int, scaling: float) -> None:
        """Adds `scaling` times the matrix product of `left` (rows x rank) and `right` (rank x columns) to `total`, in place.

        Each element of the product is a sum of fused multiply-adds in fp32, in the order of the ranks; it is multiplied and
        added, each time rounded to fp32.
        """

    def move_sparsely(
        self, total: Floats, others: Sequence[Floats], kept: Sequence[Thinned], start: int, how: Sparsity
    ) -> None:
        """Moves `total`, which begins with element `start`, by what stays of the others' differences from it, in place.

        Each step is rounded to fp32.
        """

    def select_near(self, numbers: Floats, base: Floats, low: int, high: int, found: Whole) -> tuple[int, int]:
        """Counts magnitudes of (number - base), as the bits of fp32: those above `high`, and those from `low` on to it.

        The latter go into `found`, in order; it has room for all.
        """

    def lengths(self, numbers: Floats, base: Floats, kept: Thinned, start: int) -> tuple[float, float]:
        """The sums of |number - base| in fp64, of all and of those that stay: of every 16th element, then of these."""

    def largest(self, numbers: Floats | Halves, blocks: MatrixBlocks, found: Floats) -> None:
        """Puts the largest magnitude of each block into `found`; infinity is larger than all numbers, and NaN than infinity."""

    def multiply_blocks(self, numbers: Floats, blocks: MatrixBlocks, factors: Floats) -> None:
        """Multiplies the numbers of each block by its factor, in place; products are rounded to fp32."""

    def to_codes(
        self, grid: NumberGrid, numbers: Floats | Halves, blocks: MatrixBlocks, factors: Floats, out: Bytes
    ) -> Rounded:
        """Puts the code of the grid's number that is nearest to (number / its block's factor) into `out`, of two the even one.

        The quotient is not rounded before; factors are positive. What is larger than the grid's largest number becomes that. NaN
        stays NaN in E4M3, and is 0 elsewhere.
        """

    def to_affine(self, numbers: Floats, size: int, bits: int, packed: Bytes, scales: Floats, biases: Floats) -> int:
        """Quantises groups of so many numbers as MLX does: codes of 2 to 8 bits in one stream, a scale and a bias for each.

        Returns how many groups have none: they hold NaN or infinity, or are so large that a scale is none.
        """

    def split_codes(self, raw: Bytes, bits: int, codes: Matrix, *, high_first: bool) -> None:
        """Puts codes of 1 to 8 bits that lie one behind the other, least significant bits first, into `codes`, a byte each.

        Each row begins a byte of `raw`, and all have as many. `high_first`: of 4 bits, the high half of a byte comes first.
        """

    def split_down(self, words: Matrix, bits: int, shifts: tuple[int, ...], first: int, codes: Matrix) -> None:
        """As `split_codes`, where an element of `words` holds codes of several rows; `shifts` says how many bits above
        its bottom each code is.

        The codes of row `first` and of those behind it go into `codes`.
        """

    def join_codes(self, codes: Matrix, rest: int, out: Matrix) -> None:
        """Puts codes of 4 bits into rows of bytes, two in each, the first code in the low half; bytes that are left
        over become `rest`.
        """

    def of_codes(
        self, codes: Bytes, table: Floats, blocks: MatrixBlocks, zeros: Floats | None, factors: Floats, numbers: Floats
    ) -> None:
        """Puts (number of the table - zero point) * factor into `numbers`, for each code; difference and product are rounded.

        Args:
            codes: places in the table.
            table: of 256 numbers; those behind the 16th are 0 if codes have 4 bits.
            blocks: how blocks lie over the codes.
            zeros: a zero point for each block; None for none.
            factors: a factor for each block.
            numbers: the result.
        """

    def to_q8_0(self, numbers: Floats | Halves, blocks: Bytes) -> None:
        """Writes each 32 numbers as a block of 34 bytes (ggml's Q8_0): the scale as fp16, and the numbers divided by it.

        The scale is the largest absolute number by 127. Numbers are rounded to whole ones, halves away from zero. A block that
        holds NaN or infinity has no meaning, and is the same from both engines.
        """

    def to_ggml(self, kind: str, numbers: Floats, columns: int, weights: Floats | None, blocks: Bytes) -> int:
        """Writes rows of numbers as blocks of another of ggml's types, by its name.

        Args:
            kind: the type.
            numbers: of rows, which are whole blocks.
            columns: in each row.
            weights: how much each column matters; None where all do the same.
            blocks: the result.

        Returns:
            How many blocks hold NaN or infinity, or a scale that fp16 does not hold; they have no meaning.
        """

    def of_q8_0(self, blocks: Bytes, numbers: Floats) -> None:
        """Computes the numbers of Q8_0 blocks: each block's whole numbers times its scale."""

    def of_ggml(self, kind: str, blocks: Bytes, numbers: Floats) -> None:
        """Computes the numbers of blocks of another of ggml's types, by its name."""


class Tools(Protocol):
    """What a recipe reads and computes with."""

    @property
    def kernels(self) -> Kernels:
        """The loops of the engine in use."""

    def read(self, entry: TensorEntry, start: int, stop: int, dtype: DType | None = None) -> Array:
        """Elements [start, stop) of a tensor, as an array that the caller may change.

        They are cast to `dtype`, rounded once; by default they stay in their own. Dtypes that numpy lacks (bf16, fp8) come
        as unsigned integers of their width.

        Raises:
            CastError: a number is too large for `dtype`.
            ZckptError: a source cannot be read, or changed.
        """

    def read_floats(self, entry: TensorEntry, start: int, stop: int) -> Floats:
        """Reads elements and makes them fp32."""

    def each(self, work: Callable[[Part, Tools], Found], parts: Iterable[Part]) -> list[Found]:
        """What `work` finds for each part, in order; as many threads do it as may compute, each with tools of its own.

        For what belongs to whole tensors: who needs it waits meanwhile. Errors are those of `work`.
        """

    def expect(self, entries: Iterable[TensorEntry]) -> None:
        """Lets the disk begin to read tensors that are read soon, as far as they lie on one."""


def read_numbers(entry: TensorEntry, start: int, stop: int, tools: Tools) -> Floats | Halves:
    """Elements [start, stop) of a tensor, for loops that take bf16 as it is: half as many bytes pass through memory."""
    return tools.read(entry, start, stop) if entry.dtype == BF16 else tools.read_floats(entry, start, stop)  # type: ignore[return-value]


def fold_elements(
    inputs: Sequence[TensorEntry], steps: Sequence[Uptake], start: int, stop: int, tools: Tools
) -> Floats:
    """Elements [start, stop) of tensors that are taken up one after another, beginning with zeros.

    Args:
        inputs: the tensors, of one shape.
        steps: one for each of them.
        start: first element.
        stop: one past the last.
        tools: to read and compute with.
    """
    import numpy as np

    base = total = np.zeros(stop - start if steps[0].how != How.SET else 0, np.float32)
    differs = any(step.how == How.DIFFER for step in steps)
    for entry, (how, a, b, _) in zip(inputs, steps, strict=True):
        numbers = tools.read_floats(entry, start, stop)
        match how:
            case How.SET:
                base, total = numbers, numbers.copy() if differs else numbers
            case How.ADD:
                tools.kernels.accumulate(total, numbers, a)
            case How.APPROACH:
                tools.kernels.approach(total, numbers, a)
            case How.BLEND:
                tools.kernels.blend(total, numbers, a, b)
            case How.DIFFER:
                tools.kernels.accumulate(numbers, base, -1.0)
                tools.kernels.accumulate(total, numbers, a)
            case How.LOW_RANK | How.FACTOR:
                raise ValueError("a recipe with products computes its elements itself")
    return total


_MOST_FILES = 128
"""The most files of one tensor in a batch, which has room for others."""


def are_at_hand(inputs: Sequence[TensorEntry]) -> bool:
    """Whether an engine can read all of these itself, as runs of numbers that fp32 holds."""
    files = {id(fragment.store) for entry in inputs for fragment in entry.fragments}
    return len(files) <= _MOST_FILES and all(
        entry.flat
        and (entry.dtype == F32 or (entry.dtype.kind == "float" and entry.dtype.itemsize < F32.itemsize))
        and all(isinstance(fragment.store, FileStore) and fragment.store.at_hand for fragment in entry.fragments)
        for entry in inputs
    )
