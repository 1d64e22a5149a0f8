"""The stack machine of a pickle: its state, and the calls it carries out on inert values or refuses.

For `opcodes` and `pickles`, which has the overview and [Note: bombs].
Source: CPython's Lib/pickle.py (3.13).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zckpt.base import limits
from zckpt.base.errors import COPY_AGAIN, CorruptError, UnsafeError, UnsupportedError, ZckptError
from zckpt.containers.inert import NumpyArray, Pair, Placeholder
from zckpt.containers.meanings import MEANINGS, MOST_NAME, fill_array, plain_key, runs_code
from zckpt.containers.tensor_ref import TensorRef

PersistentLoad = Callable[[object], object]
Finishers = Mapping[str, Callable[[object], object]]
"""Class -> what takes the place of an object of that class, given its state, or None: large metadata are kept in few bytes so."""

STEP = 8
"""The cost of a step, in bytes; see [Note: bombs] in `pickles`."""

ARGUMENT_COST, ITEM_COST, ENTRY_COST, PLACEHOLDER_COST = 16, 32, 104, 256
"""The costs of an argument of a call; of an item in an argument, which the call may copy; of an entry of a dict or set, which
grow by doubling; of a `Placeholder` that a call makes."""


def most_cost(nbytes: int, spent: int) -> int:
    """The highest cost of a pickle of so many bytes, with what was spent before it."""
    return min(spent + limits.PICKLE_COST_FREE + limits.PICKLE_COST_PER_BYTE * nbytes, limits.PICKLE_COST)


class Machine:
    """The state of one run.

    Args:
        data: the pickle; bytes after its end are ignored.
        file: its path, for errors.
        record: which part of the file it is, for errors.
        base: byte offset in the file, for errors.
        persistent_load: returns the object of a persistent id: in torch's files, a storage.
        spent: cost that the reader of the file has already caused.
        most: the highest cost; None for the usual one. See `charge`.
        finishers: for objects of some classes.

    Attributes:
        position: of the next byte.
        step: where the current opcode begins.
        stack: all items; those above a mark belong to the object that is being made.
        push: puts a value on the stack.
        marks: heights of the stack.
        memo: objects that are used again.
        cost: the cost so far.
        holes: where `opcodes.HOLE` may be -> how often it was carried out; for `alike`.
        hole: makes what it pushes, of where it is.
        table: the class that may stand for a dict, with its `update`; None where nothing does.
    """

    def __init__(
        self, data: bytes, file: str, *, record: str = "", base: int = 0, persistent_load: PersistentLoad | None = None,
        spent: int = 0, most: int | None = None, finishers: Finishers | None = None,
    ) -> None:  # fmt: skip
        self.table: type[Any] | None = None
        self.data = data
        self.end = len(data)
        self.position = self.step = 0
        self.file = file
        self.record = record
        self.base = base
        self.persistent_load = persistent_load or self.no_persistent_load
        self.finishers = finishers or {}
        self.stack: list[Any] = []
        self.push = self.stack.append
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.cost = spent
        self.holes: dict[int, int] = {}
        self.hole: Callable[[int], Any] | None = None
        self.most = most_cost(len(data), spent) if most is None else most

    # -- bytes -------------------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> bytes:
        """Takes the next bytes of the pickle."""
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
        """The next bytes, after their number, which takes `nbytes`."""
        data = self.take(self.uint(nbytes))
        self.charge(4 * len(data))  # a text may take four bytes for each character
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

    def pop_to_mark(self) -> list[Any]:
        """Removes the last mark and the items above it; returns the items."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        self.charge(8 * len(items))
        return items

    def pop_many(self, count: int) -> tuple[Any, ...]:
        """Removes the last items, and returns them, the deepest first."""
        if count > len(self.stack):
            raise IndexError(f"{count} items needed")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    # -- cost --------------------------------------------------------------------------------------------------------

    def charge(self, cost: int) -> None:
        """Adds to the cost: bytes of objects about to be made, or steps times `STEP`. See [Note: bombs] in `pickles`.
        Raises UnsupportedError if the cost exceeds `most`.
        """
        self.cost += cost
        if self.cost > self.most:
            what = f"its pickle needs more than {self.most:,} bytes of memory"
            raise self.refuse(UnsupportedError, what, limits.REMEDY)

    # -- objects -----------------------------------------------------------------------------------------------------

    def call(
        self, function: object, args: object, kwargs: Mapping[str, object] | None = None, forwards: int = 0
    ) -> object:
        """The value of a call: by `MEANINGS` if it has one, otherwise a `Placeholder`. Raises UnsafeError if the call
        would run code.
        """
        if type(function) is not Placeholder or type(args) is not tuple or (kwargs and type(kwargs) is not dict):
            raise TypeError(f"a {type(function).__name__} is called with a {type(args).__name__}")
        self.charge(sum(map(_size, args), ARGUMENT_COST * len(args)) + ENTRY_COST * len(kwargs or ()))
        if function.called:  # the result of a call is called
            self.charge(PLACEHOLDER_COST)
            return Placeholder(function.module, function.name, (function, *args), called=True)
        name = f"{function.module}.{function.name}"
        if meaning := MEANINGS.get(name):
            value = meaning(*args, **kwargs) if kwargs else meaning(*args)
            if value is not None:
                return value
        elif name in _FORWARDS:
            if forwards > _MOST_FORWARDS:
                raise TypeError("calls that only pass on a call")
            passed, arguments, named = _FORWARDS[name](*args)
            made = self.call(passed, arguments, named, forwards + 1)
            if name == _OF_SUBCLASS and type(made) is Placeholder:
                made.state = args[3]
            elif name == _OF_SUBCLASS and type(made) is TensorRef and type(args[3]) is dict:
                return replace(made, attributes=args[3])
            return as_new(made) if name.startswith("copyreg.") else made
        elif name == "builtins.getattr" and (member := _member(*args)):
            return member
        else:
            self.check_safe(function, (*args, *(kwargs or {}).values()))
        self.charge(PLACEHOLDER_COST)
        named = dict(kwargs) if kwargs else _NOT_NAMED
        return Placeholder(function.module, function.name, args, called=True, kwargs=named, items=_NO_ITEMS)

    def check_safe(self, function: Placeholder, args: tuple[object, ...]) -> None:
        """Raises UnsafeError for a call that would run code, of `function` or through it, as map(os.system, ...)."""
        for suspect in (function, *args):
            if isinstance(suspect, Placeholder) and runs_code(suspect):
                by = "" if suspect is function else f" through {function}"
                raise UnsafeError(
                    f"its pickle calls {suspect}{by}", file=self.file, found=f"{self.where()}; nothing was executed",
                    remedy="Do not load this file with other tools. If you know who made it, report it to them.",
                )  # fmt: skip

    def build(self, state: object) -> None:
        """Sets the state of the topmost object."""
        target = self.stack[-1]
        if isinstance(target, Placeholder):
            self._own(target).state = state
            if (finish := self.finishers.get(target.name)) and (plain := finish(state)) is not None:
                self.stack[-1] = plain
        elif isinstance(target, NumpyArray):
            self.charge(sum(map(_size, state)) if type(state) is tuple else 0)
            fill_array(target, state)
        elif not isinstance(target, dict | list | set | TensorRef):  # attributes of these, as `_metadata`, are dropped
            raise TypeError(f"a state for a {type(target).__name__}")

    def finished(self, function: Placeholder, state: object) -> object:
        """What `call` makes of a class that is only kept, without arguments, and `build` of that and this state."""
        if (finish := self.finishers.get(function.name)) and (plain := finish(state)) is not None:
            return plain
        return Placeholder(
            function.module, function.name, (), state, called=True, kwargs=_NOT_NAMED, items=_OF_SEVERAL, new=True
        )

    def append(self, items: list[Any]) -> None:
        """Adds items to the topmost list or set."""
        target = self.stack[-1]
        if isinstance(target, set):
            self.charge(ENTRY_COST * len(items))
            target.update(map(plain_key, items))
        elif isinstance(target, list | Placeholder):
            (target if isinstance(target, list) else _items_of(self._own(target))).extend(items)
        else:
            raise TypeError(f"items for a {type(target).__name__}")

    def set_items(self, items: list[Any]) -> None:
        """Sets keys and values, in turn, in the topmost dict."""
        target = self.stack[-1]
        self.charge(ENTRY_COST // 2 * len(items))
        pairs = zip(items[::2], items[1::2], strict=True)
        if self.table is not None and isinstance(target, self.table):
            target.update(pairs)
        elif isinstance(target, dict):
            target.update(zip(map(plain_key, items[::2]), items[1::2], strict=True))
        elif isinstance(target, Placeholder):
            _items_of(self._own(target)).extend(itertools.starmap(Pair, pairs))
        else:
            raise TypeError(f"entries for a {type(target).__name__}")

    def _own(self, target: Placeholder) -> Placeholder:
        """The topmost item, to be changed: one that was read in one go may stand for several objects, and is copied first."""
        if target.items is _OF_SEVERAL:
            target = self.stack[-1] = replace(target, items=_NO_ITEMS)
        return target

    def memoize(self, number: int) -> None:
        """Puts the topmost item into the memo."""
        self.memo[number] = self.stack[-1]

    # -- refusals ----------------------------------------------------------------------------------------------------

    def where(self) -> str:
        """The place of the current opcode, for errors."""
        return f"record {self.record}, byte {self.step:,}" if self.record else f"byte {self.base + self.step:,}"

    def corrupt(self, reason: str) -> CorruptError:
        """The error for a pickle that contradicts itself."""
        return CorruptError(
            "its pickle is damaged", file=self.file, found=f"{reason} ({self.where()})", remedy=COPY_AGAIN,
            byte_offset=self.base + self.step,
        )  # fmt: skip

    def refuse(self, kind: type[ZckptError], what: str, remedy: str) -> ZckptError:
        """An error at the current opcode."""
        return kind(what, file=self.file, found=self.where(), remedy=remedy)

    def no_persistent_load(self, key: object) -> object:
        """For pickles outside of a torch file."""
        raise TypeError("a reference to something outside of it")


_NOT_NAMED: dict[str, object] = {}
_NO_ITEMS: list[object] = []
"""Of all placeholders without any: the metadata of a large save are hundreds of thousands of objects."""
_OF_SEVERAL: list[object] = []
"""The same, of those that may stand for several objects."""


def _items_of(value: Placeholder) -> list[object]:
    """Its items, to be added to."""
    if value.items is _NO_ITEMS:
        value.items = []
    return value.items


def as_new(value: object) -> object:
    """Marks the result of a call as one of `__new__` alone."""
    if type(value) is Placeholder:
        value.new = True
    return value


def _size(value: object) -> int:
    """The cost of copying an argument."""
    kind = type(value)
    if kind in _TEXTS:
        return len(value)  # type: ignore[arg-type]
    return ITEM_COST * len(value) if kind in _COPIED else 0  # type: ignore[arg-type]


_TEXTS = {str, bytes, bytearray}
_COPIED = {list, tuple, dict, set, frozenset}

_OF_SUBCLASS = "torch._tensor._rebuild_from_type_v2"
"""How torch writes an instance of a subclass of Tensor, such as a DTensor, and a tensor on which Python code set attributes:
(function, class, arguments, state)."""

_FORWARDS: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    _OF_SUBCLASS: lambda function, kind, args, state: (function, args, None),
    "copyreg.__newobj__": lambda kind, *args: (kind, args, None),
    "copyreg.__newobj_ex__": lambda kind, args, kwargs: (kind, args, kwargs),
}
"""Calls that only pass on a call."""

_MOST_FORWARDS = 8
"""The most such calls in one another."""


def _member(owner: object = None, name: object = None, *_: object) -> Placeholder | None:
    """The member of a class in `getattr(Class, "NAME")`: so Python writes methods, protocol 2 `__new__`, and 3.11 enum members.

    None for any other `getattr`: attacks use it to reach functions without naming them.
    """
    if not isinstance(owner, Placeholder) or type(name) is not str or (name.startswith("_") and name != "__new__"):
        return None
    if len(owner.module) + len(owner.name) + len(name) > MOST_NAME:
        raise ValueError("a name that is too long")
    member = Placeholder(owner.module, f"{owner.name}.{name}")
    if runs_code(owner) or runs_code(member):
        return None
    return Placeholder("builtins", "getattr", (owner, name), called=True) if owner.called else member
