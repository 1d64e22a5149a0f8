"""`verify` of what a run goes on from: every moment, step count and setting equals the checkpoint's, or is reported."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import synth
import torch
from damage import edit, wrong

import zckpt
from zckpt import layouts
from zckpt.base.errors import InconsistentError
from zckpt.checks.verdict import Verification
from zckpt.core import plan
from zckpt.core.overlaps import clip
from zckpt.jobs.open import open_catalog
from zckpt.jobs.to_dcp import to_dcp

FIXTURES = Path(__file__).parents[2] / "fixtures"
ALL = "every weight is in the output, bit for bit; it also holds everything else that a run needs to resume: "
BESIDE = "step counts, settings, the loss scaler, schedules, counters and client state"
FORMS: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "2 to 3": ("zero2/groups_w3", lambda a, b: zckpt.reshard(a, b, world_size=2, stage=3)),
    "3 to 2": ("zero3/sub_groups_w2", lambda a, b: zckpt.reshard(a, b, world_size=3, stage=2)),
    "2 to 1": ("tensor/zero2_tp2_dp2", lambda a, b: zckpt.reshard(a, b, world_size=2, stage=1)),
    "universal": ("zero2/groups_w3", zckpt.to_universal),
    "universal of 3": ("zero3/sub_groups_w2", zckpt.to_universal),
    "universal of 0": ("zero0/bf16_groups", zckpt.to_universal),
    "dcp": ("zero3/sub_groups_w2", lambda a, b: to_dcp(a, b, optimizer="optim")),
}


@pytest.fixture(params=FORMS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of real DeepSpeed, and what was made of it."""
    name, make = FORMS[request.param]
    make(FIXTURES / name / "checkpoint", tmp_path / "out")
    return FIXTURES / name / "checkpoint", tmp_path / "out"


def made_as(form: str, out: Path) -> tuple[Path, Path]:
    name, make = FORMS[form]
    make(FIXTURES / name / "checkpoint", out)
    return FIXTURES / name / "checkpoint", out


def told(found: Verification) -> str:
    assert found.deletable is not None
    said = re.sub("; nothing shows whether the run saved without its frozen parameters, .*", "", found.deletable[1])
    condition, _, reason = said.rpartition(": every weight is in the output")
    assert condition.startswith("if you ") == ("only in the shards" in reason)
    return (
        f"{found.deletable[0]}: every weight is in the output{reason}"
        if condition
        else f"{found.deletable[0]}: {reason}"
    )


def test_a_run_of_fsdp_is_whole_in_a_universal_checkpoint(tmp_path: Path) -> None:
    checkpoint = FIXTURES / "dcp" / "fsdp1_w2" / "checkpoint"
    zckpt.to_universal(checkpoint, tmp_path / "out")
    assert told(zckpt.verify(checkpoint, tmp_path / "out")).startswith(
        f"True: {ALL}the optimizer states (exp_avg, exp_avg_sq)"
    )


def test_every_byte_of_a_moment_counts(made: tuple[Path, Path]) -> None:
    checkpoint, out = made
    found = zckpt.verify(checkpoint, out)
    assert not wrong(found), wrong(found)
    states = "the optimizer states (exp_avg, exp_avg_sq)"
    if (out / ".metadata").exists():
        assert told(found) == (
            f"True: every weight is in the output, bit for bit; it also holds {states}, step counts and settings; "
            "only in the shards: the loss scaler, schedules, counters and client state"
        )
    else:
        assert told(found) == f"True: {ALL}{states}, {BESIDE}"
    (out / "zckpt.json").unlink()  # what finds it is not the checksum
    held = layouts.read_training(open_catalog(str(out)).place.listing).states
    chance = random.Random(str(out))
    for state in ("exp_avg", "exp_avg_sq"):
        name = chance.choice([name for name in held if held[name][state].numel])
        entry = held[name][state]
        number, byte = chance.randrange(entry.numel), chance.randrange(4)
        (fragment,) = clip(entry.fragments, number, number + 1, 4)
        path = Path(str(fragment.store))
        before = path.read_bytes()
        after = bytearray(before)
        after[fragment.byte_offset + byte] ^= 1 << chance.randrange(8)
        path.write_bytes(after)
        found = zckpt.verify(checkpoint, out)
        assert wrong(found)["run"] == (
            f"{state} of {name!r}: 1 element differs, the first is number {number:,} (in {path.name!r})",
        )
        assert told(found).startswith("False: ")
        path.write_bytes(before)


def rank_file(out: Path, kind: str) -> Path:
    return sorted(out.glob(f"*/*_{kind}_states.pt"))[-1]


