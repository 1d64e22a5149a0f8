"""The fp32 weights and states of buckets, which have no names: each is placed by what it holds.

For `megatron_core`. Rounded, a parameter's fp32 weights are the model's own, which have names. So a part of a weight (a chunk:
what one rank has of one layer) belongs where a bucket holds the same numbers, and its moments are there in the buckets beside it.
Sixteen numbers at both ends of a part find its place; all are read where several parts agree there. Parts that are equal
throughout, such as norms that are still ones, are told apart by the order that the others prove: a layer's parameters lie
together, layers in reverse, and each layer's in the same order. A conversion then compares every number (`Replica.whole`).

[Note: buckets] `optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_D.bucket_idx_N.STATE` is a vector for each group of ranks
with the same parameters, buffer and bucket (`dp_reshardable`); its chunks begin where parameters, padding and ranks do. Of
`dp_zero_gather_scatter`, `...dp_group_idx_G.param_state` holds whole vectors, bucket after bucket. Parameters begin at multiples
of 64 elements; fused ones, such as gate and up, are several parts, one after the other.
Source: megatron-core 0.12.3 - 0.16.1, optimizer/distrib_optimizer.py `sharded_param_state_dp_reshardable`, `..._dp_zero`;
distributed/param_and_grad_buffer.py.
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
from zckpt.containers import TensorRef
from zckpt.core.catalog import Replica, Role, TensorEntry
from zckpt.core.dtypes import BF16, F16, F32, DType
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import clip, embed_box
from zckpt.engine.elements import ElementReader, Wanted
from zckpt.engine.rounding import cast
from zckpt.layouts.dcp.items import Items
from zckpt.layouts.dcp.metadata import BytesItem, Metadata, TensorItem
from zckpt.layouts.megatron_core.contents import MASTERS

ALIGNED = 64
"""Elements at multiples of which parameters begin in a bucket."""

_ENDS = 16
_PART = 1 << 20
_BUCKET = re.compile(
    r"(?P<group>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.gbuf_idx_(?P<buffer>\d+)\.dtype_.+?"
    r"\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)
_OBJECT = re.compile(
    r"(?P<group>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.(?P<what>\w+)/shard_\d+_\d+"
)
_NUMBERED = re.compile(r"\.(\d+)(?=\.)")


class Vector(NamedTuple):
    """A vector of fp32 weights, and those of its states.

    Attributes:
        name: for errors.
        group: the ranks that share it.
        order: its place among those of the group: buffer, bucket.
        numel: elements.
        states: state -> where its elements are; the fp32 weights are `param`.
        starts: elements at which something begins, as far as chunks say it.
    """

    name: str
    group: str
    order: tuple[int, int]
    numel: int
    states: Mapping[str, Sequence[Fragment]]
    starts: Sequence[int]


class Part(NamedTuple):
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


@dataclass(slots=True)
class _Slot:
    """Elements of a vector from `start` on, and the parts that hold the same numbers."""

    vector: int
    start: int
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Placed:
    """What was placed.

    Attributes:
        states: name of a weight -> state -> tensor; the fp32 weights are `param`.
        copies: name of a weight -> the same fp32 weights of other ranks.
        problems: what could not be placed, as clauses; then nothing is given.
    """

    states: Mapping[str, Mapping[str, TensorEntry]] = field(default_factory=dict[str, Mapping[str, TensorEntry]])
    copies: Mapping[str, tuple[Replica, ...]] = field(default_factory=dict[str, "tuple[Replica, ...]"])
    problems: tuple[str, ...] = ()


# ---- what a save has ------------------------------------------------------------------------------------------------


def vectors_of(names: Sequence[str], metadata: Metadata, items: Items, problems: list[str]) -> list[Vector]:
    """The vectors of a save's buckets; `problems` gets what is wrong with them."""
    found: dict[tuple[str, int, int], dict[str, TensorItem]] = {}
    objects: dict[str, list[tuple[str, BytesItem]]] = {}
    for name in names:
        item = metadata.items[name]
        if isinstance(item, TensorItem) and (match := _BUCKET.fullmatch(name)):
            state = "param" if match["state"] in MASTERS else match["state"]
            found.setdefault((match["group"], int(match["buffer"]), int(match["bucket"])), {})[state] = item
        elif isinstance(item, BytesItem) and (match := _OBJECT.fullmatch(name)):
            objects.setdefault(match["what"], []).append((match["group"], item))
    made = list(_of_buckets(found, items, problems))
    for group, item in objects.get("param_state", ()):
        made += _gathered(group, _one(items.value(item)), problems)
    for group, item in objects.get("per_bucket_numel_unpadded", ()):
        sizes = {vector.order: vector.numel for vector in made if vector.group == group}
        for order, numel in _said(_one(items.value(item))):
            if sizes.get(order) != numel:
                held = f"{sizes[order]:,}" if order in sizes else "none"
                problems.append(
                    f"bucket {order[1]} of buffer {order[0]} of {group!r} has {numel:,} elements, held are {held}"
                )
    for beginning in {group.rpartition("_")[0] for group in (vector.group for vector in made)}:
        numbers = {int(v.group.rpartition("_")[2]) for v in made if v.group.rpartition("_")[0] == beginning}
        if missing := set(range(max(numbers))) - numbers:
            problems.append(f"{beginning}_{min(missing)} is missing")
    return sorted(made, key=lambda vector: (vector.group, vector.order))


