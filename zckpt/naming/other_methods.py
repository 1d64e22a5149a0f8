"""Recipes for weights into which LoHa, LoKr, VeRA and IA3 are merged, or which an OFT or a BOFT turns, as PEFT merges them.

For `merge`. All is computed in fp32, in PEFT's order: a LoHa adds the product, element by element, of two low-rank products; a
LoKr adds the Kronecker product of two matrices, and each may be a low-rank product itself; a VeRA adds a product of two matrices
that all modules share, with the rows of each multiplied by numbers; an IA3 multiplies each column (of a feed-forward layer) or
row of a weight by a number, and the rows of its bias.
Source: PEFT 0.21.2, tuners/loha/layer.py `HadaWeight`, tuners/lokr/layer.py `make_kron`, tuners/ia3/layer.py `merge`,
tuners/lycoris_utils.py `merge`, tuners/vera/layer.py `get_delta_weight`.

OFT and BOFT: blocks of a row's elements, each times a rotation. A rotation
comes of a skew-symmetric matrix by Cayley's formula, or by the first terms of its series. Products are
the kernels', in fp32; equations are solved in fp64, element by element, so that all machines find the same bits.
Source: PEFT 0.21.2, tuners/oft/layer.py `OFTRotationModule`, `Linear.merge`, `Embedding.merge`; tuners/boft/layer.py
`cayley_batch`, `Linear.merge`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import TensorEntry
from zckpt.core.folds import Tools
from zckpt.naming.merged_matrix import KEPT

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Floats


Parts = Mapping[str, TensorEntry]

_PARTS = {
    "LOHA": r"hada_w[12]_[ab]",
    "LOKR": r"lokr_w[12](?:_[ab])?",
    "IA3": r"ia3_l",
    "VERA": r"vera_(?:lambda_[bd]|[AB])",
    "OFT": r"oft_(?:embedding_)?R\.weight",
    "BOFT": r"boft_[Rs]",
}
"""PEFT's `peft_type` -> the pattern of its tensors' names in one module; convolutions that are factored further have
others.
"""

SHARED = "base_model"
"""The module of the matrices that all modules of a VeRA share."""

SUMS = ("LOHA", "LOKR")
"""The methods that PEFT multiplies by a weight."""

CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Model types that have layers with a row of weights for each input. Source: transformers 5.23, pytorch_utils.py `Conv1D`."""


def parse_part(peft_type: object, name: str) -> tuple[str, str] | None:
    """(module, part) of a tensor of one of these methods; None for any other tensor.

    Args:
        peft_type: that the adapter's config says.
        name: of the tensor, without `base_model.model.`.
    """
    pattern = _PARTS.get(str(peft_type))
    found = re.fullmatch(rf"(?P<module>.+)\.(?P<part>{pattern})", name) if pattern else None
    return (found["module"], found["part"]) if found else None


def is_known(peft_type: object) -> bool:
    """Whether adapters of this type are merged by the recipes here."""
    return str(peft_type) in _PARTS


