"""Saves that lie further below, weights under other names, and formats that zckpt does not read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import zckpt
from zckpt.base.errors import IncompleteError, NotACheckpointError
from zckpt.jobs.open import open_catalog
from zckpt.layouts.places import find
from zckpt.storage.location import locate

FIXTURES = Path(__file__).parents[2] / "fixtures"

STATE = {"embed.weight": torch.arange(12.0).view(4, 3), "norm.weight": torch.ones(3)}


def write(path: Path, state: dict[str, torch.Tensor] = STATE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({"model": state}, path)


def touch(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("{}")


@pytest.mark.parametrize(
    "name",
    ["weights.safetensors", "model.pth", "consolidated.00.pth", "lit_model.pth", "epoch_3.pt", "step_7/last.bin"],
)
def test_one_file_of_weights_under_another_name(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run / name)
    touch(run, "config.json", "params.json", "training_args.bin", "optimizer.log", "scheduler.pt", "rng_state.pth")
    assert set(zckpt.open_checkpoint(run)) == set(STATE)


def test_two_models_in_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors")
    write(tmp_path / "b.safetensors")
    with pytest.raises(IncompleteError, match=r"'a\.safetensors', 'b\.safetensors'") as raised:
        open_catalog(str(tmp_path))
    assert "global_step" not in str(raised.value)
    (tmp_path / "b.safetensors").unlink()
    write(tmp_path / "best" / "model.safetensors")
    with pytest.raises(IncompleteError, match=r"'a\.safetensors', 'best'"):
        open_catalog(str(tmp_path))


@pytest.mark.parametrize("top", ["run", "run/step_10", "run/step_10/policy", "run/step_10/policy/weights"])
def test_a_save_further_below(top: str, tmp_path: Path) -> None:
    write(tmp_path / "run/step_10/policy/weights/model/model.safetensors")
    touch(tmp_path / "run/step_10", "training_info.json", "config.yaml", "policy/tokenizer/tokenizer.json")
    write(tmp_path / "run/step_10/policy/optimizer/optim.pt")
    assert set(zckpt.open_checkpoint(tmp_path / top)) == set(STATE)
    write(tmp_path / "run/step_10/value/weights/model/model.safetensors")
    if top == "run/step_10":
        with pytest.raises(NotACheckpointError, match=r"policy/weights/model.*value/weights/model"):
            open_catalog(str(tmp_path / top))


def test_the_newest_of_steps_with_saves_below(tmp_path: Path) -> None:
    for step in (9, 10):
        write(tmp_path / f"step_{step}" / "policy" / "model.safetensors", {"step": torch.tensor([float(step)])})
    assert zckpt.open_checkpoint(tmp_path)["step"].item() == 10


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_runs_of_trainers_with_saves_below(tmp_path: Path) -> None:
    """RLinf's and prime-rl's runs keep steps in `checkpoints/`; NeMo Automodel links the newest, and has the optimizer beside."""
    for step in (5, 10):
        state = {"step": torch.tensor([float(step)])}
        for place in (
            f"rlinf/checkpoints/global_step_{step}/actor/dcp_checkpoint",
            f"prime/checkpoints/step_{step}/trainer",
        ):
            dcp.save({"app": {"model": state}}, checkpoint_id=tmp_path / place, no_dist=True)
        write(tmp_path / f"automodel/epoch_0_step_{step}/model/model.safetensors", state)
        write(tmp_path / f"nemo-rl/step_{step}/policy/weights/model/model.safetensors", state)
        dcp.save(
            {"optim": {"state": state}}, checkpoint_id=tmp_path / f"automodel/epoch_0_step_{step}/optim", no_dist=True
        )
    (tmp_path / "automodel/LATEST").symlink_to("epoch_0_step_10")
    for path in ("rlinf", "prime", "nemo-rl", "automodel", "automodel/LATEST", "automodel/epoch_0_step_10"):
        assert zckpt.open_checkpoint(tmp_path / path)["step"].item() == 10, path


FOREIGN = {
    "fairseq2": ["model/pp_00/tp_00/sdp_00.pt", "model/pp_00/tp_00/sdp_01.pt"],
    "torchsnapshot": [".snapshot_metadata", "0/model/weight"],
    "TensorFlow": ["checkpoint", "model.ckpt-100.index", "model.ckpt-100.data-00000-of-00001"],
    "TensorFlow ": ["tf_model-00001-of-00002.h5", "tf_model-00002-of-00002.h5"],
    "Flax": ["config.json", "flax_model.msgpack"],
    "ONNX": ["model.onnx", "config.json"],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_formats_of_others_are_named(name: str, tmp_path: Path) -> None:
    touch(tmp_path / "run", *FOREIGN[name])
    paths = [tmp_path / "run"]
    if "/" not in FOREIGN[name][-1] and (tmp_path / "run" / FOREIGN[name][-1]).suffix in (".pth", ".h5", ".msgpack"):
        paths.append(tmp_path / "run" / FOREIGN[name][-1])
    for path in paths:
        with pytest.raises(NotACheckpointError, match=name.strip()) as raised:
            open_catalog(str(path))
        assert "global_step" not in str(raised.value)


def test_weights_beside_files_of_others_are_read(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors")
    touch(tmp_path, "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "model.onnx")
    assert set(zckpt.open_checkpoint(tmp_path)) == set(STATE)


@pytest.mark.parametrize("pointer", ["file", "directory"])
def test_a_file_that_names_a_tag_counts_before_directories_of_models(pointer: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero3" / "bf16_w2" / "checkpoint", tmp_path / "run")
    write(tmp_path / "run" / "model" / "model.safetensors")
    if pointer == "directory":
        (tmp_path / "run" / "latest").unlink()
        (tmp_path / "run" / "latest").mkdir()
    place = find(locate(tmp_path / "run"))
    assert place.listing.directory.name == ("global_step2" if pointer == "file" else "model")


@pytest.mark.parametrize("latest", ["link", "directory", "weights"])
def test_latest_may_be_the_newest_save_itself(latest: str, tmp_path: Path) -> None:
    """Several trainers keep a link, or a copy, of that name beside the steps."""
    save = FIXTURES / "dcp" / "alone_w2" / "checkpoint"
    for name in ("step-100", "step-200"):
        if latest == "weights":
            write(tmp_path / name / "model.safetensors")
        else:
            shutil.copytree(save, tmp_path / name)
    if latest == "directory":
        shutil.copytree(save, tmp_path / "latest")
    else:
        (tmp_path / "latest").symlink_to("step-100")
    place = find(locate(tmp_path))
    assert place.listing.directory.name == "latest"
    assert place.notes == (
        () if latest == "weights" else (f"{str(tmp_path)!r} holds 2 saves: 'latest' is taken. Pass --tag for another.",)
    )
    if latest != "weights":
        assert find(locate(tmp_path), tag="step-200").listing.directory.name == "step-200"


@pytest.mark.parametrize("given", ["run", "run/checkpoint-2", "run/checkpoint-2/global_step2", "parts"])
def test_each_directory_is_listed_once(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = FIXTURES / "zero3" / "bf16_w2" / "checkpoint"
    shutil.copytree(save, tmp_path / "run" / "checkpoint-2")
    for rank in range(2):
        for file in (save / "global_step2").glob(f"*zero_pp_rank_{rank}_*"):
            (tmp_path / "parts" / f"rank_{rank}").mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / "parts" / f"rank_{rank}")
    listed: list[str] = []
    for list_one in (os.scandir, os.listdir):

        def record(path: str, list_one: Callable[[str], object] = list_one) -> object:
            listed.append(os.path.realpath(path))
            return list_one(path)

        monkeypatch.setattr(os, list_one.__name__, record)
    found = find(locate(tmp_path / given))
    own = [path for path in listed if path.startswith(str(tmp_path / given))]
    assert len(found.listing.files) == 4 and sorted(own) == sorted({*own})
