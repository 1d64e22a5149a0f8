"""A pickle machine that runs nothing: the stack program of a pickle, carried out on inert values.

For `torch_zip` and `torch_legacy`. A pickle is a program for a stack machine whose only outside power is to import a
name and to call it. Here a name stays a name (`meanings.global_of`), a call makes one of a few plain values
(`meanings.MEANINGS`) or a `Placeholder` that remembers it, and a call of what is known to run code (`danger`) is
refused.

[Note: bombs]
A small file must not cost much. Lengths are checked against the bytes that are left before anything is allocated. Objects
are shared, never copied, when they are used twice; the few calls that do copy draw on a budget of about the pickle's own
length. Whole numbers have at most `opcodes.MAX_INT_BYTES`, keys are cheap to hash (`meanings.plain_key`), and nothing here
recurses. What leaves is nested at most `MAX_DEPTH` deep (a value that contains itself excepted), so whoever walks it may
recurse.
Still, one byte of pickle can be a set of 216 bytes. So every opcode that makes an object is charged for it, and a pickle
that has made `limits.PICKLE_MEMORY_BYTES` of them is refused, as is one that goes through the slower opcodes more than
`limits.PICKLE_STEPS` times. That is room for a hundred thousand tensors in one file.

Source: CPython's Lib/pickle.py and Lib/pickletools.py (3.13), protocols 0-5.
"""

from __future__ import annotations

from collections.abc import Iterator
from sys import getrefcount
from typing import Any

from zckpt.containers.inert import NumpyArray, Placeholder
from zckpt.containers.machine import Machine, PersistentLoad
from zckpt.containers.meanings import MISFITS
from zckpt.containers.opcodes import COSTS, OPCODES, STOP
from zckpt.errors import CorruptError

MAX_DEPTH = 400
"""Python's own limit of recursion is 1,000."""


def load_pickle(
    data: bytes,
    *,
    file: str,
    record: str = "",
    base: int = 0,
    persistent_load: PersistentLoad | None = None,
    spent: int = 0,
    room: int = 1,
) -> object:
    """The inert object in a pickle.

    Args:
        data: the pickle; bytes after its end are ignored.
        file: named in errors.
        record: which part of the file it is, for errors.
        base: byte offset in the file, for errors.
        persistent_load: answers what lies outside of the pickle, in torch's files the storages.
        spent: memory that the reader of the file has already used for it.
        room: how many times the limits of one file's pickle it may take, where it describes many files.

    Raises:
        CorruptError: it is damaged.
        UnsafeError: it would run code.
        UnsupportedError: it needs what only its writer has, or too much memory.
    """
    try:
        return read_pickle(
            data, file=file, record=record, base=base, persistent_load=persistent_load, spent=spent, room=room
        )[0]
    except EOFError as error:
        raise CorruptError(
            "a pickle without end",
            file=file,
            found=f"{record or 'it'} is over after {len(data):,} bytes",
            remedy="Copy that file again.",
            byte_offset=base + len(data),
        ) from error


def read_pickle(
    data: bytes,
    *,
    file: str,
    record: str = "",
    base: int = 0,
    persistent_load: PersistentLoad | None = None,
    spent: int = 0,
    room: int = 1,
) -> tuple[object, int]:
    """The inert object in a pickle, and how many bytes it takes. Otherwise as `load_pickle`.

    Raises:
        EOFError: `data` ends before the pickle.
    """
    machine = Machine(data, file, record, base, persistent_load)
    machine.made, machine.room = spent, room
    try:
        value = _run(machine)
        machine.memo.clear()
        _check_depth(value)
    except MISFITS as error:
        reason = f"the stack or memo holds no such item: {error}" if isinstance(error, LookupError) else str(error)
        raise machine.corrupt(reason) from error
    return value, machine.position


