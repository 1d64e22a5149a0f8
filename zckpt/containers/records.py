"""Objects that are written alike, hundreds of thousands in a row, as columns of numbers instead of objects.

For `pickles`, where the C++ is built. `phrases` finds out how the objects of a class are written; `csrc/records.cpp` reads those
that follow in the same way, and stops before the first that is not: that one is read by phrases or opcode by opcode, as all are
without the C++. An object of 150 bytes of pickle takes 60 bytes so instead of 400, and 1 us instead of 20.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from zckpt.containers.inert import Placeholder
from zckpt.containers.machine import Machine
from zckpt.containers.meanings import plain_key
from zckpt.containers.phrases import GET, LITERAL, NUMBER, SHAPE, TEXT, Phrase, Phrases, class_head
from zckpt.containers.tensor_ref import is_count

try:
    from zckpt._core import Places, read_boxes
except ImportError:  # then `pickles` does not use this module
    pass

ROW_COST = 96
"""Of a row: its numbers, and those of its shape."""

_Ways = list[tuple[list[tuple[int, int, bytes]], int]]


class ObjectKind(NamedTuple):
    """A class with objects that become rows: its name, and of each column its attribute and the kinds that it may be."""

    name: str
    columns: Mapping[str, tuple[int, ...]]
    none: str = ""
    """An attribute that must be None, or not there."""
    optional: str = ""
    """A column that may be None."""


def text_columns(name: str, *numbers: str) -> dict[str, tuple[int, ...]]:
    """The columns of a text, and of numbers."""
    return {name: (GET, TEXT)} | dict.fromkeys(numbers, (NUMBER,))


def shape_columns(*shapes: str) -> dict[str, tuple[int, ...]]:
    """The columns of shapes."""
    return dict.fromkeys(shapes, (SHAPE,))


class RowKinds(NamedTuple):
    """What becomes rows: boxes in lists, and entries of a dict of places.

    Attributes:
        boxes: two shapes of as many dimensions.
        make_boxes: makes what stands for a list of them, of their dimensions and their numbers.
        keys: a text, and a shape or None.
        values: a text and two numbers.
        make_value: makes what stands for one of these.
    """

    boxes: ObjectKind
    make_boxes: Callable[[int, bytes], Sequence[object] | object]
    keys: ObjectKind
    values: ObjectKind
    make_value: Callable[[str, int, int], tuple[str, int, int]]


class PlaceTable:
    """A dict of places: (name, offsets or None) -> (file, offset, length); what is of another kind is in `odd`."""

    def __init__(self, make_value: Callable[[str, int, int], Any]) -> None:
        self.odd: dict[object, object] = {}
        self._names: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._files: list[str] = []
        self._make = make_value
        self._kind: type[Any] = type(make_value("", 0, 0))
        self.rows = Places(self._names, self._numbers)

    def __len__(self) -> int:
        return len(self.rows) + len(self.odd)

    @property
    def files(self) -> list[str]:
        """The files, by their numbers; one list for all who ask."""
        if len(self._files) < len(self._numbers):
            self._files += itertools.islice(self._numbers, len(self._files), None)
        return self._files

    def update(self, pairs: Iterable[tuple[object, object]]) -> None:
        """Adds places; of equal keys the last one counts."""
        for key, value in pairs:
            if isinstance(key, tuple) and isinstance(value, self._kind) and _is_name_and_place(key):
                name, offsets = key
                file, offset, length = value
                numbers = None if offsets is None else array("q", offsets).tobytes()
                number = self._numbers.setdefault(file, len(self._numbers))
                self.rows.add(self._names.setdefault(name, len(self._names)), numbers, number, offset, length)
            else:
                self.odd[plain_key(key)] = value

    def get(self, key: tuple[str, tuple[int, ...] | None]) -> Any:
        """The place; None where there is none."""
        number = self._names.get(key[0])
        if number is None:
            return None
        found = self.rows.find(number, None if key[1] is None else array("q", key[1]).tobytes())
        return found and self._make(self.files[found[0]], *found[1:])

    def places(self, name: str, size: tuple[int, ...], boxes: array[int]) -> bytes:
        """File's number, offset and length for each box of a tensor; empty where they have to be looked at one by one."""
        number = self._names.get(name)
        return b"" if number is None else self.rows.find_all(number, array("q", size).tobytes(), boxes.tobytes())


def _is_name_and_place(key: tuple[object, ...]) -> bool:
    if len(key) != 2 or type(key[0]) is not str:
        return False
    offsets = key[1]
    return offsets is None or (type(offsets) is tuple and all(map(is_count, offsets)))


