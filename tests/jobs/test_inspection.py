"""What `inspect` says of resuming, and of what is not a whole model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from zckpt.base.errors import IncompleteError
from zckpt.jobs.inspection import inspect_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures"
WHOLE = ("model_world_size", "checkpoint-shard")
"""Files that are read together with those of the other ranks beside them."""
PARTS = sorted(path for path in (FIXTURES / "parts").glob("*.pt") if not path.name.startswith(WHOLE))

# ---- in lines


def test_lines_fit_the_terminal_and_say_things_once(tmp_path: Path) -> None:
    broken = Path(shutil.copytree(FIXTURES / "zero2/w12/checkpoint", tmp_path / "broken"))
    (two, three) = (next(broken.glob(f"*/*_rank_{rank}_*optim*")) for rank in (2, 3))
    two.unlink()
    three.write_bytes(three.read_bytes()[:1000])
    inspection = inspect_checkpoint(str(broken))
    lines = list(inspection.lines(width=80))
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines)
    text = " ".join(" ".join(lines).split())
    assert (
        " files rank 0 model, optimizer (" in text and " rank 2 optimizer missing rank 3 optimizer unreadable (" in text
    )
    assert text.count(three.name) == text.count(inspection.exportable.reason) == 1
    assert inspection.resumable.reason == "the checkpoint cannot be read (see export)"


def test_other_world_sizes_are_pointed_to_reshard() -> None:
    verdict = inspect_checkpoint(str(FIXTURES / "zero2/w12/checkpoint")).resumable
    assert str(verdict).startswith("yes: at data-parallel world size 12 (for others, run zckpt reshard")


# ---- universal checkpoints: the same of DeepSpeed's own in tests/interop/test_universal.py


@pytest.mark.parametrize(
    "name", ["zero0/bf16", "zero2/groups_w3", "zero3/w12", "autotp/zero3_tp2_dp2", "pipeline/zero1_pp2_tp2_dp2"]
)
def test_universal_checkpoints_resume_at_any_world_size(name: str, tmp_path: Path) -> None:
    zckpt.to_universal(FIXTURES / name / "checkpoint", tmp_path / "out")
    inspection = inspect_checkpoint(str(tmp_path / "out"))
    assert inspection.resumable.ok and inspection.resumable.reason.startswith("at any world size, with ZeRO stage")
    assert ("stage 3" in inspection.resumable.reason) == ("zero3" in name)
    text = "\n".join(inspection.lines())
    assert "other save" not in text and "extra" not in text and "tensor 1" not in text and "there is no" not in text
    cells = [cell for rows in inspection.grid.values() for row in rows.values() for cell in row.values()]
    assert len(cells) == len(list((tmp_path / "out").glob("*/*model_states.pt"))) > 0
    (tmp_path / "out" / "latest_universal").unlink()
    assert "'latest_universal'" in inspect_checkpoint(str(tmp_path / "out")).resumable.reason


def test_a_damaged_model_file_of_a_universal_checkpoint(tmp_path: Path) -> None:
    zckpt.to_universal(FIXTURES / "zero3/w12/checkpoint", tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*/zero_pp_rank_7_*model_states.pt")
    file.write_bytes(b"")
    assert "files of rank 7 are missing, damaged" in inspect_checkpoint(str(tmp_path / "out")).resumable.reason


# ---- one rank's part of a model


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.name)
@pytest.mark.parametrize("name", ["its own", "another"])
def test_one_ranks_part_is_no_model(path: Path, name: str, tmp_path: Path) -> None:
    if name == "another":  # its contents tell
        path = Path(shutil.copy(path, tmp_path / "weights.pt"))
    elif path.name.startswith("local_rank_"):  # the other rank's lies beside it: together they are the model
        report = zckpt.convert(path, tmp_path / "out.safetensors")
        assert any("one of 2 parts: all are read" in note for note in report.notes)
        return
    with pytest.raises(IncompleteError, match="one rank's part of a model") as error:
        zckpt.convert(path, tmp_path / "out.safetensors")
    assert error.value.file == str(path) and error.value.found and error.value.remedy
    assert not inspect_checkpoint(str(path)).exportable.ok
    assert not zckpt.verify(path).ok
    assert not (tmp_path / "out.safetensors").exists()


def test_there_are_parts() -> None:
    assert {path.name.rstrip("01.pt") for path in PARTS} == {
        "local_rank_", "parameters_", "sharded_",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["pytorch_model_fsdp_rank3.bin", "ep0-rank1.pt", "rank_0_of_4.pt", "m-shard07.pt"],
)
def test_names_of_ranks_parts(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    torch.save({"a.weight": torch.ones(3, 2)}, path)
    with pytest.raises(IncompleteError, match=r"one part of a save|one of 4 files"):
        zckpt.convert(path, tmp_path / "out.safetensors")
    zckpt.convert(path, tmp_path / "out.safetensors", options=zckpt.Options(as_part=True))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model_world_size_1_rank_0.pt", "a.weight"),
        ("rank_0_of_1.pt", "a.weight"),
        ("style_rank64.safetensors", "lora_unet_up.lora_up.weight"),
        ("crank3.pt", "a.weight"),
        ("model-00001-of-00001.safetensors", "a.weight"),
        ("frankfurt.pt", "a.weight"),
    ],
)
def test_names_of_whole_models(name: str, tensor: str, tmp_path: Path) -> None:
    state = {tensor: torch.ones(3, 2)}
    save_file(state, tmp_path / name) if name.endswith("s") else torch.save(state, tmp_path / name)
    assert inspect_checkpoint(str(tmp_path / name)).exportable.ok


# ---- states that zckpt does not read


def test_optimizer_states_that_are_not_read(tmp_path: Path) -> None:
    state = {"w": torch.ones(3, 2)}
    torch.save({"model": state, "optimizer": {"state": {}}, "epoch": 3}, tmp_path / "run.pt")
    assert "'optimizer' of 'run.pt'" in inspect_checkpoint(str(tmp_path / "run.pt")).resumable.reason
    home = tmp_path / "checkpoint-500"
    home.mkdir()
    save_file(state, home / "model.safetensors")
    assert inspect_checkpoint(str(home)).resumable.reason.startswith("weights alone")
    torch.save({}, home / "optimizer.pt")
    for path in (home, home / "model.safetensors"):
        verdict = inspect_checkpoint(str(path)).resumable
        assert not verdict.ok and "that zckpt does not read" in verdict.reason and "'optimizer.pt'" in verdict.reason
    verdict = inspect_checkpoint(str(FIXTURES / "dcp/ddp_w2/checkpoint")).resumable
    assert not verdict.ok and "that zckpt does not read" in verdict.reason and "numbers" in verdict.reason
    assert "weights alone" in inspect_checkpoint(str(FIXTURES / "dcp/hsdp_w4/checkpoint")).resumable.reason
