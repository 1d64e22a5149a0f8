"""Scales of scales of tensors that share one: computed once, by all threads that wait for it.

For `quantise`. It is computed from whole tensors, which are read for it alone.
"""

from __future__ import annotations

import math
from threading import Condition
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
    """

    def __init__(self, entries: tuple[TensorEntry, ...], powers: tuple[Powers, ...] = ()) -> None:
        self.entries = entries
        self.powers = powers
        self.inputs = (*entries, *(one.scales for one in powers))
        self._changed = Condition()
        self._parts: list[tuple[int, int]] | None = None
        self._at_work = 0
        self._top = 0.0
        self._value: float | None = None

    def value(self, tools: Tools) -> float:
        """It. The tensors are read for the first who asks; others who ask meanwhile read parts of them, too."""
        with self._changed:
            if self._parts is None:
                wholes = [one.scales for one in self.powers] or self.entries
                self._parts = [
                    (number, at) for number, entry in enumerate(wholes) for at in range(0, entry.numel, _AT_ONCE)
                ]
            while self._value is None:
                if self._parts:
                    self._take_part(self._parts.pop(), self._parts, tools)
                elif self._at_work:
                    self._changed.wait()
                elif self.powers:
                    self._value = math.ldexp(1.0, min(127, 9 - math.frexp(self._top)[1]))
                else:
                    self._value = second_of(self._top)
            return self._value

    def _take_part(self, part: tuple[int, int], parts: list[tuple[int, int]], tools: Tools) -> None:
        """Looks at a part while others look at others; one that cannot be read is left to whoever asks next."""
        self._at_work += 1
        self._changed.release()
        top = None
        try:
            top = self._top_of(*part, tools)
        finally:
            self._changed.acquire()
            self._at_work -= 1
            if top is None:
                parts.append(part)
            else:
                self._top = top if math.isnan(top) else max(self._top, top)  # a NaN stays
            self._changed.notify_all()

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
