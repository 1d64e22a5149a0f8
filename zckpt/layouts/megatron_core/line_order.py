"""Tells equal weights apart by the order that the others prove: layers in reverse, and each layer's weights in the same order.

For `placing`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zckpt.base.dataclass import dataclass
from zckpt.layouts.megatron_core.buckets import BucketVector
from zckpt.layouts.megatron_core.weight_parts import WeightPart


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
