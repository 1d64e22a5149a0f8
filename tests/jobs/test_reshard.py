"""Checkpoints of real DeepSpeed in other shapes: nothing is lost, and where the shape is theirs, the files are theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import proofs
import pytest
import torch
from bits import same_bits
from runs import FIXTURES, NAMES, SHARDED, assert_same_run, opened

from zckpt.base.errors import CastError, InconsistentError, OutputError, UnsupportedError, UsageError
from zckpt.core.dtypes import BF16
from zckpt.jobs.open import read_tensor
from zckpt.jobs.reshard import reshard

SHAPES = [(1, 3), (2, 1), (3, 2), (5, 3)]
"""World sizes and stages."""


@proofs.MORE
@pytest.mark.parametrize("path", SHARDED, ids=NAMES)
def test_every_shape_holds_the_same_run(path: Path, tmp_path: Path) -> None:
    """From its own shape through others and back, each made of the one before; every second save through every second shape."""
    first = source = opened(path / "checkpoint")
    home, place = (int(first[0].catalog.topology.dp), first[0].catalog.source.zero_stage), path / "checkpoint"
    some = SHAPES if proofs.IS_WHOLE else SHAPES[SHARDED.index(path) % 2 :: 2]
    for number, (world_size, stage) in enumerate([*some, home]):
        reshard(place, tmp_path / str(number), world_size=world_size, stage=stage)
        place = tmp_path / str(number)
        there = opened(place)
        assert there[0].catalog.topology.dp == world_size and there[0].catalog.source.zero_stage == stage
        assert_same_run(source, there)
        source = there
    assert_same_run(first, source)


SAME = ["zero1/bf16_w3", "zero2/groups_w3", "zero2/aligned_w2", "zero2/round_robin_w2", "zero2/tied_w2", "zero2/fp16_w2",
        "zero2/sgd_w2", "zero2/adagrad_w2", "zero2/w12", "zero2/client_state_w2", "bf16_optimizer/groups_w3",
        "zero3/groups_w3", "zero3/tied_w2", "zero3/sub_groups_w2", "zero3/lora_w2", "zero3/small_w4"]  # fmt: skip


def alike(a: Any, b: Any, where: str) -> None:
    """Loaded files, compared like this: a number of an enum is that number, a padded element is any."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape), where
        if not same_bits(a, b):
            differing = (a != b).reshape(-1).nonzero().reshape(-1).tolist()
            assert differing and (b.reshape(-1)[differing] == 0).all(), where  # padding: arbitrary there, zeros here
            assert len(differing) <= 16, where
    elif isinstance(a, dict):
        assert list(map(str, sorted(a, key=str))) == list(map(str, sorted(b, key=str))), where
        for key in a:
            alike(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            alike(x, y, f"{where}/{index}")
    elif isinstance(a, np.ndarray | np.generic):
        assert type(a) is type(b) or not isinstance(a, np.ndarray), where
        assert np.asarray(a).tolist() == np.asarray(b).tolist(), where
    elif hasattr(a, "__dict__") and not isinstance(a, int | type):
        assert type(a) is type(b) and type(a).__name__ == type(b).__name__, where
        alike(vars(a), vars(b), where)
    else:
        assert a == b, where


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAME)
def test_the_same_shape_gives_deepspeeds_own_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    home = FIXTURES / name
    how = json.loads((home / "how.json").read_text())
    reshard(home / "checkpoint", tmp_path / "out", world_size=how["world_size"])
    monkeypatch.syspath_prepend(str(FIXTURES))  # classes of the client state
    import generate

    monkeypatch.setattr(sys.modules["__main__"], "Mood", generate.Mood, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "Settings", generate.Settings, raising=False)
    theirs = {p.name: p for p in (home / "checkpoint" / how["tag"]).iterdir()}
    ours = {p.name: p for p in (tmp_path / "out" / how["tag"]).iterdir()}
    assert theirs.keys() == ours.keys()
    for file in theirs:
        a, b = (torch.load(path, weights_only=False) for path in (theirs[file], ours[file]))
        if "round_robin" in name and "optim" in file:  # DeepSpeed's own mapping is not that of its vectors
            assert a["optimizer_state_dict"].pop("param_slice_mappings") and b["optimizer_state_dict"].pop(
                "param_slice_mappings"
            )
        alike(a, b, file)


