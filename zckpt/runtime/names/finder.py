"""DeepSpeed's modules, made from `surface_0_19_8.txt` and `table`: below `zckpt.runtime`, and for this process below `deepspeed`.

A module holds nothing of its own: a name is looked up when it is first used, so importing all of them imports nothing else. A
name that DeepSpeed has and the trainer has not is there, and says so when it is called; one that DeepSpeed has not is an
AttributeError. Finders stand at the front of `sys.meta_path`, so that an empty folder that git has left behind hides nothing.

The import name `deepspeed` is for transformers, accelerate, peft and other libraries that import DeepSpeed by it: they get the
same modules, and the distribution's metadata, by which they find out whether and in which version DeepSpeed is installed. Nothing
is installed, and an installed DeepSpeed is not touched.

`.ci/deepspeed_surface.py` writes `surface_0_19_8.txt`: which modules DeepSpeed has, and which names they have; it says what its
lines mean. A line is read when its module is used.
Source: DeepSpeed 0.19.8, all its public modules.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from importlib.metadata import DistributionFinder as Wanted
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.runtime.names.table import BUILT, UNBUILT, VERSION, make_unbuilt

if TYPE_CHECKING:
    from os import PathLike


_FILE = Path(__file__).with_name("surface_0_19_8.txt")
_ENGINE = "runtime.engine.DeepSpeedEngine"


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The names of one module.

    Attributes:
        own: those that it defines -> "" for a class, "()" for a function, otherwise "=" and the literal, or "=?".
        taken: those that it has from another module of DeepSpeed -> that one's path, and the name there; "" is the module itself.
        stars: paths of modules that it has all names of.
    """

    own: Mapping[str, str]
    taken: Mapping[str, tuple[str, str]]
    stars: tuple[str, ...]


@functools.cache
def read_lines() -> Mapping[str, str]:
    """Path of each module below `deepspeed` -> its line; "" is the package itself."""
    lines = _FILE.read_text(encoding="utf-8").splitlines()
    return {path: words for path, _, words in (line.partition(":") for line in lines) if path != _ENGINE}


@functools.cache
def list_packages() -> frozenset[str]:
    """The paths of modules that have modules below them."""
    return frozenset(path.rpartition(".")[0] for path in read_lines())


@functools.cache
def names_of(path: str) -> ModuleNames:
    """The names of a module; empty if DeepSpeed has no such module."""
    own: dict[str, str] = {}
    taken: dict[str, tuple[str, str]] = {}
    stars = []
    for word in read_lines().get(path, "").split():
        name, at, home = word.partition("@")
        if name == "*":
            stars.append(home)
        elif at and name.isidentifier():
            where, colon, other = home.partition(":")
            taken[name] = (where, other if colon else name)
        else:
            name = word.partition("=")[0].removesuffix("()")
            own[name] = word.removeprefix(name)
    return ModuleNames(own, taken, tuple(stars))


@functools.cache
def all_names_of(path: str) -> frozenset[str]:
    """Every name of a module, its own or taken from others."""
    names = names_of(path)
    found = {*names.own, *names.taken}
    for star in names.stars:
        found |= all_names_of(star)
    return frozenset(found)


NAME = "deepspeed"
ROOT = "zckpt.runtime"

_DECIDED = {"accelerate.accelerator": "DeepSpeedEngineWrapper"}
"""Modules that look for DeepSpeed once, at their import, each with a name that exists only if they found it."""