def _run(machine: Machine) -> object:
    """Carries out one opcode after another. Nine tenths of all opcodes in torch's files are the twelve done right here.

    Every `_STRIDE` bytes the cost so far is looked at: what was made here, elsewhere, and what memo and stack hold.
    """
    data, end, stack, memo, marks = machine.data, len(machine.data), machine.stack, machine.memo, machine.marks
    long_put, put, get, long_get, small_int, mark, build_tuple, call, one_tuple, text = b"rqhjK(tR\x85X"
    memoize, pair = b"\x94\x86"  # of protocol 4, which torch's checkpoint metadata are in
    at = machine.position
    made = steps = 0
    check_at = at + _STRIDE
    try:
        while at < end:
            if at >= check_at:
                machine.check_cost(made, steps)
                check_at = at + _STRIDE
            opcode = data[at]
            if opcode == long_put and at + 5 <= end:
                memo[int.from_bytes(data[at + 1 : at + 5], "little")] = stack[-1]
                at += 5
            elif opcode == get and at + 2 <= end:
                stack.append(memo[data[at + 1]])
                at += 2
            elif opcode == small_int and at + 2 <= end:
                stack.append(data[at + 1])
                at += 2
            elif opcode == one_tuple:
                stack[-1] = (stack[-1],)
                made += TUPLE_COST
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
                made += TUPLE_COST + 8 * (len(stack) - start)
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
                made += 60 + at - start
                stack.append(data[start:at].decode("utf-8", "surrogatepass"))
            elif opcode == put and at + 2 <= end:
                memo[data[at + 1]] = stack[-1]
                at += 2
            elif opcode == memoize:
                memo[len(memo)] = stack[-1]
                at += 1
            elif opcode == pair:
                second = stack.pop()
                stack[-1] = (stack[-1], second)
                made += TUPLE_COST
                at += 1
            elif opcode == STOP:
                machine.position = at + 1
                return stack.pop()
            else:
                machine.step, machine.position = at, at + 1
                OPCODES[opcode](machine)
                made += COSTS[opcode]
                steps += 1
                at = machine.position
    finally:
        machine.step = at
    raise EOFError


_STRIDE = 1 << 16
"""Bytes of pickle between two looks at its cost: at most 16 MB are made in them."""

TUPLE_COST = 128
"""Of a tuple, and of what the check of its depth may remember of it."""


def _check_depth(root: object) -> None:
    """Refuses what is nested too deep, in one pass without recursion; each object is visited once, by its height.

    Only what several objects hold is remembered: millions of lists in a list would each cost a hundred bytes more.
    """
    heights: dict[int, int] = {}
    path: list[tuple[object, Iterator[object], list[int]]] = []
    pending: object = (root,)
    while True:
        if pending is not None:
            heights[id(pending)] = 0  # until it is done: what contains itself adds nothing
            path.append((pending, _children(pending), [0]))
            pending = None
        owner, children, height = path[-1]
        for child in children:
            if type(child) in _NESTS:
                if id(child) not in heights:
                    pending = child
                    break
                height[0] = max(height[0], heights[id(child)])
        child = None
        if len(path) + height[0] > MAX_DEPTH:
            raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")
        if pending is None:
            path.pop()
            if getrefcount(owner) > _ONE_HOLDER:
                heights[id(owner)] = height[0] + 1
            else:
                del heights[id(owner)]
            if not path:
                return
            path[-1][2][0] = max(path[-1][2][0], height[0] + 1)


_ONE_HOLDER = 3
"""References to an object that one other holds: that one, a variable here, and the call's own."""

_NESTS = {list, tuple, dict, set, frozenset, Placeholder, NumpyArray}


def _children(value: Any) -> Iterator[object]:
    if isinstance(value, dict):
        return iter(value.values())
    if isinstance(value, Placeholder):
        return iter((*value.args, value.state, *value.kwargs.values(), *value.items))
    return iter(value.objects if isinstance(value, NumpyArray) else value)
