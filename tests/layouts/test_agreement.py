"""Optimizer files of every kind of ranks are of one run, or it is said which two are not, and nothing is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import layouts
from zckpt.base.errors import InconsistentError, ZckptError
from zckpt.jobs.inspection import inspect_checkpoint
from zckpt.jobs.open import open_catalog
from zckpt.layouts.save.listing import natural

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCES = {
    "data": "zero2/groups_w3",
    "tensor": "tensor/zero2_tp2_dp2",
    "tensor, ZeRO-3": "autotp/zero3_tp2_dp2",
    "pipeline": "pipeline/zero1_pp2_dp2",
    "experts": "moe/zero2_w2",
    "experts without ZeRO": "moe/zero0_bf16_w4",
    "AutoEP": "autoep/zero3_w4",
}


def copied(source: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / SOURCES[source] / "checkpoint", tmp_path / "ckpt"))


def optimizer_files(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*/*optim_states.pt"), key=lambda path: natural(path.name))


def edit(path: Path, change: Callable[[Any, Any], object]) -> None:
    """Changes DeepSpeed's state of an optimizer, or torch's in it."""
    root = torch.load(path, weights_only=False)
    outer = root.get("optimizer_state_dict") or root["optimizer"]
    change(outer, outer.get("base_optimizer_state", outer.get("optimizer_state_dict")))
    torch.save(root, path)


def step_up(outer: Any, inner: Any) -> None:
    for number in inner["param_groups"][-1]["params"]:
        inner["state"][number]["step"] += 7


def rate_up(outer: Any, inner: Any) -> None:
    inner["param_groups"][-1]["lr"] = 0.5


def betas(outer: Any, inner: Any) -> None:
    inner["param_groups"][0]["betas"] = (0.9, 0.75)


def scale(outer: Any, inner: Any) -> None:
    if "loss_scaler" in outer:
        outer["loss_scaler"].cur_scale = 32.0
    else:
        outer["cur_scale"] = 32.0


def one_group_less(outer: Any, inner: Any) -> None:
    inner["param_groups"].pop()


HARMS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "'step' is": (step_up, "step"),
    "'lr' is 0.5, in": (rate_up, "0.05"),
    "'betas' is 0.75, in": (betas, "0.999"),
    "'cur_scale' is 32.0, in": (scale, "1.0"),
    "parameter groups, in": (one_group_less, "2"),
}


@pytest.mark.parametrize("words", HARMS)
@pytest.mark.parametrize("source", SOURCES)
def test_what_one_rank_says_otherwise(source: str, words: str, tmp_path: Path) -> None:
    checkpoint = copied(source, tmp_path)
    first, *_, last = optimizer_files(checkpoint)
    first = next(p for p in (first, *checkpoint.glob("*/mp_rank_00_model*")) if p.exists())
    harm, usual = HARMS[words]
    edit(last, harm)
    problems = str([check.problems for check in zckpt.verify(checkpoint).checks if not check.ok])
    of_all = "do not agree on the step" in problems  # without ZeRO, the first look at a file is that at all parameters
    assert (words in problems or of_all) and usual in problems and last.name in problems
    assert problems.count("_states.pt") > 1
    inspected = inspect_checkpoint(str(checkpoint))
    assert not inspected.resumable.ok
    assert last.name in (inspected.resumable if inspected.exportable.ok else inspected.exportable).reason
    with pytest.raises(InconsistentError) as error:
        zckpt.reshard(checkpoint, tmp_path / "out", world_size=2)
    assert last.name in error.value.found
    assert of_all or words in error.value.found
    if not of_all:  # weights have no part in it
        zckpt.convert(checkpoint, tmp_path / "weights.safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["tensor", "tensor, ZeRO-3", "pipeline", "experts without ZeRO"])
def test_slices_of_different_steps(source: str, tmp_path: Path) -> None:
    """All files of a slice, or of all experts, are of another save: masters too, so there are no weights either."""
    checkpoint = copied(source, tmp_path)
    first, *_, last = optimizer_files(checkpoint)
    slices = [path for path in optimizer_files(checkpoint) if path.name.split("_mp_")[1] == last.name.split("_mp_")[1]]

    def every(outer: Any, inner: Any) -> None:
        for state in inner["state"].values():
            state["step"] += 7

    for path in slices:
        edit(path, every)
    jobs: list[Callable[[], object]] = [
        lambda: zckpt.convert(checkpoint, tmp_path / "out"),
        lambda: zckpt.reshard(checkpoint, tmp_path / "out", world_size=2),
        lambda: zckpt.to_universal(checkpoint, tmp_path / "out"),
    ]
    for job in jobs:
        with pytest.raises(InconsistentError, match="do not agree on the step") as error:
            job()
        named = {path.name for path in (first, slices[0], *checkpoint.glob("*/mp_rank_00*")) if path.exists()}
        assert sum(name in error.value.found for name in named) > 1
    assert not (tmp_path / "out").exists()
    assert not zckpt.verify(checkpoint).ok


@pytest.mark.parametrize("source", ["tensor", "pipeline", "experts", "AutoEP"])
def test_what_an_optimizer_finds_for_itself_may_be_each_ranks_own(source: str, tmp_path: Path) -> None:
    checkpoint = copied(source, tmp_path)
    for number, path in enumerate(optimizer_files(checkpoint)):
        edit(path, lambda outer, inner, d=number: inner["param_groups"][0].update(d=d))  # type: ignore[misc]
    zckpt.reshard(checkpoint, tmp_path / "out", world_size=2)
    found = zckpt.verify(checkpoint, tmp_path / "out")
    assert found.ok and found.deletable is not None
    assert found.deletable[0] and "only in the shards: what some ranks' files say otherwise" in found.deletable[1]
    assert "'d' is 1, in" in found.deletable[1]


def test_stages_of_a_pipeline_with_other_groups(tmp_path: Path) -> None:
    """Sound as it is: groups of one number that are not told the same stay apart."""
    checkpoint = copied("pipeline", tmp_path)

    def other_groups(outer: Any, inner: Any) -> None:
        decayed, plain = inner["param_groups"]
        decayed["weight_decay"], plain["weight_decay"] = plain["weight_decay"], decayed["weight_decay"]
        inner["param_groups"].append({**plain, "params": []})

    for path in checkpoint.glob("*/*mp_rank_01_optim_states.pt"):
        edit(path, other_groups)
    assert zckpt.verify(checkpoint).ok
    zckpt.reshard(checkpoint, tmp_path / "out", world_size=2)
    old, new = (
        layouts.read_training(open_catalog(str(path)).place.listing).groups for path in (checkpoint, tmp_path / "out")
    )
    assert [group.settings["weight_decay"] for group in old] == [0.1, 0.0, 0.1]
    assert [(group.names, group.settings["weight_decay"]) for group in new] == [
        (group.names, group.settings["weight_decay"]) for group in old
    ]


@pytest.mark.parametrize("junk", [[], {}, 3, [7], {"param_groups": [{"params": [[0], None]}], "state": [1]}])
def test_states_that_are_none(junk: Any, tmp_path: Path) -> None:
    """An answer, whatever lies where an optimizer's state should."""
    checkpoint = copied("experts", tmp_path)
    edit(optimizer_files(checkpoint)[-1], lambda outer, inner: outer.update(base_optimizer_state=junk))
    zckpt.verify(checkpoint)
    with pytest.raises(ZckptError):
        zckpt.reshard(checkpoint, tmp_path / "out", world_size=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("key", "name"), [("param_shapes", "adapter.weight"), ("frozen_param_shapes", "norm.bias")])
