"""Files of FairScale's FullyShardedDataParallel, as it and its users write them."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt import layouts
from zckpt.base.errors import IncompleteError, InconsistentError, UnsupportedError, ZckptError
from zckpt.jobs.groups import Reading
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog, read_tensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "fairscale"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/how.json"))


@pytest.mark.parametrize("name", NAMES)
def test_weights_roles_and_states(name: str) -> None:
    how = json.loads((FIXTURES / name / "how.json").read_text())
    opened = open_catalog(str(FIXTURES / name / "checkpoint"))
    catalog, truth = opened.catalog, load_file(FIXTURES / name / "truth.safetensors")
    assert catalog.tensors.keys() == truth.keys()
    assert [n for n in truth if not same_bits(read_tensor(catalog[n], "pt"), truth[n])] == []
    assert catalog.aliases == how["aliases"] == {"head.table": "embed.weight", "layers.1.b.weight": "layers.1.a.weight"}
    assert {n: e.role for n, e in catalog.tensors.items()} == {n: how["roles"][n] for n in catalog.tensors}
    assert catalog.source.layout == "fairscale" and catalog.topology.dp == how["world_size"]
    training = layouts.read_training(opened.place.listing)
    states = load_file(FIXTURES / name / "optimizer.safetensors")
    found = {f"{state}/{n}": e for n, own in training.states.items() for state, e in own.items()}
    assert found.keys() == states.keys()
    assert [key for key in states if not same_bits(read_tensor(found[key], "pt"), states[key])] == []
    assert [sorted(group.names) for group in training.groups] == [sorted(group) for group in how["groups"]]


@pytest.mark.parametrize("name", ["experts_w2", "metaseq_w4"])
def test_a_resharded_run_has_weights_and_states(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name / "checkpoint"
    zckpt.to_dcp(source, tmp_path / "dcp", optimizer="optim")
    here, there = (open_catalog(str(path)) for path in (source, tmp_path / "dcp"))
    for tensor, entry in here.catalog.tensors.items():
        assert same_bits(read_tensor(entry, "pt"), read_tensor(there.catalog[tensor], "pt"))
    ours, theirs = (layouts.read_training(opened.place.listing).states for opened in (here, there))
    for parameter, states in ours.items():
        for state, entry in states.items():
            assert same_bits(read_tensor(entry, "pt"), read_tensor(theirs[parameter][state], "pt"))
    zckpt.reshard(source, tmp_path / "zero", world_size=2)
    assert zckpt.verify(source, tmp_path / "zero").ok


def test_the_framework_s_own_consolidation_agrees() -> None:
    """What `consolidate_shard_weights` would take: each rank's part without its padding, end to end."""
    home = FIXTURES / "metaseq_w4" / "checkpoint"
    roots = [torch.load(home / f"checkpoint_2-shard{rank}.pt", weights_only=False) for rank in range(4)]
    with zckpt.open_checkpoint(home) as found:
        for number, module in enumerate(roots[0]["shard_metadata"]["param_metadata"]):
            (own,) = module["params"].values()
            start = f"{module['fsdp_path']}." if module["fsdp_path"] else ""
            parts = []
            for root in roots:
                (said,) = root["shard_metadata"]["param_metadata"][number]["params"].values()
                part = root["model"][f"{start}flat_param_0"]
                parts.append(part[: len(part) - said["padding"]])
            for name, tensor, shape in zip(
                own["names"], torch.cat(parts).split(own["numels"]), own["shapes"], strict=True
            ):
                assert same_bits(found[f"{start}{name}"], tensor.view(shape))


def test_several_saves_in_a_directory(tmp_path: Path) -> None:
    home = copy_of("fairseq_w3", tmp_path)
    found = inspect_checkpoint(str(home))
    assert found.place.tags == ("checkpoint_1_1", "checkpoint_last") and found.place.listing.tag == "checkpoint_last"
    assert any("2 saves" in note for note in found.notes)
    one = open_catalog(str(home), Reading(tag="checkpoint_1_1")).catalog
    assert one.source.global_steps == 1
    file = open_catalog(str(home / "checkpoint_1_1-shard2.pt")).catalog
    assert all(same_bits(read_tensor(one[n], "pt"), read_tensor(file[n], "pt")) for n in one)
    last = open_catalog(str(home)).catalog
    assert not same_bits(read_tensor(one["embed.weight"], "pt"), read_tensor(last["embed.weight"], "pt"))
    for rank in range(3):
        (home / f"checkpoint_last-shard{rank}.pt").rename(home / f"checkpoint_best-shard{rank}.pt")
    with pytest.raises(IncompleteError, match="several saves"):
        open_catalog(str(home))


def test_averaged_weights_are_not_left_out_in_silence(tmp_path: Path) -> None:
    home = copy_of("fairseq_w3", tmp_path)
    for rank in range(3):
        changed(
            home / f"checkpoint_last-shard{rank}.pt",
            lambda root: root["extra_state"].update(ema={"a": torch.zeros(2)}),
        )
    assert any("averaged weights" in note for note in open_catalog(str(home)).catalog.source.notes)
    assert not any(
        "averaged" in n for n in open_catalog(str(FIXTURES / "fairseq_w3" / "checkpoint")).catalog.source.notes
    )


def test_outputs_are_verified_and_compared(tmp_path: Path) -> None:
    source = FIXTURES / "fairseq_w3" / "checkpoint"
    zckpt.convert(source, tmp_path / "out")
    assert zckpt.verify(source, tmp_path / "out", deep=True).ok
    assert zckpt.diff(source, tmp_path / "out").same
    truth = load_file(FIXTURES / "fairseq_w3" / "truth.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same_bits(tensor, truth[name]) for name, tensor in found.items())


# -- what is wrong ---------------------------------------------------------------------------------------------------


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / name))


