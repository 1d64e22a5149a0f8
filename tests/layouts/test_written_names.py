"""Files under the name of another rank: torch wrote the name that each was saved under into it."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt.layouts.save.series import are_other_places

FIXTURES = Path(__file__).parents[2] / "fixtures"
SAVES = {
    "zero3/bf16_w2": "global_step2/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt",
    "zero3/lora_w2": "global_step2/zero_pp_rank_{}_mp_rank_00_model_states.pt",
    "zero2/bf16_w2": "global_step2/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt",
    "autotp/zero0_tp2": "global_step2/mp_rank_0{}_model_states.pt",
    "pipeline/bf16_pp2_dp2": "global_step2/bf16_zero_pp_rank_{}_mp_rank_01_optim_states.pt",
    "fairscale/experts_w2": "checkpoint_2-shard{}.pt",
    "ranks/fsdp2_w2": "global_step_2/actor/model_world_size_2_rank_{}.pt",
}


@pytest.mark.parametrize("save", SAVES)
def test_two_ranks_files_that_changed_places_are_refused(save: str, tmp_path: Path) -> None:
    home = shutil.copytree(FIXTURES / save / "checkpoint", tmp_path / "save")
    zckpt.convert(home, tmp_path / "right.safetensors", progress=False)
    first, second = (home / SAVES[save].format(rank) for rank in (0, 1))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(zckpt.InconsistentError, match="name of another part") as caught:
        zckpt.convert(home, tmp_path / "out.safetensors", progress=False)
    assert first.name in str(caught.value.found) and second.name in str(caught.value.found)
    found = zckpt.verify(home, progress=False)
    assert not found.ok and any(
        "was written as" in problem for problem in [problem for check in found.checks for problem in check.problems]
    )
    taken = zckpt.Options(allow_unknown_layout=True)
    report = zckpt.convert(home, tmp_path / "out.safetensors", options=taken, progress=False)
    assert any("was written as" in note for note in report.notes)


@pytest.mark.parametrize("save", ["zero3/bf16_w2", "zero2/bf16_w2"])
def test_a_rank_file_that_zckpt_writes_bears_its_name(save: str, tmp_path: Path) -> None:
    """As torch names the records of a file that it saves; at stage 3 nothing else would show that two changed places."""
    home = tmp_path / "save"
    zckpt.reshard(FIXTURES / save / "checkpoint", home, world_size=3, progress=False)
    files = sorted(home.glob("global_step2/*_states.pt"))
    assert len(files) == (6 if save.startswith("zero3") else 4)
    for file in files:
        torch.save(torch.load(file, weights_only=False), tmp_path / file.name)
        written, own = (zipfile.ZipFile(path).namelist()[0] for path in (file, tmp_path / file.name))
        assert written == own == f"{file.stem}/data.pkl"
    first, second, _ = sorted(home.glob("global_step2/*_optim_states.pt"))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(zckpt.InconsistentError, match="name of another part"):
        zckpt.convert(home, tmp_path / "out.safetensors", progress=False)


def test_a_model_that_got_another_name_is_itself(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "model_step_10_fold_1.pt")
    renamed = (tmp_path / "model_step_10_fold_1.pt").rename(tmp_path / "model_step_20_fold_2.pt")
    assert zckpt.convert(renamed, tmp_path / "out.safetensors", progress=False).tensors == 1


def test_which_numbers_say_the_place() -> None:
    for name, other, of_parts, differ in (
        ("zero_pp_rank_0_mp_rank_00", "zero_pp_rank_1_mp_rank_00", False, True),
        ("layer_00-model_00-model_states", "layer_03-model_00-model_states", True, True),
        ("layer_00-model_00-model_states", "layer_03-model_00-model_states", False, False),
        ("checkpoint_1-shard0", "checkpoint_2-shard0", True, False),
        ("checkpoint_last-shard0", "checkpoint_2-shard1", True, False),
        ("rank_0", "archive", True, False),
    ):
        assert are_other_places(name, other, of_parts=of_parts) is differ, (name, other)
