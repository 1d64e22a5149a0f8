"""TIES and DARE: a base, moved by what is left of other tensors' differences from it, without small or random numbers.

For `average`. All numbers are fp32, in mergekit's order. What belongs to whole tensors (which magnitude is the smallest that
stays, what the rest is multiplied by) is found before, in parts, by reading the tensors once or twice more.
Source: mergekit 0.1.5, merge_methods/generalized_task_arithmetic.py, sparsify.py; Yadav et al. 2023 (TIES), Yu et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from zckpt.core.catalog import TensorEntry
from zckpt.core.folds import DRAWS, Sparsity, Thinned, Tools

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from zckpt.core.folds import Array, Floats, Found, Whole

    Bools = NDArray[np.bool_]

_AT_ONCE = 1 << 19
_SUMMED = 1 << 18
"""Elements per partial sum of magnitudes: a fixed number, since the order of a sum changes its last bits."""
_SAMPLES, _SAMPLED = 16, 1 << 12
"""Places in a large tensor at which magnitudes are looked at first, and elements at each."""
_MOST_KEPT = 1 << 23
"""Magnitudes near the smallest that stays, which are kept in memory, of all differences together."""
_MOST = 0x7FFFFFFF
_SMALL = 1e-7
"""Sums of magnitudes below which nothing is multiplied."""


class _Near(NamedTuple):
    """Magnitudes of a part of a difference.

    Attributes:
        start: its first element.
        above: how many are larger than those that are looked for.
        many: how many are looked for.
        found: these, as the bits of fp32; none where they would be too many.
    """

    start: int
    above: int
    many: int
    found: Whole


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
        self._kept: list[Thinned] | None = None
        self._lock = Lock()

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        with self._lock:
            if self._kept is None:
                self._kept = self._choose(tools)
        moved: Floats = tools.read_floats(self.inputs[0], start, stop)
        others = [tools.read_floats(entry, start, stop) for entry in self.inputs[1:]]
        tools.kernels.move_sparsely(moved, others, self._kept, start, self._how)
        return moved

    def _difference(self, number: int, start: int, stop: int, tools: Tools) -> Floats:
        return tools.read_floats(self.inputs[number + 1], start, stop) - tools.read_floats(self.inputs[0], start, stop)

    def _choose(self, tools: Tools) -> list[Thinned]:
        """Chooses what of each difference stays: the largest magnitudes, and of equal ones the first."""
        how, numel = self._how, self.inputs[0].numel
        kept = [Thinned(weight=weight) for weight in how.weights]
        some = []
        for number, density in enumerate(how.densities):
            if density <= 0:
                kept[number] = kept[number]._replace(least=_MOST)
            elif density < 1 and numel:
                some.append(number)
        if how.is_random:
            for number in some:
                key = _key(how.seed, self.inputs[0].name, number + 1)
                kept[number] = kept[number]._replace(key=key, draws=int(how.densities[number] * DRAWS))
        else:
            wanted = {number: max(1, int(how.densities[number] * numel)) for number in some}
            for number, (least, last) in self._thresholds(wanted, tools).items():
                kept[number] = kept[number]._replace(least=least, last=last)
        if how.rescales and some:
            for number, scale in self._scales({number: kept[number] for number in some}, tools).items():
                kept[number] = kept[number]._replace(scale=scale)
        return kept

    def _each_part(self, numbers: Iterable[int], look: Callable[[int, int, Floats, Floats, Tools], Found],
                   tools: Tools) -> list[dict[int, Found]]:  # fmt: skip
        """Number of a difference -> what `look` finds, for each part; a part of the base is read once for all.

        `look` gets the number, the first element, the other tensor's elements and the base's.
        """
        base, numbers = self.inputs[0], list(numbers)

        def work(start: int, tools: Tools) -> dict[int, Found]:
            stop = min(start + _AT_ONCE, base.numel)
            own = tools.read_floats(base, start, stop)
            return {
                number: look(number, start, tools.read_floats(self.inputs[number + 1], start, stop), own, tools)
                for number in numbers
            }

        return tools.each(work, range(0, base.numel, _AT_ONCE)) if numbers else []

    def _parts(self, number: int, tools: Tools) -> Iterator[tuple[int, Floats]]:
        for start in range(0, self.inputs[0].numel, _AT_ONCE):
            yield start, self._difference(number, start, min(start + _AT_ONCE, self.inputs[0].numel), tools)

    def _thresholds(self, wanted: Mapping[int, int], tools: Tools) -> dict[int, tuple[int, int]]:
        """The `wanted`th largest magnitude of each; of equal ones, up to which element they are wanted."""
        around = dict(tools.each(lambda one, tools: (one[0], self._around(*one, tools)), list(wanted.items())))
        sizes = dict.fromkeys(wanted, 0)
        most = _MOST_KEPT // max(1, len(wanted))

        def look(number: int, start: int, other: Floats, base: Floats, tools: Tools) -> _Near:
            import numpy as np

            found: Whole = np.empty(len(base), np.uint32)
            above, count = tools.kernels.select_near(other, base, *around[number], found)
            sizes[number] += count
            return _Near(start, above, count, found[: count if sizes[number] <= most else 0].copy())

        seen = self._each_part(wanted, look, tools)
        return {
            number: self._threshold(number, many, [found[number] for found in seen], tools)
            for number, many in wanted.items()
        }

    def _threshold(self, number: int, wanted: int, near: Sequence[_Near], tools: Tools) -> tuple[int, int]:
        """As `_thresholds`, of one, by what each part has around it."""
        import numpy as np

        found = np.concatenate([one.found for one in near])
        rank, size = wanted - sum(one.above for one in near), sum(one.many for one in near)
        if not 1 <= rank <= size or size > len(found):
            return self._threshold_of_all(number, wanted, tools)
        found.partition(size - rank)
        least = int(found[size - rank])
        rank -= int(np.count_nonzero(found > least))
        for one in near:
            rank -= (equal := int(np.count_nonzero(one.found == least)))
            if rank <= 0:
                return least, self._last(number, one.start, least, rank + equal, tools)
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

    def _threshold_of_all(self, number: int, wanted: int, tools: Tools) -> tuple[int, int]:
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
                return least, self._last(number, start, least, wanted, tools)
            wanted -= equal
        raise AssertionError

    def _scales(self, kept: Mapping[int, Thinned], tools: Tools) -> dict[int, float]:
        """What the rest of each difference is multiplied by."""

        def look(number: int, start: int, other: Floats, base: Floats, tools: Tools) -> list[tuple[float, float]]:
            return [
                tools.kernels.lengths(other[at : at + _SUMMED], base[at : at + _SUMMED], kept[number], start + at)
                for at in range(0, len(base), _SUMMED)
            ]

        before, after = dict.fromkeys(kept, 0.0), dict.fromkeys(kept, 0.0)
        for found in self._each_part(kept, look, tools):
            for number, sums in found.items():
                for whole, part in sums:
                    before[number], after[number] = before[number] + whole, after[number] + part
        return {
            number: 1.0 if before[number] < _SMALL or after[number] < _SMALL else before[number] / after[number]
            for number in kept
        }


def move_sparsely(total: Floats, others: Sequence[Floats], kept: Sequence[Thinned], start: int, how: Sparsity) -> None:
    """The reference of `Kernels.move_sparsely`."""
    import numpy as np

    with np.errstate(all="ignore"):
        terms: list[Floats] = []
        for other, one in zip(others, kept, strict=True):
            term = other - total
            terms.append(term * _stay(one, term, start) * np.float32(one.scale) * np.float32(one.weight))
        moved = sum(terms[1:], terms[0].copy())
        divisor: Floats = np.full_like(moved, sum(np.float32(one.weight) for one in kept))
        if how.elects:
            up = moved >= 0
            moved, divisor = np.zeros_like(moved), np.zeros_like(moved)
            for term, one in zip(terms, kept, strict=True):
                counts = np.where(up, term > 0, term < 0)
                divisor += np.float32(one.weight) * counts
                moved += term * counts
            divisor += divisor == 0
        elif abs(float(divisor.flat[0]) if divisor.size else 1) < _NOTHING:
            divisor[:] = 1
        total += (moved / divisor if how.normalises else moved) * np.float32(how.factor)


def select_near(numbers: Floats, base: Floats, low: int, high: int, found: Whole) -> tuple[int, int]:
    """The reference of `Kernels.select_near`."""
    import numpy as np

    with np.errstate(all="ignore"):
        bits = _magnitudes(numbers - base)
    near = bits[(bits >= low) & (bits <= high)]
    found[: len(near)] = near
    return int(np.count_nonzero(bits > high)), len(near)


def lengths(numbers: Floats, base: Floats, kept: Thinned, start: int) -> tuple[float, float]:
    """The reference of `Kernels.lengths`."""
    import numpy as np

    with np.errstate(all="ignore"):
        difference = numbers - base
        rows = np.zeros((2, -(-len(numbers) // _LANES) * _LANES))
        rows[0, : len(numbers)] = np.abs(difference)
        rows[1, : len(numbers)] = np.where(_stay(kept, difference, start), rows[0, : len(numbers)], 0)
        whole, part = (float(row.reshape(-1, _LANES).cumsum(0)[-1].cumsum()[-1]) if len(row) else 0.0 for row in rows)
    return whole, part


_NOTHING = 1e-8
_LANES = 16
"""Sums that `lengths` takes side by side, in `csrc/sparse.cpp` too."""


def _stay(kept: Thinned, difference: Floats, start: int) -> Bools:
    """Which elements of a difference from `start` on stay."""
    import numpy as np

    bits = _magnitudes(difference).view(np.int32)
    stays: Bools = bits > kept.least
    early = max(0, kept.last - start)
    stays[:early] |= bits[:early] == kept.least
    if kept.draws < DRAWS:
        stays &= _draw(kept.key, start, len(difference)) < kept.draws
    return stays


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
