"""The lines that commands print about how an output is loaded: each is run by the program that it names."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint
from bits import same_bits
from typer.testing import CliRunner

import zckpt
from zckpt.cli import app

pytest.importorskip("deepspeed")

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = FIXTURES / "transformers" / "llama_zero2" / "checkpoint"


def say(*words: object) -> str:
    """What a command prints, in one line."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def call_in(text: str, name: str) -> str:
    """The call of a function that a line has."""
    found = re.search(rf"{re.escape(name)}\([^)]*\)", text)
    assert found, text
    return found[0]


def arguments(call: str) -> tuple[list[Any], dict[str, Any]]:
    """The values that a printed call passes."""
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call)
    return [ast.literal_eval(arg) for arg in tree.args], {str(k.arg): ast.literal_eval(k.value) for k in tree.keywords}


def truth(tmp_path: Path) -> dict[str, torch.Tensor]:
    zckpt.convert(LLAMA, tmp_path / "truth.safetensors", progress=False)
    return safetensors.torch.load_file(tmp_path / "truth.safetensors")


@pytest.mark.parametrize("size", ["5GB", "2kB"])
def test_states(size: str, tmp_path: Path) -> None:
    text = say("to-states", LLAMA, tmp_path / "out", "--max-shard-size", size)
    if size == "5GB":
        found = eval(call_in(text, "safetensors.torch.load_file"), {"safetensors": safetensors})
    else:
        index = re.search(r"safetensors\.safe_open, by (\S+)", text)
        assert index, text
        names = json.loads(Path(index[1]).read_text())["weight_map"]
        found = {}
        for name, file in names.items():
            with safetensors.safe_open(Path(index[1]).parent / file, "pt") as opened:
                found[name] = opened.get_tensor(name)
    assert {name.partition("/")[0] for name in found} == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("name", ["out.safetensors", "out.bin"])
def test_one_file(name: str, tmp_path: Path) -> None:
    text = say("to-fp32", LLAMA, tmp_path / name)
    function = "safetensors.torch.load_file" if name.endswith("safetensors") else "torch.load"
    found = eval(call_in(text, function), {"safetensors": safetensors, "torch": torch})
    assert all(same_bits(found[name], tensor) for name, tensor in truth(tmp_path).items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp(tmp_path: Path) -> None:
    text = say("to-dcp", LLAMA, tmp_path / "out")
    wanted = truth(tmp_path)
    state_dict = {"model": {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}}
    eval(call_in(text, "torch.distributed.checkpoint.load"), {"torch": torch, "state_dict": state_dict})
    assert all(same_bits(state_dict["model"][name], tensor) for name, tensor in wanted.items())


def engine_call(text: str) -> tuple[Path, dict[str, Any]]:
    """The directory and the options of the call of DeepSpeed's engine that a line has, which takes them."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    [directory], options = arguments(call_in(text, "engine.load_checkpoint"))
    inspect.signature(DeepSpeedEngine.load_checkpoint).bind(None, directory, **options)
    return Path(directory), options


def test_saves_of_deepspeed(tmp_path: Path) -> None:
    """Resharded and slimmed ones, read by DeepSpeed itself."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    wanted = truth(tmp_path)
    for options, words in (
        ({}, ("reshard", LLAMA, tmp_path / "resharded", "--world-size", 3, "--stage", 3)),
        ({"load_optimizer_states": False}, ("slim", LLAMA, tmp_path / "slim", "--drop", "optimizer")),
    ):
        directory, printed = engine_call(say(*words))
        assert printed == options
        found = get_fp32_state_dict_from_zero_checkpoint(str(directory))
        assert len(found) >= len(wanted)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_universal(tmp_path: Path) -> None:
    """DeepSpeed takes the config, and finds each fp32 weight where it looks."""
    from deepspeed.runtime.config import DeepSpeedConfig

    text = say("to-universal", LLAMA, tmp_path / "out")
    directory, options = engine_call(text)
    config = json.loads(re.search(r"DeepSpeed's config: (\{.*?\}\})(?: |$)", text)[1])  # type: ignore[index]
    read = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config})
    assert read.load_universal_checkpoint and read.zero_optimization_stage in (1, 2)
    for name, tensor in truth(tmp_path).items():
        if (home := directory / options["tag"] / "zero" / name).is_dir():
            held = torch.load(home / "fp32.pt", weights_only=False)
            assert torch.equal((held["param"] if isinstance(held, dict) else held).reshape(tensor.shape), tensor)


def test_megatron(tmp_path: Path) -> None:
    """Megatron-Core finds the arguments that `--use-checkpoint-args` takes where `--load` says."""
    checkpointing = pytest.importorskip("megatron.core.dist_checkpointing.serialization")
    text = say("to-mcore", LLAMA, tmp_path / "out")
    home = Path(re.search(r"--load (\S+) --use-checkpoint-args", text)[1])  # type: ignore[index]
    tag = (home / "latest_checkpointed_iteration.txt").read_text()
    args = checkpointing.load_common_state_dict(str(home / tag))["args"]
    config = json.loads((LLAMA / "config.json").read_text())
    assert args.num_layers == config["num_hidden_layers"] and args.hidden_size == config["hidden_size"]
    shutil.rmtree(tmp_path / "out")
