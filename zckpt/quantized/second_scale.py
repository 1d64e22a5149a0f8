"""Scales of scales of tensors that share one: computed once, from whole tensors, which are read for it alone.

For `quantise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from zckpt.core.catalog import TensorEntry
from zckpt.core.folds import MatrixBlocks, read_numbers
from zckpt.quantized.coded import BlockScales
from zckpt.quantized.targets import second_of

if TYPE_CHECKING:
    from zckpt.core.folds import Tools

_AT_ONCE = 1 << 19
"""The most elements that are read together: a second-level cache has room for them."""


class Powers(NamedTuple):
    """A tensor of MXFP4 that becomes NVFP4: its blocks' powers of two are scales of halves of these blocks.

    Attributes:
        numbers: the tensor, with a row of blocks for each row of a matrix.
        scales: its powers, one for 32 elements (E8M0).
    """

    numbers: TensorEntry
    scales: TensorEntry


class Second:
    """A scale of scales that several tensors share, because servers of models join them.

    Args:
        entries: these tensors.
        powers: their powers of two, if all are of MXFP4; the scale of scales is then one too, and the largest scale 2^8.

    Attributes:
        following: the one that is probably asked for next; the disk reads its tensors while these ones are quantised.
    """

    def __init__(self, entries: tuple[TensorEntry, ...], powers: tuple[Powers, ...] = ()) -> None:
        self.entries = entries
        self.powers = powers
        self.inputs = (*entries, *(one.scales for one in powers))
        self.following: Second | None = None
        self._lock = Lock()
        self._value: float | None = None

    def value(self, tools: Tools) -> float:
        """It. The tensors are read when it is asked for the first time."""
        with self._lock:
            if self._value is None:
                wholes = self._wholes
                parts = [(number, at) for number, entry in enumerate(wholes) for at in range(0, entry.numel, _AT_ONCE)]
                tops = tools.each(lambda part, tools: self._top_of(*part, tools), parts)
                top = next(filter(math.isnan, tops), max(tops, default=0.0))
                self._value = math.ldexp(1.0, min(127, 9 - math.frexp(top)[1])) if self.powers else second_of(top)
                if self.following is not None:
                    tools.expect(self.following._wholes)
            return self._value

    @property
    def _wholes(self) -> Sequence[TensorEntry]:
        return [one.scales for one in self.powers] or self.entries

    def _top_of(self, number: int, at: int, tools: Tools) -> float:
        """The largest magnitude or power of a part of a tensor."""
        import numpy as np

        if self.powers:
            one = self.powers[number]
            stop = min(at + _AT_ONCE, one.scales.numel)
            return float(BlockScales(one.scales).read(at, stop, tools, one.numbers.name).max())
        entry, found = self.entries[number], np.zeros(1, np.float32)
        part = read_numbers(entry, at, min(at + _AT_ONCE, entry.numel), tools)
        tools.kernels.largest(part, MatrixBlocks(1, len(part), 1, len(part)), found)
        return float(found[0])
