"""Objects of the same class one after another in a pickle, each read in one go instead of opcode by opcode.

For `pickles`. The metadata of a large save are hundreds of thousands of objects of three classes, of thirty opcodes each. Python
writes them all with the same opcodes (protocol 4): NEWOBJ, an empty dict, MARK, for each attribute a key from the memo and a
value, SETITEMS, BUILD. [Note: phrases] From the first object of a class an expression is made that matches exactly these
opcodes, with other numbers, texts, shapes and memo entries in their places. Where it matches, the opcodes would make the same
object at the same cost, and that is made at once. Where it does not, the opcodes are carried out one by one.
Source: CPython's Lib/pickle.py (3.13), `save_reduce`, `_batch_setitems`, `save_tuple`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zckpt.containers.inert import Placeholder
from zckpt.containers.machine import ARGUMENT_COST, ENTRY_COST, ITEM_COST, PLACEHOLDER_COST, Machine
from zckpt.containers.meanings import MEANINGS, runs_code
from zckpt.containers.opcodes import COSTS

_INT = rb"(?:K.|M..|J.{4}|\x8a\x05.{5}|\x8a\x06.{6}|\x8a\x07.{7}|\x8a\x08.{8})"
_GET = rb"(?:h.|j.{4})"
_SHAPE = rb"\(?" + _INT + rb"{1,16}[\x85\x86\x87t]"
_MADE = b"\x94\x85\x94R\x94"
"""What turns a tuple into a call with it: the tuple, the tuple of arguments and the result go into the memo."""
_BEGIN, _END = b"\x94}\x94(", b"ub"

_FIELD = re.compile(
    b"(" + _GET + b")(?:(?P<none>N)|(?P<number>" + _INT + b")|(?P<text>\x8c)|"
    b"(?P<known>" + _GET + b")(?P<shape>" + _SHAPE + re.escape(_MADE) + b")?)", re.DOTALL
)  # fmt: skip

_MOST_FIELDS, _MOST_PHRASES = 8, 8
_MARK = ord("(")
_MEMOIZE = 0x94
_TEXT_COST = COSTS[0x8C] + COSTS[_MEMOIZE]
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
"""The opcodes of tuples without a mark -> how many items these have."""
_SIZE = "torch.Size"

_SHAPES_KEPT = 4096
"""Shapes that are kept to be used again; sizes repeat, offsets do not."""

_PLAIN_COST, _PLAIN_EXTENT_COST = 256, 40
"""Of a tuple that takes the place of an object, and of each number of a shape in it."""
_INT_COST = max(COSTS[code] for code in b"KMJN\x8ahj")
_EXTENT_COST = _INT_COST + ITEM_COST + 8


_NUMBER_KIND, _SHAPE_KIND, _KNOWN_KIND = range(3)
LITERAL, NUMBER, SHAPE, GET, TEXT = range(5)
"""The kinds of the pieces of a phrase, as `csrc/records.h` numbers them."""

_KEY = re.compile(
    b"(" + _GET + b")(?:(?P<list>\\]\x94)|(?P<known>" + _GET + b")(?:(?P<made>\\)\x81)|(?P<shape>" + _SHAPE
    + re.escape(_MADE) + b")))", re.DOTALL
)  # fmt: skip
"""In an object that holds others: a key, then a list, an object's class, or a shape."""
_CLASS = re.compile(b"(" + _GET + rb")\)\x81", re.DOTALL)
_STATE = re.compile(rb"\x94\(((?:" + _GET + rb"|[N\x88\x89]){1,16})t\x94b", re.DOTALL)
"""A state that is a tuple of entries of the memo and constants."""
_ITEM = re.compile(_GET + rb"|[N\x88\x89]", re.DOTALL)
_CONSTANTS: dict[bytes, object] = {b"N": None, b"\x88": True, b"\x89": False}
_MOST_REPEATED, _MOST_LENGTHS, _MOST_BYTES = 512, 8, 2048
"""Objects with opcodes that are kept, to be found again: how many, of how many lengths, and of how many bytes each."""
_HOLDER_COST = 512
"""Of an object that holds others: itself and its attributes."""