def test_shapes_that_one_rank_lists_otherwise(key: str, name: str, tmp_path: Path) -> None:
    """Both shapes have parts of the same size on two ranks, so that no count of elements tells them apart."""
    checkpoint = Path(shutil.copytree(FIXTURES / "zero3" / "lora_w2" / "checkpoint", tmp_path / "ckpt"))
    file = next(checkpoint.glob("*/zero_pp_rank_1_*model_states.pt"))
    root = torch.load(file, weights_only=False)
    shapes = root[key][0] if isinstance(root[key], list) else root[key]
    *outer, last = shapes[name]
    shapes[name] = torch.Size([*outer, last + 1])
    torch.save(root, file)
    problems = str([check.problems for check in zckpt.verify(checkpoint, progress=False).checks if not check.ok])
    assert f"{key} of {file.name!r}" in problems, problems


@pytest.mark.parametrize("said", [None, 3, [3], "x"])
def test_sub_parameters_without_patterns_are_no_fault_of_zckpts(said: object, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(FIXTURES / "autotp" / "fused_tp2" / "checkpoint", tmp_path / "ckpt"))
    for file in checkpoint.glob("*/mp_rank_0*_model_states.pt"):
        root = torch.load(file, weights_only=False)
        root["universal_checkpoint_info"]["parameter_with_sub_params"] = [said, {"patterns": said}]
        torch.save(root, file)
    try:
        zckpt.convert(checkpoint, tmp_path / "out.safetensors", progress=False)
    except ZckptError as error:
        assert "mp_rank_00_model_states.pt" in str(error)
