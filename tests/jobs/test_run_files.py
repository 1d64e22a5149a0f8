"""What a Trainer and Accelerate keep beside a save goes along, byte for byte, and is never unpickled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader

import zckpt
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog
from zckpt.jobs.to_dcp import NO_SCHEDULE
from zckpt.layouts.save.companions import run_files
from zckpt.layouts.save.trainers import FIRST_MODEL, FIRST_OPTIMIZER
from zckpt.storage.location import locate

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRAINERS = {
    "trainer_state.json", "training_args.bin", "scheduler.pt", "adapter_config.json", "tokenizer.json",
    "rng_state_0.pth", "rng_state_1.pth",
}  # fmt: skip
ACCELERATES = {
    "random_states_0.pkl", "random_states_1.pkl", "scheduler.bin", "sampler.bin", "sampler_1.bin", "dl_state_dict.bin",
    "custom_checkpoint_0.pkl",
}  # fmt: skip


def trainers_run(home: Path, files: set[str], folders: tuple[int, ...] = (2, 4)) -> Path:
    """A Trainer's output directory: folders of steps, with files whose bytes are not a pickle."""
    for step in folders:
        folder = home / f"checkpoint-{step}"
        save = FIXTURES / "zero2" / "bf16_w2" / "checkpoint" / "global_step2"
        shutil.copytree(save, folder / f"global_step{step}")
        (folder / "latest").write_text(f"global_step{step}")
        for name in files:
            (folder / name).write_text(f"{name} of {step}")
    return home


def carried(out: Path) -> dict[str, str]:
    beside = {"latest", "latest_universal", "zckpt.json", "config.json", ".metadata"}
    return {
        p.name: p.read_text() for p in out.iterdir() if p.is_file() and p.name not in beside and p.suffix != ".distcp"
    }


def test_every_form_carries_what_a_resume_needs(tmp_path: Path) -> None:
    run = trainers_run(tmp_path / "run", TRAINERS | ACCELERATES | {"model.safetensors", "notes.txt"})
    zckpt.to_universal(run, tmp_path / "universal", tag="checkpoint-2")
    zckpt.to_dcp(run / "checkpoint-2", tmp_path / "dcp", optimizer="optim", tag="checkpoint-2")
    report = zckpt.reshard(run, tmp_path / "same", world_size=2, tag="checkpoint-2")
    expected = {name: f"{name} of 2" for name in TRAINERS | ACCELERATES}
    for name in ("universal", "dcp", "same"):
        assert carried(tmp_path / name) == expected, name
        assert zckpt.verify(run / "checkpoint-2", tmp_path / name).ok
    assert not any("random" in note for note in report.notes)


def test_random_states_of_ranks_that_come_and_go(tmp_path: Path) -> None:
    run = trainers_run(tmp_path / "run", TRAINERS | ACCELERATES, (2,))
    report = zckpt.reshard(run, tmp_path / "one", world_size=1)
    found = carried(tmp_path / "one")
    assert found["rng_state.pth"] == "rng_state_0.pth of 2" and "random_states_0.pkl" in found
    assert not {"rng_state_0.pth", "rng_state_1.pth", "random_states_1.pkl"} & found.keys()
    assert "The random states of rank 1 are left out: the new run has 1 rank." in report.notes
    back = zckpt.reshard(tmp_path / "one", tmp_path / "three", world_size=3)
    found = carried(tmp_path / "three")
    assert found["rng_state_0.pth"] == "rng_state_0.pth of 2" and "rng_state.pth" not in found
    assert any("No random states were saved for ranks 1-2" in note for note in back.notes)
    (tmp_path / "node" / "checkpoint-2").mkdir(parents=True)
    (tmp_path / "node" / "checkpoint-2" / "rng_state_2.pth").write_text("third")
    copies, notes = run_files(locate(run / "checkpoint-2"), [locate(tmp_path / "node")], 3)
    assert {"rng_state_0.pth", "rng_state_1.pth", "rng_state_2.pth"} <= {name for _, name in copies} and not notes


@pytest.mark.parametrize("tag", ["checkpoint-2", "global_step2", "checkpoint-2/global_step2"])
def test_a_tag_of_a_trainers_directory(tag: str, tmp_path: Path) -> None:
    run = trainers_run(tmp_path / "run", set())
    assert open_catalog(str(run)).place.listing.tag == "global_step4"
    for path in (run, *([run / "checkpoint-2"] if "/" not in tag else [])):
        place = open_catalog(str(path), Reading(tag=tag)).place
        assert place.listing.directory.path.endswith("checkpoint-2/global_step2")
    with pytest.raises(zckpt.IncompleteError, match="checkpoint-2, checkpoint-4"):
        open_catalog(str(run), Reading(tag="checkpoint-3"))
    with pytest.raises(zckpt.UnsafeError):
        open_catalog(str(run), Reading(tag="../run/checkpoint-2"))


