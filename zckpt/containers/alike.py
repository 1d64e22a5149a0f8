"""Pickles of several ranks that are alike but for a few numbers: one is read, the others' objects are made from its.

For `torch_zip`. Pickles of two ranks' files often differ in a byte or two, such as a rank's coordinate in the mesh and the rows
of an uneven tensor, and in where their storages lie. [Note: how that is known] Two pickles of one length are compared byte by
byte. Where they differ, both must have the opcode of a number of so many bytes, and that number. The first one is carried out
with a `_Hole` for each of these numbers. It only counts if each hole was pushed exactly once, as an opcode, and nothing looked
into one: no call with a meaning of its own, no key. The calls that make a tensor, and the ids of storages, may hold one: these
wait. Then the other pickle would have gone the same way, at the same cost, and have made the same object with its own numbers
in the places of the holes, and with tensors of its own file's storages: these are made, and checked, by the same functions.
Storages without elements, which ZeRO-3 leaves thousands of, have no bytes in any file: all share those of the first one. In any
other case a pickle is read by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from zckpt.base.errors import ZckptError
from zckpt.containers.inert import NumpyArray, Pair, Placeholder
from zckpt.containers.machine import Machine, most_cost
from zckpt.containers.meanings import MEANINGS, MISFITS
from zckpt.containers.opcodes import HOLE
from zckpt.containers.pickles import read_pickle
from zckpt.containers.tensor_ref import StorageRef, TensorRef
from zckpt.core.dtypes import DType

_MOST_HOLES = 64
_MOST_TEMPLATES = 4
"""Pickles of one reader that are carried out with holes; with more, ranks are not alike."""

_NUMBERS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
"""Opcode of a number -> its bytes; that of four is signed."""

_TENSORS = {"torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"}
_PLAIN = {type(None), bool, int, float, complex, str, bytes, bytearray, DType, range}


Load = Callable[[object], StorageRef]
"""Gives the storage of a persistent id of one file; raises what is wrong with it."""

Like = Callable[[StorageRef], StorageRef]
"""Gives the storage that `Load` gives for the id for which another file's gave this one; raises as it does."""


class _Hole:
    """Stands for a number that differs between pickles; its opcode is at byte `at`."""

    __slots__ = ("at", "nbytes")

    def __init__(self, at: int, opcode: int) -> None:
        self.at = at
        self.nbytes = _NUMBERS[opcode]

    def number(self, pickle: bytes) -> int:
        """The number of a pickle."""
        return int.from_bytes(pickle[self.at + 1 : self.at + 1 + self.nbytes], "little", signed=self.nbytes == 4)


class _Waits(NamedTuple):
    """A storage or a tensor with holes as a part.

    Attributes:
        make: of the arguments; None for a storage.
        args: of the call, or the storage's id alone.
    """

    make: Callable[..., object] | None
    args: tuple[object, ...]


class _NotAlike(Exception):
    """The objects of other pickles cannot be made from this one's."""


class AlikePickles:
    """Reads one pickle after another. `ahead`: pickles of further files, such as the second and the last, which say
    where they differ, so that the first one need not be read again; may raise `ZckptError`.
    """

    def __init__(self, ahead: Callable[[], Iterable[bytes]] | None = None) -> None:
        self._ahead = ahead
        self._first: bytes | None = None
        self._holes: frozenset[int] = frozenset()
        self._template: _Template | None = None
        self._left = _MOST_TEMPLATES

    def root(self, pickle: bytes, load: Load, like: Like, spent: int, file: str) -> object | None:
        """The object in a pickle, made from one that is alike; None if it must be read by itself. Raises ZckptError if
        a tensor does not fit into its storage, or a storage into the file.
        """
        if self._first is None:
            self._first = pickle
            try:
                ahead = [_differing(pickle, other) for other in (self._ahead() if self._ahead else ())]
            except ZckptError:
                return None
            known = [found for found in ahead if found is not None]
            differing = frozenset[int]().union(*known) if known else None
        else:
            differing = _differing(self._first, pickle)
        if differing is None:
            return None
        if self._template is None or not differing <= self._holes:
            if not self._left or len(self._holes | differing) > _MOST_HOLES:
                return None
            self._left -= 1
            self._holes |= differing
            try:
                self._template = _Template(self._first, self._holes, file, spent, load)
            except (_NotAlike, ZckptError, EOFError):
                self._template, self._left = None, 0
        if self._template is None or not self._template.is_affordable(pickle, spent):
            return None
        try:
            return self._template.filled(pickle, load, like)
        except _NotAlike:
            return None