Found = tuple[dict[str, object], int, int, int]
"""An object that was read in one go: its attributes, where its opcodes end, their cost, and the cost of what remains where a
plain value takes its place."""

Made = tuple[object, int, int, int]
"""An object that was read in one go: what took its place, how many objects went into the memo, where its opcodes end, and the
cost of what remains."""


class Phrase:
    """How the objects of a class are written. `memoized`: how many objects it puts into the memo."""

    __slots__ = ("_cost", "_nones", "_segments", "memoized", "tokens")

    def __init__(self) -> None:
        self._nones: dict[str, object] = {}
        self._segments: list[tuple[re.Pattern[bytes], tuple[tuple[str, int], ...], str | None]] = []
        """Of each: the opcodes up to a text, the attributes in them and their kinds, and the text's attribute."""
        self._cost = PLACEHOLDER_COST + sum(COSTS[byte] for byte in b"\x81" + _BEGIN + _END)
        self.memoized = 2
        self.tokens: list[tuple[int, str, bytes]] = []
        """The same for `records`: (kind, attribute, literal bytes) of each piece."""

    @classmethod
    def of(cls, data: bytes, at: int, memo: Mapping[int, Any]) -> Phrase | None:
        """How the object with its NEWOBJ before byte `at` is written; None if in another way."""
        made = cls()
        pattern, at = re.escape(_BEGIN), at + len(_BEGIN)
        tokens = made.tokens
        tokens.append((LITERAL, "", _BEGIN))
        fields: list[tuple[str, int]] = []
        seen: set[str] = set()
        while data[at : at + 2] != _END:
            match = _FIELD.match(data, at)
            key = memo.get(_number(match[1])) if match else None
            if match is None or type(key) is not str or key in seen or len(seen) == _MOST_FIELDS:
                return None
            at = match.end()
            seen.add(key)
            pattern += re.escape(match[1])
            tokens.append((LITERAL, "", match[1]))
            made._cost += ENTRY_COST + 16 + COSTS[data[match.start()]] + _INT_COST
            if match["none"]:
                pattern += b"N"
                tokens.append((LITERAL, key, b"N"))
                made._nones[key] = None
            elif match["number"]:
                pattern += b"(" + _INT + b")"
                fields.append((key, _NUMBER_KIND))
                tokens.append((NUMBER, key, b""))
            elif match["shape"]:
                size = memo.get(_number(match["known"]))
                if type(size) is not Placeholder or str(size) != _SIZE or size.called:
                    return None
                pattern += re.escape(match["known"]) + b"(" + _SHAPE + b")" + re.escape(_MADE)
                fields.append((key, _SHAPE_KIND))
                tokens += [(LITERAL, "", match["known"]), (SHAPE, key, _MADE)]
                made._cost += sum(COSTS[byte] for byte in b"(t" + _MADE) + ARGUMENT_COST
                made.memoized += 3
            elif match["known"]:
                pattern += b"(" + _GET + b")"
                fields.append((key, _KNOWN_KIND))
                tokens.append((GET, key, b""))
            elif at < len(data):  # a text, whose length is its first byte
                made._segments.append((re.compile(pattern + b"\x8c.", re.DOTALL), tuple(fields), key))
                tokens += [(LITERAL, "", b"\x8c"), (TEXT, key, b"")]
                made._cost += COSTS[0x8C] + COSTS[0x94]
                made.memoized += 1
                tokens.append((LITERAL, "", b"\x94"))
                pattern, fields, at = b"\x94", [], at + 1 + data[at] + 1
            else:
                return None
        made._segments.append((re.compile(pattern + re.escape(_END), re.DOTALL), tuple(fields), None))
        tokens.append((LITERAL, "", _END))
        return made if seen else None

    def read(self, data: bytes, at: int, memo: Mapping[int, Any], shapes: dict[bytes, tuple[int, ...]]) -> Found | None:
        """The object with its NEWOBJ before byte `at`; None if it is written in another way.

        Args:
            data: the pickle.
            at: behind NEWOBJ.
            memo: the machine's, in which no number was ever set twice.
            shapes: those that were read before, by their opcodes; some are added.
        """
        cost, plain = self._cost, _PLAIN_COST
        state = self._nones.copy()
        for segment, fields, text_key in self._segments:
            if (match := segment.match(data, at)) is None:
                return None
            at = match.end()
            values = match.groups()
            for (key, kind), value in zip(fields, values):
                if kind == _SHAPE_KIND:
                    shape = shapes.get(value)
                    if shape is None:
                        if (shape := _shape(value)) is None:
                            return None
                        if len(shapes) == _SHAPES_KEPT:
                            shapes.clear()
                        shapes[value] = shape
                    state[key] = shape
                    cost += _EXTENT_COST * len(shape)
                    plain += _PLAIN_EXTENT_COST * len(shape)
                elif kind == _NUMBER_KIND:
                    state[key] = _int(value)
                else:
                    number = _number(value)
                    if number not in memo:
                        return None
                    state[key] = memo[number]
            if text_key is not None:
                start, at = at, at + data[at - 1]
                if at > len(data):
                    return None
                text = data[start:at].decode("utf-8", "surrogatepass")
                nbytes = len(text) if text.isascii() else 4 * (at - start)
                cost, plain = cost + nbytes, plain + nbytes
                state[text_key] = text
        return state, at, cost, plain


