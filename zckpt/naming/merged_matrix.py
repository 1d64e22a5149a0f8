"""Recipes for weights that adapters are merged into: a matrix plus products of two thin ones, and rows that others replace.

For `merge`. All is computed in fp32, in PEFT's order: the product of a LoRA's factors, times the scaling, plus the weight, each
rounded.

[Note: the shape of an update] A LoRA has A (rank x in) and B (out x rank). The update of a Linear's weight (out x in) is B @ A;
that of a Conv1D (in x out) and of an embedding (tokens x width) its transpose, A.T @ B.T. Experts that lie in one parameter
(experts x out x in, or experts x in x out) have A (experts*rank x in), expert after expert, and B (out x rank*experts), in which
the experts' columns alternate. A DoRA divides each output's row of the whole by its length and multiplies it by a magnitude.
Source: PEFT 0.21.2, tuners/lora/layer.py `get_delta_weight` of Linear, Embedding and ParamWrapper;
tuners/lora/variants.py `DoraLinearVariant.merge_safe`, `DoraEmbeddingVariant.merge_safe`; tuners/lora/dora.py `get_weight_norm`.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import TensorEntry
from zckpt.core.folds import How, ThinProduct, Tools, Uptake
from zckpt.core.recipes import Formula

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Floats

_KEPT_BYTES = 32 << 20
_MOST_TURNED = 1 << 22
"""The most elements of a factor that is kept whole; of a larger one, such as an embedding's, rows are read as they come."""
_ROWS_AT_ONCE = 1 << 20
"""The most elements of a matrix that are read together to measure its columns' lengths."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one adapter adds to a matrix; see [Note: the shape of an update].

    Attributes:
        a: the factor A; of a convolution, with its kernel.
        b: the factor B.
        rank: of an expert's product.
        scaling: what the product is multiplied by.
        transposed: whether the matrix has a row for each input, and not for each output.
        magnitude: of a DoRA, a number for each output.
    """

    a: TensorEntry
    b: TensorEntry
    rank: int
    scaling: float
    transposed: bool = False
    magnitude: TensorEntry | None = None

    @property
    def facts(self) -> tuple[object, ...]:
        return self.rank, self.scaling, self.transposed


