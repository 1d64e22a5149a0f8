"""The import name `deepspeed`, for this process: what imports it gets `zckpt.runtime`.

For transformers, accelerate, peft and other libraries that import DeepSpeed by its name. A finder at the front of
`sys.meta_path` answers for `deepspeed` and all below it with the modules of `zckpt.runtime`, which are the same objects under
both names, and for the distribution's metadata, by which those libraries find out whether and in which version DeepSpeed is
installed. Nothing is installed, and an installed DeepSpeed is not touched.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from email.message import EmailMessage
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from importlib.metadata import DistributionFinder as Wanted
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zckpt.base.errors import UsageError

if TYPE_CHECKING:
    from os import PathLike

NAME = "deepspeed"
VERSION = "0.19.8+zckpt"
"""DeepSpeed's version whose names and files the trainer has; the local label says whose it is."""

_TARGET = "zckpt.runtime"
_DECIDED = {"accelerate.accelerator": "DeepSpeedEngineWrapper"}
"""Modules that look for DeepSpeed once, when they are imported, and a name that they have only if they found it."""


def as_deepspeed() -> None:
    """From now on, in this process, `import deepspeed` and what libraries import below it is this trainer.

    Call it before anything imports `deepspeed` or accelerate; transformers' Trainer imports accelerate. A second call changes
    nothing. Processes that are started later, other than by fork, have to call it too.

    Raises:
        UsageError: DeepSpeed itself has been imported already, or accelerate has, without finding a DeepSpeed.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    real = sys.modules.get(NAME)
    if real is not None:
        raise UsageError(
            "DeepSpeed itself has been imported already",
            file=getattr(real, "__file__", None),
            remedy="Call zckpt.runtime.as_deepspeed() before anything imports deepspeed, at the top of the script. Or start "
            "the script with zckpt run.",
        )
    late = [name for name, sign in _DECIDED.items() if name in sys.modules and not hasattr(sys.modules[name], sign)]
    if late:
        raise UsageError(
            "accelerate has been imported already, and found no DeepSpeed",
            remedy="Call zckpt.runtime.as_deepspeed() before anything imports accelerate or transformers, at the top of the "
            "script. Or start the script with zckpt run.",
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds `deepspeed`, what is below it, and its metadata."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module is; None for names of others.

        Raises:
            ModuleNotFoundError: the trainer has no such module.
        """
        del path, target
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        real = _TARGET + fullname.removeprefix(NAME)
        found = importlib.util.find_spec(real)
        if found is None:  # not None, for otherwise Python would look for it in the directory of zckpt.runtime
            what = (
                f"No module named {fullname!r}: 'deepspeed' is zckpt.runtime in this process, which has no such module"
            )
            raise ModuleNotFoundError(what, name=fullname)
        spec = ModuleSpec(
            fullname, _SameModule(real), origin=found.origin, is_package=found.submodule_search_locations is not None
        )
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def find_distributions(self, context: Wanted.Context | None = None) -> Iterable[Distribution]:
        """The metadata, if it is asked for: of all distributions, or of this one."""
        name = None if context is None else context.name
        return [_Metadata()] if name is None or name.lower() == NAME else []


class _SameModule(Loader):
    """Gives the trainer's module, and leaves it as it is."""

    def __init__(self, real: str) -> None:
        self._real = real
        self._own: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Imports the trainer's module, or takes it if it is imported."""
        del spec
        module = importlib.import_module(self._real)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its own spec back: the import system has put the other name's in its place."""
        module.__spec__ = self._own


class _Metadata(Distribution):
    """What `importlib.metadata` says of `deepspeed`."""

    def read_text(self, filename: str) -> str | None:
        """A file of the distribution; None for those that it does not have."""
        if filename == "METADATA":
            message = EmailMessage()
            for key, value in (
                ("Metadata-Version", "2.1"),
                ("Name", NAME),
                ("Version", VERSION),
                ("Summary", "zckpt.runtime under the name deepspeed, in this process"),
            ):
                message[key] = value
            return message.as_string()
        return f"{NAME}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Where a file of it would be: beside this module, since there are none."""
        return Path(__file__).parent / path
