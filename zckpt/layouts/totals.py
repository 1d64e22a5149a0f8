"""The one thing that is not a move: a parameter that is the mean or the sum of what several ranks hold.

For `slices`. Such parameters are vectors (norms, biases); they are computed in memory when their elements are asked for, in
the order of additions of the tools they come from, so that the result is theirs to the bit.
Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py: `sum(slices) / len(slices)`; gpt-neox,
tools/ckpts/convert_neox_to_hf.py, likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from zckpt.catalog import TensorEntry
from zckpt.errors import UnsupportedError
from zckpt.fragments import Fragment, MemoryStore
from zckpt.mover import run
from zckpt.plan import Plan


def total_of(slices: Sequence[TensorEntry], total: Literal["mean", "sum"]) -> bytearray:
    """The elements of the mean or sum, in the slices' dtype.

    Raises:
        UnsupportedError: a dtype that numpy cannot add up.
    """
    import numpy

    first = slices[0]
    if not first.dtype.numpy or first.dtype.kind != "float":
        raise UnsupportedError(f"the {total} of slices of {first.dtype}", found=repr(first.name))
    summed = numpy.zeros(first.numel, first.dtype.numpy)
    for entry in slices:
        part = numpy.empty(first.numel, first.dtype.numpy)
        store = MemoryStore(part.ctypes.data, part.nbytes, part)
        held = replace(entry, fragments=(Fragment(store, 0, 0, entry.numel),), replicas=())
        run(Plan((), [(entry, held)]), "")
        summed += part
    if total == "mean":
        summed /= summed.dtype.type(len(slices))
    return bytearray(summed.tobytes())
