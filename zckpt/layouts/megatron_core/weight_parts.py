"""The chunks of a save's weights, each as one rank had it, and the numbers that they and vectors of buckets hold.

For `placing`.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zckpt.core.dtypes import BF16, F16, F32, DType
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import clip
from zckpt.engine.elements import ElementReader, Wanted
from zckpt.engine.rounding import cast
from zckpt.layouts.dcp.items import Items
from zckpt.layouts.dcp.metadata import TensorItem
from zckpt.layouts.megatron_core.buckets import BucketVector

_PART = 1 << 20
_NUMBERED = re.compile(r"\.(\d+)(?=\.)")


class WeightPart(NamedTuple):
    """A chunk of a weight: what one rank has of one layer.

    Attributes:
        name: of the weight.
        offsets: its first index in the weight.
        sizes: its extents.
        dtype: of the weight.
        fragments: its elements, in its own order.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: DType
    fragments: Sequence[Fragment]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    def layer(self) -> tuple[str, int] | None:
        """The stack of layers and the number in it; None for a weight outside of layers."""
        before, found, after = self.name.partition(".layers.")
        if not found:
            return None
        number = after.partition(".")[0]
        return before, int(number) if number.isdecimal() else self.offsets[0]

    def stem(self) -> str:
        """Its name without numbers of layers and experts."""
        return _NUMBERED.sub("", self.name)


def parts_of(weights: Mapping[str, TensorItem], items: Items) -> list[WeightPart]:
    """The chunks of floating weights, each as one rank had it."""
    items.open_all(weights.values())
    return [
        WeightPart(name, chunk.offsets, chunk.sizes, item.dtype, items.chunk_fragments(item, chunk))
        for name, item in weights.items()
        if item.dtype in (F32, BF16, F16)
        for chunk in item.chunks
        if chunk.numel
    ]


class HeldNumbers:
    """Reads numbers of parts and vectors, as bytes in a weight's dtype."""

    def __init__(self, reader: ElementReader) -> None:
        self._reader = reader

    def of_part(self, part: WeightPart, start: int, stop: int) -> bytes:
        """Elements [start, stop) of a part."""
        return self._reader.read(Wanted(part.fragments, part.dtype, start, stop))

    def of_vector(self, vector: BucketVector, dtype: DType, start: int, stop: int) -> bytes:
        """Elements [start, stop) of the fp32 weights of a vector, rounded."""
        data = self._reader.read(Wanted(clip(vector.states["param"], start, stop, 4), F32, 0, stop - start))
        return cast(data, F32, dtype, sys.byteorder, False)[0]

    def agree(self, part: WeightPart, vector: BucketVector, start: int) -> bool:
        """Whether all numbers of a part are those of a vector."""
        cuts = ((at, min(at + _PART, part.numel)) for at in range(0, part.numel, _PART))
        return all(
            self.of_part(part, low, high) == self.of_vector(vector, part.dtype, start + low, start + high)
            for low, high in cuts
        )

    def digest(self, vector: BucketVector, start: int, numel: int) -> bytes:
        """Of all states of some elements."""
        found = hashlib.sha256()
        for _, fragments in sorted(vector.states.items()):
            for low in range(start, start + numel, _PART):
                high = min(low + _PART, start + numel)
                found.update(self._reader.read(Wanted(clip(fragments, low, high, 4), F32, 0, high - low)))
        return found.digest()
