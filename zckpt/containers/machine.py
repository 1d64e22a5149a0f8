"""The stack machine of a pickle: its state, and the calls it makes or refuses.

For `opcodes`, which drive it one instruction at a time. See `pickles` for what it is for, and for [Note: bombs].
Source: CPython's Lib/pickle.py (3.13).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from zckpt.base import limits
from zckpt.base.errors import CorruptError, UnsafeError, UnsupportedError, ZckptError
from zckpt.containers.danger import runs_code
from zckpt.containers.inert import NumpyArray, Pair, Placeholder
from zckpt.containers.meanings import MEANINGS, MOST_NAME, fill_array, plain_key
from zckpt.containers.tensor_ref import TensorRef

PersistentLoad = Callable[[object], object]

STEP = 8
"""What a step costs, whatever it does: as much as eight bytes."""

ARGUMENT_COST, ITEM_COST, ENTRY_COST, PLACEHOLDER_COST = 16, 32, 104, 256
"""Of an argument of a call; of an item of one, which the call may copy; of an entry of a dict or set, which grow by doubling;
of what a call makes that has no meaning here.
"""


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
        cost: what has been spent so far; see `charge`.
        most: what may be.
    """

    def __init__(
        self,
        data: bytes,
        file: str,
        record: str,
        base: int,
        persistent_load: PersistentLoad | None,
        spent: int = 0,
        most: int | None = None,
    ) -> None:
        self.data = data
        self.end = len(data)
        self.position = self.step = 0
        self.file = file
        self.record = record
        self.base = base
        self.persistent_load = persistent_load or self.no_persistent_load
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.cost = spent
        share = spent + limits.PICKLE_COST_FREE + limits.PICKLE_COST_PER_BYTE * len(data)
        self.most = min(share, limits.PICKLE_COST) if most is None else most

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
        data = self.take(self.uint(nbytes))
        self.charge(4 * len(data))  # a text may take four bytes for each
        return data

    def line(self) -> bytes:
        """The next line, without its end."""
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise EOFError
        start, self.position = self.position, end + 1
        self.charge(4 * (end - start))
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
        self.charge(8 * len(items))
        return items

    def pop_many(self, count: int) -> tuple[Any, ...]:
        """Takes the last items, the deepest first."""
        if count > len(self.stack):
            raise IndexError(f"{count} items wanted")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    # -- cost --------------------------------------------------------------------------------------------------------

    def charge(self, cost: int) -> None:
        """Adds to the cost: bytes of objects about to be made, or steps times `STEP`. See [Note: bombs] in `pickles`.

        Raises:
            UnsupportedError: it is too much.
        """
        self.cost += cost
        if self.cost > self.most:
            raise self.refuse(UnsupportedError, f"a pickle that takes too much memory or time ({self.cost:,} so far)")

    # -- objects -----------------------------------------------------------------------------------------------------

    def call(
        self, function: object, args: object, kwargs: Mapping[str, object] | None = None, forwards: int = 0
    ) -> object:
        """What calling `function` would give; see the module's docstring."""
        if type(function) is not Placeholder or type(args) is not tuple or (kwargs and type(kwargs) is not dict):
            raise TypeError(f"a {type(function).__name__} is called with a {type(args).__name__}")
        self.charge(sum(map(_size, args), ARGUMENT_COST * len(args)) + ENTRY_COST * len(kwargs or ()))
        if function.called:  # what a call gave is called in turn
            self.charge(PLACEHOLDER_COST)
            return Placeholder(function.module, function.name, (function, *args), called=True)
        name = f"{function.module}.{function.name}"
        if meaning := MEANINGS.get(name):
            value = meaning(*args, **kwargs) if kwargs else meaning(*args)
            if value is not None:
                return value
        elif name in _FORWARDS:
            if forwards > _MOST_FORWARDS:
                raise TypeError("a call that is only passed on")
            passed, arguments, named = _FORWARDS[name](*args)
            made = self.call(passed, arguments, named, forwards + 1)
            return as_new(made) if name.startswith("copyreg.") else made
        elif name == "builtins.getattr" and (member := _member(*args)):
            return member
        else:
            self.check_safe(function, (*args, *(kwargs or {}).values()))
        self.charge(PLACEHOLDER_COST)
        return Placeholder(function.module, function.name, args, called=True, kwargs=dict(kwargs or {}))

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
            self.charge(sum(map(_size, state)) if type(state) is tuple else 0)
            fill_array(target, state)
        elif not isinstance(
            target, dict | list | set | TensorRef
        ):  # their attributes, such as `_metadata`, are dropped
            raise TypeError(f"a state for a {type(target).__name__}")

    def append(self, items: list[Any]) -> None:
        """Adds items to the topmost list or set."""
        target = self.stack[-1]
        if isinstance(target, set):
            self.charge(ENTRY_COST * len(items))
            target.update(map(plain_key, items))
        elif isinstance(target, list | Placeholder):
            (target if isinstance(target, list) else target.items).extend(items)
        else:
            raise TypeError(f"items for a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        """Sets keys and values, in turn, in the topmost dict."""
        target = self.stack[-1]
        self.charge(ENTRY_COST // 2 * len(items))
        pairs = zip(items[::2], items[1::2], strict=True)
        if isinstance(target, dict):
            target.update((plain_key(key), value) for key, value in pairs)
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


def _size(value: object) -> int:
    """What copying an argument would cost."""
    kind = type(value)
    if kind in _TEXTS:
        return len(value)  # type: ignore[arg-type]
    return ITEM_COST * len(value) if kind in _COPIED else 0  # type: ignore[arg-type]


_TEXTS = {str, bytes, bytearray}
_COPIED = {list, tuple, dict, set, frozenset}

_FORWARDS: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    "torch._tensor._rebuild_from_type_v2": lambda function, kind, args, state: (function, args, None),
    "copyreg.__newobj__": lambda kind, *args: (kind, args, None),
    "copyreg.__newobj_ex__": lambda kind, args, kwargs: (kind, args, kwargs),
}
"""Calls that only pass on a call; the attributes that Python code hung on a tensor are dropped."""

_MOST_FORWARDS = 8
"""Such calls of one another."""


def _member(owner: object = None, name: object = None, *_: object) -> Placeholder | None:
    """How Python spells methods, protocol 2 `__new__`, and 3.11 enum members: `getattr(Class, "NAME")`.

    None where anything else is wanted: that is how attacks find their way to functions that are not named.
    """
    if not isinstance(owner, Placeholder) or type(name) is not str or (name.startswith("_") and name != "__new__"):
        return None
    if len(owner.module) + len(owner.name) + len(name) > MOST_NAME:
        raise ValueError("a name that is too long")
    member = Placeholder(owner.module, f"{owner.name}.{name}")
    if runs_code(owner) or runs_code(member):
        return None
    return Placeholder("builtins", "getattr", (owner, name), called=True) if owner.called else member
