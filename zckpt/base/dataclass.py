"""Python's `dataclass`, with methods that are made when they are first wanted.

For every module. Python compiles six methods for each class when it is imported, and most runs call none of them:
for a hundred
classes that took a third of the time of a short command. Here all but `__init__` are the same functions for all classes, and
`__init__` is compiled when the first object is made, or somebody asks for its signature. It sets slots directly, which takes two
thirds of the time where a class is frozen. Fields, `replace`, `asdict`, `match` and pickles are Python's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None,
        /,
        *,
        frozen: bool = False,
        slots: bool = False,
        eq: bool = True,
        repr: bool = True,  # noqa: A002 - Python's name
        kw_only: bool = False,
    ) -> Any:
        """As `dataclasses.dataclass`. An option that is not listed here raises TypeError."""
        build = partial(_build_class, frozen=frozen, slots=slots, eq=eq, shows=repr, kw_only=kw_only)
        return build if cls is None else build(cls)


K = TypeVar("K")


def public(kind: K) -> K:
    """Gives a public class the module name `zckpt`, so that its name reads `zckpt.X`; a decorator."""
    kind.__module__ = "zckpt"
    return kind


def _build_class(plain: type, *, frozen: bool, slots: bool, eq: bool, shows: bool, kw_only: bool) -> type:
    own = set(vars(plain))
    hashes = vars(plain).get("__hash__") is not None
    if plain.__doc__ is None:
        plain.__doc__ = plain.__name__  # for which Python would ask for the signature
    cls: type = dataclasses.dataclass(plain, init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)
    methods: dict[str, Any] = {"__init__": _Init(cls, frozen=frozen)}
    if shows:
        methods["__repr__"] = _repr
    if eq:
        names = [one.name for one in dataclasses.fields(cls) if one.compare]
        compared: Callable[[Any], Any] = attrgetter(*names) if names else lambda _: ()
        methods["__eq__"] = _equal(compared)
        if not hashes:
            own.discard("__hash__")
            methods["__hash__"] = _hash(compared) if frozen else None
    if frozen:
        methods |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
        if slots:
            methods |= {"__getstate__": _state, "__setstate__": _restore}
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)
    return cls


class _Factory:
    """What a signature shows for a field with a default factory."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


class _Init:
    """Compiles `__init__` the first time it is needed, and takes its place until then.

    Args:
        cls: the class of the objects that it begins.
        frozen: whether their fields can only be set by it.
    """

    def __init__(self, cls: type, *, frozen: bool) -> None:
        self._cls = cls
        self._frozen = frozen

    def __get__(self, instance: object, owner: type) -> Any:
        cls = self._cls
        made = _compile_init(cls, frozen=self._frozen)
        if vars(cls).get("__init__") is self:
            cls.__init__ = made  # type: ignore[misc]
        return made.__get__(instance, owner)


def _compile_init(cls: type, *, frozen: bool) -> Any:
    names: dict[str, Any] = {"_factory": _FACTORY, "_set": object.__setattr__}
    positional: list[str] = []
    keywords: list[str] = []
    body: list[str] = []
    for one in dataclasses.fields(cls):
        name, value = one.name, one.name
        if one.default_factory is not dataclasses.MISSING:
            names[f"_make_{name}"] = one.default_factory
            value = f"_make_{name}() if {name} is _factory else {name}" if one.init else f"_make_{name}()"
            default = "=_factory"
        elif one.default is not dataclasses.MISSING:
            names[f"_default_{name}"] = one.default
            default = f"=_default_{name}"
            value = name if one.init else f"_default_{name}"
        elif not one.init:
            continue
        else:
            default = ""
        if one.init:
            (keywords if one.kw_only else positional).append(name + default)
        if not frozen:
            body.append(f"self.{name} = {value}")
        elif (set_slot := getattr(getattr(cls, name, None), "__set__", None)) is not None:
            names[f"_set_{name}"] = set_slot
            body.append(f"_set_{name}(self, {value})")
        else:
            body.append(f"_set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join(["self", *positional, *(["*", *keywords] if keywords else [])])
    exec(f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"]), names)
    made = names["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    made.__annotations__ = {one.name: one.type for one in dataclasses.fields(cls) if one.init} | {"return": None}
    return made


def _equal(compared: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def __eq__(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self is other or compared(self) == compared(other)

    return __eq__


def _hash(compared: Callable[[Any], Any]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        return hash(compared(self))

    return __hash__


def _repr(self: Any) -> str:
    shown = ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in dataclasses.fields(self) if one.repr)
    return f"{type(self).__qualname__}({shown})"


def _refuse_to_set(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, one.name) for one in dataclasses.fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for one, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, one.name, value)
