"""What was counted of a tensor, or of two that should be the same: the values that a scan gives.

For `scan` and those who read its reports. The figures are those of `csrc/statistics.h`.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar

from zckpt.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Relation:
    """What "the same" means.

    Attributes:
        rounded: the second number should be the first, rounded to the second's dtype. Zeros of both signs are the same,
            and so are all NaNs.
        atol: numbers are the same when |a - b| <= atol + rtol |b|. Where neither is given: when they are bit for bit, or,
            in two dtypes, when they have the same value.
        rtol: see `atol`.
    """

    rounded: bool = False
    atol: float | None = None
    rtol: float | None = None

    @property
    def is_tolerant(self) -> bool:
        """Whether close numbers count as the same."""
        return self.atol is not None or self.rtol is not None


@dataclass(frozen=True, slots=True)
class Spread:
    """How far numbers are apart that are not equal: a histogram.

    Attributes:
        counts: exponent e -> pairs of finite numbers with 2**e <= |a - b| < 2**(e + 1); those that are less far apart than the
            least exponent says count for it, those further apart than the largest one says for that. Exponents without
            pairs are left out; the others are in ascending order.
    """

    LEAST: ClassVar[int] = -128
    LARGEST: ClassVar[int] = 127

    counts: dict[int, int] = field(default_factory=dict[int, int])

    def __add__(self, other: Spread) -> Spread:
        exponents = sorted({*self.counts, *other.counts})
        return Spread({e: self.counts.get(e, 0) + other.counts.get(e, 0) for e in exponents})


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of numbers. Complex ones count as two.

    Attributes:
        count: numbers looked at.
        nan: of the first array.
        inf: of the first array.
        nonzero: of the first array.
        other_nan: of the second array.
        other_inf: of the second array.
        differ: numbers that are not the same.
        first: number of the first of these, or None.
        max_abs: largest |a - b|; infinite where one side alone is NaN or infinite.
        max_rel: largest |a - b| / max(|a|, |b|).
        dot: sum of a*b, over numbers that are finite on both sides.
        square: sum of a*a over these.
        other_square: sum of b*b over these.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    nonzero: int = 0
    other_nan: int = 0
    other_inf: int = 0
    differ: int = 0
    first: int | None = None
    max_abs: float = 0.0
    max_rel: float = 0.0
    dot: float = 0.0
    square: float = 0.0
    other_square: float = 0.0

    def __add__(self, later: Statistics) -> Statistics:
        firsts = [first for first in (self.first, later.first) if first is not None]
        return Statistics(
            self.count + later.count,
            self.nan + later.nan,
            self.inf + later.inf,
            self.nonzero + later.nonzero,
            self.other_nan + later.other_nan,
            self.other_inf + later.other_inf,
            self.differ + later.differ,
            min(firsts, default=None),
            max(self.max_abs, later.max_abs),
            max(self.max_rel, later.max_rel),
            self.dot + later.dot,
            self.square + later.square,
            self.other_square + later.other_square,
        )

    @property
    def cosine(self) -> float:
        """Cosine similarity of the two arrays: 1 where they are equal, also where both are nothing but zeros.

        NaN where only one of them is nothing but zeros, or where squares are too large to be added up.
        """
        if not self.differ or self.square == self.other_square == 0:
            return 1.0
        length = math.sqrt(self.square) * math.sqrt(self.other_square)
        if not length or not math.isfinite(length) or not math.isfinite(self.dot):
            return math.nan
        return max(-1.0, min(1.0, self.dot / length))
