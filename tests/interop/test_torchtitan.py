"""Saves of torchtitan's own checkpoint manager, of three versions: the same model as torchtitan's adapters give transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file

import zckpt
from zckpt.base.errors import InconsistentError, UnsupportedError, UsageError
from zckpt.jobs.groups import Form
from zckpt.jobs.open import open_catalog, read_tensor

FIXTURES = Path(__file__).parents[2] / "fixtures" / "torchtitan"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/how.json"))
FUSED = "llama3_0_3_0_w3"


def to_hf(name: str, out: Path, to: str = "hf", config: Any = None, **options: Any) -> Any:
    config = config or str(FIXTURES / name / "hf" / "config.json")
    return zckpt.convert(FIXTURES / name / "checkpoint", out, options=zckpt.Options(form=Form(to, config), **options))


def assert_hub_form(out: Path, name: str) -> None:
    found, truth = load_file(out / "model.safetensors"), load_file(FIXTURES / name / "hf" / "model.safetensors")
    assert found.keys() == truth.keys()
    assert all(same_bits(found[n], truth[n]) for n in truth)


@pytest.mark.parametrize("name", NAMES)
def test_to_transformers_and_verified(name: str, tmp_path: Path) -> None:
    to_hf(name, tmp_path / "out")
    assert_hub_form(tmp_path / "out", name)
    assert zckpt.verify(FIXTURES / name / "checkpoint", tmp_path / "out").ok
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == json.loads((FIXTURES / name / "hf" / "config.json").read_text())["model_type"]


@pytest.mark.parametrize("name", ["llama3_0_3_0_w3", "deepseek_v3_0_3_0_w1"])
def test_transformers_loads_it_whole(name: str, tmp_path: Path) -> None:
    import transformers

    to_hf(name, tmp_path / "out")
    tokens = torch.arange(18).view(2, 9)
    ours, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FIXTURES / name / "hf")
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_a_config_beside_the_save_is_enough(tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "checkpoint"
    shutil.copytree(FIXTURES / "qwen3_moe_0_3_0_w2" / "checkpoint" / "step-2", run / "step-100")
    shutil.copytree(run / "step-100", run / "step-90")
    shutil.copy(FIXTURES / "qwen3_moe_0_3_0_w2" / "hf" / "config.json", run / "step-100")
    report = zckpt.convert(run, tmp_path / "out", options=zckpt.Options(form=Form("hf")))
    assert_hub_form(tmp_path / "out", "qwen3_moe_0_3_0_w2")
    assert any("'step-100'" in note for note in report.notes)
    assert any("balancing its experts" in note and "1 tensor" in note for note in report.notes)


def test_without_a_config_the_error_asks_for_one(tmp_path: Path) -> None:
    """Nothing in a save of torchtitan tells how many heads a model has."""
    with pytest.raises(UsageError, match="attention heads") as raised:
        zckpt.convert(
            FIXTURES / "llama3_0_3_0_w3" / "checkpoint", tmp_path / "out", options=zckpt.Options(form=Form("hf"))
        )
    assert "--config" in str(raised.value)


def test_a_tensor_that_no_rule_takes_is_named(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = load_file(FIXTURES / "llama3_0_3_0_w3" / "truth.safetensors")
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save(
            state | {"layers.0.attention.gate.weight": torch.ones(2)}, checkpoint_id=tmp_path / "save", no_dist=True
        )
    config = str(FIXTURES / "llama3_0_3_0_w3" / "hf" / "config.json")
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attention\.gate\.weight"):
        zckpt.convert(tmp_path / "save", tmp_path / "out", options=zckpt.Options(form=Form("hf", config)))


def test_what_is_not_the_model_is_left_out() -> None:
    """Counters and schedules of the run, and the optimizer, whose fused name is not a tensor of the model."""
    opened = open_catalog(str(FIXTURES / "llama3_0_3_0_w3" / "checkpoint"))
    assert opened.catalog.tensors.keys() == load_file(FIXTURES / "llama3_0_3_0_w3" / "truth.safetensors").keys()
    assert opened.catalog.source.global_steps == 2


@pytest.mark.parametrize("name", NAMES)
def test_the_way_back_has_every_tensor_of_torchtitans_own_save(name: str, tmp_path: Path) -> None:
    zckpt.to_dcp(FIXTURES / name / "hf", tmp_path / "titan", under="", names="torchtitan")
    catalog = open_catalog(str(tmp_path / "titan")).catalog
    for own, tensor in load_file(FIXTURES / name / "truth.safetensors").items():
        if own == "freqs_cis":  # torchtitan 0.1 makes it again
            continue
        found = read_tensor(catalog.tensors[catalog.aliases.get(own, own)], "pt")
        is_balance = "expert_bias" in own and "deepseek" not in name  # not of the model: zeros, as before training
        assert same_bits(found, torch.zeros_like(tensor) if is_balance else tensor), own


@pytest.mark.skipif(
    "ZCKPT_TORCHTITAN" not in os.environ, reason="torchtitan is installed by hand: see generate_torchtitan.py"
)
@pytest.mark.parametrize("version", ["0.3.0", "0.2.2", "0.1.0"])
def test_torchtitans_own_models_load_it(version: str, tmp_path: Path) -> None:
    pairs: list[str] = []
    for fixture in sorted(FIXTURES.glob(f"*_{version.replace('.', '_')}_w*")):
        zckpt.to_dcp(fixture / "hf", tmp_path / fixture.name, under="", names="torchtitan")
        pairs += [str(tmp_path / fixture.name), str(fixture)]
    root = os.environ["ZCKPT_TORCHTITAN"]
    environment = {**os.environ, "PYTHONPATH": f"{root}/{version}:{root}/needed", "CUDA_VISIBLE_DEVICES": ""}
    worker = Path(__file__).with_name("titan_worker.py")
    done = subprocess.run([sys.executable, worker, *pairs], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(" equal") == len(pairs) // 2, done.stderr[-2000:]


def test_states_of_fused_parameters_follow_the_weights(tmp_path: Path) -> None:
    """The optimizer has queries, keys and values in one, over three ranks; the truth is torchtitan's own hook's."""
    save = shutil.copytree(FIXTURES / FUSED / "checkpoint", tmp_path / "checkpoint")
    truth = load_file(FIXTURES / FUSED / "optimizer.safetensors")
    with pytest.raises(UnsupportedError, match="nothing says how many heads"):
        zckpt.to_states(save, tmp_path / "states")
    assert "how many heads" in " ".join(open_catalog(str(save)).catalog.source.notes)

    config = json.loads((FIXTURES / FUSED / "hf" / "config.json").read_text())
    (save / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8}))
    with pytest.raises(InconsistentError, match="does not fit the rows"):
        zckpt.to_states(save, tmp_path / "states")
    (save / "config.json").write_text(json.dumps(config))
    assert {entry.role for entry in open_catalog(str(save)).catalog.tensors.values()} == {"parameter"}

    zckpt.to_states(save, tmp_path / "states")
    zckpt.reshard(save, tmp_path / "deepspeed", world_size=2, stage=2)
    zckpt.to_dcp(save, tmp_path / "dcp", optimizer="optimizer")
    for other in ("deepspeed", "dcp"):
        zckpt.to_states(tmp_path / other, tmp_path / f"{other}_states")
    for states in ("states", "deepspeed_states", "dcp_states"):
        found = load_file(tmp_path / states / "optimizer_states.safetensors")
        assert found.keys() == truth.keys()
        assert all(same_bits(found[name], truth[name]) for name in truth)
    with zckpt.open_checkpoint(save) as opened:
        assert {opened.steps[name] for name in opened} == {2}


def test_a_norm_of_the_heads_says_how_long_they_are(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    home, generator = "layers.0.attention", torch.Generator().manual_seed(3)
    weights = {f"{home}.{n}.weight": torch.rand(8 * heads, 4) for n, heads in (("wq", 4), ("wk", 2), ("wv", 2))}
    whole = torch.rand(64, 4, generator=generator)
    state = weights | {f"{home}.q_norm.weight": torch.ones(8)}
    optimizer = {f"state.{home}.wqkv.weight.exp_avg": whole, f"param_groups.{home}.wqkv.weight.lr": 0.5}
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save(state | {"optimizer": optimizer}, checkpoint_id=tmp_path / "save", no_dist=True)
    groups = whole.view(2, 4, 8, 4)
    with zckpt.open_checkpoint(tmp_path / "save") as opened:
        found = opened.states["exp_avg"]
        assert same_bits(found[f"{home}.wq.weight"], groups[:, :2].reshape(32, 4))
        assert same_bits(found[f"{home}.wk.weight"], groups[:, 2].reshape(16, 4))
        assert same_bits(found[f"{home}.wv.weight"], groups[:, 3].reshape(16, 4))
        assert opened.param_groups[0]["lr"] == 0.5

    optimizer[f"state.{home}.wqkv.weight.exp_avg"] = torch.rand(48, 4)
    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save(state | {"optimizer": optimizer}, checkpoint_id=tmp_path / "odd", no_dist=True)
    with pytest.raises(UnsupportedError, match="cannot be taken apart"):
        zckpt.to_states(tmp_path / "odd", tmp_path / "states")
