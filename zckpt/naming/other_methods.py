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

from zckpt.core.catalog import TensorEntry
from zckpt.core.folds import Tools
from zckpt.core.recipes import Formula
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
    """(module, part) of a tensor of one of these methods, by its name without `base_model.model.`; None for any other
    tensor.
    """
    pattern = _PARTS.get(str(peft_type))
    found = re.fullmatch(rf"(?P<module>.+)\.(?P<part>{pattern})", name) if pattern else None
    return (found["module"], found["part"]) if found else None


def is_known(peft_type: object) -> bool:
    """Whether adapters of this type are merged by the recipes here."""
    return str(peft_type) in _PARTS


def add_product(base: TensorEntry, parts: Parts, scaling: float) -> Formula | None:
    """The recipe of a weight to which a LoHa or a LoKr is added; None where shapes do not fit each other.

    Args:
        base: the weight.
        parts: the method's matrices by what they are called (`hada_w1_a`, `lokr_w2`), in the order of these names.
        scaling: what the product is multiplied by.
    """
    is_hadamard = next(iter(parts)).startswith("hada")
    left, right = ("hada_w1", "hada_w2") if is_hadamard else ("lokr_w1", "lokr_w2")
    first, second = _sides(parts, left), _sides(parts, right)
    rows, unit = base.shape[0], math.prod(base.shape[1:])
    if first is None or second is None:
        return None
    if is_hadamard and not first == second == (rows, unit):
        return None
    if not is_hadamard and (first[0] * second[0], first[1] * second[1]) != (rows, unit):
        return None
    height = second[0]

    def compute(start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        first, last = start // unit, stop // unit
        matrix: Floats = tools.read_floats(base, start, stop)
        if is_hadamard:
            update = _matrix(parts, left, first, last, tools) * _matrix(parts, right, first, last, tools)
        else:
            low, high = first // height, -(-last // height)
            outer, inner = _matrix(parts, left, low, high, tools), _matrix(parts, right, 0, height, tools)
            numbers = np.arange(first, last)
            update = (outer[numbers // height - low][:, :, None] * inner[numbers % height][:, None, :]).reshape(
                last - first, -1
            )
        update *= np.float32(scaling)
        matrix += update.reshape(-1)
        return matrix

    return Formula((base, *parts.values()), ("product", scaling, *parts), compute, unit)


def _sides(parts: Parts, name: str) -> tuple[int, int] | None:
    """The rows and columns of a matrix, or of the product of its factors; None if these do not fit each other."""
    if name in parts:
        shape = parts[name].shape
        return (shape[0], math.prod(shape[1:])) if len(shape) in (2, 4) else None
    a, b = (parts[f"{name}_{side}"].shape if f"{name}_{side}" in parts else () for side in "ab")
    return (a[0], b[1]) if len(a) == len(b) == 2 and a[1] == b[0] else None


def _matrix(parts: Parts, name: str, first: int, last: int, tools: Tools) -> Floats:
    """Rows [first, last) of a matrix, or of the product of its factors."""
    import numpy as np

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


def add_vera(
    base: TensorEntry, a: TensorEntry, b: TensorEntry, of_ranks: TensorEntry, of_outputs: TensorEntry, *, turned: bool
) -> Formula | None:
    """The recipe of a weight to which a VeRA is added; None where shapes do not fit each other.

    Args:
        base: the weight.
        a: the shared matrix with a row for each rank, of more columns perhaps than the weight has inputs.
        b: the shared matrix with a row for each output, and perhaps more.
        of_ranks: a number for each rank.
        of_outputs: a number for each output.
        turned: whether the weight has a row for each input.
    """
    outputs, inputs = base.shape[::-1] if turned else base.shape
    if not len(a.shape) == len(b.shape) == 2 or not b.shape[1] == a.shape[0] == of_ranks.numel:
        return None
    if of_outputs.numel != outputs or b.shape[0] < outputs or a.shape[1] < inputs:
        return None
    (rank, width), unit = a.shape, base.shape[1]

    def compute(start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        first, last = start // unit, stop // unit
        matrix: Floats = tools.read_floats(base, start, stop)
        ranks = tools.read_floats(of_ranks, 0, rank)[:, None]

        def down(low: int, high: int) -> Floats:
            rows = [tools.read_floats(a, at + low, at + high) for at in range(0, rank * width, width)]
            return np.stack(rows) * ranks

        def up(low: int, high: int) -> Floats:
            factors = tools.read_floats(of_outputs, low, high)[:, None]
            return tools.read_floats(b, low * rank, high * rank).reshape(-1, rank) * factors

        if turned:
            left = np.ascontiguousarray(down(first, last).T)
            right = KEPT.get((of_outputs, b), lambda: np.ascontiguousarray(up(0, unit).T))
        else:
            left = up(first, last)
            right = KEPT.get((of_ranks, a), lambda: down(0, unit))
        tools.kernels.add_low_rank(matrix, left.reshape(-1), right.reshape(-1), rank, 1.0)
        return matrix

    return Formula((base, a, b, of_ranks, of_outputs), ("vera", turned), compute, unit)


def scale_lines(base: TensorEntry, factors: TensorEntry, *, by_row: bool) -> Formula:
    """The recipe of a weight or a bias, its rows (`by_row`) or columns multiplied by an IA3: a factor for each of these."""
    unit = max(1, math.prod(base.shape[1:]))

    def compute(start: int, stop: int, tools: Tools) -> Array:
        first, last = start // unit, stop // unit
        matrix: Floats = tools.read_floats(base, start, stop)
        low, high = (first, last) if by_row else (0, factors.numel)
        own = tools.read_floats(factors, low, high)
        shaped = matrix.reshape(last - first, -1) if by_row else matrix.reshape(-1, factors.numel)
        shaped *= own[:, None] if by_row else own[None, :]
        return matrix

    return Formula((base, factors), ("scaled", by_row), compute, unit)


_EXACT = 0
"""The number of terms that stands for Cayley's formula itself."""


def rotate_rows(config: Mapping[str, object], base: TensorEntry, parts: Parts) -> Formula | None:
    """The recipe of a matrix with each row's blocks of elements times rotations; None where shapes do not fit each other.

    Args:
        config: of the adapter. It says how many terms of the series count, the largest length of a skew-symmetric matrix
            times the root of their number (COFT), and whether all blocks share one rotation.
        base: the matrix.
        parts: what the rotations are made from: upper triangles of an OFT (`oft_R.weight`, blocks x numbers), or matrices of
            a BOFT (`boft_R`, 1 x blocks x size x size) with a number for each row (`boft_s`).
    """
    name = "boft_R" if "boft_R" in parts else next(iter(parts))
    skew, of_rows = parts[name], parts.get("boft_s")
    turned, terms, bound = "embedding" not in name, _EXACT, 0.0  # rotations of a Linear are transposed
    if name != "boft_R":
        said, length = config.get("num_cayley_neumann_terms", 5), config.get("eps", 6e-5)
        terms = max(1, said) if config.get("use_cayley_neumann") and isinstance(said, int) else _EXACT
        bound = float(length) if config.get("coft") and isinstance(length, (int, float)) else 0.0
    unit, size = math.prod(base.shape[1:]), _block_rows(skew.shape)
    number = skew.shape[-3] if len(skew.shape) == 4 else skew.shape[0]
    is_shared = bool(config.get("block_share")) and number == 1
    covers = size * number == unit or (is_shared and unit % max(1, size) == 0)
    if not size or not covers or (of_rows is not None and of_rows.numel != base.shape[0]):
        return None

    def compute(start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        rows = (stop - start) // unit
        blocks: Floats = KEPT.get((base, skew), lambda: _rotations(skew, size, terms, bound, tools, turned=turned))
        matrix = tools.read_floats(base, start, stop).reshape(rows, -1, size)
        found = np.zeros_like(matrix)
        for at in range(matrix.shape[1]):
            product: Floats = np.zeros(rows * size, np.float32)
            left = np.ascontiguousarray(matrix[:, at]).reshape(-1)
            tools.kernels.add_low_rank(product, left, blocks[at % len(blocks)].reshape(-1), size, 1.0)
            found[:, at] = product.reshape(rows, size)
        if of_rows is not None:
            first = start // unit
            found *= tools.read_floats(of_rows, first, first + rows)[:, None, None]
        return found.reshape(-1)

    inputs = (base, skew) if of_rows is None else (base, skew, of_rows)
    return Formula(inputs, ("rotated", terms, bound, turned), compute, unit)


def _block_rows(shape: tuple[int, ...]) -> int:
    """The rows of a block that is turned, by the shape of what rotations are made from; 0 for one that no adapter has."""
    if len(shape) == 4:
        return shape[2] if shape[0] == 1 and shape[2] == shape[3] else 0
    found = (1 + math.isqrt(1 + 8 * shape[1])) // 2 if len(shape) == 2 else 0
    return found if found * (found - 1) == 2 * (shape[1] if len(shape) == 2 else 0) else 0


def _rotations(entry: TensorEntry, size: int, terms: int, bound: float, tools: Tools, *, turned: bool) -> Floats:
    """The matrices that blocks of a row are multiplied by, from the right."""
    import numpy as np

    numbers = tools.read_floats(entry, 0, entry.numel)
    if len(entry.shape) == 4:
        blocks = numbers.reshape(-1, size, size)
        skew = np.float32(0.5) * (blocks - blocks.transpose(0, 2, 1))
    else:
        upper = np.zeros((entry.shape[0], size, size), np.float32)
        rows, columns = np.triu_indices(size, 1)
        upper[:, rows, columns] = numbers.reshape(len(upper), -1)
        skew = upper - upper.transpose(0, 2, 1)
    if bound:
        most = np.float32(bound) / np.sqrt(np.float32(len(skew)))
        lengths = np.sqrt(np.square(skew, dtype=np.float64).sum(axis=(1, 2))).astype(np.float32)[:, None, None]
        skew = np.where(lengths <= most, skew, most * (skew / np.where(lengths == 0, np.float32(1), lengths)))
    turns = _solve(skew) if terms == _EXACT else _add_terms(skew, terms, tools)
    return np.ascontiguousarray(turns.transpose(0, 2, 1) if turned else turns)


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
