"""Saves of DeepSpeed that lack all files of a kind, with odd pointers, with states that are cut: what is said and still given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import IncompleteError, NotACheckpointError
from zckpt.checks.verify import verify
from zckpt.upkeep.keep_rules import KeepRules
from zckpt.upkeep.prune import prune

FIXTURES = Path(__file__).parents[2] / "fixtures"


def copy_of(name: str, to: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name / "checkpoint", to))


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b" \t\r\n\n"])
@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_pointer_of_any_editor(coding: str, end: bytes, tmp_path: Path) -> None:
    run = copy_of("zero3/bf16_w2", tmp_path / "run")
    tag = (run / "latest").read_text()
    (run / "latest").write_bytes((tag + end.decode()).encode(coding))
    assert zckpt.inspect_checkpoint(run).place.listing.tag == tag
    (run / "latest").write_bytes(b"\xff\x00\xd8 not a text")
    with pytest.raises(NotACheckpointError, match="--tag"):
        zckpt.inspect_checkpoint(run)


@pytest.mark.parametrize(
    "name", ["zero3/bf16_w2", "zero3/groups_w3", "zero2/bf16_w2", "zero1/bf16_w3", "autotp/zero3_tp2_dp2"]
)
def test_lost_model_files_are_named(name: str, tmp_path: Path) -> None:
    run = copy_of(name, tmp_path / "run")
    for file in run.glob("*/*model_states.pt"):
        file.unlink()
    wanted = "zero_pp_rank_0_mp_rank_00_model_states" if name.startswith("zero3") else "mp_rank_00"
    with pytest.raises(IncompleteError, match=wanted) as error:
        zckpt.convert(run, tmp_path / "o.safetensors")
    assert "allow-unknown" not in str(error.value)
    assert "allow-unknown" not in zckpt.inspect_checkpoint(run).exportable.reason


@pytest.mark.parametrize(
    "name", ["zero2/bf16_w2", "zero1/frozen_w2", "zero2/tied_frozen_w2", "tensor/zero2_tp2_dp2", "autotp/zero1_tp2_dp2"]
)
def test_model_files_alone_give_half_precision_weights(name: str, tmp_path: Path) -> None:
    """In place, and in a directory of their own; it is said that the fp32 weights are gone, and verify and prune know it."""
    run = copy_of(name, tmp_path / "run" / "checkpoint-1")
    zckpt.convert(run, tmp_path / "whole.safetensors", dtype="bf16")
    tag = run / (run / "latest").read_text()
    newer = Path(shutil.copytree(run, tmp_path / "run" / "checkpoint-2"))
    for file in newer.glob("*/*optim_states.pt"):
        file.unlink()
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in tag.glob("mp_rank_*_model_states.pt"):
        shutil.copy(file, alone)
    places = [newer, alone, *([alone / "mp_rank_00_model_states.pt"] if len(list(alone.iterdir())) == 1 else [])]
    truth = load_file(tmp_path / "whole.safetensors")
    for number, place in enumerate(places):
        report = zckpt.convert(place, tmp_path / f"{number}.safetensors", dtype="bf16")
        assert any("no optimizer file" in note and "fp32 master weights" in note for note in report.notes)
        found = load_file(tmp_path / f"{number}.safetensors")
        assert found.keys() == truth.keys() and all(same_bits(found[n], truth[n]) for n in truth)
        facts = zckpt.inspect_checkpoint(place)
        assert facts.exportable.ok and not facts.resumable.ok and "optimizer file" in facts.resumable.reason
        assert not verify(place).ok
    assert not prune(tmp_path / "run", KeepRules(last=1)).going


def test_some_optimizer_files_are_missing(tmp_path: Path) -> None:
    """An error still, that says how to come by the weights in half precision."""
    run = copy_of("zero2/bf16_w2", tmp_path / "run")
    next(run.glob("*/*rank_1*optim_states.pt")).unlink()
    with pytest.raises(IncompleteError, match=r"put mp_rank_00_model_states\.pt into a directory of its own"):
        zckpt.convert(run, tmp_path / "o.safetensors")


def test_placeholders_are_no_weights(tmp_path: Path) -> None:
    run = copy_of("zero3/bf16_w2", tmp_path / "run")
    for file in run.glob("*/*optim_states.pt"):
        file.unlink()
    with pytest.raises(IncompleteError, match="optimizer files are missing"):
        zckpt.convert(run, tmp_path / "o.safetensors")


@pytest.mark.parametrize("name", ["zero2/groups_w3", "zero3/bf16_w2", "zero1/bf16_w3"])
def test_a_moment_that_is_cut_is_a_problem(name: str, tmp_path: Path) -> None:
    """The weights are whole; `verify` and `prune` know that the run cannot resume."""
    older = copy_of(name, tmp_path / "run" / "checkpoint-1")
    newer = copy_of(name, tmp_path / "run" / "checkpoint-2")
    file = next(newer.glob("*/*rank_1_*optim_states.pt"))
    root = torch.load(file, weights_only=False)
    state = root["optimizer_state_dict"]
    inner = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    held = next(iter(inner["state"].values()))
    held["exp_avg"] = held["exp_avg"][: held["exp_avg"].numel() // 20].clone()
    torch.save(root, file)
    verdict = verify(newer)
    assert [check.name for check in verdict.checks if not check.ok] == ["states"]
    zckpt.convert(older, tmp_path / "a.safetensors")
    zckpt.convert(newer, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert not prune(tmp_path / "run", KeepRules(last=1)).going
