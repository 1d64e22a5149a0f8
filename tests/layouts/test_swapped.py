"""ZeRO-3 saves of DeepSpeed whose optimizer is on NVMe: what they hold, what is missing, what does not belong to them.

The masters of every fixture are held to the live engine's with those of all other fixtures (`test_fixtures.py`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt import layouts
from zckpt.base.errors import IncompleteError, InconsistentError, UnsafeError, UnsupportedError
from zckpt.checks.second import compare_places, compare_states
from zckpt.containers import TensorRef
from zckpt.jobs.inspection import Inspection, inspect_checkpoint
from zckpt.jobs.open import open_catalog, read_tensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "nvme"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/how.json"))
TAG = "global_step2"


def copy_of(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name / "checkpoint", tmp_path / name))


def swap_files(place: Path) -> list[Path]:
    return sorted((place / TAG / "offloaded_tensors").rglob("*.swp"))


def shown(found: Inspection) -> str:
    return " ".join(" ".join(found.lines()).split())


@pytest.mark.parametrize("name", NAMES)
def test_states_are_those_of_the_live_optimizer(name: str) -> None:
    opened = open_catalog(str(FIXTURES / name / "checkpoint"))
    training = layouts.read_training(opened.place.listing)
    truth = load_file(FIXTURES / name / "states.safetensors")
    found = {f"{state}/{name}": entry for name, states in training.states.items() for state, entry in states.items()}
    assert found.keys() == truth.keys()
    assert all(same_bits(read_tensor(entry, "pt"), truth[what]) for what, entry in found.items())


def test_bytes_behind_a_link_out_of_the_checkpoint_are_no_numbers(tmp_path: Path) -> None:
    """A swap file has no header, so any file that is long enough would be written to an output as weights."""
    place = copy_of("bf16_w2", tmp_path)
    first, *_, last = swap_files(place)
    last.unlink()
    last.symlink_to(first)
    open_catalog(place)  # in the checkpoint
    last.unlink()
    shutil.copy(first, tmp_path / "private")
    last.symlink_to(tmp_path / "private")
    with pytest.raises(UnsafeError, match="leads out"):
        layouts.read_training(open_catalog(place).place.listing)


def test_elements_of_used_buffers_in_the_optimizer_file_are_not_taken() -> None:
    """With `pipeline_write`, the optimizer files have tensors where swapped ones should be: of buffers that were used again."""
    opened = open_catalog(str(FIXTURES / "pipelined_w2" / "checkpoint"))
    listing = opened.place.listing
    vectors: list[TensorRef] = listing.entry(listing.shards("optim")[0], "optimizer_state_dict")["fp32_flat_groups"]  # type: ignore[index]
    stored = [Path(vector.store.path).read_bytes()[vector.byte_offset : vector.byte_stop] for vector in vectors]
    files = [listing.files[listing.swap_file(0, 0, vector.attributes["ds_id"])] for vector in vectors]
    assert all(stored) and any(file.read(len(held)) != held for held, file in zip(stored, files, strict=True))
    trained = [entry for entry in opened.catalog.tensors.values() if entry.role == "parameter"]
    assert {Path(str(f.store)).suffix for entry in trained for f in entry.fragments} == {".swp"}


def test_sub_groups_that_were_not_swapped_are_in_the_optimizer_file() -> None:
    stores = open_catalog(str(FIXTURES / "bf16_w2" / "checkpoint")).catalog.stores()
    assert {Path(store.path).suffix for store in stores} == {".pt", ".swp"}


def test_inspect_counts_swap_files_with_their_ranks() -> None:
    found = inspect_checkpoint(FIXTURES / "bf16_w2" / "checkpoint")
    assert "ranks 0-1 model, optimizer, 6 swap files" in shown(found)
    files = [file for file in found.as_json()["files"] if str(file["kind"]).startswith("swap")]
    assert {(file["rank"], Path(str(file["file"])).parent.name) for file in files} == {(0, "rank00"), (1, "rank01")}
    assert all(file["state"] == "ok" and file["bytes"] for file in files) and found.resumable.ok


def test_a_second_reader_finds_masters_and_states_in_the_same_places() -> None:
    for name in NAMES:
        opened = open_catalog(str(FIXTURES / name / "checkpoint"))
        training = layouts.read_training(opened.place.listing)
        states = compare_states(opened.place.listing, training, opened.catalog.tensors)
        assert states == ("second reader", 2 * len(training.states), "", ())
        assert compare_places(opened.place.listing, opened.catalog) == ("second reader", len(opened.catalog), "", ())


@pytest.mark.parametrize("state", ["", "exp_avg-"])
def test_a_missing_swap_file_is_named(state: str, tmp_path: Path) -> None:
    place = copy_of("bf16_w2", tmp_path)
    (place / TAG / "offloaded_tensors" / "rank01" / f"{state}3_8.tensor.swp").unlink()
    with pytest.raises(IncompleteError, match=rf"rank01/{state}3_8\.tensor\.swp.*is missing") as error:
        layouts.read_training(open_catalog(str(place)).place.listing)
    assert "--also" in error.value.remedy and "5 files" in error.value.found
    found = inspect_checkpoint(place)
    assert found.exportable.ok == bool(state)
    assert not found.resumable.ok
    assert f"rank 1 model, optimizer, swap {state}3_8.tensor.swp missing, 5 swap files" in shown(found)


def test_a_save_without_its_swap_files_says_where_they_are(tmp_path: Path) -> None:
    """Old versions of DeepSpeed did not copy them; and some people copy the .pt files alone."""
    place = copy_of("fp16_w1", tmp_path)
    shutil.rmtree(place / TAG / "offloaded_tensors")
    with pytest.raises(IncompleteError) as error:
        open_catalog(str(place))
    assert "NVMe" in error.value.found and "0_8.tensor.swp" in str(error.value.file)


def test_a_short_swap_file_is_named(tmp_path: Path) -> None:
    place = copy_of("bf16_w2", tmp_path)
    short = place / TAG / "offloaded_tensors" / "rank00" / "9_9.tensor.swp"
    short.write_bytes(short.read_bytes()[:1000])
    with pytest.raises(IncompleteError, match=r"rank00/9_9\.tensor\.swp.*too short") as error:
        open_catalog(str(place))
    assert (error.value.found, "1,152 bytes" in error.value.expected) == ("1,000 bytes", True)


def test_files_of_another_node_are_laid_over(tmp_path: Path) -> None:
    place = copy_of("bf16_w2", tmp_path)
    other = tmp_path / "other" / TAG / "offloaded_tensors"
    other.mkdir(parents=True)
    shutil.move(place / TAG / "offloaded_tensors" / "rank01", other / "rank01")
    zckpt.convert(place, tmp_path / "out.safetensors", also=[tmp_path / "other"])
    truth = load_file(FIXTURES / "bf16_w2" / "truth.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert all(same_bits(found[name], truth[name]) for name in truth)


def test_what_an_earlier_run_left_is_not_read(tmp_path: Path) -> None:
    """DeepSpeed never empties `nvme_path`, and copies all of it; a file may also be longer than what is written to it now."""
    place = copy_of("bf16_w2", tmp_path)
    for path in swap_files(place):
        path.write_bytes(path.read_bytes() + b"\x01" * 512)
    (place / TAG / "offloaded_tensors" / "rank00" / "0_9.tensor.swp").write_bytes(b"\x02" * 4096)
    zckpt.convert(place, tmp_path / "out.safetensors")
    truth = load_file(FIXTURES / "bf16_w2" / "truth.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert all(same_bits(found[name], truth[name]) for name in truth)
    assert zckpt.verify(place, deep=True).ok and inspect_checkpoint(place).resumable.ok


def test_a_place_on_nvme_is_never_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config names the run's own files, which go on changing."""
    place = copy_of("fp16_w1", tmp_path)
    running = tmp_path / "swapped/nvme/fp16_w1/zero_stage_3/optimizer/rank0"
    running.mkdir(parents=True)
    (running / "0_8.tensor.swp").write_bytes(b"\x03" * 8192)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(place / TAG / "offloaded_tensors")
    with pytest.raises(IncompleteError):
        open_catalog(str(place))


