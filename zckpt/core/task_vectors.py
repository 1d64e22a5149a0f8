"""TIES and DARE: a base, moved by what is left of other tensors' differences from it, without small or random numbers.

For `average`. All numbers are fp32, in mergekit's order. What belongs to whole tensors (which magnitude is the smallest that
stays, what the rest is multiplied by) is found before, in parts, by reading the tensors once or twice more.
Source: mergekit 0.1.5, merge_methods/generalized_task_arithmetic.py, sparsify.py; Yadav et al. 2023 (TIES), Yu et al. 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    Whole = NDArray[np.int64 | np.uint32]

_AT_ONCE, _IN_CACHE = 1 << 18, 1 << 14
_SAMPLES, _SAMPLED = 64, 1 << 10
"""Places in a large tensor at which magnitudes are looked at first, and elements at each."""
_MOST_KEPT = 1 << 22
"""Magnitudes near the smallest that stays, which are kept in memory."""
_MOST = 0x7FFFFFFF
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
        import numpy as np

        how = self._how
        with self._lock:
            if self._chosen is None:
                self._chosen = [self._choose(number, tools) for number in range(len(how.weights))]
        moved: Floats = tools.read_floats(self.inputs[0], start, stop)
        others = [tools.read_floats(entry, start, stop) for entry in self.inputs[1:]]
        with np.errstate(all="ignore"):
            for at in range(0, stop - start, _IN_CACHE):
                base = moved[at : at + _IN_CACHE]
                terms: list[Floats] = []
                for number, weight in enumerate(how.weights):
                    term = others[number][at : at + _IN_CACHE] - base
                    stays, scale = self._stays(number, term, start + at), np.float32(self._chosen[number].scale)
                    terms.append((term * stays if scale == 1 else term * stays * scale) * np.float32(weight))
                base += self._sum(terms)
        return moved

    def _sum(self, terms: Sequence[Floats]) -> Floats:
        """The sum of the terms that count, divided and multiplied as is asked."""
        import numpy as np

        how = self._how
        total = sum(terms[1:], terms[0].copy())
        divisor: Floats = np.full_like(total, sum(map(np.float32, how.weights)))
        if how.elects:
            up = total >= 0
            down, is_finite = ~up, np.isfinite(total).all()
            positive, negative, divisor = np.zeros_like(total), np.zeros_like(total), np.zeros_like(total)
            for term, weight in zip(terms, how.weights, strict=True):
                counts = ((term > 0) & up) | ((term < 0) & down)
                divisor += np.float32(weight) * counts
                positive += np.maximum(term, 0) if is_finite else term * counts
                negative += np.minimum(term, 0)
            total = positive * up + negative * down if is_finite else positive
            divisor += divisor == 0
        elif abs(float(divisor.flat[0]) if divisor.size else 1) < _NOTHING:
            divisor[:] = 1
        if how.normalises:
            total = total / divisor
        return total * np.float32(how.factor) if how.factor != 1 else total

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
        early = max(0, chosen.last - start)
        stays[:early] |= bits[:early] == chosen.least
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
        """The `wanted`th largest magnitude, of those around it; of equal ones, up to which element they are wanted."""
        import numpy as np

        low, high = self._around(number, wanted, tools)
        near: list[tuple[int, Whole]] = []
        for start, part in self._parts(number, tools):
            bits = _magnitudes(part)
            wanted -= int(np.count_nonzero(bits > high))
            near.append((start, bits[(bits >= low) & (bits <= high)]))
            if sum(len(found) for _, found in near) > _MOST_KEPT:
                break
        found = np.concatenate([found for _, found in near])
        if not 1 <= wanted <= len(found) <= _MOST_KEPT:
            return self._threshold_of_all(
                number, max(1, int(self._how.densities[number] * self.inputs[0].numel)), tools
            )
        found.partition(len(found) - wanted)
        least = int(found[len(found) - wanted])
        wanted -= int(np.count_nonzero(found > least))
        for start, found in near:
            wanted -= (equal := int(np.count_nonzero(found == least)))
            if wanted <= 0:
                return _Chosen(least, self._last(number, start, least, wanted + equal, tools), 1.0)
        raise AssertionError

    def _last(self, number: int, start: int, least: int, wanted: int, tools: Tools) -> int:
        """One past the `wanted`th element with this magnitude in the part from `start` on."""
        import numpy as np

        part = self._difference(number, start, min(start + _AT_ONCE, self.inputs[0].numel), tools)
        return start + int(np.flatnonzero(_magnitudes(part) == least)[wanted - 1]) + 1

    def _around(self, number: int, wanted: int, tools: Tools) -> tuple[int, int]:
        """Magnitudes below and above the `wanted`th largest one, by a sample; of few elements, all."""
        import numpy as np

        numel = self.inputs[0].numel
        if numel <= _AT_ONCE:
            return 0, _MOST
        apart = numel // _SAMPLES
        starts = range(0, apart * _SAMPLES, apart)
        bits = [_magnitudes(self._difference(number, at, at + _SAMPLED, tools)) for at in starts]
        sample = np.sort(np.concatenate(bits))
        at, width = len(sample) - int(wanted / numel * len(sample)), len(sample) // 50
        low = int(sample[at - width]) if at > width else 0
        return low, int(sample[at + width]) if at + width < len(sample) else _MOST

    def _threshold_of_all(self, number: int, wanted: int, tools: Tools) -> _Chosen:
        """The same, by counting magnitudes in two passes."""
        import numpy as np

        high, low = np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int64)
        for _, part in self._parts(number, tools):
            high += np.bincount(_magnitudes(part) >> np.uint32(16), minlength=1 << 16)
        top, wanted = _bin_of(high, wanted)
        for _, part in self._parts(number, tools):
            bits = _magnitudes(part)
            low += np.bincount(bits[bits >> np.uint32(16) == top] & np.uint32(0xFFFF), minlength=1 << 16)
        rest, wanted = _bin_of(low, wanted)
        least = top << 16 | rest
        for start, part in self._parts(number, tools):
            equal = int(np.count_nonzero(_magnitudes(part) == least))
            if equal >= wanted:
                return _Chosen(least, self._last(number, start, least, wanted, tools), 1.0)
            wanted -= equal
        raise AssertionError

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

    bits: Whole = np.ascontiguousarray(numbers).view(np.uint32) & np.uint32(_MOST)
    return bits


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
