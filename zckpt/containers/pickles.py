"""Reads pickles without running anything: the stack program of a pickle is carried out on inert values.

For `torch_zip`, `torch_legacy` and the layouts' metadata. A pickle is a program for a stack machine, which can import a name and
call it. Here a name stays a name (`meanings.global_of`), a call makes one of a few plain values (`meanings.MEANINGS`) or a
`Placeholder`, and a call that is known to run code (`meanings`) is an error.

[Note: bombs]
A small file must not cost much memory or time. Lengths are checked against the bytes that are left before anything is allocated.
Objects that are used twice are shared, never copied. Whole numbers have at most `opcodes.MAX_INT_BYTES`, names
`meanings.MOST_NAME` letters, keys are cheap to hash and to compare (`meanings.plain_key`), and nothing here recurses. The result
is nested at most `MAX_DEPTH` deep (a value that contains itself excepted), so its users may recurse.
Still, one byte of a pickle can make a set of 216 bytes, or a call that goes through a million arguments. So the cost of a pickle
is counted, in bytes of memory, with a few bytes for the time of each step: every opcode adds its `opcodes.COSTS`, and all
that copies or goes through items adds a cost for each of them (`Machine.charge`), before it does so. A pickle may cost
`limits.PICKLE_COST`, and no more than a multiple of its length. That is enough for 150,000 tensors in one file.

Source: CPython's Lib/pickle.py and Lib/pickletools.py (3.13), protocols 0-5.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from zckpt.base.errors import COPY_AGAIN, CorruptError
from zckpt.containers.inert import NumpyArray, Placeholder
from zckpt.containers.machine import ENTRY_COST, STEP, Finishers, Machine, PersistentLoad, as_new
from zckpt.containers.meanings import MISFITS
from zckpt.containers.opcodes import COSTS, OPCODES, STOP

try:
    from zckpt._core import entries_behind
except ImportError:
    entries_behind = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from zckpt.containers.phrases import Phrases
    from zckpt.containers.records import Records, RowKinds

MAX_DEPTH = 400
"""Python's own limit of recursion is 1,000."""


def load_pickle(
    data: bytes, *, file: str, record: str = "", base: int = 0, persistent_load: PersistentLoad | None = None,
    spent: int = 0, most: int | None = None, finishers: Finishers | None = None, rows: RowKinds | None = None,
) -> object:  # fmt: skip
    """The inert object in a pickle. The arguments are those of `Machine`, and what becomes rows of a table. Raises
    CorruptError if it is damaged; UnsafeError if it would run code; UnsupportedError if it needs parts that are not in it, or
    too much memory.
    """
    machine = Machine(
        data,
        file,
        record=record,
        base=base,
        persistent_load=persistent_load,
        spent=spent,
        most=most,
        finishers=finishers,
    )
    try:
        return read_pickle(machine, rows)
    except EOFError as error:
        raise CorruptError(
            "its pickle has no end", file=file, found=f"{len(data):,} bytes{f' in record {record}' if record else ''}",
            remedy=COPY_AGAIN, byte_offset=base + len(data),
        ) from error  # fmt: skip
    finally:
        machine.data = b""  # a machine refers to itself, and so stays for a while


def read_pickle(machine: Machine, rows: RowKinds | None = None) -> object:
    """The inert object in a machine's pickle, which ends at the machine's `position` then. Raises EOFError if the data
    end before the pickle, ZckptError as `load_pickle`.
    """
    try:
        value = _run(machine, rows)
        machine.memo.clear()
        _check_depth(machine, value)
    except MISFITS as error:
        reason = f"no such item on the stack or in the memo: {error}" if isinstance(error, LookupError) else str(error)
        raise machine.corrupt(reason) from error
    return value


