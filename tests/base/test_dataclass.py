"""zckpt's `dataclass` is Python's: everything that one can see of a class and its objects is the same."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

from zckpt.base import dataclass as module

OPTIONS: list[dict[str, bool]] = [
    {"frozen": frozen, "slots": slots, **more}
    for frozen in (False, True)
    for slots in (False, True)
    for more in ({}, {"eq": False}, {"repr": False}, {"kw_only": True})
]


def classes(decorator: Callable[..., Any], options: dict[str, bool]) -> tuple[type, type]:
    """A class with all kinds of fields, and one that inherits from it; pickles find them by their names here."""

    @decorator(**options)
    class Base:
        """A class."""

        first: int
        second: list[int] = dataclasses.field(default_factory=list)
        third: str = dataclasses.field(default="x", repr=False, compare=False)
        fourth: int = dataclasses.field(default=4, init=False)
        fifth: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

        def __post_init__(self) -> None:
            if self.first < 0:
                raise ValueError("first")

    @decorator(**options)
    class Derived(Base):
        """Another."""

        sixth: dict[str, int] = dataclasses.field(default_factory=dict, init=False)

        def __repr__(self) -> str:
            return "Derived"

    for cls in (Base, Derived):
        cls.__qualname__ = cls.__name__
        setattr(sys.modules[__name__], cls.__name__, cls)
    return Base, Derived


def tried(what: Callable[[], Any]) -> Any:
    try:
        return what()
    except Exception as error:
        return type(error), str(error).replace("classes.<locals>.", "")


def seen(decorator: Callable[..., Any], options: dict[str, bool]) -> list[Any]:
    found: list[Any] = []
    for cls in classes(decorator, options):
        found.append(str(inspect.signature(cls)).replace("<class '", "").replace("'>", ""))
        made = [cls(first=1), cls(first=1), cls(first=2, second=[3], third="y", fifth=(5,))]
        one, same, other = made
        found += [repr(one) if options.get("repr", True) else "", one == same, one == other, one != other, one == 1]
        found.append(tried(lambda: hash(cls(first=1, second=())) == hash(cls(first=1, second=()))))  # noqa: B023
        found.append(tried(lambda: isinstance(hash(one), int)))  # noqa: B023
        found += [tried(lambda: cls(-1)), tried(lambda: cls(first=-1)), tried(lambda: cls(1, nothing=2)), tried(cls)]  # noqa: B023
        for way in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
            found.append(dataclasses.asdict(way(other)))
        found += [dataclasses.asdict(dataclasses.replace(other, first=7)), dataclasses.astuple(other)]
        found.append([(f.name, f.init, f.repr, f.compare, f.kw_only) for f in dataclasses.fields(cls)])
        found += [cls.__match_args__, cls.__doc__, cls.__hash__ is None, hasattr(one, "__dict__")]  # type: ignore[attr-defined]
        found.append(tried(lambda: setattr(one, "first", 9)))  # noqa: B023
        found.append(tried(lambda: delattr(one, "first")))  # noqa: B023
        found.append(tried(lambda: one.first))  # noqa: B023
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_all_that_can_be_seen_is_as_of_pythons_own(options: dict[str, bool]) -> None:
    assert seen(module.dataclass, options) == seen(dataclasses.dataclass, options)


def test_what_a_class_defines_itself_stays() -> None:
    for decorator in (module.dataclass, dataclasses.dataclass):

        @decorator(frozen=True)
        class Own:
            value: int

            def __eq__(self, other: object) -> bool:
                return True

            def __hash__(self) -> int:
                return 5

            def __repr__(self) -> str:
                return "own"

        assert Own(1) == Own(2) and hash(Own(1)) == 5 and repr(Own(1)) == "own"


def test_init_is_compiled_when_it_is_wanted() -> None:
    @module.dataclass(frozen=True, slots=True)
    class Late:
        value: int

    assert not inspect.isfunction(vars(Late)["__init__"])
    assert Late(3).value == 3
    assert inspect.isfunction(vars(Late)["__init__"])


def test_an_option_that_is_not_known_is_an_error() -> None:
    with pytest.raises(TypeError, match="order"):
        module.dataclass(order=True)(type("A", (), {}))
