"""Saves of torch_checkpointing as the package writes them: what they hold, what is wrong with them."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file, save_file

import zckpt
from zckpt import layouts
from zckpt.base.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    UnsafeError,
    UnsupportedError,
    ZckptError,
)
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog, read_tensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "torch_checkpointing"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/how.json"))


def assert_truth(checkpoint: Path, name: str) -> None:
    truth = load_file(FIXTURES / name / "truth.safetensors")
    found = {n: read_tensor(e, "pt") for n, e in open_catalog(str(checkpoint)).catalog.tensors.items()}
    assert found.keys() == truth.keys()
    assert all(same_bits(found[n], truth[n]) for n in truth)


@pytest.mark.parametrize("name", NAMES)
def test_weights_roles_and_states(name: str) -> None:
    assert_truth(FIXTURES / name / "checkpoint", name)
    how = json.loads((FIXTURES / name / "how.json").read_text())
    opened = open_catalog(str(FIXTURES / name / "checkpoint"))
    assert {n: e.role for n, e in opened.catalog.tensors.items()} == how["roles"]
    assert opened.catalog.source.layout == "torch_checkpointing" and opened.catalog.source.global_steps == 2
    states = layouts.read_training(opened.place.listing).states
    truth = load_file(FIXTURES / name / "optimizer.safetensors")
    found = {f"{state}/{n}": entry for n, own in states.items() for state, entry in own.items()}
    assert found.keys() == truth.keys()
    assert all(same_bits(read_tensor(found[key], "pt"), truth[key]) for key in truth)


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / "save"))


def rewritten(save: Path, change: Any) -> Path:
    """The save with other metadata."""
    said = pickle.loads((save / "metadata.pkl").read_bytes())
    (save / "metadata.pkl").write_bytes(pickle.dumps(change(said) or said))
    return save


def test_every_file_is_verified_and_inspected(tmp_path: Path) -> None:
    save = copy_of("safetensors_w4", tmp_path)
    assert zckpt.verify(save, deep=True).ok
    found = inspect_checkpoint(str(save))
    assert found.grid[0].keys() == {0, 1, 2, 3}
    path = save / "optimizer_2.pt"
    data = bytearray(path.read_bytes())
    data[data.index(b"data/0") + 70] ^= 1
    path.write_bytes(data)
    assert not zckpt.verify(save, deep=True).ok


def test_the_older_form_of_the_metadata(tmp_path: Path) -> None:
    def old(said: dict[str, Any]) -> dict[str, Any]:
        items = said["metadata"]
        paths = {
            json.dumps([item, *json.loads(path)]): groups
            for item, own in items.items()
            for path, groups in own["nested_path_to_metadata"].items()
        }
        layouts_of = {
            str(rank): {item: own["rank_to_layout_info"].get(rank) for item, own in items.items()} for rank in range(4)
        }
        return {"version": "1.0", "world_size": 4, "metadata": paths, "rank_to_layout_info_mappings": layouts_of}

    assert_truth(rewritten(copy_of("safetensors_w4", tmp_path), old), "safetensors_w4")


def test_pieces_by_their_offsets(tmp_path: Path) -> None:
    """What the package writes of tensors of other classes, which say where their pieces are."""
    save, truth = copy_of("safetensors_w4", tmp_path), load_file(FIXTURES / "safetensors_w4" / "truth.safetensors")
    weight = truth["embed.weight"]
    for rank in range(4):  # each rank two rows in reverse, before a row that is of nothing
        rows = [rank, rank + 4] if rank + 4 < 7 else [rank]
        path = save / f"rank_{rank}" / "model.safetensors"
        own = torch.stack([torch.full((3,), -1.0), *(weight[row] for row in reversed(rows))])
        save_file(load_file(path) | {"embed.weight": own}, path)

    def change(said: dict[str, Any]) -> None:
        groups = []
        for rank in range(4):
            rows = [rank, rank + 4] if rank + 4 < 7 else [rank]
            data = {
                "global_shape": [7, 3], "dtype": "torch.float32", "local_sizes": [[1, 3]] * len(rows),
                "global_offsets": [[row, 0] for row in reversed(rows)],
                "local_offsets": [[1 + number, 0] for number in range(len(rows))],
            }  # fmt: skip
            groups.append({"sharding_metadata": {"type": "default_tensor_v1", "data": data}, "ranks": (rank,)})
        said["metadata"]["model"]["nested_path_to_metadata"]['["embed.weight"]'] = groups

    assert_truth(rewritten(save, change), "safetensors_w4")


@pytest.mark.parametrize("name", NAMES)
def test_missing_files_are_named(name: str, tmp_path: Path) -> None:
    save = copy_of(name, tmp_path)
    victim = next(path for path in (save / "model_1.pt", save / "rank_1" / "model.safetensors") if path.exists())
    victim.unlink()
    with pytest.raises(IncompleteError, match=r"1 of \d model files are missing \(rank 1\)"):
        open_catalog(str(save))


def test_a_file_of_another_save(tmp_path: Path) -> None:
    save = copy_of("torch_files_w2", tmp_path)
    torch.save({"embed.weight": torch.zeros(9, 9)}, save / "model_1.pt")
    with pytest.raises(InconsistentError, match="not what its placement says"):
        open_catalog(str(save))
    shutil.copy(FIXTURES.parent / "ranks/tp_w4/checkpoint/model_world_size_4_rank_1.pt", save / "model_1.pt")
    with pytest.raises(InconsistentError, match="ranks do not agree"):
        open_catalog(str(save))


def _group(said: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = said["metadata"]["model"]["nested_path_to_metadata"]['["body.weight"]'][0]
    return group


def _data(said: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = _group(said)["sharding_metadata"]["data"]
    return data


HOSTILE = {
    "outside": (lambda said: said["metadata"]["model"]["rank_to_layout_info"][1].update(file_path="../x"), UnsafeError),
    "absolute": (
        lambda said: said["metadata"]["model"]["rank_to_layout_info"][1].update(file_path="/etc/x"),
        UnsafeError,
    ),
    "world size": (lambda said: said.update(world_size=1 << 60), CorruptError),
    "a rank that is none": (lambda said: _group(said).update(ranks=(0, 1, 2, 7)), CorruptError),
    "a text instead of ranks": (lambda said: _group(said).update(ranks="0123"), CorruptError),
    "no mesh": (lambda said: _data(said).pop("mesh_spec"), CorruptError),
    "another mesh": (lambda said: _data(said)["mesh_spec"].update(mesh_data=(0, 1, 2, 9)), CorruptError),
    "too few placements": (lambda said: _data(said).update(placements=[{"type": "Shard", "dim": 0}]), CorruptError),
    "a dimension that is none": (lambda said: _data(said)["placements"][0].update(dim=9), CorruptError),
    "a sum": (lambda said: _data(said)["placements"][0].update(type="Partial"), UnsupportedError),
    "another size": (lambda said: _data(said).update(global_shape=[1 << 40, 3]), InconsistentError),
    "another kind": (lambda said: _group(said)["sharding_metadata"].update(type="x"), UnsupportedError),
    "another form": (
        lambda said: said["metadata"]["model"]["rank_to_layout_info"][1]["serialization_format"].update(type="x"),
        UnsupportedError,
    ),
    "a path that is none": (
        lambda said: said["metadata"]["model"]["nested_path_to_metadata"].update({"[[]]": []}),
        CorruptError,
    ),
    "a list": (lambda said: [said], CorruptError),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_metadata_that_cannot_be(what: str, tmp_path: Path) -> None:
    change, error = HOSTILE[what]

    def changed(said: dict[str, Any]) -> object:
        found = change(said)  # type: ignore[no-untyped-call]
        return found if what == "a list" else None

    with pytest.raises(error):
        open_catalog(str(rewritten(copy_of("safetensors_w4", tmp_path), changed)))


def test_nothing_of_the_metadata_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    save = copy_of("torch_files_w2", tmp_path)
    (save / "metadata.pkl").write_bytes(pickle.dumps({"metadata": Evil(), "world_size": 2}))
    with pytest.raises(ZckptError):
        open_catalog(str(save))


def test_other_files_of_such_names_are_no_save(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model_0.pt")
    assert list(zckpt.open_checkpoint(tmp_path / "model_0.pt")) == ["a"]
    catalog = inspect_checkpoint(str(tmp_path / "model_0.pt")).catalog
    assert catalog is not None and catalog.source.layout == "plain"
    torch.save({"a": torch.ones(2)}, tmp_path / "model_1.pt")
    with pytest.raises(ZckptError, match=r"several models.*'model_0.pt', 'model_1.pt'"):
        open_catalog(str(tmp_path))
