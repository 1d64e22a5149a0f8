"""Which modules DeepSpeed has, and which names they have: `surface_0_19_8.txt`.

For `finder`. `.ci/deepspeed_surface.py` writes that file, and says what its lines mean. A line is read when its module is used.
Source: DeepSpeed 0.19.8, all its public modules.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from zckpt.base.dataclass import dataclass

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