def install() -> None:
    """Makes DeepSpeed's modules importable below `zckpt.runtime`. A second call changes nothing."""
    if not any(isinstance(finder, OwnFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, OwnFinder())


def home_of(path: str) -> str | None:
    """The path of the module that a path below `deepspeed` stands for, also by a shorter name; None if there is none."""
    if path in read_lines() or path in BUILT:
        return path
    where, name = names_of("").taken.get(path, ("", path))
    return where if not name else None


def find_name(path: str, name: str) -> Any:
    """The object for a name of a module of DeepSpeed. Raises AttributeError if neither DeepSpeed nor the table has it there."""
    row = BUILT.get(path, {})
    rows = {"*": row} if isinstance(row, str) else row
    if name in rows:
        target = rows[name]
        return make_unbuilt(name) if target is None else _import_target(target)
    names = names_of(path)
    if name in names.own and isinstance(whole := rows.get("*"), str) and hasattr(built := _import_target(whole), name):
        return getattr(built, name)
    if name in names.own:
        kind = names.own[name]
        if kind.startswith("=") and kind != "=?":
            return ast.literal_eval(kind[1:])
        return make_unbuilt(name, instead_of(path), is_function={"": False, "()": True}.get(kind))
    if name in names.taken:
        where, other = names.taken[name]
        module = importlib.import_module(f"{ROOT}.{where}".rstrip("."))
        return getattr(module, other) if other else module
    for star in names.stars:
        if _shows(star, name):
            return getattr(importlib.import_module(f"{ROOT}.{star}"), name)
    below = f"{path}.{name}".lstrip(".")
    if home_of(below) is not None:
        return importlib.import_module(f"{ROOT}.{below}")
    raise AttributeError(f"module {f'{ROOT}.{path}'.rstrip('.')!r} has no attribute {name!r}")


def _shows(path: str, name: str) -> bool:
    """Whether `import *` takes a name of a module, modules below a package included."""
    own = name in all_names_of(path) or home_of(f"{path}.{name}") is not None
    return own or any(_shows(star, name) for star in names_of(path).stars)


def instead_of(path: str) -> str:
    """The table's remedy for a module's parts that are not built: that of the row with the longest path."""
    if path in UNBUILT:
        return UNBUILT[path]
    parts = path.split(".")
    rows = (f"{'.'.join(parts[:end])}.**" for end in range(len(parts), 0, -1))
    return next((UNBUILT[row] for row in rows if row in UNBUILT), UNBUILT["**"])


def names_in(path: str) -> list[str]:
    """The public names of a module: DeepSpeed's, and those of its row."""
    row = BUILT.get(path)
    return sorted(
        {*all_names_of(path), *(name for name in (row if isinstance(row, dict) else ()) if name[0] not in "_*")}
    )


@functools.cache
def _import_target(target: str) -> Any:
    """The object that a target of the table names, or the value behind "="."""
    if target[0] == "=":
        return ast.literal_eval(target[1:])
    module, _, name = target.partition(":")
    found = importlib.import_module(module, ROOT)
    return getattr(found, name) if name else found


class DeepSpeedModule(ModuleType):
    """A module with DeepSpeed's names; names that have been used are its attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, DeepSpeedModule) and value.__name__ == f"{self.__name__}.{name}":
            names = names_of(self.__name__.removeprefix(f"{ROOT}."))
            if name in names.own or names.taken.get(name, ("", ""))[1]:
                return  # the import system tells of a module below; its name is something else's here
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        path = self.__name__.removeprefix(f"{ROOT}.")
        found: Any = names_in(path) if name == "__all__" else find_name(path, name)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *names_in(self.__name__.removeprefix(f"{ROOT}."))})


class OwnFinder(MetaPathFinder):
    """Finds DeepSpeed's modules below `zckpt.runtime`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        """The spec of a module of DeepSpeed; None for other modules and the trainer's own."""
        del path, target
        below = fullname.removeprefix(f"{ROOT}.")
        home = home_of(below) if below != fullname else None
        return None if home is None else _spec_of(fullname, home)


def _spec_of(fullname: str, home: str) -> ModuleSpec:
    real = f"{ROOT}.{home}".rstrip(".")
    return ModuleSpec(fullname, _Maker(real), is_package=home in list_packages())


class _Maker(Loader):
    """Makes a module, or under a second name gives the same one, and leaves it as it is."""

    def __init__(self, real: str) -> None:
        self._real = real
        self._own: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Makes the module; under a second name, imports or returns the module that is meant."""
        if spec.name == self._real:
            self._own = spec
            path = spec.name.removeprefix(f"{ROOT}.")
            return DeepSpeedModule(spec.name, f"What deepspeed.{path} has: see `zckpt.runtime.names.table`.")
        module = importlib.import_module(self._real)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec: the import system has put the other name's in its place."""
        module.__spec__ = self._own


def as_deepspeed() -> None:
    """Makes `import deepspeed`, and the imports of libraries below it, load this trainer in this process.

    Call it before anything imports `deepspeed` or accelerate; transformers' Trainer imports accelerate. A second call
    changes nothing. Processes that are started later, other than by fork, have to call it too. Raises UsageError if
    DeepSpeed itself has been imported already, or accelerate has, without finding a DeepSpeed.
    """
    if any(isinstance(finder, SecondFinder) for finder in sys.meta_path):
        return
    real = sys.modules.get(NAME)
    if real is not None:
        raise UsageError(
            "DeepSpeed itself has been imported already", file=getattr(real, "__file__", None),
            remedy="Call zckpt.runtime.as_deepspeed() before anything imports deepspeed, at the top of the script. Or start "
            "the script with zckpt run.",
        )  # fmt: skip
    late = [name for name, sign in _DECIDED.items() if name in sys.modules and not hasattr(sys.modules[name], sign)]
    if late:
        raise UsageError(
            "accelerate has been imported already, and found no DeepSpeed",
            remedy="Call zckpt.runtime.as_deepspeed() before anything imports accelerate or transformers, at the top of the "
            "script. Or start the script with zckpt run.",
        )
    sys.meta_path.insert(0, SecondFinder())


class SecondFinder(MetaPathFinder):
    """Finds `deepspeed`, what is below it, and its metadata."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        """The spec of a module below `deepspeed`, None for others. Raises ModuleNotFoundError if there is none."""
        del path, target
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        home = home_of(fullname.removeprefix(NAME).lstrip("."))
        if home is None:  # not None, for otherwise Python would look for it in the directory of zckpt.runtime
            why = "'deepspeed' is zckpt.runtime in this process, which has no such module"
            raise ModuleNotFoundError(f"No module named {fullname!r}: {why}", name=fullname)
        spec = _spec_of(fullname, home)
        if fullname == NAME:
            spec.origin, spec.submodule_search_locations = sys.modules[ROOT].__file__, list(sys.modules[ROOT].__path__)
        return spec

    def find_distributions(self, context: Wanted.Context | None = None) -> Iterable[Distribution]:
        """The metadata of `deepspeed`, if all distributions or this one are asked for."""
        name = None if context is None else context.name
        return [_Metadata()] if name is None or name.lower() == NAME else []


class _Metadata(Distribution):
    """The metadata of `deepspeed` for `importlib.metadata`; the version has a local label that names zckpt."""

    def read_text(self, filename: str) -> str | None:
        """The text of a file of the distribution; None for files that it lacks."""
        if filename == "METADATA":
            what = "Summary: zckpt.runtime under the name deepspeed, in this process"
            return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}+zckpt\n{what}\n"
        return f"{NAME}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """The path of a file of the distribution: beside this module, since there are none."""
        return Path(__file__).parent / path
