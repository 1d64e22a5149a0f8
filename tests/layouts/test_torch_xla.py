"""Files of torch_xla's FullyShardedDataParallel, made in the form that its source documents."""

from __future__ import annotations

import math
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

SHAPES = {
    "embed.weight": (7, 3), "blocks.0.up.weight": (5, 3), "blocks.0.up.bias": (5,), "blocks.0.scale": (), "head.weight": (2, 3),
}  # fmt: skip
"""`blocks.0` is flattened, the others are alone."""

MARK = "_fsdp_shard_FSDP_SHARD_SEPARATOR_"


def truth() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} | {"seen": torch.tensor(4)}


def save(
    home: Path, state: dict[str, torch.Tensor], world: int, name: str = "final_ckpt_rank-{:08d}-of-{:08d}.pth"
) -> Path:
    """What every rank writes; a flat parameter is one vector, and each part has as many elements as the first."""
    home.mkdir()
    flat = [name for name in SHAPES if name.startswith("blocks.0.")]
    vectors = {
        ("", "_fpw_module.embed.weight"): (state["embed.weight"].flatten(), SHAPES["embed.weight"]),
        ("_fpw_module.blocks.0", "_fsdp_wrapped_module.flat_param_0"): (
            torch.cat([state[n].flatten() for n in flat]), (sum(math.prod(SHAPES[n]) for n in flat),),
        ),
        ("_fpw_module.head", "_fpw_module.weight"): (state["head.weight"].flatten(), SHAPES["head.weight"]),
    }  # fmt: skip
    info: dict[str, dict[str, Any]] = {}
    for (prefix, own), (_, shape) in vectors.items():
        info.setdefault(prefix, {})[MARK + own.replace(".", "_")] = {"_orig_name": own, "_orig_size": shape}
    inside = [name.removeprefix("blocks.0.") for name in flat]
    flattened = (inside, [SHAPES[name] for name in flat], [math.prod(SHAPES[name]) for name in flat])
    for rank in range(world):
        model: dict[str, torch.Tensor] = {}
        for (prefix, own), (vector, _) in vectors.items():
            size = -(-vector.numel() // world)
            padded = torch.cat([vector, torch.zeros(size * world - vector.numel())])
            key = ".".join(filter(None, (prefix, MARK + own.replace(".", "_"))))
            model[key] = padded[rank * size : (rank + 1) * size].clone()
        model["_fpw_module.seen"] = state["seen"]
        metadata = {
            "shard_info": info,
            "flatten_info": {"_fpw_module.blocks.0._fsdp_wrapped_module.flat_param_0": flattened},
            "buffer_info": {},
            "world_size": world,
            "rank": rank,
        }
        torch.save({"model": model, "shard_metadata": metadata}, home / name.format(rank, world))
    return home


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
        lambda said: said["shard_info"][""].update({MARK + "_fpw_module_embed_weight": {"_orig_name": "x", "_orig_size": (-1,)}}),
        lambda said: said["shard_info"][""].update({MARK + "_fpw_module_embed_weight": {"_orig_name": "x", "_orig_size": 5}}),
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
    key = MARK + "_fpw_module_embed_weight"
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
