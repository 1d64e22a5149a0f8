"""Recipes: how elements are computed from tensors, on their way to an output.

For jobs with an output that is not a copy: sums, merged adapters, quantised forms. A recipe is a value that says what
it reads and what
its numbers depend on; `engine.bringing` follows it, for the parts that a batch of moves needs, so memory stays bounded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from threading import Lock
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import Role, TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.folds import Fold, How, Tools, Uptake, are_at_hand, fold_elements
from zckpt.core.fragments import Fragment

if TYPE_CHECKING:
    from zckpt.core.folds import Array


class Recipe(Protocol):
    """A rule by which the elements of a tensor are computed.

    One that knows which elements of its inputs `compute` reads has a method for it, so that they can be fetched before:
    `reads(start, stop)` gives (input, start, stop) for each part.

    One with elements that are found when another recipe's are computed, such as scales, has an `is_byproduct` that is true: in a
    part of an output its elements are computed after those of the other recipes.
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
    steps = recipe.steps if isinstance(recipe, Fold) and are_at_hand(recipe.inputs) else ()
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


@dataclass(frozen=True, slots=True)
class Mean(Fold):
    """The mean of tensors of one shape in fp32, one after another: mean + (tensor - mean) / (how many there are so
    far).

    So equal tensors give themselves. It is what torch.optim.swa_utils.get_swa_avg_fn computes. `inputs`: the tensors.
    """

    inputs: tuple[TensorEntry, ...]
    facts: tuple[object, ...] = ("mean",)
    unit: int = 1

    @property
    def steps(self) -> tuple[Uptake, ...]:
        return Uptake(How.SET), *(Uptake(How.APPROACH, number) for number in range(2, len(self.inputs) + 1))


@dataclass(frozen=True, slots=True)
class MovingAverage(Fold):
    """An exponential moving average in fp32 that begins with the first tensor: decay * average + (1 - decay) * tensor.

    It is what torch.optim.swa_utils.get_ema_avg_fn computes.

    Attributes:
        inputs: the tensors, oldest first.
        decay: what of the average stays at each step.
    """

    inputs: tuple[TensorEntry, ...]
    decay: float
    unit: int = 1

    @property
    def facts(self) -> tuple[object, ...]:
        return ("moving average", self.decay)

    @property
    def steps(self) -> tuple[Uptake, ...]:
        return Uptake(How.SET), *((Uptake(How.BLEND, self.decay, 1 - self.decay),) * (len(self.inputs) - 1))


@dataclass(frozen=True, slots=True)
class WeightedSum(Fold):
    """Tensors of one shape, each times a weight, added in fp32 in the order in which they are given; or a base, moved by
    such a sum of the differences of other tensors from it: base + sum of weight * (other - base).

    Attributes:
        inputs: the tensors; the base first, where one is moved.
        weights: a factor for each but the base; rounded to fp32.
        moves_base: whether the first tensor is a base.
    """

    inputs: tuple[TensorEntry, ...]
    weights: tuple[float, ...]
    moves_base: bool = False
    unit: int = 1

    @property
    def facts(self) -> tuple[object, ...]:
        return ("moved" if self.moves_base else "weighted sum", self.weights)

    @property
    def steps(self) -> tuple[Uptake, ...]:
        if self.moves_base:
            return Uptake(How.SET), *(Uptake(How.DIFFER, weight) for weight in self.weights)
        return tuple(Uptake(How.ADD, weight) for weight in self.weights)


class Interpolated:
    """The point at `t` of the way from one tensor to another along the arc between their directions (slerp), in fp32.

    If both have nearly the same direction, or opposite ones, or one is zero, it is the point on the straight line. The
    directions are those of the whole tensors, which are read once more for this, in the order of their elements.

    Args:
        inputs: both tensors.
        t: 0 gives the first, 1 the second.
    """

    unit = 1

    def __init__(self, inputs: tuple[TensorEntry, TensorEntry], t: float) -> None:
        self.inputs = inputs
        self.facts: tuple[object, ...] = ("interpolated", t)
        self._t = t
        self._factors: tuple[float, float] | None = None
        self._lock = Lock()

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        with self._lock:
            if self._factors is None:
                self._factors = self._measured(tools)
        return fold_elements(
            self.inputs, tuple(Uptake(How.ADD, factor) for factor in self._factors), start, stop, tools
        )

    def _measured(self, tools: Tools) -> tuple[float, float]:
        """The factors of both tensors."""
        a, b = self.inputs

        def products(start: int, tools: Tools) -> tuple[float, float, float]:
            stop = min(start + _MEASURED, a.numel)
            return tools.kernels.products(tools.read_floats(a, start, stop), tools.read_floats(b, start, stop))

        dot = square = other_square = 0.0
        for found in tools.each(products, range(0, a.numel, _MEASURED)):
            dot, square, other_square = dot + found[0], square + found[1], other_square + found[2]
        length = math.sqrt(square) * math.sqrt(other_square)
        if not length or not math.isfinite(dot / length) or abs(dot / length) > _NEARLY_PARALLEL:
            return 1 - self._t, self._t
        angle = math.acos(dot / length)
        return math.sin((1 - self._t) * angle) / math.sin(angle), math.sin(self._t * angle) / math.sin(angle)


_MEASURED = 1 << 21
"""Elements per partial sum of products: a fixed number, since the order of a sum changes its last bits."""
_NEARLY_PARALLEL = 0.9995
"""Cosine beyond which the arc is taken for a line, as mergekit's slerp does."""
