"""Parameters that are stored end to end in flat vectors, of one rank or of several.

For every family that keeps flat vectors. How long each rank's part is, and where padding is, differs from family to family: see
[Note: flat groups, partitions, padding] in `zero.partition` for DeepSpeed's ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zckpt.base.errors import OTHER_SAVE, InconsistentError
from zckpt.base.words import count
from zckpt.containers import TensorRef
from zckpt.core.catalog import Role, TensorEntry
from zckpt.core.fragments import Fragment
from zckpt.layouts.save.module_states import Shape


class VectorRun(NamedTuple):
    """Elements [start, start + count) of a parameter, at element `offset` of vector number `index`."""

    index: int  # type: ignore[assignment]  # tuple's method of this name is not needed
    offset: int
    start: int
    count: int  # type: ignore[assignment]  # tuple's method of this name is not needed


def fragment_of(vector: TensorRef, piece: VectorRun, start: int, file: str) -> Fragment:
    """A piece of a parameter, as a fragment of a rank's vector; its first element is number `start` of the tensor.
    Raises InconsistentError if the vector is shorter than the piece needs.
    """
    if piece.offset + piece.count > (vector.shape[0] if len(vector.shape) == 1 else vector.numel):
        raise InconsistentError(
            "optimizer state is shorter than its master weights",
            file=file,
            found=f"{vector.numel:,} elements",
            expected=f"{piece.offset + piece.count:,} elements or more",
            remedy=OTHER_SAVE,
        )
    return Fragment(vector.store, vector.byte_offset + piece.offset * vector.dtype.itemsize, start, piece.count)


def unflatten(
    shapes: Mapping[str, Shape], runs: Sequence[tuple[TensorRef, int]], role: Role = "parameter"
) -> dict[str, TensorEntry]:
    """The parameters that are stored end to end in the first elements of vectors, one vector after another.

    Args:
        shapes: name -> shape, in the order in which the parameters are stored.
        runs: dense vectors of one dtype, and how many elements of each are parameters'. What is behind them is padding.
        role: of the parameters.

    Returns:
        Name -> the parameter, in the order of `shapes`.

    Raises:
        InconsistentError: the parameters need more elements than there are, or fewer; or vectors are not what they should be.
    """
    if not shapes:
        return {}
    file = runs[0][0].store.path if runs else ""
    wanted, held = sum(math.prod(shape) for shape in shapes.values()), sum(used for _, used in runs)
    if wanted != held or not runs:
        raise InconsistentError(
            "does not hold as many elements as its parameters have",
            file=file,
            found=f"{count(held, 'element')} in {count(len(runs), 'vector')}",
            expected=f"{wanted:,} for {count(len(shapes), 'parameter')}",
            remedy=OTHER_SAVE,
        )
    for ref, used in runs:
        if not ref.is_contiguous or not 0 <= used <= ref.numel or ref.dtype != runs[0][0].dtype:
            raise InconsistentError(
                "holds a flat vector that does not fit the others",
                file=ref.store.path,
                found=f"{ref.dtype} {list(ref.shape)}",
                expected=f"a dense vector of {runs[0][0].dtype} with at least {used:,} elements",
                remedy=OTHER_SAVE,
            )
    entries: dict[str, TensorEntry] = {}
    index = at = 0
    for name, shape in shapes.items():
        numel, done = math.prod(shape), 0
        fragments: list[Fragment] = []
        while done < numel:
            ref, stop = runs[index]
            if step := min(numel - done, stop - at):
                fragments.append(Fragment(ref.store, ref.byte_offset + at * ref.dtype.itemsize, done, step))
            done, at = done + step, at + step
            if at == stop:
                index, at = index + 1, 0
        entries[name] = TensorEntry(name, shape, runs[0][0].dtype, role, tuple(fragments))
    return entries
