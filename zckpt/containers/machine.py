"""The stack machine of a pickle: its state, and the calls it makes or refuses.

For `opcodes`, which drive it one instruction at a time. See `pickles` for what it is for, and for [Note: bombs].
Source: CPython's Lib/pickle.py (3.13).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from zckpt import limits
from zckpt.containers.danger import runs_code
from zckpt.containers.inert import NumpyArray, Pair, Placeholder
from zckpt.containers.meanings import MEANINGS, fill_array, plain_key
from zckpt.containers.tensor_ref import TensorRef
from zckpt.errors import CorruptError, UnsafeError, UnsupportedError, ZckptError

PersistentLoad = Callable[[object], object]

_MEMO_COST, _STACK_COST = 90, 16
"""Bytes of an entry: of the memo with its number; of the stack, which grows by copying."""


class Machine:
    """The state of one run.

    Attributes:
        data: the pickle.
        base: where it begins in the file.
        position: of the next byte.
        step: where the opcode in progress began.
        stack: all items; those above a mark belong to the object in progress.
        marks: heights of the stack.
        memo: objects that are used again.
        made: bytes of objects made by what has no fixed cost.
        room: how many times the limits it may take.
    """

    def __init__(self, data: bytes, file: str, record: str, base: int, persistent_load: PersistentLoad | None) -> None:
        self.data = data
        self.end = len(data)
        self.position = self.step = 0
        self.file = file
        self.record = record
        self.base = base
        self.persistent_load = persistent_load or self.no_persistent_load
        self.budget = len(data) + (1 << 16)
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.made = 0
        self.room = 1

    # -- bytes -------------------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        start = self.position
        self.position = end = start + nbytes
        if end > self.end:
            raise EOFError
        return self.data[start:end]

    def uint(self, nbytes: int) -> int:
        """The next whole number, unsigned."""
        start = self.position
        self.position = end = start + nbytes
        if end > self.end:
            raise EOFError
        return int.from_bytes(self.data[start:end], "little")

    def counted(self, nbytes: int) -> bytes:
        """Bytes after their number, which is stored in `nbytes`."""
        return self.take(self.uint(nbytes))

    def line(self) -> bytes:
        """The next line, without its end."""
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise EOFError
        start, self.position = self.position, end + 1
        return self.data[start:end]

    # -- stack -------------------------------------------------------------------------------------------------------

    def push(self, value: object) -> None:
        """Puts `value` on the stack."""
        self.stack.append(value)

    def pop_to_mark(self) -> list[Any]:
        """Takes the items above the last mark, and the mark."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        self.made += 8 * len(items)
        return items

    def pop_many(self, count: int) -> tuple[Any, ...]:
        """Takes the last items, the deepest first."""
        if count > len(self.stack):
            raise IndexError(f"{count} items wanted")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    # -- cost --------------------------------------------------------------------------------------------------------

    def check_cost(self, made: int, steps: int) -> None:
        """Refuses a pickle that has made too much; see [Note: bombs].

        Args:
            made: bytes of objects, but for those that are counted here.
            steps: through the slower opcodes.

        Raises:
            UnsupportedError: it has.
        """
        needed = made + self.made + _MEMO_COST * len(self.memo) + _STACK_COST * len(self.stack)
        if needed > self.room * limits.PICKLE_MEMORY_BYTES:
            raise self.refuse(UnsupportedError, f"a pickle that would fill the memory ({needed:,} bytes so far)")
        if steps > self.room * limits.PICKLE_STEPS:
            raise self.refuse(UnsupportedError, f"a pickle that takes too long ({steps:,} steps so far)")

    # -- objects -----------------------------------------------------------------------------------------------------

    def call(self, function: object, args: object, kwargs: Mapping[str, object] | None = None) -> object:
        """What calling `function` would give; see the module's docstring."""
        if type(function) is not Placeholder or type(args) is not tuple or (kwargs and type(kwargs) is not dict):
            raise TypeError(f"a {type(function).__name__} is called with a {type(args).__name__}")
        if function.called:  # what a call gave is called in turn
            return Placeholder(function.module, function.name, (function, *args), called=True)
        name = f"{function.module}.{function.name}"
        if meaning := MEANINGS.get(name):
            if args:
                self.charge(args)
            value = meaning(*args, **kwargs) if kwargs else meaning(*args)
            if value is not None:
                return value
        elif name in _FORWARDS:
            made = self.call(*_FORWARDS[name](*args))
            return as_new(made) if name.startswith("copyreg.") else made
        elif name == "builtins.getattr" and (member := _member(*args)):
            return member
        else:
            self.check_safe(function, (*args, *(kwargs or {}).values()))
        return Placeholder(function.module, function.name, args, called=True, kwargs=dict(kwargs or {}))

    def charge(self, values: tuple[object, ...]) -> None:
        """Takes from the budget what copying these would cost; see [Note: bombs]."""
        for value in values:
            if type(value) in _COPIED:
                self.budget -= len(value)  # type: ignore[arg-type]
        if self.budget < 0:
            raise ValueError("it makes far larger objects than it has bytes")

    def check_safe(self, function: Placeholder, args: tuple[object, ...]) -> None:
        """Refuses a call that would run code, of `function` or through it."""
        for suspect in (function, *args):  # map(os.system, ...) runs it as well
            if isinstance(suspect, Placeholder) and runs_code(suspect):
                by = "" if suspect is function else f" through {function}"
                raise UnsafeError(
                    "a pickle that runs code",
                    file=self.file,
                    found=f"{self.where()}: it calls {suspect}{by}",
                    remedy="zckpt never runs pickles; nothing was executed. Do not load this file with other tools. "
                    "If you know its origin, report it.",
                )

    def build(self, state: object) -> None:
        """Gives the topmost object its state."""
        target = self.stack[-1]
        if isinstance(target, Placeholder):
            target.state = state
        elif isinstance(target, NumpyArray):
            self.charge(state if type(state) is tuple else ())
            fill_array(target, state)
        elif not isinstance(
            target, dict | list | set | TensorRef
        ):  # their attributes, such as `_metadata`, are dropped
            raise TypeError(f"a state for a {type(target).__name__}")

    def append(self, items: list[Any]) -> None:
        """Adds items to the topmost list or set."""
        target = self.stack[-1]
        if isinstance(target, set):
            target.update(map(plain_key, items))
        elif isinstance(target, list | Placeholder):
            (target if isinstance(target, list) else target.items).extend(items)
        else:
            raise TypeError(f"items for a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        """Sets keys and values, in turn, in the topmost dict."""
        target = self.stack[-1]
        pairs = zip(items[::2], items[1::2], strict=True)
        if isinstance(target, dict):
            target.update((key if type(key) is str else plain_key(key), value) for key, value in pairs)
        elif isinstance(target, Placeholder):
            target.items.extend(itertools.starmap(Pair, pairs))
        else:
            raise TypeError(f"entries for a {type(target).__name__}")

    def memoize(self, number: int) -> None:
        """Remembers the topmost item."""
        self.memo[number] = self.stack[-1]

    # -- refusals ----------------------------------------------------------------------------------------------------

    def where(self) -> str:
        """The opcode in progress, for errors."""
        return f"record {self.record}, byte {self.step:,}" if self.record else f"byte {self.base + self.step:,}"

    def corrupt(self, reason: str) -> CorruptError:
        """The error for a pickle that cannot be."""
        return CorruptError(
            "a damaged pickle",
            file=self.file,
            found=f"{self.where()}: {reason}",
            remedy="Copy that file again.",
            byte_offset=self.base + self.step,
        )

    def refuse(self, kind: type[ZckptError], what: str) -> ZckptError:
        """An error at the opcode in progress."""
        return kind(what, file=self.file, found=self.where(), remedy=limits.REMEDY if kind is UnsupportedError else "")

    def no_persistent_load(self, key: object) -> object:
        """For pickles that lie in no container."""
        raise TypeError("it refers to something outside of it")


def as_new(value: object) -> object:
    """`value`, fresh from a call, as one of `__new__` alone."""
    if type(value) is Placeholder:
        value.new = True
    return value


_COPIED = {list, tuple, dict, set, frozenset, str, bytes, bytearray}

_FORWARDS: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    "torch._tensor._rebuild_from_type_v2": lambda function, kind, args, state: (function, args),
    "copyreg.__newobj__": lambda kind, *args: (kind, args),
    "copyreg.__newobj_ex__": lambda kind, args, kwargs: (kind, args, kwargs),
}
"""Calls that only pass on a call; the attributes that Python code hung on a tensor are dropped."""


def _member(owner: object = None, name: object = None, *_: object) -> Placeholder | None:
    """How Python spells methods, protocol 2 `__new__`, and 3.11 enum members: `getattr(Class, "NAME")`.

    None where anything else is wanted: that is how attacks find their way to functions that are not named.
    """
    if not isinstance(owner, Placeholder) or type(name) is not str or (name.startswith("_") and name != "__new__"):
        return None
    member = Placeholder(owner.module, f"{owner.name}.{name}")
    if runs_code(owner) or runs_code(member):
        return None
    return Placeholder("builtins", "getattr", (owner, name), called=True) if owner.called else member
