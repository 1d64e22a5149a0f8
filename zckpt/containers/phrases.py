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
from collections.abc import Mapping
from typing import Any

from zckpt.containers.danger import runs_code
from zckpt.containers.inert import Placeholder
from zckpt.containers.machine import ARGUMENT_COST, ENTRY_COST, ITEM_COST, PLACEHOLDER_COST, Machine
from zckpt.containers.meanings import MEANINGS
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
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
"""The opcodes of tuples without a mark -> how many items these have."""
_SIZE = "torch.Size"

_SHAPES_KEPT = 4096
"""Shapes that are kept to be used again; sizes repeat, offsets do not."""

_INT_COST = max(COSTS[code] for code in b"KMJN\x8ahj")
_EXTENT_COST = _INT_COST + ITEM_COST + 8


_NUMBER_KIND, _SHAPE_KIND, _KNOWN_KIND = range(3)

Found = tuple[dict[str, object], int, int]
"""An object that was read in one go: its attributes, where its opcodes end, and their cost."""


class Phrase:
    """How the objects of a class are written.

    Attributes:
        memoized: how many objects it puts into the memo.
    """

    __slots__ = ("_cost", "_nones", "_segments", "memoized")

    def __init__(self) -> None:
        self._nones: dict[str, object] = {}
        self._segments: list[tuple[re.Pattern[bytes], tuple[tuple[str, int], ...], str | None]] = []
        """Of each: the opcodes up to a text, the attributes in them and their kinds, and the text's attribute."""
        self._cost = PLACEHOLDER_COST + sum(COSTS[byte] for byte in b"\x81" + _BEGIN + _END)
        self.memoized = 2

    @classmethod
    def of(cls, data: bytes, at: int, memo: Mapping[int, Any]) -> Phrase | None:
        """How the object whose NEWOBJ is before byte `at` is written; None if in another way."""
        made = cls()
        pattern, at = re.escape(_BEGIN), at + len(_BEGIN)
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
            made._cost += ENTRY_COST + 16 + COSTS[data[match.start()]] + _INT_COST
            if match["none"]:
                pattern += b"N"
                made._nones[key] = None
            elif match["number"]:
                pattern += b"(" + _INT + b")"
                fields.append((key, _NUMBER_KIND))
            elif match["shape"]:
                size = memo.get(_number(match["known"]))
                if type(size) is not Placeholder or str(size) != _SIZE or size.called:
                    return None
                pattern += re.escape(match["known"]) + b"(" + _SHAPE + b")" + re.escape(_MADE)
                fields.append((key, _SHAPE_KIND))
                made._cost += sum(COSTS[byte] for byte in b"(t" + _MADE) + ARGUMENT_COST
                made.memoized += 3
            elif match["known"]:
                pattern += b"(" + _GET + b")"
                fields.append((key, _KNOWN_KIND))
            elif at < len(data):  # a text, whose length is its first byte
                made._segments.append((re.compile(pattern + b"\x8c.", re.DOTALL), tuple(fields), key))
                made._cost += COSTS[0x8C] + COSTS[0x94]
                made.memoized += 1
                pattern, fields, at = b"\x94", [], at + 1 + data[at] + 1
            else:
                return None
        made._segments.append((re.compile(pattern + re.escape(_END), re.DOTALL), tuple(fields), None))
        return made if seen else None

    def read(self, data: bytes, at: int, memo: Mapping[int, Any], shapes: dict[bytes, tuple[int, ...]]) -> Found | None:
        """The object whose NEWOBJ is before byte `at`; None if it is written in another way.

        Args:
            data: the pickle.
            at: behind NEWOBJ.
            memo: the machine's, in which no number was ever set twice.
            shapes: those that were read before, by their opcodes; some are added.
        """
        cost = self._cost
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
                cost += len(text) if text.isascii() else 4 * (at - start)
                state[text_key] = text
        return state, at, cost


class Phrases:
    """The phrases of one pickle, by class."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Placeholder, list[Phrase]]] = {}
        self._shapes: dict[bytes, tuple[int, ...]] = {}

    def read(self, machine: Machine, function: object, at: int) -> tuple[Phrase, Found] | None:
        """The object of a class whose NEWOBJ is before byte `at`, without arguments; None if it is not read in one go."""
        known = self._known.get(id(function))
        if known is None:
            if type(function) is not Placeholder or not _is_plain(function, machine):
                return None
            known = self._known[id(function)] = (function, [])
        phrases = known[1]
        for phrase in phrases:
            if (found := phrase.read(machine.data, at, machine.memo, self._shapes)) is not None:
                return phrase, found
        if len(phrases) < _MOST_PHRASES and machine.data.startswith(_BEGIN, at):
            made = Phrase.of(machine.data, at, machine.memo)
            if made is not None and (found := made.read(machine.data, at, machine.memo, self._shapes)) is not None:
                phrases.append(made)
                return made, found
        return None


def _is_plain(function: Placeholder, machine: Machine) -> bool:
    """Whether a class makes objects that are only kept, and that its reader wants in few bytes."""
    if function.called or function.name not in machine.finishers or runs_code(function):
        return False
    return str(function) not in MEANINGS


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
