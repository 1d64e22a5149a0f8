"""Recipes for weights into which LoHa, LoKr, VeRA and IA3 are merged, as PEFT merges them; `rotations` has those of OFT and BOFT.

For `merge`. All is computed in fp32, in PEFT's order: a LoHa adds the product, element by element, of two low-rank products; a
LoKr adds the Kronecker product of two matrices, and each may be a low-rank product itself; a VeRA adds a product of two matrices
that all modules share, with the rows of each multiplied by numbers; an IA3 multiplies each column (of a feed-forward layer) or
row of a weight by a number, and the rows of its bias.
Source: PEFT 0.21.2, tuners/loha/layer.py `HadaWeight`, tuners/lokr/layer.py `make_kron`, tuners/ia3/layer.py `merge`,
tuners/lycoris_utils.py `merge`, tuners/vera/layer.py `get_delta_weight`.
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
