"""`zckpt estimate` as a person or a script meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zckpt.base.errors import UsageError
from zckpt.cli import app

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def estimate(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["estimate", *words], env={"COLUMNS": "80"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_the_table_fits_and_says_what_fits(model: str) -> None:
    status, text = estimate(model, "--gpus", "8", "--nodes", "16", "--memory", "80GB", "--cpu-memory", "1TB")
    assert status == 0 and "8.03 B parameters, all trained" in " ".join(text.split())
    assert [line for line in text.splitlines() if len(line) > 80 and not line.startswith("/")] == []
    assert "bf16 and fp16: stage 1 fits in 80 GB per GPU and 1 TB of host memory per node." in " ".join(text.split())
    assert text.count("\n3      cpu") == 2


def test_json_is_exact_and_the_status_answers(model: str) -> None:
    status, text = estimate(model, "--memory", "80GB", "--json")
    found = json.loads(text)
    assert found["model"]["parameters"] == 8_030_261_248 and found["model"]["frozen"] == 0
    by_hand = {(one["stage"], one["precision"], one["offload"], one["checkpointing"]): one for one in found["choices"]}
    assert by_hand[0, "bf16", "none", False]["rank"]["optimizer"] == 8 * 8_030_261_248
    assert by_hand[3, "fp32", "cpu", True]["host_bytes_per_node"] == 16 * 8_030_261_248
    assert len(by_hand) == 3 * 7 * 2
    assert status == 0 and found["fits"]["bf16"]["offload"] == "cpu"
    status, text = estimate(model, "--memory", "1GB")
    assert status == 1 and "nothing fits in 1 GB per GPU" in text


def test_a_config_is_estimated(model: str, tmp_path: Path) -> None:
    pytest.importorskip("pydantic")
    config = tmp_path / "ds.json"
    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": 0.9}},
    }  # fmt: skip
    config.write_text(json.dumps(settings))
    status, text = estimate(model, "--gpus", "2", "--config", str(config), "--json", "--memory", "80GB")
    found = json.loads(text)
    assert status == 0 and found["config"]["fits"] is True
    assert (found["config"]["stage"], found["config"]["offload"], found["config"]["precision"]) == (3, "cpu", "bf16")
    assert (found["run"]["micro_batch"], found["run"]["accumulation"]) == (2, 4)
    assert found["config"]["rank"]["optimizer"] == 4 * 8_030_261_248 // 2
    status, text = estimate(model, "--gpus", "2", "--config", str(config), "--memory", "2GB")
    assert status == 1 and "it does not fit" in " ".join(text.split())


def test_wrong_words_are_errors(model: str) -> None:
    with pytest.raises(UsageError, match="optimizer 'Adafactor' is not known"):
        estimate(model, "--optimizer", "Adafactor")
    with pytest.raises(UsageError, match="is not a size"):
        estimate(model, "--memory", "much")
    with pytest.raises(UsageError, match="no such adapter"):
        estimate(model, "--adapter", model + ".no")