def _run(machine: Machine, rows: RowKinds | None) -> object:
    """Carries out one opcode after another. Those that are nine tenths of torch's files are done here, for speed.

    Objects of one class are read in one go where `phrases` can. The cost is added up here, and passed to the machine every
    `_STRIDE` bytes.
    """
    data, end, stack, memo, marks = machine.data, len(machine.data), machine.stack, machine.memo, machine.marks
    long_put, put, get, long_get, small_int, mark, build_tuple, call, one_tuple, text = b"rqhjK(tR\x85X"
    memoize, new, build, long_int, empty_dict, empty_tuple, pair, short_text = (
        b"\x94\x81bJ})\x86\x8c"  # torch's metadata
    )
    at = machine.position
    phrases = None
    if machine.finishers:  # few pickles are metadata
        from zckpt.containers.phrases import Phrases

        phrases = Phrases()
    records = None if rows is None else _records(machine, rows, phrases)
    needed: bytearray | None = None
    dropped = 0  # objects that no opcode takes out of the memo, and that are not kept there
    cost = 0
    check_at = at + _STRIDE
    try:
        while at < end:
            opcode = data[at]
            cost += COSTS[opcode]
            if at >= check_at:
                machine.step = at
                machine.charge(cost)
                cost, check_at = 0, at + _STRIDE
            if opcode == memoize:
                number = len(memo) + dropped
                if number < _ALWAYS_KEPT:
                    memo[number] = stack[-1]
                else:
                    if needed is None:
                        needed = _used_behind(data, at, number)
                    if needed.find(1, number, number + 1) >= 0:
                        memo[number] = stack[-1]
                    else:
                        dropped += 1
                        cost -= _MEMO_COST
                at += 1
            elif opcode == long_put and at + 5 <= end:
                memo[int.from_bytes(data[at + 1 : at + 5], "little")] = stack[-1]
                phrases = None  # numbers could be set twice
                at += 5
            elif opcode == get and at + 2 <= end:
                stack.append(memo[data[at + 1]])
                at += 2
            elif opcode == small_int and at + 2 <= end:
                stack.append(data[at + 1])
                at += 2
            elif opcode == one_tuple:
                stack[-1] = (stack[-1],)
                at += 1
            elif opcode == call:
                machine.step = at
                args = stack.pop()
                stack[-1] = machine.call(stack[-1], args)
                at += 1
            elif opcode == mark:
                marks.append(len(stack))
                at += 1
            elif opcode == build_tuple:
                start = marks.pop()
                cost += 8 * (len(stack) - start)
                stack[start:] = [tuple(stack[start:])]
                at += 1
            elif opcode == long_get and at + 5 <= end:
                stack.append(memo[int.from_bytes(data[at + 1 : at + 5], "little")])
                at += 5
            elif opcode == text and at + 5 <= end:
                start = at + 5
                at = start + int.from_bytes(data[at + 1 : start], "little")
                if at > end:
                    break
                value = data[start:at].decode("utf-8", "surrogatepass")
                cost += at - start if value.isascii() else 4 * (at - start)
                stack.append(value)
            elif opcode == short_text and at + 2 <= end:
                start = at + 2
                at = start + data[at + 1]
                if at > end:
                    break
                value = data[start:at].decode("utf-8", "surrogatepass")
                cost += at - start if value.isascii() else 4 * (at - start)
                stack.append(value)
            elif opcode == put and at + 2 <= end:
                memo[data[at + 1]] = stack[-1]
                phrases = None
                at += 2
            elif opcode == new:
                machine.step = at
                args = stack.pop()
                at += 1
                if phrases is not None and needed is not None and not args:
                    number = len(memo) + dropped
                    if records is not None and (many := records.read(stack[-1], at, number, needed)) is not None:
                        memoized, at, extra = many
                        dropped += memoized
                        cost += extra
                        stack.pop()
                        continue
                    said = phrases.read(machine, stack[-1], at)
                    if said is not None and needed.find(1, number, number + said[1]) < 0:
                        stack[-1], memoized, at, extra = said
                        dropped += memoized
                        cost += extra
                        number += memoized
                        at, memoized, extra = phrases.read_repeated(machine, at, min(check_at, end), number, needed)
                        dropped += memoized
                        cost += extra
                        continue
                stack[-1] = as_new(machine.call(stack[-1], args))
            elif opcode == build:
                machine.step = at
                state = stack.pop()
                machine.build(state)
                at += 1
            elif opcode == long_int and at + 5 <= end:
                stack.append(int.from_bytes(data[at + 1 : at + 5], "little", signed=True))
                at += 5
            elif opcode == empty_dict:
                stack.append({})
                at += 1
            elif opcode == empty_tuple:
                stack.append(())
                at += 1
            elif opcode == pair:
                second = stack.pop()
                stack[-1] = (stack[-1], second)
                at += 1
            elif opcode == STOP:
                machine.position = at + 1
                return stack.pop()
            else:
                machine.step, machine.position = at, at + 1
                if opcode in _PUTS:
                    phrases = None
                OPCODES[opcode](machine)
                at = machine.position
    finally:
        machine.step = at
        if records is not None and phrases is not None:
            phrases.boxes = (
                None  # each knows the other, and the pickle would stay in memory until somebody collects circles
            )
    raise EOFError


