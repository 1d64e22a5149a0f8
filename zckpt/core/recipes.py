"""Recipes: how elements are computed from tensors, on their way to an output.

For jobs with an output that is not a copy: sums, merged adapters, quantised forms. A recipe is a value that says what
it reads and what
its numbers depend on; `engine.bringing` follows it, for the parts that a batch of moves needs, so memory stays bounded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import Role, TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.folds import How, Tools, Uptake, are_at_hand, fold_elements
from zckpt.core.fragments import Fragment

if TYPE_CHECKING:
    from zckpt.core.folds import Array


class Recipe(Protocol):
    """A rule by which the elements of a tensor are computed.

    One that knows which elements of its inputs `compute` reads has a method for it, so that they can be fetched before:
    `reads(start, stop)` gives (input, start, stop) for each part.

    One with elements that are found when another recipe's are computed, such as scales, has an `is_byproduct` that is true: in a
    part of an output its elements are computed after those of the other recipes.

    One that takes up one tensor after another has `steps`, one for each of its inputs: an engine may do that itself.
    """

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        """The tensors that the recipe reads."""

    @property
    def facts(self) -> tuple[object, ...]:
        """What else the numbers depend on, in plain values: together with the inputs they identify a result."""

    @property
    def unit(self) -> int:
        """The number of elements that are computed together, such as a row of a matrix or a block; parts are multiples
        of it.
        """

    def compute(self, start: int, stop: int, tools: Tools, /) -> Array:
        """Elements [start, stop) of the result, as an array of its dtype (or of unsigned integers of that width).

        `start` is a multiple of `unit`, and `stop` is one or the end of the tensor. Several threads may call it at once.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """A recipe that is a function, with what it reads; attributes as in `Recipe`. `reads`: None where it is not known."""

    inputs: tuple[TensorEntry, ...]
    facts: tuple[object, ...]
    compute: Callable[[int, int, Tools], Array]
    unit: int = 1
    reads: Callable[[int, int], Iterable[tuple[TensorEntry, int, int]]] | None = None
    is_byproduct: bool = False
    steps: tuple[Uptake, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class DerivedStore:
    """Elements that a recipe computes from tensors while they are moved, a part at a time; they are nowhere before.

    Attributes:
        recipe: how they are computed.
        itemsize: bytes of one of them.
        size: in bytes.
        steps: how an engine computes them itself from the inputs of the recipe (`core.folds`); empty where it cannot.
        place: the part of a file that is unpacked; empty for elements that are computed from tensors.
    """

    recipe: Recipe
    itemsize: int
    size: int
    steps: tuple[Uptake, ...] = ()
    place: str = ""
    byteorder: ClassVar[Literal["little", "big"]] = "little" if sys.byteorder == "little" else "big"
    at_hand: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.place or "computed elements"


def derive_entry(
    name: str, shape: tuple[int, ...], dtype: DType, recipe: Recipe, role: Role = "parameter"
) -> TensorEntry:
    """A tensor with elements that a recipe computes; shape in elements, `dtype` that of the recipe's results.

    A tensor of no elements has no fragments: there is nothing to compute.
    """
    numel = math.prod(shape)
    if not numel:
        return TensorEntry(name, shape, dtype, role, ())
    steps = getattr(recipe, "steps", ())
    if steps and not are_at_hand(recipe.inputs):
        steps = ()
    store = DerivedStore(recipe, dtype.itemsize, numel * dtype.itemsize, steps)
    return TensorEntry(name, shape, dtype, role, (Fragment(store, 0, 0, numel),))


def compute_bytes(store: DerivedStore, start: int, stop: int, tools: Tools) -> tuple[Array, int]:
    """The array with bytes [start, stop) of computed elements, widened to whole units, and the byte at which it begins.

    Args:
        store: the store with the recipe.
        start: first byte.
        stop: one past the last.
        tools: what the recipe computes with.
    """
    import numpy as np

    block = store.recipe.unit * store.itemsize
    first, last = start // block * block, min(store.size, -(-stop // block) * block)
    array = store.recipe.compute(first // store.itemsize, last // store.itemsize, tools)
    if array.nbytes != last - first:
        raise ValueError(f"a recipe gave {array.nbytes} bytes where {last - first} were wanted")
    return np.ascontiguousarray(array), first


def _fold(inputs: tuple[TensorEntry, ...], facts: tuple[object, ...], steps: tuple[Uptake, ...]) -> Formula:
    """The recipe of tensors of one shape that are taken up one after another, by a step each; fp32."""

    def reads(start: int, stop: int) -> Iterable[tuple[TensorEntry, int, int]]:
        return ((entry, start, stop) for entry in inputs)

    return Formula(inputs, facts, partial(fold_elements, inputs, steps), reads=reads, steps=steps)


def mean_of(inputs: tuple[TensorEntry, ...]) -> Formula:
    """The mean of tensors of one shape in fp32, one after another: mean + (tensor - mean) / (how many there are so
    far).

    So equal tensors give themselves. It is what torch.optim.swa_utils.get_swa_avg_fn computes.
    """
    later = (Uptake(How.APPROACH, number) for number in range(2, len(inputs) + 1))
    return _fold(inputs, ("mean",), (Uptake(How.SET), *later))


def moving_average_of(inputs: tuple[TensorEntry, ...], decay: float) -> Formula:
    """An exponential moving average in fp32 that begins with the first tensor, the oldest: decay * average + (1 - decay)
    * tensor.

    It is what torch.optim.swa_utils.get_ema_avg_fn computes.
    """
    later = (Uptake(How.BLEND, decay, 1 - decay),) * (len(inputs) - 1)
    return _fold(inputs, ("moving average", decay), (Uptake(How.SET), *later))


def weighted_sum_of(
    inputs: tuple[TensorEntry, ...], weights: tuple[float, ...], *, moves_base: bool = False
) -> Formula:
    """Tensors of one shape, each times a weight, added in fp32 in the order in which they are given; or a base, moved by
    such a sum of the differences of other tensors from it: base + sum of weight * (other - base).

    Args:
        inputs: the tensors; the base first, where one is moved.
        weights: a factor for each but the base; rounded to fp32.
        moves_base: whether the first tensor is a base.
    """
    if moves_base:
        return _fold(inputs, ("moved", weights), (Uptake(How.SET), *(Uptake(How.DIFFER, weight) for weight in weights)))
    return _fold(inputs, ("weighted sum", weights), tuple(Uptake(How.ADD, weight) for weight in weights))


def point_between(inputs: tuple[TensorEntry, TensorEntry], t: float) -> Formula:
    """The point at `t` of the way from one tensor to another along the arc between their directions (slerp), in fp32.

    If both have nearly the same direction, or opposite ones, or one is zero, it is the point on the straight line. The
    directions are those of the whole tensors, which are read once more for this, in the order of their elements.

    Args:
        inputs: both tensors.
        t: 0 gives the first, 1 the second.
    """
    lock = Lock()
    steps: list[Uptake] = []

    def compute(start: int, stop: int, tools: Tools) -> Array:
        with lock:
            if not steps:
                steps.extend(Uptake(How.ADD, factor) for factor in _arc_factors(*inputs, t, tools))
        return fold_elements(inputs, steps, start, stop, tools)

    return Formula(inputs, ("interpolated", t), compute)


def _arc_factors(a: TensorEntry, b: TensorEntry, t: float, tools: Tools) -> tuple[float, float]:
    """The factors of both tensors."""

    def products(start: int, tools: Tools) -> tuple[float, float, float]:
        stop = min(start + _MEASURED, a.numel)
        return tools.kernels.products(tools.read_floats(a, start, stop), tools.read_floats(b, start, stop))

    dot = square = other_square = 0.0
    for found in tools.each(products, range(0, a.numel, _MEASURED)):
        dot, square, other_square = dot + found[0], square + found[1], other_square + found[2]
    length = math.sqrt(square) * math.sqrt(other_square)
    if not length or not math.isfinite(dot / length) or abs(dot / length) > _NEARLY_PARALLEL:
        return 1 - t, t
    angle = math.acos(dot / length)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


_MEASURED = 1 << 21
"""Elements per partial sum of products: a fixed number, since the order of a sum changes its last bits."""
_NEARLY_PARALLEL = 0.9995
"""Cosine beyond which the arc is taken for a line, as mergekit's slerp does."""
