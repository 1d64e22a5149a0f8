"""What other packages add to zckpt by entry points: layouts of saves (`zckpt.layouts`), names of tensors (`zckpt.schemes`), and
recipes, by which quantised weights become numbers (`zckpt.recipes`).

An entry point is found by reading `entry_points.txt` of what is installed, which takes a few milliseconds for hundreds of
packages; `importlib.metadata` takes ten times as long to import. Nothing of a package is imported until something is its own.
Packages in the current directory do not count: a checkpoint that somebody sent would be one, to a shell that stands in it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from zckpt.base.errors import UnsupportedError, ZckptError

_END = ".dist-info"


class Extension(NamedTuple):
    """One entry point.

    Attributes:
        group: what it adds to, such as "zckpt.layouts".
        name: what it is for; see the group.
        value: where it is: a module, or `module:attribute`.
        package: the name of what was installed.
        version: of that.
        home: the directory that it was installed in.
    """

    group: str
    name: str
    value: str
    package: str
    version: str
    home: str

    def as_json(self) -> dict[str, str]:
        """The fields that programs get."""
        return {"group": self.group, "name": self.name, "package": self.package, "version": self.version}

    def load(self, kind: type) -> Any:
        """Imports the object that the entry point names. Raises UnsupportedError if that fails, or it is no `kind`."""
        module, _, attribute = self.value.partition(":")
        try:
            found = functools.reduce(getattr, filter(None, attribute.split(".")), import_module(module))
        except Exception as error:
            raise self.broken(f"{type(error).__name__}: {error}") from error
        if not isinstance(found, kind):
            raise self.broken(f"{self.value} is a {type(found).__name__}, and no {kind.__name__}")
        return found

    def file(self, name: str) -> str:
        """The path of a file in the package that the entry point names; nothing is imported. Raises UnsupportedError if
        the package is not there.
        """
        top, *inner = self.value.split(".")
        spec = find_spec(top)
        homes = spec.submodule_search_locations if spec is not None else None
        if not homes:
            raise self.broken(f"no package {top}")
        return os.path.join(homes[0], *inner, name)

    def broken(self, found: str) -> ZckptError:
        """The error for an entry point that does not work."""
        return UnsupportedError(
            f"the package {self.package} {self.version} adds {self.name!r} to {self.group}, and does not work",
            file=self.home, found=found, expected=f"what its entry point names: {self.value}",
            remedy=f"Update it, or take it away: pip uninstall {self.package}.",
        )  # fmt: skip


@functools.cache
def extensions(group: str) -> tuple[Extension, ...]:
    """The entry points of a group, in the order of the packages' names.

    Example:
        >>> extensions("zckpt.nothing_has_this_name")
        ()
    """
    return tuple(sorted(_list_installed().get(group, ())))


@functools.cache
def _list_installed() -> dict[str, list[Extension]]:
    """Group of zckpt's -> its entry points; of a package that is installed twice, those of the first on the path."""
    found: dict[str, list[Extension]] = {}
    packages: set[str] = set()
    here = os.path.realpath(os.curdir)
    for home in sys.path:
        if not home or os.path.realpath(home) == here or not os.path.isdir(home):
            continue
        for name in os.listdir(home):
            if name.endswith(_END):
                package, _, version = name.removesuffix(_END).partition("-")
                if package.casefold() not in packages:
                    packages.add(package.casefold())
                    for one in _read(home, name, package, version):
                        found.setdefault(one.group, []).append(one)
    return found


def _read(home: str, name: str, package: str, version: str) -> Iterator[Extension]:
    try:
        with open(os.path.join(home, name, "entry_points.txt"), "rb") as file:
            data = file.read()
    except OSError:  # a package without any
        return
    group = ""
    for line in map(str.strip, data.decode(errors="replace").splitlines()) if b"[zckpt." in data else ():
        if line.startswith("["):
            group = line.strip("[]").strip()
        elif group.startswith("zckpt.") and "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            yield Extension(group, key.strip(), value.partition("[")[0].strip(), package, version, home)
