"""FairScale's saves that are cut once more: metaseq's parts of a model, fairseq's files of experts, by their own code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bits import same_bits
from damage import forget_name
from safetensors.torch import load_file

import zckpt
from zckpt import layouts
from zckpt.base.errors import IncompleteError, UnsupportedError, ZckptError
from zckpt.jobs.groups import Reading
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog, read_tensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "fairscale_parts"


@pytest.mark.parametrize("name", ["metaseq_w4", "experts_w2"])
def test_weights_and_states(name: str, tmp_path: Path) -> None:
    home = FIXTURES / name
    how, truth = json.loads((home / "how.json").read_text()), load_file(home / "truth.safetensors")
    opened = open_catalog(str(home / "checkpoint"))
    catalog = opened.catalog
    assert catalog.tensors.keys() == truth.keys()
    assert [n for n in truth if not same_bits(read_tensor(catalog[n], "pt"), truth[n])] == []
    assert catalog.aliases == how["aliases"]
    assert catalog.topology.dp * catalog.topology.tp == how["world_size"]
    training = layouts.read_training(opened.place.listing)
    states = load_file(home / "optimizer.safetensors")
    found = {f"{state}/{n}": e for n, own in training.states.items() for state, e in own.items()}
    assert found.keys() == states.keys()
    assert [key for key in states if not same_bits(read_tensor(found[key], "pt"), states[key])] == []
    assert inspect_checkpoint(home / "checkpoint").resumable.ok
    zckpt.reshard(home / "checkpoint", tmp_path / "zero", world_size=2)
    assert zckpt.verify(home / "checkpoint", tmp_path / "zero", deep=True).ok


def test_files_that_are_not_sharded(tmp_path: Path) -> None:
    home = FIXTURES / "whole_experts_w2"
    truth = load_file(home / "truth.safetensors")
    with zckpt.open_checkpoint(home / "checkpoint") as found:
        assert set(found) == truth.keys()
        assert [n for n in truth if not same_bits(found[n], truth[n])] == []
        with pytest.raises(UnsupportedError, match="cannot be named"):
            _ = found.states
    assert "does not read" in inspect_checkpoint(home / "checkpoint").resumable.reason

    # as metaseq's reshard_fsdp leaves each part with one shard, unflattened
    save = FIXTURES / "metaseq_w4" / "checkpoint"
    for part in range(2):
        roots = [
            torch.load(save / f"checkpoint_last-model_part-{part}-shard{n}.pt", weights_only=False) for n in (0, 1)
        ]
        model = {}
        for number, module in enumerate(roots[0]["shard_metadata"]["param_metadata"]):
            start = f"{module['fsdp_path']}." if module["fsdp_path"] else ""
            said = [root["shard_metadata"]["param_metadata"][number]["params"]["flat_param_0"] for root in roots]
            parts = [root["model"][f"{start}flat_param_0"] for root in roots]
            flat = torch.cat([part[: len(part) - own["padding"]] for part, own in zip(parts, said, strict=True)])
            for name, tensor, shape in zip(
                said[0]["names"], flat.split(said[0]["numels"]), said[0]["shapes"], strict=True
            ):
                model[f"{start}{name}"] = tensor.view(shape).clone()
        torch.save({"model": model, "cfg": {}, "shard_metadata": None}, tmp_path / f"reshard-model_part-{part}.pt")
    truth = load_file(FIXTURES / "metaseq_w4" / "truth.safetensors")
    with zckpt.open_checkpoint(tmp_path) as found:
        assert set(found) == truth.keys()
        assert [n for n in truth if not same_bits(found[n], truth[n])] == []


@pytest.mark.parametrize(
    ("name", "lost", "said"),
    [
        ("metaseq_w4", "checkpoint_last-model_part-0-shard*.pt", "parts of the model are missing"),
        ("metaseq_w4", "checkpoint_last-model_part-1-shard*.pt", "parts of the model are missing"),
        ("metaseq_w4", "checkpoint_last-model_part-1-shard1.pt", "shard.* missing"),
        ("metaseq_w4", "checkpoint_last-model_part-0-shard0.pt", "model_part-0 shard"),
        ("experts_w2", "checkpoint_2-rank-0-shard0.pt", "experts files are missing"),
        ("experts_w2", "checkpoint_2-shared-shard1.pt", "shared files are missing"),
        ("whole_experts_w2", "checkpoint_2-rank-0.pt", "experts files are missing"),
    ],
)
def test_what_is_missing_is_named(name: str, lost: str, said: str, tmp_path: Path) -> None:
    save = shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / "save")
    for file in save.glob(lost):
        file.unlink()
    with pytest.raises(IncompleteError, match=said):
        open_catalog(str(save))
    assert not inspect_checkpoint(save).exportable.ok


def test_a_gate_knows_how_many_experts_there_are(tmp_path: Path) -> None:
    save = shutil.copytree(FIXTURES / "whole_experts_w2" / "checkpoint", tmp_path / "save")
    shared = torch.load(save / "checkpoint_2-shared.pt", weights_only=False)
    shared["model"]["layers.4.gate.wg.weight"] = torch.ones(4, 5)
    torch.save(shared, save / "checkpoint_2-shared.pt")
    assert len(open_catalog(str(save)).catalog.tensors) == 26
    (save / "checkpoint_2-rank-1.pt").unlink()
    with pytest.raises(IncompleteError, match="experts are missing") as caught:
        open_catalog(str(save))
    assert caught.value.found == "2 experts layers.4.experts.*"


def test_slices_that_no_rule_joins(tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"rules": [{"match": "decoder.embed_tokens.*", "join": 0}]}))
    options = Reading(read_options=zckpt.ReadOptions(tp_rules=str(rules)))
    with pytest.raises(UnsupportedError, match="no rule says how to join"):
        open_catalog(str(FIXTURES / "metaseq_w4" / "checkpoint"), options)


def test_damage_is_an_error(tmp_path: Path) -> None:
    for name in ("metaseq_w4", "experts_w2", "whole_experts_w2"):
        save = shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / name)
        for file in sorted(save.iterdir()):
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) // 2])
            with pytest.raises(ZckptError):
                zckpt.convert(save, tmp_path / "out")
            root = torch.load(FIXTURES / name / "checkpoint" / file.name, weights_only=False)
            for model in ({}, None, {"decoder.odd.weight": torch.ones(2)})[: 2 if "whole" in name else 3]:
                torch.save(root | {"model": model}, file)
                with pytest.raises(ZckptError):
                    zckpt.convert(save, tmp_path / "out")
            file.write_bytes(whole)


def test_files_of_two_ranks_that_hold_the_same_bytes_are_named(tmp_path: Path) -> None:
    """FairScale's files do not say their rank, so a copy contradicts nothing but the name that torch wrote, if it did."""
    home = tmp_path / "save"
    shutil.copytree(FIXTURES / "metaseq_w4" / "checkpoint", home)
    names = [f"checkpoint_last-model_part-{part}-shard0.pt" for part in (0, 1)]
    assert zckpt.verify(home, progress=False).notes == ()
    shutil.copy(home / names[0], home / names[1])
    forget_name(home / names[1])
    found = zckpt.verify(home, progress=False)
    told = " ".join(problem for check in found.checks for problem in check.problems)
    assert not found.ok and all(name in told for name in names) and "same bytes" in told