class Phrases:
    """The phrases of one pickle, by class."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Placeholder, list[Phrase]]] = {}
        self._shapes: dict[bytes, tuple[int, ...]] = {}
        self._states: dict[tuple[int, bytes], tuple[Placeholder, object]] = {}
        self._repeated: dict[bytes, tuple[object, int]] = {}
        self._lengths: dict[int, None] = {}
        self.boxes: Callable[[object, bytes, int], tuple[object, int, int, int] | None] | None = None
        """Reads a whole list of objects of a class, which these bytes push; see `records.Records.boxes`."""

    def known(self, function: object) -> Sequence[Phrase]:
        """How objects of a class were written so far."""
        known = self._known.get(id(function))
        return known[1] if known is not None and known[0] is function else ()

    def learn(self, machine: Machine, function: Placeholder, at: int) -> Sequence[Phrase]:
        """How the object of a class with its NEWOBJ before byte `at` is written, and no other."""
        if not _is_plain(function, machine) or (made := Phrase.of(machine.data, at, machine.memo)) is None:
            return ()
        known = self._known.setdefault(id(function), (function, []))
        known[1].append(made)
        return known[1]

    def read(self, machine: Machine, function: object, at: int) -> Made | None:
        """The object of a class with its NEWOBJ before byte `at`, without arguments; None if it is not read in one go."""
        known = self._known.get(id(function))
        if known is None:
            if type(function) is not Placeholder or not _is_plain(function, machine):
                return None
            known = self._known[id(function)] = (function, [])
        function, phrases = known
        for phrase in phrases:
            if (found := phrase.read(machine.data, at, machine.memo, self._shapes)) is not None:
                return _finish_object(machine, function, phrase, found)
        if (nested := self.read_nested(machine, function, at)) is not None:
            return nested
        if len(phrases) < _MOST_PHRASES and machine.data.startswith(_BEGIN, at):
            made = Phrase.of(machine.data, at, machine.memo)
            if made is not None and (found := made.read(machine.data, at, machine.memo, self._shapes)) is not None:
                phrases.append(made)
                return _finish_object(machine, function, made, found)
        return None

    def read_nested(self, machine: Machine, function: Placeholder, at: int) -> Made | None:
        """The same, of an object that holds others; None if it is written in another way."""
        data, memo = machine.data, machine.memo
        if not data.startswith(_BEGIN, at):
            return None
        head = class_head(machine, function, at)
        start = at - len(head)
        for nbytes in self._lengths if head else ():
            if (known := self._repeated.get(data[start : start + nbytes])) is not None:
                return *known, start + nbytes, 0
        at += len(_BEGIN)
        state: dict[str, object] = {}
        memoized, cost = 2, _HOLDER_COST
        while data[at : at + 2] != _END:
            match = _KEY.match(data, at)
            key = memo.get(_number(match[1])) if match else None
            if match is None or type(key) is not str or key in state or len(state) == _MOST_FIELDS:
                return None
            at = match.end()
            value: object
            if match["list"]:
                found = self._read_list(machine, at)
                if found is None:
                    return None
                value, more, at, extra = found
                memoized, cost = memoized + 1 + more, cost + extra
            elif match["made"]:
                made = self._read_object(machine, memo.get(_number(match["known"])), at)
                if made is None:
                    return None
                value, more, at, extra = made
                memoized, cost = memoized + more, cost + extra
            else:
                size = memo.get(_number(match["known"]))
                shape = _shape(match["shape"][: -len(_MADE)])
                if type(size) is not Placeholder or str(size) != _SIZE or size.called or shape is None:
                    return None
                value, memoized, cost = shape, memoized + 3, cost + _PLAIN_EXTENT_COST * len(shape)
            state[key] = value
        if not state:
            return None
        whole, end = machine.finished(function, state), at + len(_END)
        if head and end - start <= _MOST_BYTES and len(self._repeated) < _MOST_REPEATED:
            if len(self._lengths) < _MOST_LENGTHS:
                self._lengths.setdefault(end - start)
            if end - start in self._lengths:
                self._repeated[data[start:end]] = whole, memoized
        return whole, memoized, end, cost

    def read_repeated(
        self, machine: Machine, at: int, limit: int, number: int, needed: bytearray
    ) -> tuple[int, int, int]:
        """Texts from byte `at` on, each with an object behind it of the opcodes of an earlier one, which stands for both.

        Tensors of one shape and dtype, cut in one way, are described by equal objects: only their names differ. Pushes texts and
        objects.

        Args:
            machine: that reads the pickle.
            at: where a text begins.
            limit: behind this byte, no other begins.
            number: of the memo's next entry.
            needed: for each of the memo's numbers, 1 if it is used again.

        Returns:
            Where they end, how many objects the memo does not keep, and their cost.
        """
        data, stack, memo = machine.data, machine.stack, machine.memo
        repeated, lengths = self._repeated, self._lengths
        dropped = cost = 0
        while at + 1 < limit and data[at : at + 1] == b"\x8c":
            end = at + 2 + data[at + 1]
            begin = end + 1
            for nbytes in lengths:
                if (known := repeated.get(data[begin : begin + nbytes])) is not None:
                    break
            else:
                break
            made, memoized = known
            if data[end] != _MEMOIZE or needed.find(1, number + 1, number + 1 + memoized) >= 0:
                break
            text = data[at + 2 : end].decode("utf-8", "surrogatepass")
            cost += _TEXT_COST + (len(text) if text.isascii() else 4 * len(text))
            stack += text, made
            if needed.find(1, number, number + 1) >= 0:
                memo[number] = text
            else:
                dropped += 1
            dropped += memoized
            number += 1 + memoized
            at = begin + nbytes
        return at, dropped, cost

    def _read_list(self, machine: Machine, at: int) -> tuple[object, int, int, int] | None:
        """Objects of a list that is empty before byte `at`, by one APPEND, or one or more APPENDS."""
        data, memo = machine.data, machine.memo
        match = _CLASS.match(data, at + 1) if self.boxes is not None and data[at : at + 1] == b"(" else None
        if match and self.boxes and (boxes := self.boxes(memo.get(_number(match[1])), match[0], at)) is not None:
            return boxes
        found: list[object] = []
        memoized = cost = 0
        is_marked = False
        while True:
            if match := _CLASS.match(data, at):
                made = self._read_object(machine, memo.get(_number(match[1])), match.end())
                if made is None:
                    return None
                value, more, at, extra = made
                found.append(value)
                memoized, cost = memoized + more, cost + extra
                if not is_marked:
                    return (found, memoized, at + 1, cost) if data[at : at + 1] == b"a" and len(found) == 1 else None
            elif not is_marked and data[at : at + 1] == b"(":
                is_marked, at = True, at + 1
            elif is_marked and data[at : at + 1] == b"e":
                is_marked, at = False, at + 1
                if data[at : at + 1] != b"(":
                    return found, memoized, at, cost
            else:
                return (found, memoized, at, cost) if not found and not is_marked else None

    def _read_object(self, machine: Machine, function: object, at: int) -> Made | None:
        """The object of a class with its NEWOBJ before byte `at`, and with a simple state."""
        state = _STATE.match(machine.data, at)
        if state is None:
            return self.read(machine, function, at)
        known = self._states.get((id(function), state[0]))
        if known is None:
            if type(function) is not Placeholder or not _is_kept(function):
                return None
            values: list[object] = []
            for item in _ITEM.findall(state[1]):
                if item not in _CONSTANTS and _number(item) not in machine.memo:
                    return None
                values.append(_CONSTANTS[item] if item in _CONSTANTS else machine.memo[_number(item)])
            if len(self._states) == _SHAPES_KEPT:
                return None
            known = self._states[id(function), state[0]] = function, machine.finished(function, tuple(values))
        return known[1], 2, state.end(), 0


def _finish_object(machine: Machine, function: Placeholder, phrase: Phrase, found: Found) -> Made:
    state, at, cost, plain = found
    made = machine.finished(function, state)
    return made, phrase.memoized, at, cost if type(made) is Placeholder else plain


def _is_plain(function: Placeholder, machine: Machine) -> bool:
    """Whether a class makes objects that are only kept, and that its reader wants in few bytes."""
    return function.name in machine.finishers and _is_kept(function)


def _is_kept(function: Placeholder) -> bool:
    """Whether a call of a class makes objects that are only kept."""
    return not function.called and not runs_code(function) and str(function) not in MEANINGS


def class_head(machine: Machine, function: object, at: int) -> bytes:
    """The opcodes that push a class and make an object of it, up to byte `at`; empty if they are others."""
    for nbytes in (5, 2):
        start = at - nbytes - 2
        opcode = machine.data[start : start + nbytes]
        if opcode[:1] == (b"j" if nbytes == 5 else b"h") and machine.memo.get(_number(opcode)) is function:
            return machine.data[start:at]
    return b""


def _number(get: bytes) -> int:
    """The memo's number that an opcode gets."""
    return int.from_bytes(get[1:], "little")


def _int(opcode: bytes) -> int:
    """The number that an opcode pushes."""
    kind = opcode[0]
    if kind == 0x8A:
        return int.from_bytes(opcode[2:], "little", signed=True)
    return int.from_bytes(opcode[1:], "little", signed=kind == 0x4A)


def _shape(opcodes: bytes) -> tuple[int, ...] | None:
    """The tuple that these opcodes make; None if they make something else."""
    marked = opcodes[0] == _MARK
    at, end = int(marked), len(opcodes) - 1
    shape: list[int] = []
    while at < end:
        opcode = opcodes[at]
        if opcode == 0x4B:  # "K"
            shape.append(opcodes[at + 1])
            at += 2
        elif opcode == 0x4D:  # "M"
            shape.append(opcodes[at + 1] + (opcodes[at + 2] << 8))
            at += 3
        else:
            nbytes = 5 if opcode == 0x4A else 2 + opcodes[at + 1]
            shape.append(_int(opcodes[at : at + nbytes]))
            at += nbytes
    wanted = _TUPLES.get(opcodes[end])
    return tuple(shape) if (marked if wanted is None else not marked and len(shape) == wanted) else None
