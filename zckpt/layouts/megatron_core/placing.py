"""The fp32 weights and states of buckets, which have no names: each is placed by what it holds.

For `megatron_core`. Rounded, a parameter's fp32 weights are the model's own, which have names. So a part of a weight (a chunk:
what one rank has of one layer) belongs where a bucket holds the same numbers, and its moments are there in the buckets beside it.
Sixteen numbers at both ends of a part find its place; all are read where several parts agree there. Parts that are equal
throughout, such as norms that are still ones, are told apart by the order that the others prove: a layer's parameters lie
together, layers in reverse, and each layer's in the same order. A conversion then compares every number (`Replica.whole`).
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.base.words import count, examples
from zckpt.core.catalog import Replica, TensorEntry
from zckpt.core.dtypes import BF16, F16, F32, DType
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import clip, embed_box
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
    """Numbers of parts and vectors, as bytes in a weight's dtype; parts are found by their first ones."""

    def __init__(self, reader: ElementReader, parts: Sequence[WeightPart]) -> None:
        self._reader = reader
        self._by_head: dict[tuple[DType, bytes], list[WeightPart]] = {}
        for part in parts:
            head = self.of_part(part, 0, min(_ENDS, part.numel))
            self._by_head.setdefault((part.dtype, head), []).append(part)
        self._kinds = sorted({(dtype, len(head) // dtype.itemsize) for dtype, head in self._by_head}, key=str)

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

    def parts_at(self, vector: BucketVector, start: int) -> list[WeightPart]:
        """The parts that a vector may hold at an element."""
        found: list[WeightPart] = []
        for dtype, length in self._kinds:
            if start + length > vector.numel:
                continue
            head = self.of_vector(vector, dtype, start, start + length)
            for part in self._by_head.get((dtype, head), ()):
                stop = start + part.numel
                if stop > vector.numel:
                    continue
                low = max(part.numel - _ENDS, 0)
                tail = self.of_vector(vector, dtype, start + low, stop)
                if tail == self.of_part(part, low, part.numel):
                    found.append(part)
        if len(found) > 1:
            found = [part for part in found if self.agree(part, vector, start)]
        return found


_ALIGNED = 64
"""Parameters begin at multiples of so many elements of a bucket."""
_ENDS = 16


@dataclass(frozen=True, slots=True)
class PlacedStates:
    """What was placed.

    Attributes:
        states: name of a weight -> state -> tensor; the fp32 weights are `param`.
        copies: name of a weight -> the same fp32 weights of other ranks.
        problems: what could not be placed, as clauses; then nothing is given.
    """

    states: Mapping[str, Mapping[str, TensorEntry]] = field(default_factory=dict[str, Mapping[str, TensorEntry]])
    copies: Mapping[str, tuple[Replica, ...]] = field(default_factory=dict[str, "tuple[Replica, ...]"])
    problems: tuple[str, ...] = ()


def place(
    vectors: Sequence[BucketVector],
    parts: Sequence[WeightPart],
    shapes: Mapping[str, tuple[int, ...]],
    problems: list[str],
) -> PlacedStates:
    """The parameters of vectors, placed by what they hold; `problems` says what was found wrong before."""
    with ElementReader() as reader:
        numbers = HeldNumbers(reader, parts)
        slots = [slot for n, vector in enumerate(vectors) for slot in _slots(n, vector, numbers, problems)]
        tell_apart(slots, vectors)
        if _share_equals(slots, vectors, numbers):
            tell_apart(slots, vectors)
    for slot in slots:
        if len(slot.parts) > 1:
            names = dict.fromkeys(_words(part) for part in slot.parts)
            problems.append(
                f"{examples(names)} hold the same numbers, and the order does not tell which is at element "
                f"{slot.start:,} of {vectors[slot.vector].name}"
            )
        elif not slot.parts:
            problems.append(
                f"element {slot.start:,} of {vectors[slot.vector].name} is of no weight that is not elsewhere too"
            )
    return PlacedStates(problems=tuple(problems)) if problems else _put_together(slots, vectors, parts, shapes)


def _words(part: WeightPart) -> str:
    layer = part.layer()
    return part.name if layer is None or str(layer[1]) in part.name.split(".") else f"{part.name}[{layer[1]}]"


def _slots(number: int, vector: BucketVector, numbers: HeldNumbers, problems: list[str]) -> Iterator[BucketSlot]:
    """The places of parameters in a vector, in order."""
    starts = {*vector.starts, vector.numel}
    at, lost = 0, -1
    while at < vector.numel:
        parts = numbers.parts_at(vector, at)
        if any(at + part.numel in starts for part in parts):
            parts = [part for part in parts if at + part.numel in starts]
        if len({part.numel for part in parts}) > 1:
            longest = max(part.numel for part in parts)
            parts = [part for part in parts if part.numel == longest]
        if parts:
            if lost >= 0 and at - lost != -lost % _ALIGNED:
                problems.append(f"elements {lost:,}-{at - 1:,} of {vector.name} are no weight's")
            yield BucketSlot(number, at, parts)
            at, lost = at + parts[0].numel, -1
        else:
            lost = at if lost < 0 else lost
            at = min((at // _ALIGNED + 1) * _ALIGNED, vector.numel)
    if lost >= 0 and vector.numel - lost != -lost % _ALIGNED:
        problems.append(f"elements {lost:,}-{vector.numel - 1:,} of {vector.name} are no weight's")


def _share_equals(slots: Sequence[BucketSlot], vectors: Sequence[BucketVector], numbers: HeldNumbers) -> bool:
    """Gives slots with equal parts and equal states one part each: it is the same whichever has which; whether there are
    any.
    """
    shared = False
    tied: dict[tuple[object, ...], list[BucketSlot]] = {}
    for slot in slots:
        if len(slot.parts) > 1:
            key = (vectors[slot.vector].group, *sorted((part.name, part.offsets) for part in slot.parts))
            tied.setdefault(key, []).append(slot)
    for own in tied.values():
        if len(own) != len(own[0].parts):
            continue
        digests = {numbers.digest(vectors[slot.vector], slot.start, slot.parts[0].numel) for slot in own}
        if len(digests) == 1:
            for slot, part in zip(own, sorted(own[0].parts), strict=True):
                slot.parts = [part]
            shared = True
    return shared


def _put_together(
    slots: Sequence[BucketSlot],
    vectors: Sequence[BucketVector],
    parts: Sequence[WeightPart],
    shapes: Mapping[str, tuple[int, ...]],
) -> PlacedStates:
    """The tensors that the parts of slots make."""
    held: dict[str, dict[tuple[int, ...], list[BucketSlot]]] = {}
    for slot in slots:
        held.setdefault(slot.parts[0].name, {}).setdefault(slot.parts[0].offsets, []).append(slot)
    wanted: dict[str, set[tuple[int, ...]]] = {}
    for part in parts:
        wanted.setdefault(part.name, set()).add(part.offsets)
    lost = {name: min(wanted[name] - own.keys()) for name, own in held.items() if wanted[name] - own.keys()}
    if lost:
        some = ", ".join(f"{name!r} at {list(at)}" for name, at in list(lost.items())[:3])
        return PlacedStates(problems=(f"{count(len(lost), 'weight')} have no fp32 weights in part: {some}",))
    states: dict[str, dict[str, TensorEntry]] = {}
    copies: dict[str, tuple[Replica, ...]] = {}
    for name, own in held.items():
        kinds = {frozenset(vectors[slot.vector].states) for every in own.values() for slot in every}
        if len(kinds) != 1:
            return PlacedStates(problems=(f"the ranks do not have the same states of {name!r}",))
        most = max(map(len, own.values()))
        for state in sorted(next(iter(kinds))):
            rows = [[f for every in own.values() for f in _embed_slot(every[n % len(every)], vectors, state, shapes[name])]
                    for n in range(most if state == "param" else 1)]  # fmt: skip
            first, *others = (tuple(sorted(row, key=lambda f: f.start)) for row in rows)
            states.setdefault(name, {})[state] = TensorEntry(name, shapes[name], F32, "parameter", first)
            if others:
                copies[name] = tuple(Replica(F32, other, f"copy {n}") for n, other in enumerate(others, 1))
    return PlacedStates(states, copies)


def _embed_slot(
    slot: BucketSlot, vectors: Sequence[BucketVector], state: str, shape: Sequence[int]
) -> Sequence[Fragment]:
    """A slot's elements of a state, as fragments of the weight."""
    part = slot.parts[0]
    own = clip(vectors[slot.vector].states[state], slot.start, slot.start + part.numel, 4)
    return embed_box(own, part.sizes, part.offsets, shape, 4)


@dataclass(slots=True)
class BucketSlot:
    """Elements of a vector from `start` on, and the parts that hold the same numbers."""

    vector: int
    start: int
    parts: list[WeightPart]


def tell_apart(slots: Sequence[BucketSlot], vectors: Sequence[BucketVector]) -> None:
    """Leaves those parts of slots that fit the order of the others."""
    lines: dict[tuple[str, int], list[BucketSlot]] = {}
    for slot in slots:
        vector = vectors[slot.vector]
        lines.setdefault((vector.group, vector.order[0]), []).append(slot)
    changed = True
    while changed:
        before = _orders(lines.values())
        changed = _use_once(slots, vectors)
        for line in lines.values():
            for at, slot in enumerate(line):
                if len(slot.parts) > 1:
                    kept = [part for part in slot.parts if _fits(part, at, line, before)]
                    changed |= len(kept) != len(slot.parts)
                    slot.parts = kept


def _orders(lines: Iterable[Sequence[BucketSlot]]) -> set[tuple[str, str]]:
    """Pairs of names; the first lies before the other in a layer."""
    found: set[tuple[str, str]] = set()
    for line in lines:
        layers: dict[tuple[str, int], dict[str, None]] = {}
        for slot in line:
            if len(slot.parts) == 1 and (layer := slot.parts[0].layer()) is not None:
                layers.setdefault(layer, {})[slot.parts[0].stem()] = None
        for names in layers.values():
            own = list(names)
            found.update((a, b) for n, a in enumerate(own) for b in own[n + 1 :])
    return found


def _use_once(slots: Sequence[BucketSlot], vectors: Sequence[BucketVector]) -> bool:
    """Takes a part that one slot has away from the other slots of these ranks; whether there was any."""
    owners: dict[tuple[str, str, tuple[int, ...]], BucketSlot] = {}
    changed = False
    for slot in slots:
        if len(slot.parts) == 1:
            owners.setdefault((vectors[slot.vector].group, slot.parts[0].name, slot.parts[0].offsets), slot)
    for slot in slots:
        group = vectors[slot.vector].group
        kept = [part for part in slot.parts if owners.get((group, part.name, part.offsets), slot) is slot]
        changed |= len(kept) != len(slot.parts)
        slot.parts = kept
    return changed


def _fits(part: WeightPart, at: int, line: Sequence[BucketSlot], before: set[tuple[str, str]]) -> bool:
    """Whether a part can be at this place of a line, between those that are known."""
    own, stem = part.layer(), part.stem()
    for step in (-1, 1):
        for n in range(at + step, -1 if step < 0 else len(line), step):
            if len(line[n].parts) != 1 or (layer := (other := line[n].parts[0]).layer()) is None:
                continue
            if own is None and step < 0 and _goes_on(line, at, layer):
                return False  # among layers
            if own is None or layer[0] != own[0]:
                continue
            if (own[1] - layer[1]) * step < 0:
                return False
            if layer != own:
                break
            if ((stem, other.stem()) if step < 0 else (other.stem(), stem)) in before:
                return False
    return True


def _goes_on(line: Sequence[BucketSlot], at: int, layer: tuple[str, int]) -> bool:
    """Whether layers of a stack lie behind this place too."""
    known = (slot.parts[0].layer() for slot in line[at + 1 :] if len(slot.parts) == 1)
    return any(other is not None and other[0] == layer[0] for other in known)