class Records:
    """Reads the rows of one pickle.

    Args:
        machine: that reads the pickle.
        kinds: what becomes rows.
        phrases: how objects are written, as far as it is known.
    """

    def __init__(self, machine: Machine, kinds: RowKinds, phrases: Phrases) -> None:
        self._machine = machine
        self._kinds = kinds
        self._phrases = phrases
        self._heads: dict[str, tuple[object, bytes]] = {}
        self._needed = b""
        self._learned: tuple[int, ...] = ()
        self._box_ways: tuple[tuple[object, ...], _Ways] = ((), [])
        self.table: PlaceTable | None = None

    def read(self, function: object, at: int, number: int, needed: bytearray) -> tuple[int, int, int] | None:
        """The entries of a dict from a key of this class on, with its NEWOBJ before byte `at`: how many objects went into the
        memo, where they end, and the cost of what remains. The class is still on the stack. None if there are none.
        """
        if type(function) is not Placeholder or function.name not in (self._kinds.keys.name, self._kinds.values.name):
            return None
        head = self._head(function, at)
        if function.name != self._kinds.keys.name or head is None or (table := self._table(needed)) is None:
            return None
        start = at - len(head)
        data, memo = self._machine.data, self._machine.memo
        rows, memoized, end = table.rows.read(data, start, memo, self._needed, number)
        return (memoized, end, ROW_COST * rows) if rows else None

    def boxes(self, function: object, head: bytes, at: int) -> tuple[object, int, int, int] | None:
        """The boxes of a list that is empty before byte `at`, of a class that these bytes push; None if it has others."""
        if type(function) is not Placeholder or function.name != self._kinds.boxes.name:
            return None
        phrases = self._phrases.known(function) or self._phrases.learn(self._machine, function, at + 1 + len(head))
        key = (id(function), head, len(phrases))
        if self._box_ways[0] != key:
            self._box_ways = key, _ways(head, phrases, self._kinds.boxes)
        if not self._box_ways[1] or (found := read_boxes(self._machine.data, at, self._box_ways[1])) is None:
            return None
        dims, numbers, memoized, end = found
        return self._kinds.make_boxes(dims, numbers), memoized, end, len(numbers)

    def _head(self, function: Placeholder, at: int) -> bytes | None:
        """The opcodes that push a class and make an object of it, up to byte `at`."""
        known = self._heads.get(function.name)
        if known is None and (head := class_head(self._machine, function, at)):
            known = self._heads[function.name] = function, head
        if known is None or known[0] is not function or not self._machine.data.endswith(known[1], 0, at):
            return None
        return known[1]

    def _table(self, needed: bytearray) -> PlaceTable | None:
        """The table that stands for the dict that is being filled, ready to read rows; None where there can be none."""
        stack, marks = self._machine.stack, self._machine.marks
        keys, values = self._kinds.keys, self._kinds.values
        if (
            not marks
            or not 0 < marks[-1] < len(stack)
            or (len(stack) - 1 - marks[-1]) % 2
            or values.name not in self._heads
        ):
            return None
        table = self._table_at(marks[-1] - 1)
        if table is None:
            return None
        known = [self._phrases.known(self._heads[kind.name][0]) for kind in (keys, values)]
        if (learned := tuple(map(len, known))) != self._learned:
            ways = [_ways(self._heads[k.name][1], phrases, k) for k, phrases in zip((keys, values), known)]
            table.rows.learn(*ways)
            self._learned = learned
        if not self._needed:
            self._needed = array("q", itertools.compress(itertools.count(), needed)).tobytes()
        begun = stack[marks[-1] : -1]
        del stack[marks[-1] : -1]
        table.update(zip(begun[::2], begun[1::2], strict=True))
        return table

    def _table_at(self, place: int) -> PlaceTable | None:
        stack = self._machine.stack
        owner = stack[place]
        if (known := self.table) is not None:
            return known if owner is known else None
        if type(owner) is not dict or sys.getrefcount(owner) > _ON_THE_STACK_ALONE:
            return None
        table = PlaceTable(self._kinds.make_value)
        self.table = stack[place] = table
        table.update(owner.items())
        return table


_ON_THE_STACK_ALONE = 3
"""References to an object on the stack, in a variable, and as an argument."""


def _ways(head: bytes, phrases: Iterable[Phrase], kind: ObjectKind) -> _Ways:
    """The ways to write an object that have all columns, for `csrc/records.cpp`."""
    found: _Ways = []
    columns = list(kind.columns)
    for phrase in phrases:
        kinds = {attribute: piece for piece, attribute, _ in phrase.tokens if attribute}
        wanted = [name for name in columns if name != kind.optional or kinds.get(name) != LITERAL]
        if (
            any(kinds.get(name) not in kind.columns[name] for name in wanted)
            or kinds.get(kind.none, LITERAL) != LITERAL
        ):
            continue
        tokens = [
            (piece, columns.index(attribute) if attribute in columns and piece != LITERAL else -1, literal)
            for piece, attribute, literal in phrase.tokens
        ]
        found.append(([(LITERAL, -1, head), *tokens], phrase.memoized))
    return found