def test_a_save_without_a_tag_keeps_its_step(tmp_path: Path) -> None:
    zckpt.reshard(FIXTURES / "dcp" / "fsdp1_w2" / "checkpoint", tmp_path / "adam", world_size=2)
    assert (tmp_path / "adam" / "latest").read_text() == "global_step2"
    shutil.copytree(FIXTURES / "dcp" / "hsdp_w4" / "checkpoint", tmp_path / "step-70")  # SGD, which counts no steps
    zckpt.reshard(tmp_path / "step-70", tmp_path / "sgd", world_size=2)
    assert (tmp_path / "sgd" / "latest").read_text() == "global_step70"


def test_accelerates_tag_stays_what_load_state_asks_for(tmp_path: Path) -> None:
    source = FIXTURES / "zero2" / "bf16_w2" / "checkpoint" / "global_step2"
    shutil.copytree(source, tmp_path / "state" / "pytorch_model")
    (tmp_path / "state" / "latest").write_text("pytorch_model")
    zckpt.to_universal(tmp_path / "state", tmp_path / "out")
    assert (tmp_path / "out" / "latest_universal").read_text() == "pytorch_model"


def test_a_directory_of_fsdp_is_one_of_fsdp_again(tmp_path: Path) -> None:
    """What a Trainer wrote under FSDP, and what DeepSpeed wrote, where accelerate looks for it, with what a resume needs."""
    folder = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(FIXTURES / "dcp" / "accelerate_fsdp2_w2" / "checkpoint", folder)
    for name in TRAINERS:
        (folder / name).write_text(f"{name} of 2")
    report = zckpt.to_dcp(tmp_path / "run", tmp_path / "out", accelerate=True, tag="checkpoint-2")
    assert carried(tmp_path / "out") == {name: f"{name} of 2" for name in TRAINERS} and NO_SCHEDULE not in report.notes
    assert {p.name for p in (tmp_path / "out").iterdir() if p.is_dir()} == {FIRST_MODEL, FIRST_OPTIMIZER}
    for part in (FIRST_MODEL, FIRST_OPTIMIZER):
        before, after = (items_of(home / part) for home in (folder, tmp_path / "out"))
        assert before == after, part
    assert zckpt.verify(folder, tmp_path / "out").ok
    zckpt.reshard(tmp_path / "out", tmp_path / "zero", world_size=3)
    assert (tmp_path / "zero" / "latest").read_text() == "global_step2"
    assert {"rng_state_0.pth", "trainer_state.json", "scheduler.pt"} <= carried(tmp_path / "zero").keys()
    run = trainers_run(tmp_path / "deepspeed", TRAINERS - {"scheduler.pt"}, (2,))
    report = zckpt.to_dcp(run, tmp_path / "of zero", accelerate=True)
    assert NO_SCHEDULE in report.notes and "trainer_state.json" in carried(tmp_path / "of zero")
    asked = {f"optimizer.param_groups.0.{name}" for name in torch.optim.AdamW([torch.zeros(1)]).param_groups[0]}
    assert asked <= items_of(tmp_path / "of zero" / FIRST_OPTIMIZER).keys()
    with pytest.raises(zckpt.UsageError, match="accelerate says itself"):
        zckpt.to_dcp(run, tmp_path / "no", accelerate=True, optimizer="optim")


def items_of(save: Path) -> dict[str, object]:
    """What is in a save, as torch's own reader has it."""
    found = FileSystemReader(save).read_metadata()
    items = found.state_dict_metadata
    return {name: (found.planner_data[name], getattr(items[name], "size", None)) for name in items}


def test_an_optimizer_with_names_needs_no_order(tmp_path: Path) -> None:
    """`FULL_STATE_DICT`: safetensors sorted by name, and states by name; the newest folder of a Trainer's run."""
    shape = (3, 2)
    weights = {name: torch.randn(shape) for name in ("a", "b", "c")}
    states = {f"_orig_mod.{n}": {"step": torch.tensor(2.0), "exp_avg": torch.randn(shape)} for n in ("c", "a", "b")}
    groups = [{"lr": 0.1, "params": ["_orig_mod.c"]}, {"lr": 0.2, "params": ["_orig_mod.a", "_orig_mod.b"]}]
    folder = tmp_path / "run" / "checkpoint-2"
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    torch.save({"state": states, "param_groups": groups}, folder / "optimizer.bin")
    found = zckpt.open_checkpoint(tmp_path / "run").states["exp_avg"]
    assert {name: found[name].tolist() for name in found} == {
        name: states[f"_orig_mod.{name}"]["exp_avg"].tolist() for name in weights
    }
    torch.save({"state": states, "param_groups": [{"params": ["_orig_mod.d"]}]}, folder / "optimizer.bin")
    with pytest.raises(zckpt.InconsistentError, match="of other parameters than the weights"):
        zckpt.reshard(tmp_path / "run", tmp_path / "out", world_size=1)
