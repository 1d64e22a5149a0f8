"""Optimizer states by name: those of the live optimizers, of every layout that names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bits import same_bits
from safetensors import safe_open
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import NoTensorError, UnsupportedError, UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures"
OWN = ["states/adamw8bit_w1", "states/torch_muon_w1"]
NAMED = [
    "zero1/bf16_w3", "zero2/groups_w3", "zero2/round_robin_w2", "zero3/sub_groups_w2", "zero3/tied_w2", "autotp/zero3_tp2_dp2",
    "dcp/fsdp2_nested_w2", "dcp/fsdp2_flat_w4", "ranks/fsdp2_w2", "torch_checkpointing/torch_files_w2", "fairscale/alone_w1",
    "mcore/reshardable_dp2", "megatron_legacy/groups_tp2", "optimizers/oss_ranks_w3", "nvme/bf16_w2", "pipeline/zero1_pp2_dp2",
    *OWN,
]  # fmt: skip


def truth_of(name: str) -> dict[str, torch.Tensor]:
    """ "<state>/<parameter>" -> what the live optimizer held, where a fixture has it; masters and weights are not states."""
    path = FIXTURES / name / "optimizer.safetensors"
    return (
        {key: value for key, value in load_file(path).items() if not key.startswith("param/")} if path.exists() else {}
    )


@pytest.mark.parametrize("name", NAMED)
def test_states_are_those_of_the_live_optimizer(name: str) -> None:
    with zckpt.open_checkpoint(FIXTURES / name / "checkpoint") as ckpt:
        found = {f"{state}/{name}": ckpt.states[state][name] for state in ckpt.states for name in ckpt.states[state]}
        params = [name for group in ckpt.param_groups for name in group["params"]]
        assert found and {key.split("/", 1)[1] for key in found} <= {*params, *ckpt.catalog.aliases}
        assert set(params) <= set(ckpt) and all(step == 2 for step in ckpt.steps.values())
        assert "lr" in ckpt.param_groups[0]
        own = ckpt.catalog
    for key, tensor in truth_of(name).items():
        assert key in found and same_bits(found[key], tensor), key
    for key, tensor in found.items():
        state, parameter = key.split("/", 1)
        if not state.startswith(("absmax", "qmap")):
            assert tuple(tensor.shape) == own[parameter].shape if parameter in own else True
    assert not truth_of(name) or len(found) >= len(truth_of(name))


def test_a_mapping_as_dicts_are() -> None:
    path = FIXTURES / "zero2" / "bf16_w2" / "checkpoint"
    with zckpt.open_checkpoint(path, framework="np") as ckpt:
        states = ckpt.states
        assert list(states) == ["exp_avg", "exp_avg_sq"] and len(states) == 2 and "exp_avg" in states
        one = states["exp_avg"]
        name = next(iter(one))
        assert name in one and one.entry(name).dtype.name == "F32" and one[name].shape == one.entry(name).shape
        for wrong in (lambda: states["momentum"], lambda: one["nothing"]):
            with pytest.raises(NoTensorError):
                wrong()
        assert states.get("momentum") is None
        assert "exp_avg" in repr(states) and "exp_avg" in repr(one)
    with pytest.raises(UsageError, match="closed"):
        _ = ckpt.states


def test_tied_names_have_the_same_states() -> None:
    with zckpt.open_checkpoint(FIXTURES / "dcp" / "fsdp2_nested_w2" / "checkpoint") as ckpt:
        own = ckpt.states["exp_avg"]
        assert same_bits(own["head.weight"], own["embed.weight"])


def test_what_names_no_states_says_why(tmp_path: Path) -> None:
    plain = FIXTURES / "states" / "adamw8bit_w1" / "checkpoint" / "pytorch_model.bin"
    shutil.copy(plain, tmp_path)
    for path, why in {
        tmp_path / "pytorch_model.bin": "holds no optimizer states that zckpt can read",
        FIXTURES / "dcp" / "ddp_w2" / "checkpoint": "numbers instead of parameter names",
        FIXTURES / "dcp" / "alone_w2" / "checkpoint": "holds no optimizer states",
    }.items():
        with zckpt.open_checkpoint(path) as ckpt, pytest.raises(UnsupportedError, match=why):
            _ = ckpt.states


def test_quantised_states_are_as_they_were_saved_and_nothing_that_resumes_is_made_of_them(tmp_path: Path) -> None:
    path = FIXTURES / "states" / "adamw8bit_w1" / "checkpoint"
    with zckpt.open_checkpoint(path) as ckpt:
        assert ckpt.states["state1"]["0.weight"].dtype == torch.uint8
        assert ckpt.states["absmax1"]["0.weight"].shape == (3,) and ckpt.states["absmax1"]["2.weight"].shape == (1,)
        assert ckpt.states["qmap1"]["0.weight"].shape == (256,)
    for job in (
        lambda: zckpt.reshard(path, tmp_path / "out", world_size=2),
        lambda: zckpt.to_universal(path, tmp_path / "out"),
        lambda: zckpt.to_dcp(path, tmp_path / "out", optimizer="optim"),
    ):
        with pytest.raises(UnsupportedError, match="another shape than its parameter"):
            job()
    assert not (tmp_path / "out").exists()


def test_groups_are_plain_values() -> None:
    for name in NAMED:
        with zckpt.open_checkpoint(FIXTURES / name / "checkpoint") as ckpt:
            assert json.loads(json.dumps(ckpt.param_groups))


@pytest.mark.parametrize("name", ["zero3/groups_w3", "ranks/fsdp2_w2", "megatron_legacy/groups_tp2", *OWN])
def test_states_as_safetensors(name: str, tmp_path: Path) -> None:
    """safetensors' own reader finds every state; verify compares them with the shards; the run again does nothing."""
    checkpoint, out = FIXTURES / name / "checkpoint", tmp_path / "out"
    options = zckpt.Options(max_shard_size=200)
    report = zckpt.to_states(checkpoint, out, options=options)
    index = json.loads((out / "optimizer_states.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for file in sorted(out.glob("optimizer_states-*-of-*.safetensors")):
        found |= load_file(file)
        with safe_open(file, "pt") as opened:
            aliases |= {k: v for k, v in (opened.metadata() or {}).items() if k != "format"}
    assert found.keys() == index.keys() and report.tensors == len(found) and len({*index.values()}) > 1
    whole = found | {dropped: found[kept] for dropped, kept in aliases.items()}
    with zckpt.open_checkpoint(checkpoint) as ckpt:
        own = {
            f"{s}/{n}": ckpt.states[s][n] for s in ckpt.states for n in ckpt.states[s] if n not in ckpt.catalog.aliases
        }
        facts = json.loads((out / "optimizer_states.json").read_text())
        assert facts == {"steps": ckpt.steps, "param_groups": ckpt.param_groups}
    assert whole.keys() == own.keys() and all(same_bits(whole[key], own[key]) for key in own)
    assert zckpt.verify(out).ok
    found_again = zckpt.verify(checkpoint, out)
    assert found_again.ok and not found_again.deletable[0]
    assert zckpt.to_states(checkpoint, out, options=options).already_done
    changed = next(out.glob("optimizer_states-00001-*"))
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    assert not zckpt.verify(checkpoint, out).ok


def test_which_states_are_written(tmp_path: Path) -> None:
    path = FIXTURES / "zero2" / "bf16_w2" / "checkpoint"
    zckpt.to_states(path, tmp_path / "out", options=zckpt.Options(include=["exp_avg/*"]))
    found = load_file(tmp_path / "out" / "optimizer_states.safetensors")
    assert found and all(name.startswith("exp_avg/") for name in found)
    assert zckpt.verify(path, tmp_path / "out").ok
    with pytest.raises(UnsupportedError, match="without states"):
        zckpt.to_states(FIXTURES / "zero2" / "sgd_w2" / "checkpoint", tmp_path / "sgd")
    with pytest.raises(UsageError, match="written to a directory"):
        zckpt.to_states(path, tmp_path / "out.safetensors")
    assert not (tmp_path / "sgd").exists()
