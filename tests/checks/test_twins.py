"""A rank's file that was copied over another one's: the bytes are sound, and the model is not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage import forget_name

import zckpt

FIXTURES = Path(__file__).parents[2] / "fixtures"
OPTIMIZER = "global_step2/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def copy_over(save: str, source: str, target: str, tmp_path: Path) -> zckpt.Verification:
    home = shutil.copytree(FIXTURES / save / "checkpoint", tmp_path / "save")
    shutil.copy(home / source, home / target)
    forget_name(home / target)
    zckpt.convert(home, tmp_path / "out", progress=False)
    return zckpt.verify(home, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("save", "source", "target"),
    [
        ("zero3/bf16_w2", OPTIMIZER.format(1), OPTIMIZER.format(0)),
        ("fairscale/fairseq_w3", "checkpoint_last-shard1.pt", "checkpoint_last-shard0.pt"),
        ("fairscale_parts/whole_experts_w2", "checkpoint_2-rank-0.pt", "checkpoint_2-rank-1.pt"),
        ("autotp/zero0_tp2", "global_step2/mp_rank_00_model_states.pt", "global_step2/mp_rank_01_model_states.pt"),
        ("dcp/boxes_w4", "__0_1.distcp", "__0_0.distcp"),
        ("nvme/bf16_w2", *(f"global_step2/offloaded_tensors/rank0{n}/{of}.tensor.swp" for n, of in ((0, "3_8"), (1, "9_9")))),
        ("torch_checkpointing/safetensors_w4", "rank_1/model.safetensors", "rank_0/model.safetensors"),
    ],
)  # fmt: skip
def test_a_copy_under_another_rank_s_name_is_a_problem(save: str, source: str, target: str, tmp_path: Path) -> None:
    found = copy_over(save, source, target, tmp_path)
    check = next(check for check in found.checks if check.name == "ranks")
    told = check.problems[0]
    assert source.removeprefix("global_step2/") in told and target.removeprefix("global_step2/") in told, told
    assert not found.ok and found.deletable is not None and not found.deletable[0]


def test_moments_of_another_rank_are_found_where_the_weights_are_not_there(tmp_path: Path) -> None:
    home = "global_step2/offloaded_tensors"
    found = copy_over(
        "nvme/bf16_w2", f"{home}/rank00/exp_avg-3_8.tensor.swp", f"{home}/rank01/exp_avg-9_9.tensor.swp", tmp_path
    )
    assert [check.name for check in found.checks if check.problems] == ["ranks"]


def test_parts_that_may_be_alike_are_no_problem(tmp_path: Path) -> None:
    """Tensors of one number, and a run that has not trained yet."""
    even = {"norm.weight": torch.ones(64), "head.weight": torch.zeros(32, 8)}
    halves = [{f"{name}.{at}": tensor.chunk(2)[at] for name, tensor in even.items()} for at in (0, 1)]
    with pytest.warns(UserWarning):
        dcp.save({"model": {**halves[0], **halves[1]}}, checkpoint_id=tmp_path / "even", no_dist=True)
    assert zckpt.verify(tmp_path / "even", progress=False).ok
    home = shutil.copytree(FIXTURES / "fairscale_parts" / "whole_experts_w2" / "checkpoint", tmp_path / "save")
    roots = [torch.load(home / f"checkpoint_2-rank-{rank}.pt", weights_only=False) for rank in (0, 1)]
    for rank, root in enumerate(roots):
        root["model"] = {name: torch.full_like(value, 0.5) for name, value in root["model"].items()}
        torch.save(root, home / f"checkpoint_2-rank-{rank}.pt")
    found = zckpt.verify(home, progress=False)
    assert [check for check in found.checks if check.problems] == []
    assert any("hold the same bytes" in note for note in found.notes)