def settings_of(names: Sequence[str], metadata: Metadata, items: Items) -> Iterator[Mapping[str, object]]:
    """The settings of the parameter groups that are beside buckets, each once."""
    seen: set[str] = set()
    for name in names:
        item, match = metadata.items[name], _OBJECT.fullmatch(name)
        if match is None or match["what"] != "optimizer" or not isinstance(item, BytesItem):
            continue
        held = _one(items.value(item))
        for group in held.get("param_groups", ()) if isinstance(held, Mapping) else ():
            if isinstance(group, Mapping) and (text := repr(sorted(group.items(), key=str))) not in seen:
                seen.add(text)
                yield {str(key): value for key, value in group.items()}


def _one(value: object) -> object:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _said(value: object) -> Iterator[tuple[tuple[int, int], int]]:
    """(buffer, bucket) and elements, as `per_bucket_numel_unpadded` says them."""
    for buffer, own in enumerate(value if isinstance(value, list) else ()):
        for sizes in own.values() if isinstance(own, Mapping) else ():
            for bucket, numel in enumerate(sizes if isinstance(sizes, list) else ()):
                if type(numel) is int:
                    yield (buffer, bucket), numel


def _of_buckets(
    found: Mapping[tuple[str, int, int], dict[str, TensorItem]], items: Items, problems: list[str]
) -> Iterator[Vector]:
    for (group, buffer, bucket), own in found.items():
        what = f"bucket {bucket} of buffer {buffer} of {group!r}"
        master = own.get("param")
        odd = [state for state, item in own.items() if master and (item.size, item.dtype) != (master.size, F32)]
        if master is None or odd or len(master.size) != 1:
            problems.append(f"{what} has {f'{odd[0]!r} of another size or dtype' if odd else 'no fp32 weights'}")
            continue
        roles: dict[str, Role] = dict.fromkeys(own, "parameter")
        states = {state: entry.fragments for state, entry in items.tensors(own, roles).items()}
        starts = sorted(chunk.offsets[0] for chunk in master.chunks if chunk.numel)
        yield Vector(what, group, (buffer, bucket), master.size[0], states, starts)


def _gathered(group: str, held: object, problems: list[str]) -> Iterator[Vector]:
    """The vectors of `dp_zero_gather_scatter`."""
    for buffer, own in held.items() if isinstance(held, Mapping) else ():
        for vectors in own.values() if type(buffer) is int and isinstance(own, Mapping) else ():
            refs = (
                {str(k): v for k, v in vectors.items() if isinstance(v, TensorRef) and v.shape}
                if isinstance(vectors, Mapping)
                else {}
            )
            refs = {"param" if state in MASTERS else state: ref for state, ref in refs.items()}
            what = f"buffer {buffer} of {group!r}"
            if (
                "param" not in refs
                or len({(ref.shape, ref.dtype) for ref in refs.values()} | {(refs["param"].shape, F32)}) > 1
            ):
                problems.append(f"{what} has no fp32 weights, or states of another size or dtype")
                continue
            states = {state: ref.fragments() for state, ref in refs.items()}
            yield Vector(what, group, (buffer, 0), refs["param"].numel, states, (0,))


