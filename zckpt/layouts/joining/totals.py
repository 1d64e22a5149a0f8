"""Elements that are computed: the mean or the sum of several ranks' slices, and whole numbers as floats.

For `slices` and `universal`. Such tensors are small (norms, biases, counters); they are computed in memory when their
elements are used, in the order of additions of the tools they come from, so that the result is the same bit for bit.
Source: DeepSpeed 0.19.8, checkpoint/ds_to_universal.py: `sum(slices) / len(slices)`; gpt-neox,
tools/ckpts/convert_neox_to_hf.py, likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from zckpt.base.errors import UnsupportedError
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.fragments import ComputedStore, Fragment
from zckpt.engine.elements import ElementReader, elements

if TYPE_CHECKING:
    import numpy


def total_of(slices: Sequence[TensorEntry], total: Literal["mean", "sum"]) -> bytearray:
    """The elements of the mean or sum, in the slices' dtype. Raises UnsupportedError if numpy cannot add up the dtype."""
    import numpy

    first = slices[0]
    if not first.dtype.numpy or first.dtype.kind != "float":
        raise UnsupportedError(
            f"cannot compute the {total} of slices of {first.dtype}",
            found=f"tensor {first.name!r}",
            remedy="Pass another rule for it with --tp-rules, or leave it out with --exclude.",
        )
    summed = numpy.zeros(first.numel, first.dtype.numpy)
    for entry in slices:
        summed += _array_of(entry)
    if total == "mean":
        summed /= summed.dtype.type(len(slices))
    return bytearray(summed.tobytes())


def as_float(entry: TensorEntry) -> TensorEntry:
    """A tensor as fp32 numbers, as by torch's `.float()`: floats are cast by the engine, others in memory. Raises
    UnsupportedError if the numbers are complex.
    """
    if entry.dtype.kind == "float":
        return replace(entry, replicas=())
    if entry.dtype.kind == "complex":
        raise UnsupportedError(
            "cannot convert complex numbers to floats",
            found=f"tensor {entry.name!r}",
            remedy="Leave it out with --exclude.",
        )
    store = ComputedStore(
        entry.numel * 4, lambda: bytearray(_array_of(entry).astype("<f4").tobytes()), sources_of([entry])
    )
    fragments = (Fragment(store, 0, 0, entry.numel),) if entry.numel else ()
    return TensorEntry(entry.name, entry.shape, F32, entry.role, fragments)


def sources_of(entries: Sequence[TensorEntry]) -> list[tuple[Sequence[Fragment], int]]:
    """The sources from which elements are computed, for these tensors."""
    return [(entry.fragments, entry.dtype.itemsize) for entry in entries]


def _array_of(entry: TensorEntry) -> numpy.ndarray[Any, Any]:
    """The elements of a tensor, in memory."""
    import numpy

    with ElementReader() as reader:
        data = reader.read(elements(entry, 0, entry.numel))
        reader.check_sources()
    return numpy.frombuffer(data, entry.dtype.numpy)
