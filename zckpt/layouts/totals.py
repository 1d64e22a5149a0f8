"""The one thing that is not a move: a parameter that is the mean or the sum of what several ranks hold.

For `slices`. Such parameters are vectors (norms, biases); they are computed in memory when their elements are asked for, in
the order of additions of the tools they come from, so that the result is theirs to the bit.
Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py: `sum(slices) / len(slices)`; gpt-neox,
tools/ckpts/convert_neox_to_hf.py, likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from zckpt.catalog import TensorEntry
from zckpt.errors import UnsupportedError
from zckpt.open_files import OpenFiles
from zckpt.rederive import elements


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
    with OpenFiles() as files:
        for entry in slices:
            summed += numpy.frombuffer(elements(entry, 0, entry.numel, files), first.dtype.numpy)
        files.check_sources()
    if total == "mean":
        summed /= summed.dtype.type(len(slices))
    return bytearray(summed.tobytes())
