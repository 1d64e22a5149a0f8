"""TIES and DARE: a base, moved by what is left of other tensors' differences from it, without small or random numbers.

For `average`. All numbers are fp32, in mergekit's order. What belongs to whole tensors (which magnitude is the smallest that
stays, what the rest is multiplied by) is found before, in parts, by reading the tensors once or twice more.
Source: mergekit 0.1.5, merge_methods/generalized_task_arithmetic.py, sparsify.py; Yadav et al. 2023 (TIES), Yu et al. 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import TensorEntry
from zckpt.core.folds import Tools

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zckpt.core.folds import Array, Floats

    Bools = NDArray[np.bool_]
    Whole = NDArray[np.int64]

_AT_ONCE = 1 << 20
_SMALL = 1e-7
"""Sums of magnitudes below which nothing is multiplied."""
_DRAWS = 1 << 24


@dataclass(frozen=True, slots=True)
class Sparsity:
    """How differences are thinned out and added.

    Attributes:
        weights: of each tensor's difference.
        densities: the part of it that stays.
        is_random: whether random numbers stay (DARE), and not the largest ones.
        elects: whether only numbers count that have the sign of their sum.
        normalises: whether the sum is divided by the weights that count.
        rescales: whether what stays is multiplied so that the magnitudes add up to what they were.
        factor: of the whole sum.
        seed: of the random choice, which depends on it, on the tensor's name and on its place among the others.
    """

    weights: tuple[float, ...]
    densities: tuple[float, ...]
    is_random: bool = False
    elects: bool = True
    normalises: bool = True
    rescales: bool = False
    factor: float = 1.0
    seed: int = 0

    @property
    def facts(self) -> tuple[object, ...]:
        """All fields, in plain values."""
        how = self.is_random, self.elects, self.normalises, self.rescales, self.factor, self.seed
        return ("sparse", self.weights, self.densities, *how)


class _Chosen(NamedTuple):
    """What stays of a difference: magnitudes above `least` (as the bits of fp32), and those equal to it before element
    `last`.
    """

    least: int
    last: int
    scale: float


class SparseSum:
    """A base, moved by the sum of thinned-out differences of other tensors from it; a recipe.

    Args:
        inputs: the base, and the others.
        how: what stays of each difference, and what it counts.
    """

    unit = 1

    def __init__(self, inputs: tuple[TensorEntry, ...], how: Sparsity) -> None:
        self.inputs = inputs
        self.facts = how.facts
        self._how = how
        self._chosen: list[_Chosen] | None = None
        self._lock = Lock()
        self._keys = [_key(how.seed, inputs[0].name, number) for number in range(1, len(inputs))]

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`; fp32."""
        import numpy as np

        how = self._how
        with self._lock:
            if self._chosen is None:
                self._chosen = [self._choose(number, tools) for number in range(len(how.weights))]
        base = tools.read_floats(self.inputs[0], start, stop)
        with np.errstate(all="ignore"):
            terms: list[Floats] = []
            for number, weight in enumerate(how.weights):
                term = self._difference(number, start, stop, tools)
                stays, scale = self._stays(number, term, start), np.float32(self._chosen[number].scale)
                terms.append((term * stays if scale == 1 else term * stays * scale) * np.float32(weight))
            total = sum(terms[1:], terms[0].copy())
            divisor: Floats = np.full_like(total, sum(map(np.float32, how.weights)))
            if how.elects:
                sign = np.where(total >= 0, np.float32(1), np.float32(-1))
                counts = [np.sign(term) == sign for term in terms]
                total = sum((term * one for term, one in zip(terms, counts, strict=True)), np.zeros_like(total))
                weighed = (np.float32(w) * one for w, one in zip(how.weights, counts, strict=True))
                divisor = sum(weighed, np.zeros_like(total))
                divisor[divisor == 0] = 1
            elif abs(float(divisor.flat[0]) if divisor.size else 1) < _NOTHING:
                divisor[:] = 1
            if how.normalises:
                total = total / divisor
            if how.factor != 1:
                total = total * np.float32(how.factor)
            moved: Floats = base + total
            return moved

    def _difference(self, number: int, start: int, stop: int, tools: Tools) -> Floats:
        return tools.read_floats(self.inputs[number + 1], start, stop) - tools.read_floats(self.inputs[0], start, stop)

    def _stays(self, number: int, difference: Floats, start: int) -> Bools:
        """Which elements of a difference from `start` on stay."""
        import numpy as np

        density = self._how.densities[number]
        if density >= 1:
            return np.ones(len(difference), bool)
        if density <= 0:
            return np.zeros(len(difference), bool)
        if self._how.is_random:
            stays: Bools = _draw(self._keys[number], start, len(difference)) < int(density * _DRAWS)
            return stays
        assert self._chosen is not None
        chosen, bits = self._chosen[number], _magnitudes(difference)
        stays = bits > chosen.least
        if start < chosen.last:
            stays |= (bits == chosen.least) & (np.arange(start, start + len(bits)) < chosen.last)
        return stays

    def _choose(self, number: int, tools: Tools) -> _Chosen:
        """Chooses what of a difference stays: the largest magnitudes, and of equal ones the first."""
        density, numel = self._how.densities[number], self.inputs[0].numel
        if not 0 < density < 1 or not numel:
            return _Chosen(0, 0, 1.0)
        if self._how.is_random:
            chosen = _Chosen(0, 0, 1.0)
        else:
            chosen = self._threshold(number, max(1, int(density * numel)), tools)
        return chosen._replace(scale=self._scale(number, chosen, tools)) if self._how.rescales else chosen

    def _parts(self, number: int, tools: Tools) -> Iterator[tuple[int, Floats]]:
        for start in range(0, self.inputs[0].numel, _AT_ONCE):
            yield start, self._difference(number, start, min(start + _AT_ONCE, self.inputs[0].numel), tools)

    def _threshold(self, number: int, wanted: int, tools: Tools) -> _Chosen:
        import numpy as np

        high, low = np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int64)
        for _, part in self._parts(number, tools):
            high += np.bincount(_magnitudes(part) >> 16, minlength=1 << 16)
        top, wanted = _bin_of(high, wanted)
        for _, part in self._parts(number, tools):
            bits = _magnitudes(part)
            low += np.bincount(bits[bits >> 16 == top] & 0xFFFF, minlength=1 << 16)
        rest, wanted = _bin_of(low, wanted)
        least, last = top << 16 | rest, self.inputs[0].numel
        if wanted < low[rest]:  # of those that are equal, the first
            for start, part in self._parts(number, tools):
                equal = np.flatnonzero(_magnitudes(part) == least)
                if len(equal) >= wanted:
                    last = start + int(equal[wanted - 1]) + 1
                    break
                wanted -= len(equal)
        return _Chosen(least, last, 1.0)

    def _scale(self, number: int, chosen: _Chosen, tools: Tools) -> float:
        import numpy as np

        before = after = 0.0
        kept, self._chosen = self._chosen, [chosen] * (number + 1)
        for start, part in self._parts(number, tools):
            lengths = np.abs(part, dtype=np.float64)
            before += float(lengths.sum())
            after += float(lengths[self._stays(number, part, start)].sum())
        self._chosen = kept
        return 1.0 if before < _SMALL or after < _SMALL else before / after


_NOTHING = 1e-8


def _magnitudes(numbers: Floats) -> Whole:
    """The bits of the absolute values, which as whole numbers are in the same order."""
    import numpy as np

    return np.abs(np.ascontiguousarray(numbers)).view(np.uint32).astype(np.int64)


def _bin_of(counts: Whole, wanted: int) -> tuple[int, int]:
    """The bin with the `wanted`th largest number, and that number's rank within the bin."""
    import numpy as np

    above = np.cumsum(counts[::-1])
    at = int(np.searchsorted(above, wanted))
    return len(counts) - 1 - at, wanted - (int(above[at - 1]) if at else 0)


def _key(seed: int, name: str, number: int) -> int:
    from hashlib import sha256

    return int.from_bytes(sha256(repr((seed, name, number)).encode("utf-8", "surrogatepass")).digest()[:8], "little")


def _draw(key: int, start: int, length: int) -> Whole:
    """A number below 2**24 for each element, which depends on the key and on the element alone (splitmix64)."""
    import numpy as np

    with np.errstate(over="ignore"):
        x = np.arange(start + 1, start + length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.int64)
