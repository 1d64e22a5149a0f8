"""Saves of Lightning and Composer as these write them: found from the run's directory, under the model's own names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import IncompleteError, NotACheckpointError, UnsafeError
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog, read_tensor, strip_wrappers
from zckpt.layouts.save import trainers

FIXTURES = Path(__file__).parents[2] / "fixtures" / "trainers"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/how.json"))


def assert_truth(path: Path, name: str, tag: str | None = None) -> None:
    catalog, _ = strip_wrappers(open_catalog(str(path), Reading(tag=tag)).catalog)
    truth = load_file(FIXTURES / name / "truth.safetensors")
    assert catalog.tensors.keys() == truth.keys()
    assert all(same_bits(read_tensor(catalog.tensors[n], "pt"), truth[n]) for n in truth)


@pytest.mark.parametrize("name", NAMES)
def test_the_run_directory_means_the_newest_save(name: str, tmp_path: Path) -> None:
    checkpoint = FIXTURES / name / "checkpoint"
    assert_truth(checkpoint, name)
    zckpt.convert(checkpoint, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == load_file(FIXTURES / name / "truth.safetensors").keys()
    assert zckpt.verify(checkpoint, tmp_path / "out").ok


def test_every_directory_of_a_lightning_run(tmp_path: Path) -> None:
    run = Path(shutil.copytree(FIXTURES / "lightning_w1" / "checkpoint", tmp_path / "run"))
    logs = run / "lightning_logs"
    saves = logs / "version_0" / "checkpoints"
    for path in (run, logs, logs / "version_0", saves, saves / "epoch=0-step=2.ckpt"):
        assert_truth(path, "lightning_w1")
    assert "epoch=0-step=1" in str(open_catalog(str(saves), Reading(tag="epoch=0-step=1.ckpt")).place.listing.directory)
    with pytest.raises(AssertionError):
        assert_truth(run, "lightning_w1", tag="epoch=0-step=1.ckpt")
    shutil.copy(saves / "epoch=0-step=2.ckpt", saves / "epoch=1-step=10.ckpt")
    assert "step=10" in str(open_catalog(str(run)).place.listing.directory)
    shutil.copy(saves / "epoch=0-step=1.ckpt", saves / "last.ckpt")
    opened = open_catalog(str(run))
    assert "last.ckpt" in str(opened.place.listing.directory) and any(
        "last.ckpt" in note for note in opened.catalog.source.notes
    )
    shutil.copytree(saves, logs / "version_10" / "checkpoints")
    assert "version_10" in str(open_catalog(str(run)).place.listing.directory)


def test_saves_that_no_name_orders(tmp_path: Path) -> None:
    for name in ("best.ckpt", "other.ckpt"):
        shutil.copy(
            FIXTURES / "lightning_w1/checkpoint/lightning_logs/version_0/checkpoints/epoch=0-step=2.ckpt",
            tmp_path / name,
        )
    with pytest.raises(IncompleteError, match="newest") as raised:
        open_catalog(str(tmp_path))
    assert "--tag other.ckpt" in str(raised.value)
    assert_truth(tmp_path, "lightning_w1", tag="best.ckpt")
    shutil.copy(FIXTURES / "lightning_w1" / "truth.safetensors", tmp_path / "model.safetensors")
    stores = {store.path for store in open_catalog(str(tmp_path)).catalog.stores()}
    assert stores == {str(tmp_path / "model.safetensors")}  # plain weights come first, as ever


def test_what_lightnings_deepspeed_strategy_writes(tmp_path: Path) -> None:
    """A directory by `engine.save_checkpoint(tag="checkpoint")`, in which `latest` says so."""
    home = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "epoch=0-step=5.ckpt"
    source = FIXTURES.parent / "zero2" / "bf16_w2"
    shutil.copytree(source / "checkpoint" / (source / "checkpoint" / "latest").read_text(), home / "checkpoint")
    (home / "latest").write_text("checkpoint")
    opened = open_catalog(str(tmp_path))
    assert opened.place.listing.tag == "checkpoint" and opened.catalog.source.zero_stage == 2
    assert opened.catalog.tensors.keys() == load_file(source / "truth.safetensors").keys()


def test_composers_link_is_its_marker(tmp_path: Path) -> None:
    run = Path(shutil.copytree(FIXTURES / "composer_w1" / "checkpoint", tmp_path / "run"))
    (run / "latest-rank0.pt").symlink_to("ep0-ba1-rank0.pt")
    with pytest.raises(AssertionError):
        assert_truth(run, "composer_w1")
    assert_truth(run, "composer_w1", tag="ep0-ba2-rank0.pt")
    sharded = Path(shutil.copytree(FIXTURES / "composer_sharded_w2" / "checkpoint", tmp_path / "sharded"))
    (sharded / "latest-rank0.pt").symlink_to("ep0-ba2")
    for path in (sharded, sharded / "latest-rank0.pt", sharded / "ep0-ba2"):
        assert_truth(path, "composer_sharded_w2")


@pytest.mark.parametrize("name", ["lightning_model_parallel_w2", "composer_sharded_w2"])
def test_states_go_on_under_the_models_names(name: str, tmp_path: Path) -> None:
    zckpt.to_dcp(FIXTURES / name / "checkpoint", tmp_path / "dcp", optimizer="optim")
    from zckpt import layouts

    training = layouts.read_training(open_catalog(str(tmp_path / "dcp")).place.listing)
    truth = load_file(FIXTURES / name / "optimizer.safetensors")
    found = {f"{state}/{n}": entry for n, own in training.states.items() for state, entry in own.items()}
    assert found.keys() == truth.keys()
    assert all(same_bits(read_tensor(found[key], "pt"), truth[key]) for key in truth)
    assert [list(group.names) for group in training.groups] == json.loads((FIXTURES / name / "how.json").read_text())[
        "groups"
    ]


def test_names_that_say_nothing() -> None:
    assert trainers.newest_of(["a.ckpt", "b.ckpt"]) == "" and trainers.newest_of(["a.ckpt"]) == "a.ckpt"
    assert trainers.newest_of(["step=1.ckpt", "step=1-v1.ckpt"]) == ""
    assert trainers.newest_of(["last.ckpt", "last-v2.ckpt", "last-v10.ckpt"]) == "last-v10.ckpt"
    assert (
        trainers.folder_of(["version_2", "version_10", ".x"]) == "version_10"
        and trainers.folder_of(["version_2", "a"]) == ""
    )


def test_empty_and_hostile_runs(tmp_path: Path) -> None:
    (tmp_path / "lightning_logs" / "version_0").mkdir(parents=True)
    with pytest.raises(NotACheckpointError):
        open_catalog(str(tmp_path))
    home = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "step=1.ckpt"
    home.mkdir(parents=True)
    (home / "latest").write_text("../../../../elsewhere")
    with pytest.raises(UnsafeError):
        open_catalog(str(tmp_path))
