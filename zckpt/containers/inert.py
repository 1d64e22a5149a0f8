"""What pickled objects become: values that do nothing.

For whoever looks into a file's root. Plain Python values are themselves, tensors are `TensorRef`, dtypes are `DType`;
everything else, whatever its class, is a `Placeholder` that remembers how it was to be made, and numpy's arrays are a
`NumpyArray` of bytes. No class of a file is ever imported, so none of its code can run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Pair(NamedTuple):
    """A key and its value, which were to be set on an object that is no plain dict."""

    key: object
    value: object


@dataclass(slots=True, eq=False, repr=False)
class Placeholder:
    """Stands for a class, function or object of a pickle that zckpt does not know and therefore does not make.

    Attributes:
        module: as the pickle names it.
        name: in that module; dotted for nested ones.
        args: what it was to be called with.
        state: what its `__setstate__` or `__dict__` was to get.
        called: whether this is an instance (a call's result) rather than the class or function itself.
        kwargs: named arguments of the call.
        items: what was to be appended to it, and (key, value) `Pair`s that were to be set on it.
        new: whether the call is of its `__new__` alone, without its `__init__`.
    """

    module: str
    name: str
    args: tuple[object, ...] = ()
    state: object = None
    called: bool = False
    kwargs: dict[str, object] = field(default_factory=dict[str, object])
    items: list[object] = field(default_factory=list[object])
    new: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:  # never its contents: they may be huge, or contain it
        return f"<{self}{' object' if self.called else ''}>"


@dataclass(frozen=True, slots=True, eq=False)
class NumpyArray:
    """A numpy array or scalar (shape ()) that was pickled by value.

    Attributes:
        dtype: numpy's type string, such as "<f4"; "|O" for Python objects.
        shape: in elements.
        data: the elements' bytes; empty for Python objects.
        fortran: whether they lie column-major.
        objects: the elements of an array of Python objects.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)
    fortran: bool = False
    objects: list[object] = field(default_factory=list[object], repr=False)


def enum_value(value: object) -> object:
    """The value of an enum member, which a pickle holds as a call of its class with it; any other object as it is."""
    if isinstance(value, Placeholder) and value.called and len(value.args) == 1 and not value.kwargs:
        return value.args[0]
    return value


def brief_text(value: object) -> str:
    """The beginning of a text; nothing of what is none, whose description may be endless."""
    return value[:64] if type(value) is str else ""


def brief(value: object) -> str:
    """A short description of any object of a file. Unlike `repr`, its cost does not grow with the object."""
    if isinstance(value, str | bytes):
        return f"{value[:60]!r}"
    plain = value is None or isinstance(value, int | float | Placeholder)
    return repr(value) if plain else f"a {type(value).__name__}"