def test_precision_is_changed_where_it_is_said(tmp_path: Path) -> None:
    source = FIXTURES / "zero2" / "bf16_w2" / "checkpoint"
    reshard(source, tmp_path / "out", world_size=2, precision="fp16", stage=3)
    found, training = opened(tmp_path / "out")
    assert training.precision.name == "F16" and "DynamicLossScaler" in str(training.scaler["loss_scaler"])
    assert not list((tmp_path / "out").glob("*/bf16_*"))
    config = training.model["ds_config"]
    assert isinstance(config, dict) and config["fp16"] == {"enabled": True} and config["bf16"] == {"enabled": False}
    assert config["zero_optimization"]["stage"] == 3
    before, _ = opened(source)
    for name, entry in before.catalog.tensors.items():
        assert same_bits(read_tensor(entry, "pt"), read_tensor(found.catalog.tensors[name], "pt"))
    reshard(tmp_path / "out", tmp_path / "again", world_size=1, precision="fp32", stage=2)
    again, training = opened(tmp_path / "again")
    assert training.precision.name == "F32"
    module = torch.load(tmp_path / "again" / "global_step2" / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    assert all(same_bits(module[n], read_tensor(e, "pt")) for n, e in again.catalog.tensors.items())


@pytest.mark.parametrize("name", ["autotp/zero1_tp2_dp2", "autotp/zero3_tp2_dp2"])
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_other_ranks_hold_too_keep_their_dtype(name: str, stage: int, tmp_path: Path) -> None:
    """Masters have copies: the model's own, and those of other ranks, in fp32."""
    _, before = opened(FIXTURES / name / "checkpoint")
    reshard(FIXTURES / name / "checkpoint", tmp_path / "out", world_size=2, stage=stage)
    _, after = opened(tmp_path / "out")
    assert after.precision == before.precision == BF16
    path = next((tmp_path / "out").glob("*/*_model_states.pt"))
    found = torch.load(path, weights_only=False)
    trained = {n for names in found["param_shapes"] for n in names}
    assert {tensor.dtype for n, tensor in found["module"].items() if n in trained} == {torch.bfloat16}


def test_a_parameter_group_of_nothing(tmp_path: Path) -> None:
    for stage in (2, 3):
        reshard(FIXTURES / "dcp/fsdp1_w2/checkpoint", tmp_path / str(stage), world_size=2, stage=stage)
        assert [len(group.names) for group in opened(tmp_path / str(stage))[1].groups] == [9]


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "bf16_groups"])
def test_a_save_without_zero_becomes_one_with(name: str, tmp_path: Path) -> None:
    source = opened(FIXTURES / "zero0" / name / "checkpoint")
    for stage in (2, 3):
        out = tmp_path / str(stage)
        reshard(FIXTURES / "zero0" / name / "checkpoint", out, world_size=2, stage=stage)
        there = opened(out)
        assert there[0].catalog.source.zero_stage == stage and there[1].states
        assert_same_run(source, there)


def test_what_goes_wrong_is_said_and_writes_nothing(tmp_path: Path) -> None:
    source, out = FIXTURES / "zero2" / "bf16_w2" / "checkpoint", tmp_path / "out"
    with pytest.raises(UsageError, match="target is impossible"):
        reshard(source, out, world_size=0)
    plain_weights = tmp_path / "plain"
    plain_weights.mkdir()
    torch.save({"weight": torch.ones(2)}, plain_weights / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match="no optimizer states"):
        reshard(plain_weights, out, world_size=1)
    with pytest.raises(OutputError, match="inside the input"):
        reshard(source, source / "x", world_size=1)
    broken = tmp_path / "broken"
    reshard(source, broken, world_size=2)
    path = next(broken.glob("*/*rank_1*optim*"))
    loaded = torch.load(path, weights_only=False)
    loaded["optimizer_state_dict"]["single_partition_of_fp32_groups"][0][0] = 1e6
    torch.save(loaded, path)
    with pytest.raises(InconsistentError, match="fp32 weights are not the model"):
        reshard(broken, out, world_size=1)
    model = next(broken.glob("*/mp_rank*"))
    state = torch.load(model, weights_only=False)
    state["module"] = {name: tensor.float() for name, tensor in state["module"].items()}
    torch.save({**state, "module": {}}, model)
    with pytest.raises(CastError, match="too large for float16"):
        reshard(broken, out, world_size=1, precision="fp16")
    assert not out.exists()


def test_the_command(tmp_path: Path) -> None:
    source, out = FIXTURES / "zero3" / "tied_w2" / "checkpoint", tmp_path / "out"
    command = [sys.executable, "-m", "zckpt", "reshard", str(source), str(out), "--world-size", "3", "--json"]
    planned = json.loads(subprocess.run([*command, "--dry-run"], capture_output=True, check=True).stdout)
    assert planned["dry_run"] and not out.exists()
    done = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert done["zero_stage"] == 3 and done["world_size"] == 3 and done["files"] == planned["files"]
    assert {f["path"]: f["bytes"] for f in done["files"]} == {
        str(p.relative_to(out)): p.stat().st_size for p in out.rglob("*") if p.is_file() and p.name != "zckpt.json"
    }
    again = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert again["already_done"] and again["bytes_written"] == 0
    other = subprocess.run([*command, "--stage", "2"], capture_output=True, text=True, check=False)
    assert other.returncode == 2 and "exists" in other.stderr
