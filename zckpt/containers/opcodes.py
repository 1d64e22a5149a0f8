"""What each opcode of a pickle does to the machine.

For `pickles`.
Source: CPython's Lib/pickletools.py (3.13), protocols 0-5.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

from zckpt.base.errors import COPY_AGAIN, CorruptError, UnsafeError, UnsupportedError
from zckpt.containers.machine import STEP, Machine, as_new
from zckpt.containers.meanings import global_of, plain_key

MAX_INT_BYTES = 1024
"""Of a whole number: at most 2,466 digits. Python itself refuses to print more than 4,300."""

STOP = ord(".")
HOLE = 0xFE
"""No opcode of a pickle: `alike` puts it where a number of one byte is pushed."""

_SAVE_PLAIN = "Load it where it was made, and save its tensors with torch.save."


def _unknown(m: Machine) -> None:
    raise m.refuse(CorruptError, f"its pickle holds the unknown opcode {m.data[m.step]:#04x}", COPY_AGAIN)


def _hole(m: Machine) -> None:
    if m.hole is None or m.step not in m.holes:
        raise m.refuse(CorruptError, f"its pickle holds the unknown opcode {m.data[m.step]:#04x}", COPY_AGAIN)
    m.holes[m.step] += 1
    hole = m.hole(m.step)
    m.take(hole.nbytes)
    m.push(hole)


def _extension(m: Machine) -> None:
    raise m.refuse(UnsafeError, "its pickle calls code of its writer's extension registry", _SAVE_PLAIN)


def _buffer(m: Machine) -> None:
    raise m.refuse(UnsupportedError, "its pickle does not hold its own buffers (protocol 5, out of band)", _SAVE_PLAIN)


def _protocol(m: Machine) -> None:
    if m.uint(1) > 5:
        raise m.refuse(UnsupportedError, "its pickle has a protocol after 5", _SAVE_PLAIN)


def _frame(m: Machine) -> None:
    if m.uint(8) > len(m.data) - m.position:
        raise EOFError


def _whole(text: bytes) -> int:
    if len(text) > 2 * MAX_INT_BYTES:
        raise ValueError("a whole number that is too large")
    return int(text)


def _int_line(m: Machine) -> None:
    text = m.line()  # protocol 0 writes booleans so
    m.push(text == b"01" if text in (b"00", b"01") else _whole(text))


def _long(m: Machine, nbytes: int) -> None:
    size = m.uint(nbytes)
    if size > MAX_INT_BYTES:
        raise ValueError("a whole number that is too large")
    m.push(int.from_bytes(m.take(size), "little", signed=True))


def _text(data: bytes) -> str | bytes:
    """A string of Python 2: as text if it is UTF-8, otherwise as bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


_QUOTED = re.compile(rb"""(['"])((?:[^\\]|\\[\\'"abfnrtv]|\\x[0-9a-fA-F]{2})*)\1""", re.DOTALL)


def _string_line(m: Machine) -> None:
    quoted = _QUOTED.fullmatch(m.line().strip())
    if quoted is None:
        raise ValueError("a string without its quotes")
    m.push(_text(codecs.escape_decode(quoted[2])[0]))


def _names(m: Machine) -> Any:
    return global_of(m.line().decode(), m.line().decode())


def _stack_global(m: Machine) -> None:
    module, name = m.pop_many(2)
    if type(module) is not str or type(name) is not str:
        raise TypeError("a global whose name is not a text")
    m.push(global_of(module, name))


def _reduce(m: Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args)


def _new_object(m: Machine) -> None:
    _reduce(m)
    as_new(m.stack[-1])


def _new_object_with_kwargs(m: Machine) -> None:
    m.push(as_new(m.call(*m.pop_many(3))))


def _instance(m: Machine) -> None:
    kind, args = _names(m), tuple(m.pop_to_mark())
    m.push(m.call(kind, args))


def _object(m: Machine) -> None:
    kind, *args = m.pop_to_mark()
    m.push(m.call(kind, tuple(args)))


def _get(m: Machine, number: int) -> None:
    m.stack.append(m.memo[number])


def _pop(m: Machine) -> None:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.stack.pop()


def _dict(m: Machine) -> None:
    items = m.pop_to_mark()
    m.push({})
    m.set_items(items)