def parts_of(weights: Mapping[str, TensorItem], items: Items) -> list[Part]:
    """The chunks of floating weights, each as one rank had it."""
    items.open_all(weights.values())
    return [
        Part(name, chunk.offsets, chunk.sizes, item.dtype, items.chunk_fragments(item, chunk))
        for name, item in weights.items()
        if item.dtype in (F32, BF16, F16)
        for chunk in item.chunks
        if chunk.numel
    ]


# ---- places ---------------------------------------------------------------------------------------------------------


class _Numbers:
    """Reads numbers of parts and vectors, as bytes in a weight's dtype."""

    def __init__(self, reader: ElementReader) -> None:
        self._reader = reader

    def of_part(self, part: Part, start: int, stop: int) -> bytes:
        return self._reader.read(Wanted(part.fragments, part.dtype, start, stop))

    def of_vector(self, vector: Vector, dtype: DType, start: int, stop: int) -> bytes:
        data = self._reader.read(Wanted(clip(vector.states["param"], start, stop, 4), F32, 0, stop - start))
        return cast(data, F32, dtype, sys.byteorder, False)[0]

    def agree(self, part: Part, vector: Vector, start: int) -> bool:
        """Whether all numbers of a part are those of a vector."""
        cuts = ((at, min(at + _PART, part.numel)) for at in range(0, part.numel, _PART))
        return all(
            self.of_part(part, low, high) == self.of_vector(vector, part.dtype, start + low, start + high)
            for low, high in cuts
        )

    def digest(self, vector: Vector, start: int, numel: int) -> bytes:
        """Of all states of some elements."""
        found = hashlib.sha256()
        for _, fragments in sorted(vector.states.items()):
            for low in range(start, start + numel, _PART):
                high = min(low + _PART, start + numel)
                found.update(self._reader.read(Wanted(clip(fragments, low, high, 4), F32, 0, high - low)))
        return found.digest()