@dataclass(frozen=True, slots=True)
class MergedProduct:
    """A weight to which a LoHa or a LoKr is added: a recipe.

    Attributes:
        base: the weight.
        parts: the method's matrices by what they are called: `hada_w1_a`, `lokr_w2`.
        scaling: what the product is multiplied by.
    """

    base: TensorEntry
    parts: tuple[tuple[str, TensorEntry], ...]
    scaling: float

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        return self.base, *(entry for _, entry in self.parts)

    @property
    def facts(self) -> tuple[object, ...]:
        return ("product", self.scaling, *(name for name, _ in self.parts))

    @property
    def unit(self) -> int:
        return math.prod(self.base.shape[1:])

    def misfit(self) -> TensorEntry | None:
        """A matrix with a shape that does not fit the others or the weight; None if all fit."""
        parts = dict(self.parts)
        sides = (
            self._side(parts, name)
            for name in (("hada_w1", "hada_w2") if self._is_hadamard else ("lokr_w1", "lokr_w2"))
        )
        (first, second), (rows, columns) = sides, (self.base.shape[0], self.unit)
        odd = next(iter(parts.values()))
        if first is None or second is None:
            return odd
        if self._is_hadamard:
            return None if first == second == (rows, columns) else odd
        return None if (first[0] * second[0], first[1] * second[1]) == (rows, columns) else odd

    @property
    def _is_hadamard(self) -> bool:
        return self.parts[0][0].startswith("hada")

    @staticmethod
    def _side(parts: Parts, name: str) -> tuple[int, int] | None:
        """The rows and columns of a matrix, or of the product of its factors; None if these do not fit each other."""
        if name in parts:
            shape = parts[name].shape
            return (shape[0], math.prod(shape[1:])) if len(shape) in (2, 4) else None
        a, b = (parts[f"{name}_{side}"].shape if f"{name}_{side}" in parts else () for side in "ab")
        return (a[0], b[1]) if len(a) == len(b) == 2 and a[1] == b[0] else None

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        first, last = start // self.unit, stop // self.unit
        matrix: Floats = tools.read_floats(self.base, start, stop)
        if self._is_hadamard:
            update = self._matrix("hada_w1", first, last, tools) * self._matrix("hada_w2", first, last, tools)
        else:
            height = dict(self.parts).get("lokr_w2", dict(self.parts).get("lokr_w2_a", self.base)).shape[0]
            low, high = first // height, -(-last // height)
            outer, inner = self._matrix("lokr_w1", low, high, tools), self._matrix("lokr_w2", 0, height, tools)
            numbers = np.arange(first, last)
            update = (outer[numbers // height - low][:, :, None] * inner[numbers % height][:, None, :]).reshape(
                last - first, -1
            )
        update *= np.float32(self.scaling)
        matrix += update.reshape(-1)
        return matrix

    def _matrix(self, name: str, first: int, last: int, tools: Tools) -> Floats:
        """Rows [first, last) of a matrix, or of the product of its factors."""
        import numpy as np

        parts = dict(self.parts)
        if name in parts:
            columns = math.prod(parts[name].shape[1:])
            rows: Floats = tools.read_floats(parts[name], first * columns, last * columns)
            return rows.reshape(last - first, columns)
        a, b = parts[f"{name}_a"], parts[f"{name}_b"]
        rank, columns = b.shape
        product: Floats = np.zeros((last - first) * columns, np.float32)
        left = tools.read_floats(a, first * rank, last * rank)
        tools.kernels.add_low_rank(product, left, tools.read_floats(b, 0, b.numel), rank, 1.0)
        return product.reshape(last - first, columns)


@dataclass(frozen=True, slots=True)
class MergedVera:
    """A weight to which a VeRA is added: a recipe.

    Attributes:
        base: the weight.
        a: the shared matrix with a row for each rank, of more columns perhaps than the weight has inputs.
        b: the shared matrix with a row for each output, and perhaps more.
        of_ranks: a number for each rank.
        of_outputs: a number for each output.
        turned: whether the weight has a row for each input.
    """

    base: TensorEntry
    a: TensorEntry
    b: TensorEntry
    of_ranks: TensorEntry
    of_outputs: TensorEntry
    turned: bool

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        return self.base, self.a, self.b, self.of_ranks, self.of_outputs

    @property
    def facts(self) -> tuple[object, ...]:
        return ("vera", self.turned)

    @property
    def unit(self) -> int:
        return self.base.shape[1]

    def fits(self) -> bool:
        """Whether the shapes fit each other."""
        outputs, inputs = self.base.shape[::-1] if self.turned else self.base.shape
        ranks, there = self.of_ranks.numel, len(self.a.shape) == len(self.b.shape) == 2
        fits = self.of_outputs.numel == outputs and there and self.b.shape[1] == self.a.shape[0] == ranks
        return fits and self.b.shape[0] >= outputs and self.a.shape[1] >= inputs

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        rank, width = self.a.shape
        first, last = start // self.unit, stop // self.unit
        matrix: Floats = tools.read_floats(self.base, start, stop)
        ranks = tools.read_floats(self.of_ranks, 0, rank)[:, None]

        def down(low: int, high: int) -> Floats:
            rows = [tools.read_floats(self.a, at + low, at + high) for at in range(0, rank * width, width)]
            return np.stack(rows) * ranks

        def up(low: int, high: int) -> Floats:
            factors = tools.read_floats(self.of_outputs, low, high)[:, None]
            return tools.read_floats(self.b, low * rank, high * rank).reshape(-1, rank) * factors

        if self.turned:
            left = np.ascontiguousarray(down(first, last).T)
            right = KEPT.get((self,), lambda: np.ascontiguousarray(up(0, self.unit).T))
        else:
            left = up(first, last)
            right = KEPT.get((self,), lambda: down(0, self.unit))
        tools.kernels.add_low_rank(matrix, left.reshape(-1), right.reshape(-1), rank, 1.0)
        return matrix


@dataclass(frozen=True, slots=True)
class ScaledLines:
    """A weight, its rows or columns multiplied by an IA3: a recipe.

    Attributes:
        base: the weight, or a bias.
        factors: a number for each row, or for each column.
        by_row: which.
    """

    base: TensorEntry
    factors: TensorEntry
    by_row: bool

    @property
    def inputs(self) -> tuple[TensorEntry, ...]:
        return self.base, self.factors

    @property
    def facts(self) -> tuple[object, ...]:
        return ("scaled", self.by_row)

    @property
    def unit(self) -> int:
        return max(1, math.prod(self.base.shape[1:]))

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        first, last = start // self.unit, stop // self.unit
        matrix: Floats = tools.read_floats(self.base, start, stop)
        low, high = (first, last) if self.by_row else (0, self.factors.numel)
        factors = tools.read_floats(self.factors, low, high)
        shaped = matrix.reshape(last - first, -1) if self.by_row else matrix.reshape(-1, self.factors.numel)
        shaped *= factors[:, None] if self.by_row else factors[None, :]
        return matrix


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