class AlikeLengths(AlikePickles):
    """Reads many small pickles, such as those of a save's items; those of one length are often alike."""

    def __init__(self) -> None:
        super().__init__()
        self._by_length: dict[int, AlikePickles] = {}

    def root(self, pickle: bytes, load: Load, like: Like, spent: int, file: str) -> object | None:
        """As `AlikePickles.root`."""
        if len(pickle) > _MOST_BYTES or (len(pickle) not in self._by_length and len(self._by_length) == _MOST_LENGTHS):
            return None
        return self._by_length.setdefault(len(pickle), AlikePickles()).root(pickle, load, like, spent, file)


_MOST_BYTES, _MOST_LENGTHS = 1 << 12, 64

_OTHER = re.compile(rb"[^\0]")


def _differing(one: bytes, other: bytes) -> frozenset[int] | None:
    """Where the opcodes of numbers are that two pickles have differently; None if they differ in anything else."""
    if one == other:
        return frozenset()
    if len(one) != len(other):
        return None
    both = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    found: set[int] = set()
    end = 0
    for match in _OTHER.finditer(both.to_bytes(len(one), "little")):
        at = match.start()
        if at < end:
            continue
        before = (at - nbytes for nbytes in range(1, 5) if at >= nbytes)
        opcode = next(
            (b for b in before if b >= end and one[b] == other[b] and _NUMBERS.get(one[b], 0) >= at - b), None
        )
        if opcode is None or len(found) == _MOST_HOLES:
            return None
        found.add(opcode)
        end = opcode + 1 + _NUMBERS[one[opcode]]
    return frozenset(found)


class _HoleMachine(Machine):
    """Carries out a pickle with holes; storages are kept with their ids."""

    def __init__(self, data: bytes, file: str, spent: int, load: Load) -> None:
        super().__init__(data, file, record="data.pkl", persistent_load=self._load, spent=spent)
        self.load = load
        self.keys: dict[str, object] = {}
        self.held: dict[str, StorageRef] = {}

    def _load(self, key: object) -> StorageRef | _Waits:
        if isinstance(key, tuple) and _has_hole(key):
            return _Waits(None, (key,))
        storage = self.load(key)
        if self.keys.setdefault(storage.key, key) != key:
            raise _NotAlike
        self.held[storage.key] = storage
        return storage

    def call(self, function: object, args: object, kwargs: Any = None, forwards: int = 0) -> object:
        """As `Machine.call`, but for calls that would look at a hole."""
        named = f"{function.module}.{function.name}" if isinstance(function, Placeholder) else ""
        if named in MEANINGS and isinstance(args, tuple) and _has_hole((*args, *(kwargs or {}).values())):
            if named not in _TENSORS or kwargs or _has_hole(args[4:]):
                raise _NotAlike
            return _Waits(MEANINGS[named], args)
        made = super().call(function, args, kwargs, forwards)
        if type(made) is _Waits:  # of a subclass, which has attributes too
            raise _NotAlike
        return made

    def build(self, state: object) -> None:
        """As `Machine.build`, but for states that would be looked at."""
        if isinstance(self.stack[-1], NumpyArray) and isinstance(state, tuple) and _has_hole(state):
            raise _NotAlike
        super().build(state)


def _has_hole(values: Sequence[object]) -> bool:
    """Whether a hole is among values, or in tuples and lists among them."""
    pending, depth = list(values), 0
    while pending and depth < _LOOKED_INTO:
        depth += 1
        kinds = set(map(type, pending))
        if _Hole in kinds or _Waits in kinds:
            return True
        pending = [inner for value in pending if type(value) in (tuple, list) for inner in value]  # type: ignore[attr-defined]
    return bool(pending)


_LOOKED_INTO = 4
"""Tuples in tuples among arguments; what is nested deeper counts as a hole."""


_Spots = tuple[Any, list[tuple[Any, int]]]
"""An object of the template in which others must be put, and where: (index or key in it, number of the other in the plan)."""