class _Index:
    """Parts by their first numbers."""

    def __init__(self, parts: Sequence[Part], numbers: _Numbers) -> None:
        self._numbers = numbers
        self._by_head: dict[tuple[DType, bytes], list[Part]] = {}
        for part in parts:
            head = numbers.of_part(part, 0, min(_ENDS, part.numel))
            self._by_head.setdefault((part.dtype, head), []).append(part)
        self._kinds = sorted({(dtype, len(head) // dtype.itemsize) for dtype, head in self._by_head}, key=str)

    def at(self, vector: Vector, start: int) -> list[Part]:
        """The parts that a vector may hold at an element."""
        found: list[Part] = []
        for dtype, length in self._kinds:
            if start + length > vector.numel:
                continue
            head = self._numbers.of_vector(vector, dtype, start, start + length)
            for part in self._by_head.get((dtype, head), ()):
                stop = start + part.numel
                if stop > vector.numel:
                    continue
                low = max(part.numel - _ENDS, 0)
                tail = self._numbers.of_vector(vector, dtype, start + low, stop)
                if tail == self._numbers.of_part(part, low, part.numel):
                    found.append(part)
        if len(found) > 1:
            found = [part for part in found if self._numbers.agree(part, vector, start)]
        return found


def place(
    vectors: Sequence[Vector], parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]], problems: list[str]
) -> Placed:
    """The parameters of vectors, placed by what they hold; `problems` says what was found wrong before."""
    with ElementReader() as reader:
        numbers = _Numbers(reader)
        index = _Index(parts, numbers)
        slots = [slot for n, vector in enumerate(vectors) for slot in _slots(n, vector, index, problems)]
        _tell_apart(slots, vectors)
        if _share_equals(slots, vectors, numbers):
            _tell_apart(slots, vectors)
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
    return Placed(problems=tuple(problems)) if problems else _put_together(slots, vectors, parts, shapes)


def _words(part: Part) -> str:
    layer = part.layer()
    return part.name if layer is None or str(layer[1]) in part.name.split(".") else f"{part.name}[{layer[1]}]"


def _slots(number: int, vector: Vector, index: _Index, problems: list[str]) -> Iterator[_Slot]:
    """The places of parameters in a vector, in order."""
    starts = {*vector.starts, vector.numel}
    at, lost = 0, -1
    while at < vector.numel:
        parts = index.at(vector, at)
        if any(at + part.numel in starts for part in parts):
            parts = [part for part in parts if at + part.numel in starts]
        if len({part.numel for part in parts}) > 1:
            longest = max(part.numel for part in parts)
            parts = [part for part in parts if part.numel == longest]
        if parts:
            if lost >= 0 and at - lost != -lost % ALIGNED:
                problems.append(f"elements {lost:,}-{at - 1:,} of {vector.name} are no weight's")
            yield _Slot(number, at, parts)
            at, lost = at + parts[0].numel, -1
        else:
            lost = at if lost < 0 else lost
            at = min((at // ALIGNED + 1) * ALIGNED, vector.numel)
    if lost >= 0 and vector.numel - lost != -lost % ALIGNED:
        problems.append(f"elements {lost:,}-{vector.numel - 1:,} of {vector.name} are no weight's")


def _tell_apart(slots: Sequence[_Slot], vectors: Sequence[Vector]) -> None:
    """Leaves those parts of slots that fit the order of the others."""
    lines: dict[tuple[str, int], list[_Slot]] = {}
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


def _orders(lines: Iterable[Sequence[_Slot]]) -> set[tuple[str, str]]:
    """Pairs of names, the first of which lies before the other in a layer."""
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


def _use_once(slots: Sequence[_Slot], vectors: Sequence[Vector]) -> bool:
    """Takes a part that one slot has away from the other slots of these ranks; whether there was any."""
    owners: dict[tuple[str, str, tuple[int, ...]], _Slot] = {}
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


def _fits(part: Part, at: int, line: Sequence[_Slot], before: set[tuple[str, str]]) -> bool:
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


def _goes_on(line: Sequence[_Slot], at: int, layer: tuple[str, int]) -> bool:
    """Whether layers of a stack lie behind this place too."""
    known = (slot.parts[0].layer() for slot in line[at + 1 :] if len(slot.parts) == 1)
    return any(other is not None and other[0] == layer[0] for other in known)


def _share_equals(slots: Sequence[_Slot], vectors: Sequence[Vector], numbers: _Numbers) -> bool:
    """Gives slots with equal parts and equal states one part each: it is the same whichever has which; whether there are
    any.
    """
    shared = False
    tied: dict[tuple[object, ...], list[_Slot]] = {}
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


# ---- tensors --------------------------------------------------------------------------------------------------------


def _put_together(
    slots: Sequence[_Slot], vectors: Sequence[Vector], parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]]
) -> Placed:
    """The tensors that the parts of slots make."""
    held: dict[str, dict[tuple[int, ...], list[_Slot]]] = {}
    for slot in slots:
        held.setdefault(slot.parts[0].name, {}).setdefault(slot.parts[0].offsets, []).append(slot)
    wanted: dict[str, set[tuple[int, ...]]] = {}
    for part in parts:
        wanted.setdefault(part.name, set()).add(part.offsets)
    lost = {name: min(wanted[name] - own.keys()) for name, own in held.items() if wanted[name] - own.keys()}
    if lost:
        some = ", ".join(f"{name!r} at {list(at)}" for name, at in list(lost.items())[:3])
        return Placed(problems=(f"{count(len(lost), 'weight')} have no fp32 weights in part: {some}",))
    states: dict[str, dict[str, TensorEntry]] = {}
    copies: dict[str, tuple[Replica, ...]] = {}
    for name, own in held.items():
        kinds = {frozenset(vectors[slot.vector].states) for every in own.values() for slot in every}
        if len(kinds) != 1:
            return Placed(problems=(f"the ranks do not have the same states of {name!r}",))
        most = max(map(len, own.values()))
        for state in sorted(next(iter(kinds))):
            rows = [[f for every in own.values() for f in _embedded(every[n % len(every)], vectors, state, shapes[name])]
                    for n in range(most if state == "param" else 1)]  # fmt: skip
            first, *others = (tuple(sorted(row, key=lambda f: f.start)) for row in rows)
            states.setdefault(name, {})[state] = TensorEntry(name, shapes[name], F32, "parameter", first)
            if others:
                copies[name] = tuple(Replica(F32, other, f"copy {n}") for n, other in enumerate(others, 1))
    return Placed(states, copies)


def _embedded(slot: _Slot, vectors: Sequence[Vector], state: str, shape: Sequence[int]) -> Sequence[Fragment]:
    """A slot's elements of a state, as fragments of the weight."""
    part = slot.parts[0]
    own = clip(vectors[slot.vector].states[state], slot.start, slot.start + part.numel, 4)
    return embed_box(own, part.sizes, part.offsets, shape, 4)
