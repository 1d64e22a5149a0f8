"""The inert values that stand for pickled objects.

For all users of `Container.root`. Plain Python values are themselves, tensors are `TensorRef`, dtypes are `DType`, numpy's
arrays are `NumpyArray`, and objects of all other classes are a `Placeholder` with the call that would have made them. zckpt
never imports a class that a file names, so it runs no code of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, NamedTuple

from zckpt.base.dataclass import dataclass


class Pair(NamedTuple):
    """A key and its value, to be set on an object that is not a plain dict."""

    key: object
    value: object


@dataclass(slots=True, eq=False, repr=False)
class Placeholder:
    """Stands for a class, function or object of a pickle that zckpt does not know and therefore does not make.

    Attributes:
        module: as the pickle names it.
        name: in that module; dotted for nested ones.
        args: arguments of the call.
        state: argument of its `__setstate__`, or its `__dict__`.
        called: whether this is an instance (a call's result) rather than the class or function itself.
        kwargs: named arguments of the call.
        items: values to be appended to it, and `Pair`s to be set on it.
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

    def __repr__(self) -> str:  # without its contents, which may be huge or contain it
        return f"<{self}{' object' if self.called else ''}>"


@dataclass(frozen=True, slots=True, eq=False)
class NumpyArray:
    """A numpy array or scalar (shape ()) that was pickled by value.

    Attributes:
        dtype: numpy's type string, such as "<f4"; "|O" for Python objects.
        shape: in elements.
        data: the elements' bytes; empty for Python objects.
        fortran: whether they are column-major.
        objects: the elements of an array of Python objects.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)
    fortran: bool = False
    objects: list[object] = field(default_factory=list[object], repr=False)


def enum_value(value: object) -> object:
    """The value of an enum member, which in a pickle is a call of its class with that value; any other object unchanged."""
    if isinstance(value, Placeholder) and value.called and len(value.args) == 1 and not value.kwargs:
        return value.args[0]
    return value


def value_at(value: object, *keys: object) -> Any:
    """The value under these keys, each of a mapping inside the one before; None where there is none.

    Files may hold anything in place of what their writer puts there.
    """
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def mapping_at(value: object, *keys: object) -> Mapping[Any, Any]:
    """The mapping that `value_at` finds; an empty one where it finds none."""
    found = value_at(value, *keys)
    return found if isinstance(found, Mapping) else {}


def list_at(value: object, *keys: object) -> list[Any]:
    """The items of the list or tuple that `value_at` finds; none where it finds none."""
    found = value_at(value, *keys)
    return list(found) if isinstance(found, list | tuple) else []


def brief(value: object) -> str:
    """A short description of any object of a file; unlike that of `repr`, its cost does not grow with the object."""
    if isinstance(value, str | bytes):
        return f"{value[:60]!r}"
    plain = value is None or isinstance(value, int | float | Placeholder)
    return repr(value) if plain else f"a {type(value).__name__}"