def _records(machine: Machine, rows: RowKinds, phrases: Phrases | None) -> Records | None:
    if phrases is None or entries_behind is None:
        return None
    from zckpt.containers import records

    machine.table = records.PlaceTable
    made = records.Records(machine, rows, phrases)
    phrases.boxes = made.boxes
    return made


_PUTS = b"pqr"

_MEMO_COST = COSTS[0x94] - STEP

_ALWAYS_KEPT = 256
"""Numbers below this are those of the opcode with a single byte."""

_LONG_GET = re.compile(rb"j(?=(.{4}))", re.DOTALL)
_LINE_GET = re.compile(rb"g(?=(\d{1,10})\n)")


def _used_behind(data: bytes, at: int, number: int) -> bytearray:
    """For each number of the memo up to `number` and behind, 1 if a pickle may still use it behind byte `at`, up to the last of
    these; bytes in texts may look so.

    Pickles of protocol 4 put nearly every object in the memo, and use few of them again. Those of large metadata would take more
    memory there than all that remains of them.
    """
    if entries_behind is not None:
        found: Iterable[int] = array("q", entries_behind(data, at))
    else:
        found = {int.from_bytes(number, "little") for number in set(_LONG_GET.findall(data, at))}
        found |= set(map(int, _LINE_GET.findall(data, at)))
    most = number + 1 + sum(data.count(opcode, at) for opcode in _MEMOIZING)
    used = bytearray(max((one for one in found if one < most), default=-1) + 1)
    for one in found:
        if one < most:
            used[one] = 1
    return used


_MEMOIZING = (b"\x94", b"p", b"q", b"r")
"""What puts an object into the memo: no number there is larger than all of these together."""


_STRIDE = 1 << 12
"""Bytes of a pickle after which its cost is checked again: they make at most 2 MB, beside texts."""


def _check_depth(machine: Machine, root: object) -> None:
    """Raises ValueError for values that are nested too deep; each object is visited once, without recursion."""
    heights: dict[int, int] = {}
    path: list[tuple[object, Iterator[object], list[int]]] = []
    pending: object = (root,)
    while True:
        if pending is not None:
            machine.charge(ENTRY_COST)
            heights[id(pending)] = 0  # until it is done: an object that contains itself adds nothing
            path.append((pending, _children(pending), [0]))
            pending = None
        owner, children, height = path[-1]
        for child in children:
            if type(child) in _NESTS:
                if type(child) is tuple and len(child) <= _SHORT and _NESTS.isdisjoint(map(type, child)):
                    height[0] = max(height[0], 1)
                    continue
                if id(child) not in heights:
                    pending = child
                    break
                height[0] = max(height[0], heights[id(child)])
        if len(path) + height[0] > MAX_DEPTH:
            raise ValueError(f"values nested more than {MAX_DEPTH} deep")
        if pending is None:
            path.pop()
            heights[id(owner)] = height[0] + 1
            if not path:
                return
            path[-1][2][0] = max(path[-1][2][0], height[0] + 1)


_SHORT = 8
"""Tuples of so few plain values, such as shapes, are looked at again wherever they are used again."""

_NESTS = {list, tuple, dict, set, frozenset, Placeholder, NumpyArray}


def _children(value: Any) -> Iterator[object]:
    if isinstance(value, dict):
        return iter(value.values())
    if isinstance(value, Placeholder):
        return iter((*value.args, value.state, *value.kwargs.values(), *value.items))
    return iter(value.objects if isinstance(value, NumpyArray) else value)
