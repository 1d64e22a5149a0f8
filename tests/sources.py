"""The package's own modules, parsed once for all tests that look at what is written in them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest
from ending import share_imports

import zckpt

ROOT = Path(zckpt.__file__).parent
TOGETHER = pytest.mark.xdist_group("sources")
"""Of the files of tests that look at all modules: one process parses them."""


@functools.cache
def parsed() -> dict[Path, tuple[Any, ...]]:
    """File -> all nodes of its tree, the module first, then as `ast.walk` gives them."""
    found = {path: tuple(ast.walk(ast.parse(path.read_text()))) for path in sorted(ROOT.rglob("*.py"))}
    share_imports()
    return found