_ACTIONS: Mapping[int | str, Callable[[Machine], object]] = {
    # control and stack
    0x80: _protocol,
    0x95: _frame,
    "(": lambda m: m.marks.append(len(m.stack)),
    "0": _pop,
    "1": lambda m: m.pop_to_mark(),
    "2": lambda m: m.push(m.stack[-1]),
    # constants and numbers
    "N": lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    "I": _int_line,
    "L": lambda m: m.push(_whole(m.line().rstrip(b"L"))),
    "J": lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
    "K": lambda m: m.push(m.uint(1)),
    HOLE: _hole,
    "M": lambda m: m.push(m.uint(2)),
    0x8A: lambda m: _long(m, 1),
    0x8B: lambda m: _long(m, 4),
    "F": lambda m: m.push(float(m.line()[:MAX_INT_BYTES])),
    "G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    # text and bytes
    "S": _string_line,
    "T": lambda m: m.push(_text(m.counted(4))),
    "U": lambda m: m.push(_text(m.counted(1))),
    "V": lambda m: m.push(m.line().decode("raw-unicode-escape")),
    "X": lambda m: m.push(m.counted(4).decode("utf-8", "surrogatepass")),
    0x8C: lambda m: m.push(m.counted(1).decode("utf-8", "surrogatepass")),
    0x8D: lambda m: m.push(m.counted(8).decode("utf-8", "surrogatepass")),
    "B": lambda m: m.push(m.counted(4)),
    "C": lambda m: m.push(m.counted(1)),
    0x8E: lambda m: m.push(m.counted(8)),
    0x96: lambda m: m.push(bytearray(m.counted(8))),
    # tuples, lists, dicts, sets
    ")": lambda m: m.push(()),
    "t": lambda m: m.push(tuple(m.pop_to_mark())),
    0x85: lambda m: m.push(m.pop_many(1)),
    0x86: lambda m: m.push(m.pop_many(2)),
    0x87: lambda m: m.push(m.pop_many(3)),
    "]": lambda m: m.push([]),
    "l": lambda m: m.push(m.pop_to_mark()),
    "a": lambda m: m.append([m.stack.pop()]),
    "e": lambda m: m.append(m.pop_to_mark()),
    "}": lambda m: m.push({}),
    "d": _dict,
    "s": lambda m: m.set_items(list(m.pop_many(2))),
    "u": lambda m: m.set_items(m.pop_to_mark()),
    0x8F: lambda m: m.push(set()),
    0x90: lambda m: m.append(m.pop_to_mark()),
    0x91: lambda m: m.push(frozenset(map(plain_key, m.pop_to_mark()))),
    # memo
    "p": lambda m: m.memoize(_whole(m.line())),
    "q": lambda m: m.memoize(m.uint(1)),
    "r": lambda m: m.memoize(m.uint(4)),
    0x94: lambda m: m.memoize(len(m.memo)),
    "g": lambda m: _get(m, _whole(m.line())),
    "h": lambda m: _get(m, m.uint(1)),
    "j": lambda m: _get(m, m.uint(4)),
    # names, calls, and references to the outside
    "c": lambda m: m.push(_names(m)),
    0x93: _stack_global,
    "R": _reduce,
    0x81: _new_object,
    0x92: _new_object_with_kwargs,
    "i": _instance,
    "o": _object,
    "b": lambda m: m.build(m.stack.pop()),
    "P": lambda m: m.push(m.persistent_load(m.line().decode())),
    "Q": lambda m: m.push(m.persistent_load(m.stack.pop())),
    0x82: _extension,
    0x83: _extension,
    0x84: _extension,
    0x97: _buffer,
    0x98: _buffer,
}
COSTS = [STEP] * 256
"""The cost of an opcode: a step, and the most bytes that it makes with a place on the stack or in the memo. `Machine` charges
for items, texts and results of calls."""
for _codes, _cost in {
    "hgj21N\x88\x89K\xfe": 8, "MJIL\x8a\x8bFG": 48, "STUVX\x8c\x8d": 72, "BC\x8e\x96": 72, "qrp\x94": 80,
    ")t\x85\x86\x87": 72, "]l": 112, "a": 16, "}d": 240, "\x8f\x91": 240, "c\x93": 400, "R\x81\x92io": 128, "b": 16, "PQ": 200,
}.items():  # fmt: skip
    for _code in _codes:
        COSTS[ord(_code)] += _cost

OPCODES = [_ACTIONS.get(code) or _ACTIONS.get(chr(code), _unknown) for code in range(256)]
"""The actions by number."""
