"""Makes the lines of `zckpt --version`, and with `--verbose` those that a bug report needs.

Nothing of it says who the user is: no paths, no names of machines, no values of variables.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata

from zckpt.base.version import __version__

_PACKAGES = ("torch", "numpy", "safetensors", "huggingface_hub", "fsspec", "typer", "transformers", "deepspeed", "peft")
"""Packages with versions that can matter; only their metadata is read."""


def lines(verbose: bool) -> list[str]:
    """Makes the lines to print."""
    if not verbose:
        return [f"zckpt {__version__}"]
    table = {
        "zckpt": f"{__version__}, {_engine()}",
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}{_libc()}",
        "processors": f"{_processors()}, {sys.byteorder}-endian",
        **{name: _installed_version(name) for name in _PACKAGES},
    }
    width = max(map(len, table)) + 2
    return [f"{name:<{width}}{value}" for name, value in table.items()]


def _engine() -> str:
    try:
        from zckpt import _core  # noqa: F401
    except ImportError:
        return "without the C++ engine"
    return "with the C++ engine"


def _libc() -> str:
    name, version = platform.libc_ver()
    return f", {name} {version}" if name else ""


def _processors() -> int:
    """The number of processors that this process may use, where the system records it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _installed_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