@dataclass(frozen=True, slots=True)
class MergedMatrix:
    """A weight with updates, one after the other as PEFT merges adapters: a recipe.

    The native engine computes one without magnitudes itself, if it has room for the factors.

    Attributes:
        base: the weight.
        updates: in their order.
        columns: elements in a row.
        experts: matrices that lie in `base` one after the other.
    """

    base: TensorEntry
    updates: tuple[Update, ...]
    columns: int
    experts: int = 1

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        factors = ((update.a, update.b, update.magnitude) for update in self.updates)
        return self.base, *(entry for three in factors for entry in three if entry is not None)

    @property
    def facts(self) -> tuple[object, ...]:
        return ("merged", self.columns, self.experts, *(update.facts for update in self.updates))

    @property
    def unit(self) -> int:
        return self.columns

    @property
    def steps(self) -> tuple[Uptake, ...]:
        sizes = [
            entry.numel
            for update in self.updates
            for entry in (update.a, update.b)
            if entry is update.a or update.transposed or self.experts > 1
        ]
        if any(update.magnitude is not None for update in self.updates) or sum(sizes) > _MOST_TURNED:
            return ()
        rows, found = self.base.numel // self.columns // self.experts, [Uptake(How.SET)]
        for update in self.updates:
            product = ThinProduct(update.rank, rows, self.columns, self.experts, update.transposed)
            found += Uptake(How.LOW_RANK, update.scaling, 0.0, product), Uptake(How.FACTOR, 0.0, 0.0, product)
        return tuple(found)

    def reads(self, start: int, stop: int) -> Iterable[tuple[TensorEntry, int, int]]:
        """The part of the weight; factors are kept, and asked for once."""
        return [(self.base, start, stop)]

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        each = self.base.numel // self.columns // self.experts
        first, last = start // self.columns, stop // self.columns
        matrix: Floats = tools.read_floats(self.base, start, stop)
        bounds = [first, *range(first // each * each + each, last, each), last]
        for low, high in itertools.pairwise(bounds):
            part = matrix[(low - first) * self.columns : (high - first) * self.columns]
            self._merge(part, low // each, low % each, high - low, tools)
        return matrix

    def _merge(self, matrix: Floats, expert: int, first: int, rows: int, tools: Tools) -> None:
        """Updates rows of one expert's matrix, in place."""
        later = any(update.magnitude is not None for update in self.updates[1:])
        before = matrix.copy() if later else matrix
        for number, update in enumerate(self.updates):
            if update.magnitude is None:
                self._add(matrix, update, expert, first, rows, tools)
            else:
                self._add_dora(matrix, before if number else None, update, first, rows, tools)

    def _add(self, matrix: Floats, update: Update, expert: int, first: int, rows: int, tools: Tools) -> None:
        left, right = self._factors(update, expert, first, rows, tools)
        tools.kernels.add_low_rank(matrix, left, right, update.rank, update.scaling)

    def _add_dora(
        self, matrix: Floats, before: Floats | None, update: Update, first: int, rows: int, tools: Tools
    ) -> None:
        """Merges a DoRA; lengths are those of the weight with this update alone: `before` is the weight, if others were
        added.
        """
        import numpy as np

        if update.transposed:
            lengths = KEPT.get((self, update), lambda: self._column_lengths(update, tools))
            self._add(matrix, update, 0, first, rows, tools)
        elif before is None:
            self._add(matrix, update, 0, first, rows, tools)
            lengths = _row_lengths(matrix, rows)
        else:
            alone = before.copy()
            self._add(alone, update, 0, first, rows, tools)
            lengths = _row_lengths(alone, rows)
            self._add(matrix, update, 0, first, rows, tools)
        magnitude = update.magnitude
        assert magnitude is not None
        low, high = (0, magnitude.numel) if update.transposed else (first, first + rows)
        with np.errstate(all="ignore"):
            factors = tools.read_floats(magnitude, low, high) / lengths
            shaped = matrix.reshape(rows, self.columns)
            shaped *= factors[None, :] if update.transposed else factors[:, None]

    def _column_lengths(self, update: Update, tools: Tools) -> Floats:
        """The length of each column of the whole matrix with this update, always read in the same parts."""
        import numpy as np

        rows = self.base.numel // self.columns
        step = max(1, _ROWS_AT_ONCE // self.columns)
        squares = np.zeros(self.columns)
        for first in range(0, rows, step):
            number = min(step, rows - first)
            part = tools.read_floats(self.base, first * self.columns, (first + number) * self.columns)
            self._add(part, update, 0, first, number, tools)
            squares += np.square(part, dtype=np.float64).reshape(number, self.columns).sum(axis=0)
        return np.sqrt(squares).astype(np.float32)

    def _factors(self, update: Update, expert: int, first: int, rows: int, tools: Tools) -> tuple[Floats, Floats]:
        """The factors of rows [first, first + rows) of an expert's update, dense: rows x rank and rank x columns."""
        import numpy as np

        rank, experts = update.rank, self.experts
        if experts == 1 and not update.transposed:
            left = tools.read_floats(update.b, first * rank, (first + rows) * rank)
            return left, KEPT.get((update.a,), lambda: tools.read_floats(update.a, 0, update.a.numel))
        inputs, outputs = update.a.numel // (rank * experts), update.b.numel // (rank * experts)
        b = KEPT.get(
            (update.b,),
            lambda: np.ascontiguousarray(  # expert x rank x out
                tools.read_floats(update.b, 0, update.b.numel).reshape(outputs, rank, experts).transpose(2, 1, 0)
            ),
        )[expert]
        if update.transposed and update.a.numel <= _MOST_TURNED:
            turned = KEPT.get(
                (update.a, "turned"),
                lambda: np.ascontiguousarray(  # expert x in x rank
                    tools.read_floats(update.a, 0, update.a.numel).reshape(experts, rank, inputs).transpose(0, 2, 1)
                ),
            )
            return turned[expert, first : first + rows].reshape(-1), b.reshape(-1)
        if update.transposed:
            at = range(expert * rank * inputs + first, (expert + 1) * rank * inputs, inputs)
            columns = [tools.read_floats(update.a, start, start + rows) for start in at]
            return np.stack(columns, axis=1).reshape(-1), b.reshape(-1)
        left = np.ascontiguousarray(b[:, first : first + rows].T).reshape(-1)
        size = rank * inputs
        return left, tools.read_floats(update.a, expert * size, (expert + 1) * size)


def _row_lengths(matrix: Floats, rows: int) -> Floats:
    import numpy as np

    squares = np.square(matrix, dtype=np.float64).reshape(rows, -1).sum(axis=1)
    lengths: Floats = np.sqrt(squares).astype(np.float32)
    return lengths


def replace_rows(base: TensorEntry, others: tuple[tuple[TensorEntry, tuple[tuple[int, int], ...]], ...]) -> Formula:
    """The recipe of a matrix with some rows taken from `others`, tokens of an embedding that were trained alone: for each
    adapter, its matrix, and pairs of a row of `base` and the row that it becomes.
    """
    width = math.prod(base.shape[1:])

    def compute(start: int, stop: int, tools: Tools) -> Array:
        matrix, first, last = tools.read_floats(base, start, stop), start // width, stop // width
        for entry, rows in others:
            for row, own in rows:
                if first <= row < last:
                    at = (row - first) * width
                    matrix[at : at + width] = tools.read_floats(entry, own * width, (own + 1) * width)
        return matrix

    inputs = base, *(entry for entry, _ in others)
    return Formula(inputs, ("rows", width, *(rows for _, rows in others)), compute, width)


class _Kept:
    """A cache of arrays that the next parts of the same matrix need too: the last used ones, up to a total size."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[int, ...], _Held] = OrderedDict()

    def get(self, owners: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """The array of these owners; if it is not cached, the first thread makes it, and others wait for it."""
        key = tuple(map(id, owners))
        with self._lock:
            held = self._found.get(key) or _Held(owners)
            self._found[key] = held
            self._found.move_to_end(key)
        with held.lock:
            if held.array is None:
                held.array = make()
        with self._lock:
            size = sum(one.array.nbytes for one in self._found.values() if one.array is not None)
            for other in list(self._found)[:-1]:
                if size <= self._most:
                    break
                dropped = self._found[other]
                if dropped.array is not None:
                    size -= dropped.array.nbytes
                    del self._found[other]
        return held.array


class _Held:
    """A cached array, with its owner: an object's id stays its own while the object exists."""

    __slots__ = ("array", "lock", "owners")

    def __init__(self, owners: tuple[object, ...]) -> None:
        self.owners = owners
        self.lock = threading.Lock()
        self.array: Any = None


KEPT = _Kept(_KEPT_BYTES)
"""The cache of factors that rows of one matrix share."""