class _Template:
    """A pickle's object, and how those of pickles that are alike are made from it.

    Args:
        first: the pickle.
        holes: where others have other numbers.
        file: its path, for errors.
        spent: cost before it.
        load: of any of the files.

    Raises:
        _NotAlike, ZckptError, EOFError: others cannot be made from it.
    """

    def __init__(self, first: bytes, holes: frozenset[int], file: str, spent: int, load: Load) -> None:
        data = bytearray(first)
        for at in holes:
            data[at] = HOLE
        machine = _HoleMachine(bytes(data), file, spent, load)
        machine.hole = lambda at: _Hole(at, first[at])
        machine.holes = dict.fromkeys(holes, 0)
        root = read_pickle(machine)
        if any(pushed != 1 for pushed in machine.holes.values()):
            raise _NotAlike
        self._cost = machine.cost - spent
        self._held = tuple(storage for storage in machine.held.values() if storage.numel)
        self._plan: list[_Hole | StorageRef | TensorRef | _Waits | _Spots] = []
        self._known: dict[int, int] = {}
        self._root = root
        self._number = self._planned(root)

    def is_affordable(self, pickle: bytes, spent: int) -> bool:
        """Whether a machine that reads this pickle would not refuse its cost."""
        return spent + self._cost <= most_cost(len(pickle), spent)

    def _planned(self, value: object) -> int:
        """The number in the plan of an object that differs between files; -1 for one that they share."""
        kind = type(value)
        if kind in _PLAIN:
            return -1
        known = self._known.get(id(value))
        if known is not None:
            if known == _BEGUN:  # an object that contains itself
                raise _NotAlike
            return known
        self._known[id(value)] = _BEGUN
        made: _Hole | StorageRef | TensorRef | _Waits | _Spots | None = None
        if isinstance(value, _Hole):
            made = value
        elif isinstance(value, StorageRef):
            made = value if value.numel else None
        elif isinstance(value, TensorRef):
            if value.attributes is not None:
                raise _NotAlike
            made = value if value.storage_nbytes else None
        elif isinstance(value, _Waits):
            made = _Waits(value.make, (self._planned(value.args),))
        elif kind in (tuple, list, Pair):
            made = self._spots(value, enumerate(value))  # type: ignore[arg-type]
        elif kind is dict:
            made = self._spots(value, value.items())  # type: ignore[attr-defined]
            if any(self._planned(key) >= 0 for key in value):  # type: ignore[attr-defined]
                raise _NotAlike
        elif kind is Placeholder:
            made = self._spots(value, ((name, getattr(value, name)) for name in _FIELDS))
        elif kind in (set, frozenset, NumpyArray):
            inner = value.objects if isinstance(value, NumpyArray) else value
            if any(self._planned(item) >= 0 for item in inner):  # type: ignore[attr-defined]
                raise _NotAlike
        else:
            raise _NotAlike
        number = -1
        if made is not None:
            number = len(self._plan)
            self._plan.append(made)
        self._known[id(value)] = number
        return number

    def _spots(self, value: object, items: Any) -> _Spots | None:
        spots: list[tuple[Any, int]] = []
        for key, item in items:
            if type(item) not in _PLAIN and (number := self._planned(item)) >= 0:
                spots.append((key, number))
        return (value, spots) if spots else None

    def filled(self, pickle: bytes, load: Load, like: Like) -> object:
        """The object of another pickle, or of this one; raises as `AlikePickles.root`."""
        held = {storage.key: like(storage) for storage in self._held}
        made: list[Any] = []
        for step in self._plan:
            kind = type(step)
            if kind is TensorRef:
                ref: Any = step
                made.append(held[ref.storage_key].like(ref))
            elif kind is StorageRef:
                made.append(held[step.key])  # type: ignore[union-attr]
            elif kind is _Hole:
                made.append(step.number(pickle))  # type: ignore[union-attr]
            elif kind is _Waits:
                args = made[step.args[0]]  # type: ignore[union-attr,index]
                made.append(_build_waiting(step.make, args, load))  # type: ignore[union-attr]
            else:
                value, spots = step[0], step[1]  # type: ignore[index]
                made.append(_with(value, [(key, made[number]) for key, number in spots]))  # type: ignore[misc]
        return made[self._number] if self._number >= 0 else self._root


def _build_waiting(make: Callable[..., object] | None, args: tuple[object, ...], load: Load) -> object:
    """A storage or tensor that had to wait. Raises _NotAlike if the call has no such meaning for these arguments."""
    if make is None:
        return load(args[0])
    try:
        value = make(*args)
    except MISFITS as error:
        raise _NotAlike from error
    if value is None:
        raise _NotAlike
    return value


_BEGUN = -2
_FIELDS = ("args", "state", "kwargs", "items")


def _with(value: Any, inside: list[tuple[Any, object]]) -> object:
    """A copy of an object with others in it."""
    kind = type(value)
    if kind is dict:
        return {**value, **dict(inside)}
    if kind is Placeholder:
        own = {"args": value.args, "state": value.state, "kwargs": value.kwargs, "items": value.items, **dict(inside)}
        return Placeholder(value.module, value.name, called=value.called, new=value.new, **own)
    items = list(value)
    for at, item in inside:
        items[at] = item
    return items if kind is list else Pair(*items) if kind is Pair else tuple(items)