def step_up(root: Any) -> None:
    root["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["step"] += 1


def rate_up(root: Any) -> None:
    root["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0]["lr"] *= 2


@pytest.mark.parametrize(
    ("kind", "harm", "words"),
    [
        ("optim", step_up, "the step"),
        ("optim", rate_up, "parameter group 0: 'lr' is 0.2, in"),
        (
            "optim",
            lambda root: root["optimizer_state_dict"].update(overflow=True),
            "the loss scaler: 'overflow' is True",
        ),
        ("model", lambda root: root.update(global_steps=99), "step"),
        ("model", lambda root: root.update(skipped_steps=99), "the model file: 'skipped_steps' is 99"),
        ("model", lambda root: root["lr_scheduler"].update(last_batch_iteration=99), "'last_batch_iteration' is 99"),
        ("model", lambda root: root.pop("lr_scheduler"), "the model file lacks 'lr_scheduler'"),
    ],
)
def test_what_one_rank_says_otherwise(kind: str, harm: Callable[[Any], object], words: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    synth.zero12(source, [{"a": torch.randn(70, 50), "b": torch.randn(11)}, {"c": torch.randn(9)}], 2)
    edit(source / "global_step5/mp_rank_00_model_states.pt", lambda r: r.update(
        lr_scheduler={"last_batch_iteration": 4}, skipped_steps=0, rng=torch.arange(9)))  # fmt: skip
    for rank in range(2):
        path = source / f"global_step5/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        groups = [{"lr": 0.1, "params": [number]} for number in range(2)]
        edit(path, lambda r, groups=groups: r["optimizer_state_dict"].update(overflow=False))  # type: ignore[misc]
        edit(path, lambda r, g=groups: r["optimizer_state_dict"]["base_optimizer_state"].update(param_groups=g))  # type: ignore[misc]
    zckpt.reshard(source, tmp_path / "out", world_size=2, stage=3)
    (tmp_path / "out" / "zckpt.json").unlink()
    assert zckpt.verify(source, tmp_path / "out").ok
    path = rank_file(tmp_path / "out", kind)
    edit(path, harm)
    problems = str(wrong(zckpt.verify(source, tmp_path / "out")))
    assert words in problems
    assert path.name in problems


def test_a_step_of_one_parameter(tmp_path: Path) -> None:
    checkpoint, out = made_as("universal", tmp_path / "out")
    path = sorted(out.glob("*/zero/*/step.pt"))[-1]
    torch.save(torch.load(path, weights_only=False) + 1, path)
    assert "step count differs from that of other parameters" in str(wrong(zckpt.verify(checkpoint, out))["run"])


@pytest.mark.parametrize("form", ["universal", "2 to 3"])
def test_a_moment_that_is_missing(form: str, tmp_path: Path) -> None:
    checkpoint, out = made_as(form, tmp_path / "out")
    if form == "universal":
        sorted(out.glob("*/zero/*/exp_avg_sq.pt"))[0].unlink()
    else:
        edit(rank_file(out, "optim"), lambda root: root["optimizer_state_dict"]["optimizer_state_dict"]["state"][0].pop(
            "exp_avg_sq"))  # fmt: skip
    (out / "zckpt.json").unlink()
    found = zckpt.verify(checkpoint, out)
    assert "exp_avg_sq" in str(wrong(found)["run"]) and told(found).startswith("False")


def test_a_mistake_of_the_fast_path_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = plan.route

    def broken(*sides: Any) -> Any:
        for move in real(*sides):
            back = move.src_dtype.itemsize if move.count > 10 and move.start > 0 else 0
            yield move._replace(src_offset=move.src_offset - back)

    monkeypatch.setattr(plan, "route", broken)
    checkpoint, out = made_as("2 to 3", tmp_path / "out")
    assert "parts of the run differ from the checkpoint" in str(wrong(zckpt.verify(checkpoint, out))["run"])


def test_weights_alone(tmp_path: Path) -> None:
    checkpoint = FIXTURES / "zero2/groups_w3/checkpoint"
    to_dcp(checkpoint, tmp_path / "out")
    assert told(zckpt.verify(checkpoint, tmp_path / "out")) == (
        "True: every weight is in the output, bit for bit; only in the shards: the optimizer states (exp_avg, exp_avg_sq), "
        "step counts, settings, schedules, counters and client state"
    )
    zckpt.convert(FIXTURES / "zero2/sgd_w2/checkpoint", tmp_path / "out.bin", dtype="bf16")
    assert told(zckpt.verify(FIXTURES / "zero2/sgd_w2/checkpoint", tmp_path / "out.bin")) == (
        "True: every weight is in the output, rounded to BF16; only in the shards: the numbers in full precision, "
        "step counts, settings, schedules, counters and client state"
    )


def test_another_precision_begins_the_loss_scale_anew(tmp_path: Path) -> None:
    checkpoint = FIXTURES / "zero2/bf16_w2/checkpoint"
    zckpt.reshard(checkpoint, tmp_path / "out", world_size=2, precision="fp16")
    found = zckpt.verify(checkpoint, tmp_path / "out")
    assert found.ok and told(found).endswith("; only in the shards: the loss scaler")


def test_what_each_rank_has_for_itself(tmp_path: Path) -> None:
    """Random states: one rank's go along, the others' cannot."""
    checkpoint = synth.zero3(tmp_path / "ckpt", [{"a": torch.randn(70, 50)}], 3)
    for rank in range(3):
        model = checkpoint / f"global_step5/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        edit(model, lambda root, r=rank: root.update(rng=torch.arange(5) + r))  # type: ignore[misc]
        optimizer = model.with_name(model.name.replace("model_states", "optim_states"))
        edit(optimizer, lambda root: root["optimizer_state_dict"]["optimizer_state_dict"].update(
            param_groups=[{"lr": 0.1, "params": [0]}]))  # fmt: skip
    zckpt.reshard(checkpoint, tmp_path / "out", world_size=2, stage=2)
    found = zckpt.verify(checkpoint, tmp_path / "out")
    assert (
        found.ok
        and "only in the shards: what some ranks' files say otherwise" in told(found)
        and "'rng'" in told(found)
    )
    zckpt.to_universal(checkpoint, tmp_path / "universal")
    assert told(zckpt.verify(checkpoint, tmp_path / "universal")).startswith(f"True: {ALL}")


def test_moments_that_ranks_hold_differently(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(FIXTURES / "tensor/zero2_tp2_dp2/checkpoint", tmp_path / "ckpt")
    zckpt.reshard(checkpoint, tmp_path / "out", world_size=2)
    torch.serialization.set_crc32_options(False)  # what finds it is not the checksum
    try:
        for path in checkpoint.rglob("*.pt"):
            edit(path, lambda root: None)
    finally:
        torch.serialization.set_crc32_options(True)
    held = layouts.read_training(open_catalog(str(checkpoint)).place.listing).states
    name, copy = next((name, copy) for name, states in held.items() for copy in states["exp_avg"].replicas)
    with open(str(copy.fragments[0].store), "r+b") as file:
        file.seek(copy.fragments[0].byte_offset)
        file.write(b"1234")
    found = zckpt.verify(checkpoint, tmp_path / "out")
    assert found.ok and told(found).endswith(
        "; only in the shards: optimizer states that ranks hold differently "
        f"({f'exp_avg of {name!r} on tensor-parallel rank 1'!r})"
    )


def test_moments_that_only_one_rank_has(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(FIXTURES / "tensor/zero2_tp2_dp2/checkpoint", tmp_path / "ckpt")
    states = "optimizer_state_dict", "base_optimizer_state", "state"
    for path in checkpoint.glob("*/*mp_rank_01_optim*"):
        edit(path, lambda root: [held.pop("exp_avg") for held in reduce(getitem, states, root).values()])
    with pytest.raises(InconsistentError, match="no optimizer state 'exp_avg' of parameter"):
        zckpt.reshard(checkpoint, tmp_path / "out", world_size=2)


def test_what_others_put_among_the_shards(tmp_path: Path) -> None:
    checkpoint = synth.zero12(tmp_path / "ckpt", [{"a": torch.randn(70, 50)}], 2)
    (checkpoint / "global_step5/random_states_0.pkl").write_bytes(b"mine")
    zckpt.convert(checkpoint, tmp_path / "out.bin")
    zckpt.reshard(checkpoint, tmp_path / "out", world_size=3)
    for name in ("out", "out.bin"):
        words = told(zckpt.verify(checkpoint, tmp_path / name))
        assert "only in the shards: files that are not DeepSpeed's ('random_states_0.pkl')" in words


def test_half_precision_weights_are_the_rounded_masters(tmp_path: Path) -> None:
    """In the middle of a fragment, where the quick look at the checkpoint does not see it."""
    checkpoint = synth.zero12(tmp_path / "ckpt", [{"a": torch.randn(70, 50)}], 2)
    zckpt.reshard(checkpoint, tmp_path / "out", world_size=2, stage=3)

    def harm(root: Any) -> None:
        root["module"]["a"][30, 30] += 1

    edit(checkpoint / "global_step5/mp_rank_00_model_states.pt", harm)
    assert zckpt.verify(checkpoint).ok
    assert "number 1,530" in str(wrong(zckpt.verify(checkpoint, tmp_path / "out"))["masters"])


def test_what_accelerate_asks_for_beside_a_runs_settings_is_no_difference(tmp_path: Path) -> None:
    """Its groups have settings of torch's AdamW that DeepSpeed's groups lack, such as the first rate of a schedule."""
    save = FIXTURES / "transformers" / "llama_zero2" / "checkpoint"
    to_dcp(save, tmp_path / "out", accelerate=True, progress=False)
    found = zckpt.verify(save, tmp_path / "out", progress=False)
    assert found.ok and found.deletable is not None and found.deletable[0]
