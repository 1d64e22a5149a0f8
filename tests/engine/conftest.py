"""Tests of the engine write to the disk: it writes there past the page cache, and asks what a file system can."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from temporary import on_disk


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    path = on_disk()
    yield path
    shutil.rmtree(path, ignore_errors=True)
