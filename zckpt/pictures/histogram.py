"""Histograms of distances as inline SVG: how many pairs of numbers are how far apart, on an axis of powers of two.

For `differences`. All histograms of a page have one axis, so that they can be compared with the eye. A shape has classes, and no
style of its own, which the page's policy would not allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from zckpt.base.dataclass import dataclass
from zckpt.base.words import count
from zckpt.engine.tensor_statistics import Spread
from zckpt.pictures.page import text

_MOST_BARS = 40
_LARGE_HEIGHT, _BELOW, _TITLE = 200, 24, 18
"""Pixels of a large histogram, of the numbers below it, and of each axis title."""
_SMALL_WIDTH, _SMALL_HEIGHT = 160, 30
_MOST_LABELS = 14


@dataclass(frozen=True, slots=True)
class Axis:
    """The exponents that a page's histograms show: `bars` bars from 2**low on, each `step` exponents wide."""

    low: int
    step: int
    bars: int

    @classmethod
    def of(cls, spreads: Iterable[Spread]) -> Axis | None:
        """The axis for all of these spreads; None if no numbers differ."""
        ends = [end for spread in spreads if spread.counts for end in (min(spread.counts), max(spread.counts))]
        if not ends:
            return None
        low, exponents = min(ends), max(ends) - min(ends) + 1
        step = math.ceil(exponents / _MOST_BARS)
        return cls(low, step, max(6, math.ceil(exponents / step)))

    def bars_of(self, spread: Spread) -> dict[int, int]:
        """The exponent at which each bar begins -> how many pairs of numbers are so far apart."""
        pairs = dict.fromkeys(range(self.low, self.low + self.bars * self.step, self.step), 0)
        for exponent, number in spread.counts.items():
            pairs[exponent - (exponent - self.low) % self.step] += number
        return pairs

    def words(self, low: int) -> str:
        """The distances between which a bar counts that begins at an exponent."""
        return f"{distance(low)} to {distance(low + self.step)}"

    def powers_of_ten(self) -> Iterator[tuple[int, float]]:
        """Powers of ten on the axis, and where they are, between 0 and 1."""
        length = self.bars * self.step
        for power in range(math.ceil(self.low * math.log10(2)), math.floor((self.low + length) * math.log10(2)) + 1):
            yield power, (power / math.log10(2) - self.low) / length


def distance(exponent: int) -> str:
    """2**exponent, as a person reads it."""
    return f"{2.0**exponent:.2g}"


def summary(axis: Axis, bars: Mapping[int, int]) -> str:
    """A text for those who cannot see the histogram."""
    filled = [low for low, pairs in bars.items() if pairs]
    if not filled:
        return "no distances"
    most = axis.words(max(filled, key=bars.__getitem__))
    return f"distances from {distance(filled[0])} to {distance(filled[-1] + axis.step)}, most of them {most}"


def small(axis: Axis, spread: Spread) -> str:
    """A histogram for a row of a table, as one shape; its highest bar has the full height."""
    bars = axis.bars_of(spread)
    most = max(bars.values())
    width = _SMALL_WIDTH / axis.bars
    shapes: list[str] = []
    for i, pairs in enumerate(bars.values()):
        if pairs:
            height = max(1.5, pairs / most * (_SMALL_HEIGHT - 1))
            shapes.append(f"M{i * width:.4g} {_SMALL_HEIGHT}v-{height:.3g}h{width * 0.86:.3g}v{height:.3g}z")
    words = text(summary(axis, bars))
    return (
        f'<svg class="spread" viewBox="0 0 {_SMALL_WIDTH} {_SMALL_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{words}"><title>{words}</title><path class="line" d="M0 {_SMALL_HEIGHT}h{_SMALL_WIDTH}"/>'
        f'<path d="{"".join(shapes)}"/></svg>'
    )


def large(axis: Axis, spread: Spread) -> str:
    """A histogram with its axis; a bar shows its numbers when it is pointed at.

    It is as wide as there is room, and letters keep their size: places are parts of the width.
    """
    bars = axis.bars_of(spread)
    most = max(bars.values())
    width = 100 / axis.bars
    ground = _LARGE_HEIGHT - _BELOW
    drawn: list[str] = []
    for i, (low, pairs) in enumerate(bars.items()):
        height = max(2.0, pairs / most * (ground - _TITLE - 4)) if pairs else 0
        drawn.append(
            f'<g aria-hidden="true"><title>{text(axis.words(low))}: {count(pairs, "pair")} of numbers</title>'
            f'<rect class="room" x="{i * width:.3f}%" y="0" width="{width:.3f}%" height="{ground}"/>'
            f'<rect class="bar" x="{(i + 0.06) * width:.3f}%" y="{ground - height:.2f}" width="{width * 0.88:.3f}%" '
            f'height="{height:.2f}" rx="1.5"/></g>'
        )
    marks = list(axis.powers_of_ten())
    every = math.ceil(len(marks) / _MOST_LABELS)
    for number, (power, place) in enumerate(marks[::every]):
        extra = ' class="extra"' if number % 2 else ""
        anchor = "start" if place < 0.03 else "end" if place > 0.97 else "middle"
        drawn.append(
            f'<g{extra}><rect class="mark" x="{100 * place:.2f}%" y="{ground}" width="1" height="5"/>'
            f'<text x="{100 * place:.2f}%" y="{_LARGE_HEIGHT - 5}" text-anchor="{anchor}">'
            f"{'1' if power == 0 else f'1e{power}'}</text></g>"
        )
    return (
        f'<svg class="histogram" height="{_LARGE_HEIGHT + _TITLE}" role="img" aria-label="{text(summary(axis, bars))}">'
        f'<text x="0" y="{_TITLE - 6}" text-anchor="start">pairs of numbers; the highest bar: {most:,}</text>'
        f'<text x="50%" y="{_LARGE_HEIGHT + _TITLE - 6}" text-anchor="middle">|a - b|, how far two numbers are apart</text>'
        f'{"".join(drawn)}<rect class="mark" x="0" y="{ground}" width="100%" height="1"/></svg>'
    )
