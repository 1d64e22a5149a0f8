"""Recipes for weights that an OFT or a BOFT turns, as PEFT merges them: blocks of a row's elements, each times a rotation.

For `merge`. A rotation comes of a skew-symmetric matrix by Cayley's formula, or by the first terms of its series. Products are
the kernels', in fp32; equations are solved in fp64, element by element, so that all machines find the same bits.
Source: PEFT 0.21.2, tuners/oft/layer.py `OFTRotationModule`, `Linear.merge`, `Embedding.merge`; tuners/boft/layer.py
`cayley_batch`, `Linear.merge`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import TensorEntry
from zckpt.core.folds import Tools
from zckpt.naming.merged_matrix import KEPT

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Floats

_EXACT = 0
"""The value of `terms` for Cayley's formula itself."""


@dataclass(frozen=True, slots=True)
class RotatedRows:
    """A matrix, each row's blocks of elements times rotations: a recipe.

    Attributes:
        base: the matrix.
        skew: what the rotations are made from: upper triangles of an OFT (blocks x numbers), or matrices of a BOFT
            (1 x blocks x size x size).
        factors: a number for each row, of a BOFT.
        terms: of the series; 0 for Cayley's formula.
        bound: largest length of a skew-symmetric matrix times the root of their number (COFT); 0 for none.
        turned: whether rotations are transposed, as those of a Linear are.
    """

    base: TensorEntry
    skew: TensorEntry
    factors: TensorEntry | None = None
    terms: int = _EXACT
    bound: float = 0.0
    turned: bool = True

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        return (self.base, self.skew) if self.factors is None else (self.base, self.skew, self.factors)

    @property
    def facts(self) -> tuple[object, ...]:
        return ("rotated", self.terms, self.bound, self.turned)

    @property
    def unit(self) -> int:
        return math.prod(self.base.shape[1:])

    @property
    def size(self) -> int:
        """The rows of a block; 0 for a shape that no such adapter has."""
        shape = self.skew.shape
        if len(shape) == 4:
            return shape[2] if shape[0] == 1 and shape[2] == shape[3] else 0
        found = (1 + math.isqrt(1 + 8 * shape[1])) // 2 if len(shape) == 2 else 0
        return found if found * (found - 1) == 2 * (shape[1] if len(shape) == 2 else 0) else 0

    def fits(self, *, is_shared: bool) -> bool:
        """Whether the blocks cover a row, each by itself or `is_shared` one for all, and the factors the rows."""
        number = self.skew.shape[-3] if len(self.skew.shape) == 4 else self.skew.shape[0]
        covers = self.size * number == self.unit or (is_shared and number == 1 and self.unit % max(1, self.size) == 0)
        return bool(self.size) and covers and (self.factors is None or self.factors.numel == self.base.shape[0])

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        rows, size = (stop - start) // self.unit, self.size
        blocks: Floats = KEPT.get((self, self.skew), lambda: self._rotations(tools))
        matrix = tools.read_floats(self.base, start, stop).reshape(rows, -1, size)
        found = np.zeros_like(matrix)
        for at in range(matrix.shape[1]):
            product: Floats = np.zeros(rows * size, np.float32)
            left = np.ascontiguousarray(matrix[:, at]).reshape(-1)
            tools.kernels.add_low_rank(product, left, blocks[at % len(blocks)].reshape(-1), size, 1.0)
            found[:, at] = product.reshape(rows, size)
        if self.factors is not None:
            first = start // self.unit
            found *= tools.read_floats(self.factors, first, first + rows)[:, None, None]
        return found.reshape(-1)

    def _rotations(self, tools: Tools) -> Floats:
        """The matrices that blocks of a row are multiplied by, from the right."""
        import numpy as np

        size, numbers = self.size, tools.read_floats(self.skew, 0, self.skew.numel)
        if len(self.skew.shape) == 4:
            blocks = numbers.reshape(-1, size, size)
            skew = np.float32(0.5) * (blocks - blocks.transpose(0, 2, 1))
        else:
            upper = np.zeros((self.skew.shape[0], size, size), np.float32)
            rows, columns = np.triu_indices(size, 1)
            upper[:, rows, columns] = numbers.reshape(len(upper), -1)
            skew = upper - upper.transpose(0, 2, 1)
        if self.bound:
            bound = np.float32(self.bound) / np.sqrt(np.float32(len(skew)))
            lengths = np.sqrt(np.square(skew, dtype=np.float64).sum(axis=(1, 2))).astype(np.float32)[:, None, None]
            skew = np.where(lengths <= bound, skew, bound * (skew / np.where(lengths == 0, np.float32(1), lengths)))
        turns = _solve(skew) if self.terms == _EXACT else _add_terms(skew, self.terms, tools)
        return np.ascontiguousarray(turns.transpose(0, 2, 1) if self.turned else turns)


def _add_terms(skew: Floats, terms: int, tools: Tools) -> Floats:
    """Unit matrix + 2 S + 2 S^2 + ... + S^n: the series to its nth term, where the last counts once."""
    import numpy as np

    size = skew.shape[1]

    def times(matrices: Floats) -> Floats:
        found: Floats = np.zeros_like(matrices)
        for at, (left, right) in enumerate(zip(matrices, skew, strict=True)):
            tools.kernels.add_low_rank(found[at].reshape(-1), left.reshape(-1), right.reshape(-1), size, 1.0)
        return found

    skew = np.ascontiguousarray(skew)
    total = np.tile(np.eye(size, dtype=np.float32), (len(skew), 1, 1))
    if terms > 1:
        total += 2 * skew
    if terms > 2:
        power = times(skew)
        total += 2 * power
        for _ in range(3, terms - 1):
            power = times(power)
            total += 2 * power
        total += times(power)
    return total


def _solve(skew: Floats) -> Floats:
    """(unit matrix - S) times the inverse of (unit matrix + S), by elimination, in which no pivot can be zero."""
    import numpy as np

    whole = skew.astype(np.float64)
    unit = np.eye(skew.shape[1])
    left, right = unit - whole, unit + whole  # X (I + S) = I - S; both factors commute
    for at in range(skew.shape[1]):
        pivot = right[:, at : at + 1, at : at + 1]
        row, own = right[:, at : at + 1] / pivot, left[:, at : at + 1] / pivot
        factors = right[:, :, at : at + 1].copy()
        right -= factors * row
        left -= factors * own
        right[:, at : at + 1], left[:, at : at + 1] = row, own
    return left.astype(np.float32)


def rotate_rows(config: Mapping[str, object], base: TensorEntry, parts: Mapping[str, TensorEntry]) -> RotatedRows:
    """The recipe of a weight with an OFT or a BOFT; `parts` by what they are called: `oft_R.weight`, `boft_s`."""
    if "boft_R" in parts:
        return RotatedRows(base, parts["boft_R"], parts.get("boft_s"))
    (name, skew), *_ = parts.items()
    said, length = config.get("num_cayley_neumann_terms", 5), config.get("eps", 6e-5)
    terms = max(1, said) if config.get("use_cayley_neumann") and isinstance(said, int) else _EXACT
    bound = float(length) if config.get("coft") and isinstance(length, (int, float)) else 0.0
    return RotatedRows(base, skew, terms=terms, bound=bound, turned="embedding" not in name)
