"""What the tests of conversions that fail or are killed share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zckpt._core import inject
from zckpt.engine import batches

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def every_file_counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files are on record as soon as they are complete, however small; injected faults end with the test."""
    monkeypatch.setattr(batches, "LEAST_BYTES", 0)
    yield
    inject(False, 0, 0)
    inject(True, 0, 0)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "out"