def test_swap_files_of_two_ranks_in_each_others_place_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes another rank's swap files gives wrong numbers of the right shape."""
    from zckpt.layouts.save.listing import Listing

    right = Listing.swap_file
    monkeypatch.setattr(Listing, "swap_file", lambda self, dp, mp, label: right(self, 1 - dp, mp, label))
    opened = open_catalog(str(FIXTURES / "bf16_w2" / "checkpoint"))
    assert compare_places(opened.place.listing, opened.catalog).problems


def test_a_vector_that_is_not_used_whole_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from zckpt.layouts.zero import zero3

    monkeypatch.setattr(zero3, "tail_of", lambda vector: iter(()))
    with pytest.raises(InconsistentError, match="no parameter has"):
        open_catalog(str(FIXTURES / "fp16_w1" / "checkpoint"))


def test_damage_is_an_error_or_changes_numbers_alone(tmp_path: Path) -> None:
    """A swap file has no index: any bytes of the right count are numbers, and the manifest of an output knows them."""
    place = copy_of("fp16_w1", tmp_path)
    zckpt.reshard(place, tmp_path / "out", stage=2, world_size=1)
    facts = json.loads((tmp_path / "out" / "zckpt.json").read_text())
    assert not any("swp" in file["path"] for file in facts["files"])
    assert zckpt.verify(place, tmp_path / "out").ok
    path = swap_files(place)[0]
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert not zckpt.verify(place, tmp_path / "out").ok


def test_frozen_parameters_that_were_on_nvme_are_not_in_the_save(tmp_path: Path) -> None:
    """DeepSpeed writes its placeholder for what was swapped, `torch.tensor(1).half()`, as the fragment of each rank."""
    place = copy_of("fp16_w1", tmp_path)
    for path in (place / TAG).glob("*_model_states.pt"):
        root = torch.load(path, weights_only=False)
        root["frozen_param_fragments"]["body.weight"] = torch.tensor(1).half()
        torch.save(root, path)
    with pytest.raises(IncompleteError, match=r"frozen parameter 'body\.weight'") as error:
        open_catalog(str(place))
    assert "offload_param" in error.value.expected


@pytest.mark.parametrize("label", [None, "", "../../0_9", "/etc/passwd", "a" * 5000, "0_9\0", 7, ["0_9"]], ids=range(8))
def test_names_that_are_none_of_a_swap_file(label: object, tmp_path: Path) -> None:
    place = copy_of("fp16_w1", tmp_path)
    for path in (place / TAG).glob("*_optim_states.pt"):
        root = torch.load(path, weights_only=False)
        vector = root["optimizer_state_dict"]["fp32_flat_groups"][0]
        vector.ds_id = label
        torch.save(root, path)
    with pytest.raises(UnsupportedError, match="does not say which swap file"):
        open_catalog(str(place))
    with pytest.raises(UnsupportedError):
        zckpt.verify(place)
    assert not inspect_checkpoint(place).exportable.ok


def test_addresses(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.put(str(FIXTURES / "bf16_w2" / "checkpoint"), "/swapped", recursive=True)
    zckpt.convert("memory://swapped", tmp_path / "out.safetensors")
    truth = load_file(FIXTURES / "bf16_w2" / "truth.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert all(same_bits(found[name], truth[name]) for name in truth)
