"""GGUF as a layout: which files are one model, and what is refused. The gguf package's own writer splits them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

import zckpt
from zckpt.base.errors import IncompleteError, InconsistentError, NotACheckpointError
from zckpt.layouts import gguf, places
from zckpt.layouts.gguf.second import find_again
from zckpt.storage.location import locate

MODEL = {f"blk.{n}.attn_q.weight": np.arange(64, dtype=np.float32).reshape(2, 32) + n for n in range(5)}


def write(path: Path, split: int = 0) -> list[Path]:
    """A model, in parts of so many tensors; all files that it is in."""
    writer = GGUFWriter(path, "llama", split_max_tensors=split)
    for name, tensor in MODEL.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))


def bits(path: Path) -> dict[str, bytes]:
    with zckpt.open_checkpoint(path, framework="np") as checkpoint:
        return {name: checkpoint[name].tobytes() for name in checkpoint}


@pytest.mark.parametrize("split", [0, 1, 2, 4])
def test_one_part_stands_for_all(tmp_path: Path, split: int) -> None:
    files = write(tmp_path / "model.gguf", split)
    assert len(files) == (1 if not split else -(-len(MODEL) // split))
    for given in (tmp_path, files[0], files[-1]):
        assert bits(given) == {name: tensor.tobytes() for name, tensor in MODEL.items()}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_part_is_named(tmp_path: Path, lost: int) -> None:
    files = write(tmp_path / "model.gguf", 2)
    files[lost].unlink()
    with pytest.raises(IncompleteError, match=f"no part {lost + 1}"):
        zckpt.open_checkpoint(files[1 if lost == 0 else 0])


def test_a_part_under_anothers_name_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path / "model.gguf", 2)
    shutil.copy(files[2], files[1])
    with pytest.raises(InconsistentError, match=r"split.no 2"):
        zckpt.open_checkpoint(tmp_path)


def test_several_models_are_told_apart(tmp_path: Path) -> None:
    (one,), parts = write(tmp_path / "one.gguf"), write(tmp_path / "two.gguf", 3)
    assert bits(one) == bits(parts[0])
    with pytest.raises((InconsistentError, IncompleteError), match="several"):
        zckpt.open_checkpoint(tmp_path)


def test_a_name_is_not_enough(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUX" + bytes(60))
    with pytest.raises(NotACheckpointError):
        zckpt.open_checkpoint(tmp_path / "x.gguf")


def test_a_second_reader_finds_the_same(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", 2)
    listing = places.find(locate(tmp_path)).listing
    look, catalog = find_again(listing), gguf.FAMILY.read(listing)
    assert look.names == {name: entry.shape for name, entry in catalog.tensors.items()}
    found = {run.tensor: (run.run.path, run.run.offset) for run in look.runs}
    assert found == {n: (e.fragments[0].store.path, e.fragments[0].byte_offset) for n, e in catalog.tensors.items()}  # type: ignore[union-attr]