@pytest.mark.parametrize(
    ("rank", "name"), [(0, "metaseq_w4"), (2, "metaseq_w4"), (3, "metaseq_w4"), (1, "unflattened_w2")]
)
def test_a_missing_rank_is_named(rank: int, name: str, tmp_path: Path) -> None:
    """The last one too: the sizes of the parts tell how many there were."""
    home = copy_of(name, tmp_path)
    next(home.glob(f"*shard{rank}.pt")).unlink()
    with pytest.raises(IncompleteError, match=rf"\(rank {rank}\)"):
        open_catalog(str(home))
    found = inspect_checkpoint(str(home))
    assert not found.exportable.ok and found.grid[0][rank]["shard"].state == "missing"
    assert not zckpt.verify(home).ok


def test_a_file_of_another_save(tmp_path: Path) -> None:
    home = copy_of("metaseq_w4", tmp_path)
    for name, size in (
        ("experts_w2/checkpoint/checkpoint_2-shard1.pt", 1),
        ("fairseq_w3/checkpoint/checkpoint_last-shard0.pt", 4),
    ):
        other = home / f"checkpoint_2-shard{size}.pt"
        before = other.read_bytes() if other.exists() else None
        shutil.copy(FIXTURES / name, other)
        with pytest.raises(InconsistentError):
            open_catalog(str(home))
        other.unlink() if before is None else other.write_bytes(before)
    shutil.copy(home / "checkpoint_2-shard0.pt", home / "checkpoint_2-shard4.pt")
    with pytest.raises(InconsistentError, match="more files"):
        open_catalog(str(home))


def changed(path: Path, change: Callable[[Any], object]) -> None:
    root = torch.load(path, weights_only=False)
    change(root)
    torch.save(root, path)


@pytest.mark.parametrize(
    "change",
    [
        lambda own: own.update(padding=7), lambda own: own.update(padding=-1), lambda own: own.update(padding="1"),
        lambda own: own["names"].pop(), lambda own: own.update(names=["embed.weight"] * 3),
        lambda own: own.update(shapes=[torch.Size([7, 5]), torch.Size([5]), torch.Size([6])]),
        lambda own: own.update(shapes=[(7, -5), (5,), (5,)]), lambda own: own.update(shapes=None), lambda own: own.clear(),
    ],
)  # fmt: skip
def test_metadata_that_contradict_the_parts(change: Callable[[Any], object], tmp_path: Path) -> None:
    home = copy_of("fairseq_w3", tmp_path)
    changed(
        home / "checkpoint_last-shard1.pt",
        lambda root: change(root["fsdp_metadata"]["param_metadata"][0]["params"]["flat_param_0"]),
    )
    with pytest.raises(ZckptError):
        open_catalog(str(home))


def test_modules_that_each_rank_has_of_its_own(tmp_path: Path) -> None:
    """Without a number of an expert in the names, nothing says what they are."""
    home = copy_of("experts_w2", tmp_path)

    def rename(root: Any) -> None:
        for module in root["shard_metadata"]["param_metadata"]:
            module["fsdp_path"] = module["fsdp_path"].replace("experts", "own")
        for key in [key for key in root["model"] if ".experts." in key]:
            root["model"][key.replace("experts", "own")] = root["model"].pop(key)

    for rank in range(2):
        changed(home / f"checkpoint_2-shard{rank}.pt", rename)
    with pytest.raises(UnsupportedError, match="of its own"):
        open_catalog(str(home))
    catalog = open_catalog(str(home), Reading(allow_unknown_layout=True)).catalog
    truth = load_file(FIXTURES / "experts_w2" / "truth.safetensors")
    assert same_bits(read_tensor(catalog["layers.4.own.1.weight"], "pt"), truth["layers.4.experts.1.weight"])


def test_numbers_that_fit_in_no_way(tmp_path: Path) -> None:
    home = copy_of("metaseq_w4", tmp_path)

    def swap(root: Any) -> None:
        states = root["last_optimizer_state"]["state"]
        states[0], states[1] = states[1], states[0]

    for rank in range(4):
        changed(home / f"checkpoint_2-shard{rank}.pt", swap)
    opened = open_catalog(str(home))
    assert any("not read" in note for note in opened.catalog.source.notes)
    with pytest.raises(UnsupportedError, match="no way"):
        layouts.read_training(opened.place.listing)
    assert "that zckpt does not read" in inspect_checkpoint(str(home)).resumable.reason


def test_copies_of_buffers_that_differ_are_found(tmp_path: Path) -> None:
    home = copy_of("fairseq_w3", tmp_path)
    assert zckpt.verify(home, deep=True).ok
    changed(home / "checkpoint_last-shard1.pt", lambda root: root["model"]["mean"].mul_(2))
    found = zckpt.verify(home, deep=True)
    assert any("mean" in problem for check in found.checks for problem in check.problems)


def test_one_rank_alone_is_no_model(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "fairseq_w3/checkpoint/checkpoint_last-shard0.pt", tmp_path / "weights.pt")
    with pytest.raises(IncompleteError, match="one rank's part of a model"):
        open_catalog(str(tmp_path / "weights.pt"))


def test_nothing_of_a_pickle_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    home = copy_of("alone_w1", tmp_path)
    torch.save(
        {"model": Evil(), "fsdp_metadata": {"param_metadata": []}},
        home / "checkpoint_last-shard0.pt",
        pickle_module=pickle,
    )
    with pytest.raises(ZckptError):
        open_catalog(str(home))
