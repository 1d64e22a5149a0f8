"""Recipes: how elements are computed from tensors, on their way to an output.

For jobs whose output is no copy: sums, merged adapters, quantised forms. A recipe is a value that says what it reads and what
its numbers depend on; `engine.bringing` follows it, for the parts that a batch of moves needs, so memory stays bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zckpt.core.catalog import Role, TensorEntry
from zckpt.core.dtypes import F32, DType
from zckpt.core.fragments import DerivedStore, Fragment

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Array = NDArray[np.generic]


class Kernels(Protocol):
    """Loops over elements; the C++ ones and those of the reference give the same bits. Arrays are dense, of one dimension."""

    def accumulate(self, total: Floats, numbers: Floats, weight: float) -> None:
        """Adds `weight` times each number to `total`, in place: the weight, the product and the sum are rounded to fp32."""


class Tools(Protocol):
    """What a recipe computes with."""

    @property
    def kernels(self) -> Kernels:
        """The loops of the engine that works."""

    def read(self, entry: TensorEntry, start: int, stop: int, dtype: DType | None = None) -> Array:
        """Elements [start, stop) of a tensor, as an array that the caller may change.

        They are cast to `dtype`, rounded once; by default they stay in their own. Dtypes that numpy lacks (bf16, fp8) come
        as unsigned integers of their width.

        Raises:
            CastError: a number is too large for `dtype`.
            ZckptError: a source cannot be read, or changed.
        """

    def read_floats(self, entry: TensorEntry, start: int, stop: int) -> Floats:
        """The same as fp32."""


class Recipe(Protocol):
    """How the elements of a tensor are computed."""

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        """The tensors that it reads."""

    @property
    def facts(self) -> tuple[object, ...]:
        """What else its numbers depend on, in plain values: together with the inputs they identify a result."""

    @property
    def unit(self) -> int:
        """It computes multiples of so many elements: rows of a matrix, or blocks."""

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """Elements [start, stop) of the result, as an array of its dtype (or of unsigned integers of that width).

        `start` is a multiple of `unit`, and `stop` is one or the end of the tensor. Several threads may call it at once.
        """


def derived(name: str, shape: tuple[int, ...], dtype: DType, recipe: Recipe, role: Role = "parameter") -> TensorEntry:
    """A tensor whose elements a recipe computes; shape in elements, `dtype` that of the recipe's results."""
    numel = 1
    for extent in shape:
        numel *= extent
    store = DerivedStore(recipe, dtype.itemsize, numel * dtype.itemsize)
    return TensorEntry(name, shape, dtype, role, (Fragment(store, 0, 0, numel),))


def followed(store: DerivedStore, start: int, stop: int, tools: Tools) -> tuple[Array, int]:
    """The array with bytes [start, stop) of computed elements, widened to whole units, and the byte at which it begins.

    Args:
        store: with the recipe.
        start: first byte.
        stop: one past the last.
        tools: that it computes with.
    """
    import numpy as np

    block = store.recipe.unit * store.itemsize
    first, last = start // block * block, min(store.size, -(-stop // block) * block)
    array = store.recipe.compute(first // store.itemsize, last // store.itemsize, tools)
    if array.nbytes != last - first:
        raise ValueError(f"a recipe gave {array.nbytes} bytes where {last - first} were wanted")
    return np.ascontiguousarray(array), first


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """Tensors of one shape, each times a weight, added in fp32 in the order in which they are given.

    Attributes:
        inputs: the tensors.
        weights: a factor for each; rounded to fp32.
    """

    inputs: tuple[TensorEntry, ...]
    weights: tuple[float, ...]
    unit: int = 1

    @property
    def facts(self) -> tuple[object, ...]:
        """The weights."""
        return ("weighted sum", self.weights)

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`; fp32. The first product is rounded as the others, and added to nothing."""
        import numpy as np

        total = np.zeros(stop - start, np.float32)
        for entry, weight in zip(self.inputs, self.weights, strict=True):
            tools.kernels.accumulate(total, tools.read_floats(entry, start, stop), weight)
        return total


def weighted_sum(name: str, inputs: tuple[TensorEntry, ...], weights: tuple[float, ...]) -> TensorEntry:
    """The sum as a tensor of fp32, with the first input's shape and role."""
    return derived(name, inputs[0].shape, F32, WeightedSum(inputs, weights), inputs[0].role)
