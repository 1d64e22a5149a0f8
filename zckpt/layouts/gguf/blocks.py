"""Elements in blocks of ggml's types: floats made from them, and blocks made from floats, while they are moved.

For `read` and `write`. [Note: Q8_0] 32 elements of a row share a scale: the largest absolute value divided by 127, stored as
fp16. The elements are multiplied by the reciprocal of the scale before its rounding to fp16, and rounded to whole numbers, halves
away from zero. An element is that number times the stored scale, in fp32.
Source: gguf-py 0.19.0, quants.py `Q8_0` (the same bits as ggml, src/ggml-quants.c `quantize_row_q8_0_ref`). Of the other types:
`engine.kernels_to_ggml`, which `verify` computes them with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zckpt.base.errors import CastError
from zckpt.containers.gguf_file import BY_NAME, Q8_0, GgmlType
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32, U8
from zckpt.core.folds import read_numbers
from zckpt.core.recipes import DerivedStore, Formula, derive_entry
from zckpt.engine import kernels_to_ggml
from zckpt.engine.kernels import ReferenceKernels
from zckpt.layouts.gguf.importance import Weighting

if TYPE_CHECKING:
    from zckpt.core.catalog import Catalog
    from zckpt.core.folds import Array, Tools

_AT_ONCE = 1 << 18
"""The most numbers that become blocks at once."""
_UNWEIGHTED = (Q8_0, BY_NAME["MXFP4"])
"""Types in which an importance matrix changes nothing."""
_OF = "of "
"""The beginning of the fact of a recipe of the numbers that blocks stand for; the type's name follows."""


def blocks_of(entry: TensorEntry, kind: GgmlType, weighting: Weighting | None, *, again: bool) -> Formula:
    """The recipe of a tensor as bytes of a type's blocks; of Q8_0, see [Note: Q8_0]. Arguments as for `in_blocks`."""
    block, nbytes = kind.block, kind.nbytes
    beside = () if weighting is None else weighting.entries
    row = entry.shape[-1] // block * nbytes

    def reads(start: int, stop: int) -> Iterable[tuple[TensorEntry, int, int]]:
        return [(entry, start // nbytes * block, stop // nbytes * block), *((one, 0, one.numel) for one in beside)]

    def compute(start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`. Raises CastError if a block holds what the type cannot."""
        import numpy as np

        blocks = np.empty(stop - start, np.uint8)
        for first, last, columns, expert in parts(start, stop):
            where = entry, first // nbytes * block, last // nbytes * block
            out = blocks[first - start : last - start]
            if kind is Q8_0:
                tools.kernels.to_q8_0(read_numbers(*where, tools), out)
                continue
            numbers = tools.read_floats(*where)
            weights = None if weighting is None else weighting.of_expert(expert, columns, tools)
            encode = kernels_to_ggml.to_ggml if again else tools.kernels.to_ggml
            if unsound := encode(kind.name, numbers, columns, weights, out):
                raise CastError(
                    f"tensor {entry.name!r} holds numbers that have no place in {kind.name}",
                    found=f"{unsound:,} of the blocks that were looked at hold NaN, infinity, or too large a number",
                    expected="finite numbers, with scales that fp16 holds", remedy="Look at it with `zckpt verify CKPT --deep`.",
                )  # fmt: skip
        return blocks

    def parts(start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """The parts that are computed at once: bytes [first, last), the columns of a row, and the expert."""
        if weighting is None:
            step = _AT_ONCE // block * nbytes
            yield from ((first, min(first + step, stop), block, 0) for first in range(start, stop, step))
            return
        *_, rows, columns = entry.shape
        step = max(1, _AT_ONCE // columns)
        at, end = start // row, stop // row
        while at < end:
            until = min(at + step, end, (at // rows + 1) * rows)
            yield at * row, until * row, columns, at // rows
            at = until

    more = () if weighting is None else ("weighted", weighting.calls)
    unit = nbytes if weighting is None else row
    return Formula((entry, *beside), (f"to {kind.name}", *more), compute, unit, reads)


def in_blocks(
    entry: TensorEntry, kind: GgmlType = Q8_0, weighting: Weighting | None = None, *, again: bool = False
) -> TensorEntry:
    """A tensor as bytes of a type's blocks; its rows must be whole blocks.

    Args:
        entry: the tensor.
        kind: the type.
        weighting: how much its columns matter.
        again: whether it is for `verify`.
    """
    recipe = blocks_of(entry, kind, None if kind in _UNWEIGHTED else weighting, again=again)
    return derive_entry(entry.name, kind.stored(entry.shape), U8, recipe, entry.role)


def as_floats(blocks: TensorEntry, kind: GgmlType = Q8_0, *, again: bool = False) -> TensorEntry:
    """The numbers of a tensor of blocks, as fp32; `again`: as `verify` computes them, by other code."""

    def reads(start: int, stop: int) -> Iterable[tuple[TensorEntry, int, int]]:
        return [(blocks, start // kind.block * kind.nbytes, stop // kind.block * kind.nbytes)]

    def compute(start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        ((_, first, last),) = reads(start, stop)
        numbers = np.empty(stop - start, np.float32)
        raw: Any = tools.read(blocks, first, last)
        kernels = ReferenceKernels() if again else tools.kernels
        if kind is Q8_0:
            kernels.of_q8_0(raw, numbers)
        else:
            kernels.of_ggml(kind.name, raw, numbers)
        return numbers

    shape = (*blocks.shape[:-1], blocks.shape[-1] // kind.nbytes * kind.block)
    recipe = Formula((blocks,), (_OF + kind.name,), compute, kind.block, reads)
    return derive_entry(blocks.name, shape, F32, recipe, blocks.role)


def read_again(catalog: Catalog) -> Catalog:
    """The catalog, with blocks that become numbers as `verify` computes them: by numpy, not by the C++ loops."""
    return replace(catalog, tensors={name: _again(entry) for name, entry in catalog.tensors.items()})


def _again(entry: TensorEntry) -> TensorEntry:
    recipes = [f.store.recipe for f in entry.fragments if isinstance(f.store, DerivedStore)]
    fact = str(recipes[0].facts[0]) if len(entry.fragments) == 1 and recipes else ""
    kind = BY_NAME[fact.removeprefix(_OF)] if fact.startswith(_OF) else None
    return entry if kind is None else as_floats(recipes[0].inputs[0], kind, again=True)
