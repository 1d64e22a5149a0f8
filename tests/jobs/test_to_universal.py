"""Universal checkpoints hold the same run as the checkpoint they were made of, whatever wrote that."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from bits import same_bits
from runs import NAMES, SHARDED, assert_same_run, opened

from zckpt.base.errors import (
    CorruptError,
    IncompleteError,
    InconsistentError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from zckpt.jobs.open import open_checkpoint, read_tensor
from zckpt.jobs.reshard import reshard
from zckpt.jobs.to_universal import to_universal

FIXTURES = Path(__file__).parents[2] / "fixtures"
FAMILIES = {"tensor", "pipeline", "megatron"}, {"moe", "autoep"}
"""Of fixtures: slices, which are whole in a universal checkpoint; and experts."""
EXPERTS = {"moe/zero1_ep1_w2", "autoep/zero1_w2", "autoep/zero2_w4", "autoep/zero3_w4"}
"""Those of which DeepSpeed has a universal form."""
DATA_PARALLEL = [
    (path, name)
    for path, name in zip(SHARDED, NAMES, strict=True)
    if name in EXPERTS or name.split("/")[0] not in set.union(*FAMILIES)
]


@pytest.mark.parametrize("path", [path for path, _ in DATA_PARALLEL], ids=[name for _, name in DATA_PARALLEL])
def test_nothing_of_the_run_is_lost(path: Path, tmp_path: Path) -> None:
    to_universal(path / "checkpoint", tmp_path / "universal")
    source, there = opened(path / "checkpoint"), opened(tmp_path / "universal")
    assert there[0].catalog.source.layout == "universal"
    assert there[0].catalog.source.zero_stage == source[0].catalog.source.zero_stage
    assert_same_run(source, there)


@pytest.mark.parametrize("name", ["moe/zero2_w2", "moe/tensor_w4", "autoep/folded_w4"])
def test_experts_that_deepspeed_could_not_load_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no universal form"):
        to_universal(FIXTURES / name / "checkpoint", tmp_path / "universal")
    assert not (tmp_path / "universal").exists()


@pytest.mark.parametrize("name", ["tensor/zero1_tp2_dp2", "tensor/zero3_tp2_dp2", "pipeline/zero1_pp2_tp2_dp2"])
def test_slices_are_whole_in_it(name: str, tmp_path: Path) -> None:
    to_universal(FIXTURES / name / "checkpoint", tmp_path / "universal")
    source, there = opened(FIXTURES / name / "checkpoint"), opened(tmp_path / "universal")
    trained = {n: entry for n, entry in source[0].catalog.tensors.items() if entry.role == "parameter"}
    for n, entry in trained.items():
        assert same_bits(read_tensor(entry, "pt"), read_tensor(there[0].catalog.tensors[n], "pt")), n
        for state, held in source[1].states[n].items():
            assert same_bits(read_tensor(held, "pt"), read_tensor(there[1].states[n][state], "pt")), (n, state)


@pytest.mark.parametrize("name", ["zero2/groups_w3", "zero3/sub_groups_w2", "zero3/lora_w2"])
def test_it_becomes_a_sharded_checkpoint_again(name: str, tmp_path: Path) -> None:
    home = FIXTURES / name / "checkpoint"
    to_universal(home, tmp_path / "universal")
    reshard(tmp_path / "universal", tmp_path / "back", world_size=2)
    reshard(home, tmp_path / "direct", world_size=2)
    assert_same_run(opened(tmp_path / "direct"), opened(tmp_path / "back"))


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    to_universal(FIXTURES / "zero2/fp32_w1/checkpoint", tmp_path / "universal")
    return tmp_path / "universal"


def zero_of(universal: Path) -> Path:
    return universal / (universal / "latest_universal").read_text() / "zero"


def test_converting_it_again_is_a_mistake(universal: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="universal already"):
        to_universal(universal, tmp_path / "again")


def test_a_missing_parameter_is_named(universal: Path) -> None:
    (zero_of(universal) / "norm.weight" / "fp32.pt").unlink()
    with pytest.raises(IncompleteError, match=r"norm\.weight"):
        open_checkpoint(universal)


def test_a_tensor_of_another_shape_is_refused(universal: Path) -> None:
    torch.save({"param": torch.zeros(7, 3)}, zero_of(universal) / "norm.weight" / "fp32.pt")
    with pytest.raises(InconsistentError, match="another shape"):
        open_checkpoint(universal)
    torch.save({"nothing": 1}, zero_of(universal) / "norm.weight" / "fp32.pt")
    with pytest.raises(CorruptError, match="holds no tensor"):
        open_checkpoint(universal)


def test_without_model_files_it_says_so(universal: Path) -> None:
    tag = zero_of(universal).parent
    for path in tag.glob("*_model_states.pt"):
        path.unlink()
    with pytest.raises(IncompleteError, match="has no model files"):
        open_checkpoint(tag)


def renamed(home: Path, name: str) -> None:
    """A ZeRO-2 checkpoint of one rank whose `norm.weight` has another name."""
    tag = home / (home / "latest").read_text().strip()
    path = tag / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=False)
    for group in [model["module"], *model["param_shapes"]]:
        if "norm.weight" in group:
            items = [(name if key == "norm.weight" else key, value) for key, value in group.items()]
            group.clear()
            group.update(items)
    torch.save(model, path)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("../../../../escaped", UnsafeError),
        ("/tmp/escaped", UnsafeError),
        ("a//b", UnsafeError),
        ("a/./b", UnsafeError),
        ("..", UnsafeError),
        ("", UnsafeError),
        ("nul\0byte", UnsafeError),
        ("n" * 10_000, UnsupportedError),
    ],
)
def test_hostile_names_write_nothing(name: str, error: type[Exception], tmp_path: Path) -> None:
    import shutil

    home = tmp_path / "in" / "deep" / "checkpoint"
    shutil.copytree(FIXTURES / "zero2/fp32_w1/checkpoint", home)
    renamed(home, name)
    before = sorted(os.walk(tmp_path))
    with pytest.raises(error):
        to_universal(home, tmp_path / "in" / "out")
    assert sorted(os.walk(tmp_path)) == before


def test_a_name_with_slashes_is_a_directory_in_a_directory(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(FIXTURES / "zero2/fp32_w1/checkpoint", tmp_path / "in")
    renamed(tmp_path / "in", "norm/weight of 50% é")
    to_universal(tmp_path / "in", tmp_path / "out")
    assert "norm/weight of 50% é" in list(open_checkpoint(tmp_path / "out"))
    path = zero_of(tmp_path / "out") / "norm/weight of 50% é/step.pt"
    assert float(torch.load(path, weights_only=True)) == json.loads(
        (FIXTURES / "zero2/fp32_w1/how.json").read_text()
    ).get("steps", 2)
