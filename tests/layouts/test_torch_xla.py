"""Files of torch_xla's FullyShardedDataParallel, made in the form that its source documents."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import CorruptError, IncompleteError, InconsistentError, UnsafeError
from zckpt.jobs.inspection import inspect_checkpoint

BUILDER = Path(__file__).parents[2] / "fixtures" / "generate_torch_xla.py"
spec = importlib.util.spec_from_file_location("generate_torch_xla", BUILDER)
assert spec is not None and spec.loader is not None
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)
save, truth = made.save, made.truth
EMBED = f"{made.MARK}_fpw_module{made.SEPARATOR}embed{made.SEPARATOR}weight"


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_every_element(world: int, tmp_path: Path) -> None:
    """Parts of uneven sizes, ranks that hold padding alone, a parameter without dimensions."""
    state = truth()
    home = save(tmp_path / "in", state, world)
    zckpt.convert(home, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in state.items())
    verified = zckpt.verify(home, tmp_path / "out")
    assert verified.ok and verified.deletable and verified.deletable[0], verified


def test_names_of_the_trainer(tmp_path: Path) -> None:
    home = save(tmp_path / "in", truth(), 2, "rank{}-of-{}-pytorch_model.bin")
    opened = zckpt.open_checkpoint(home)
    assert opened.metadata()["layout"] == "torch_xla" and same_bits(opened["head.weight"], truth()["head.weight"])
    whole = inspect_checkpoint(home / "rank1-of-2-pytorch_model.bin")  # one file means all
    assert whole.exportable.ok


def change(file: Path, how: Callable[[dict[str, Any]], object]) -> None:
    root = torch.load(file, weights_only=False)
    how(root)
    torch.save(root, file)


def wrong_rank(root: dict[str, Any]) -> None:
    root["shard_metadata"]["rank"] = 0


def other_world(root: dict[str, Any]) -> None:
    root["shard_metadata"]["world_size"] = 3


def shorter(root: dict[str, Any]) -> None:
    name = next(iter(root["model"]))
    root["model"][name] = root["model"][name][:-1].clone()


def other_tensors(root: dict[str, Any]) -> None:
    root["model"]["extra"] = torch.zeros(1)


@pytest.mark.parametrize("how", [wrong_rank, other_world, shorter, other_tensors])
def test_files_that_do_not_fit_each_other(how: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    home = save(tmp_path / "in", truth(), 2)
    file = home / "final_ckpt_rank-00000001-of-00000002.pth"
    change(file, how)
    with pytest.raises(InconsistentError, match=file.name):
        zckpt.convert(home, tmp_path / "out")


@pytest.mark.parametrize(
    "how",
    [
        lambda said: said["shard_info"].pop("_fpw_module.head"),
        lambda said: said.update(flatten_info={}),
        lambda said: next(iter(said["flatten_info"].values()))[2].__setitem__(0, 16),
        lambda said: said["shard_info"][""].update({EMBED: {"_orig_name": "x", "_orig_size": (-1,)}}),
        lambda said: said["shard_info"][""].update({EMBED: {"_orig_name": "x", "_orig_size": 5}}),
        lambda said: said.update(world_size="2"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_read(how: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    home = save(tmp_path / "in", truth(), 2)
    for file in sorted(home.iterdir()):
        change(file, lambda root: how(root["shard_metadata"]))
    with pytest.raises(CorruptError, match="metadata"):
        zckpt.convert(home, tmp_path / "out")


def test_larger_than_its_parts_and_names_twice(tmp_path: Path) -> None:
    home = save(tmp_path / "in", truth(), 2)
    key = EMBED
    for said, text in (
        (("_fpw_module.embed.weight", (70, 3)), "not the whole"),
        (("seen", (7, 3)), "would both be called"),
    ):
        for file in sorted(home.iterdir()):
            named = dict(zip(("_orig_name", "_orig_size"), said, strict=True))
            change(file, lambda root, named=named: root["shard_metadata"]["shard_info"][""].update({key: named}))  # type: ignore[misc]
        with pytest.raises(InconsistentError, match=text):
            zckpt.convert(home, tmp_path / "out")


def test_missing_ranks_and_states(tmp_path: Path) -> None:
    home = save(tmp_path / "in", truth(), 3)
    change(home / "final_ckpt_rank-00000000-of-00000003.pth", lambda root: root.update(optimizer={"state": {}}))
    assert "optimizer" in "".join(inspect_checkpoint(home).lines())
    (home / "final_ckpt_rank-00000002-of-00000003.pth").unlink()
    with pytest.raises(IncompleteError, match="rank 2"):
        zckpt.convert(home, tmp_path / "out")


def test_a_pickle_that_runs_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("true",)

    home = save(tmp_path / "in", truth(), 2)
    change(home / "final_ckpt_rank-00000001-of-00000002.pth", lambda root: root.update(more=Evil()))
    with pytest.raises(UnsafeError):
        zckpt.convert(home, tmp_path / "out")
