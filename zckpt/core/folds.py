"""Tensors that are taken up one after another, such as the terms of a sum: what recipes (`recipes`) and engines know of it.

The native engine does it while it reads, where the numbers of all tensors lie in files in runs (`csrc/fold.cpp`); elsewhere
`folded` does, with the loops of either engine. All give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.fragments import FileStore

if TYPE_CHECKING:
    from zckpt.core.recipes import Array, Floats, Tools


class How(IntEnum):
    """What becomes of the numbers so far, in fp32, when the next tensor comes; `csrc/mover.h` has them in this order."""

    SET = 0
    """They are the tensor."""
    ADD = 1
    """`a` times the tensor is added: product and sum are rounded."""
    APPROACH = 2
    """They move by (tensor - they) / `a`; each step is rounded."""
    BLEND = 3
    """They are `a` times they + `b` times the tensor; products and sum are rounded."""
    DIFFER = 4
    """`a` times (tensor - what was set) is added, each step rounded."""


class Uptake(NamedTuple):
    """How one tensor is taken up; the factors are rounded to fp32."""

    how: How
    a: float = 0.0
    b: float = 0.0


def folded(inputs: Sequence[TensorEntry], steps: Sequence[Uptake], start: int, stop: int, tools: Tools) -> Floats:
    """Elements [start, stop) of tensors that are taken up one after another, beginning with zeros.

    Args:
        inputs: the tensors, of one shape.
        steps: one for each of them.
        start: first element.
        stop: one past the last.
        tools: to read and compute with.
    """
    import numpy as np

    base = total = np.zeros(stop - start if steps[0].how != How.SET else 0, np.float32)
    differs = any(step.how == How.DIFFER for step in steps)
    for entry, (how, a, b) in zip(inputs, steps, strict=True):
        numbers = tools.read_floats(entry, start, stop)
        match how:
            case How.SET:
                base, total = numbers, numbers.copy() if differs else numbers
            case How.ADD:
                tools.kernels.accumulate(total, numbers, a)
            case How.APPROACH:
                tools.kernels.approach(total, numbers, a)
            case How.BLEND:
                tools.kernels.blend(total, numbers, a, b)
            case How.DIFFER:
                tools.kernels.accumulate(numbers, base, -1.0)
                tools.kernels.accumulate(total, numbers, a)
    return total


class Fold:
    """A recipe that takes up one tensor after another: an engine may do that itself, by its `inputs` and `steps`."""

    __slots__ = ()
    inputs: tuple[TensorEntry, ...]

    @property
    def steps(self) -> tuple[Uptake, ...]:
        """One for each input."""
        raise NotImplementedError

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`; fp32."""
        return folded(self.inputs, self.steps, start, stop, tools)


_MOST_FILES = 128
"""A batch names so many files for one tensor, and has room for others."""


def are_at_hand(inputs: Sequence[TensorEntry]) -> bool:
    """Whether an engine can read all of these itself, as runs of numbers that fp32 holds."""
    files = {id(fragment.store) for entry in inputs for fragment in entry.fragments}
    return len(files) <= _MOST_FILES and all(
        entry.flat
        and (entry.dtype == F32 or (entry.dtype.kind == "float" and entry.dtype.itemsize < F32.itemsize))
        and all(isinstance(fragment.store, FileStore) and fragment.store.at_hand for fragment in entry.fragments)
        for entry in inputs
    )
