"""Of every fixture, each single file and directory given as the checkpoint, and the rest without each single file.

What comes out is all of the model, or an error, or what is said not to be known to be the model.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import proofs
import pytest

from zckpt.base.errors import ZckptError
from zckpt.core.catalog import Catalog
from zckpt.jobs.open import open_catalog

FIXTURES = Path(__file__).parents[2] / "fixtures"
SAVES = sorted(path for path in FIXTURES.glob("*/*/checkpoint") if path.is_dir())
TURN = SAVES if proofs.IS_WHOLE else SAVES[::6]


def shapes_in(path: Path) -> tuple[dict[str, tuple[int, ...]], Catalog] | None:
    try:
        catalog = open_catalog(path).catalog
    except ZckptError:
        return None
    return {name: entry.shape for name, entry in catalog.items()}, catalog


def assert_honest(path: Path, whole: dict[str, tuple[int, ...]], what: str) -> None:
    found = shapes_in(path)
    if found is not None and any(found[0].get(name) != shape for name, shape in whole.items()):
        assert found[1].evidence.complete is not True, what
        assert not found[1].evidence.is_counted, what


@pytest.mark.proof
@pytest.mark.parametrize("save", TURN, ids=lambda save: str(save.parent.relative_to(FIXTURES)))
def test_each_file_given_and_each_file_lost(save: Path, tmp_path: Path) -> None:
    found = shapes_in(save)
    if found is None:
        pytest.skip("only the model knows its shapes, or only the user its rules")
    whole = found[0]
    for path in sorted(save.rglob("*")):
        assert_honest(path, whole, f"{path} alone")
    left = Path(shutil.copytree(save, tmp_path / "run" / "checkpoint", symlinks=True))
    for file in [path for path in sorted(left.rglob("*")) if path.is_file() and not path.is_symlink()]:
        file.rename(tmp_path / "lost")
        assert_honest(left, whole, f"without {file}")
        (tmp_path / "lost").rename(file)


def test_a_pipeline_without_zero_cannot_count_its_layers(tmp_path: Path) -> None:
    save = FIXTURES / "pipeline" / "zero0_pp2" / "checkpoint"
    for lost in ("layer_00", "layer_03"):
        left = Path(shutil.copytree(save, tmp_path / lost))
        next(left.glob(f"*/{lost}*")).unlink()
        opened = open_catalog(left)
        assert opened.catalog.evidence.complete is None and "no layer file has" in opened.catalog.evidence.by
