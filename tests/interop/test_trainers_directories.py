"""Directories of trainers that save adapters: each as its own code leaves it, named as people name it.

Source: Axolotl (2026-08), train.py `save_initial_configs`, `save_trained_model`; LLaMA-Factory (2026-08), extras/constants.py,
train/sft/workflow.py; ms-swift (2026-08), arguments/base_args/base_args.py; Unsloth (2026-08), save.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt import LoraMerge, Options
from zckpt.jobs.inspection import inspect_checkpoint

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of these libraries among themselves

TRAINER = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")


def save(directory: Path, seed: int, step: int = 0) -> dict[str, torch.Tensor]:
    """An adapter of PEFT with numbers of its own; with a step, beside what transformers' Trainer keeps. The merged weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=False
    )  # fmt: skip
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    )
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                tensor.normal_(std=0.1)
    model.save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    if step:
        for name in TRAINER:
            torch.save({"step": step}, directory / name)
        (directory / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
    merged: dict[str, torch.Tensor] = model.merge_and_unload().state_dict()
    return merged


def axolotl(top: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The model's config and the last adapter at the top, beside the Trainer's checkpoints."""
    save(top / "checkpoint-4", 1, 4)
    transformers.LlamaConfig(vocab_size=32).save_pretrained(top)
    (top / "debug.log").write_text("")
    return top, save(top, 2)


def axolotl_stopped(top: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Both configs are there from the beginning; the last adapter is not."""
    wanted = save(top / "checkpoint-4", 1, 4)
    transformers.LlamaConfig(vocab_size=32).save_pretrained(top)
    for name in ("adapter_config.json", "tokenizer_config.json"):
        (top / name).write_bytes((top / "checkpoint-4" / name).read_bytes())
    return top, wanted


def llama_factory(top: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The last adapter at the top, with the state of the Trainer and reports."""
    save(top / "checkpoint-4", 1, 4)
    for name in ("all_results.json", "train_results.json"):
        (top / name).write_text("{}")
    for name in ("trainer_log.jsonl", "training_args.yaml", "training_loss.png"):
        (top / name).write_text("")
    (top / "trainer_state.json").write_text(json.dumps({"global_step": 8}))
    torch.save({}, top / "training_args.bin")
    return top, save(top, 2)


def ms_swift(top: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory for each start, which has checkpoints alone."""
    run = top / "v0-20261127-101112"
    found = {step: save(run / f"checkpoint-{step}", step, step) for step in (4, 12)}
    for home in (run, *run.glob("checkpoint-*")):
        (home / "args.json").write_text(json.dumps({"model_type": "llama", "tuner_type": "lora"}))
    for step in found:
        (run / f"checkpoint-{step}" / "additional_config.json").write_text(
            '{"lora_dtype": null, "lorap_lr_ratio": null}'
        )
    (run / "logging.jsonl").write_text("")
    for name in ("runs", "images"):
        (run / name).mkdir()
        (run / name / "events.out.tfevents.1").write_bytes(b"")
    return run, found[12]


def unsloth(top: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The Trainer's `outputs`; `lora_model` is beside it."""
    save(top / "lora_model", 3)
    return top / "outputs", {step: save(top / "outputs" / f"checkpoint-{step}", step, step) for step in (30, 60)}[60]


@pytest.mark.parametrize("trainer", [axolotl, axolotl_stopped, llama_factory, ms_swift, unsloth])
def test_the_directory_as_people_name_it(trainer: object, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=False
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    named, wanted = trainer(tmp_path / "run")  # type: ignore[operator]
    lora = LoraMerge(base=tmp_path / "base")
    zckpt.convert(named, tmp_path / "out", dtype="fp32", options=Options(lora=lora), progress=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=1e-6, atol=1e-7) for name in wanted)
    assert zckpt.verify(named, tmp_path / "out", lora=lora, progress=False).ok
    zckpt.to_peft(named, tmp_path / "alone", progress=False)
    assert (tmp_path / "alone" / "adapter_config.json").is_file()
    alone = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    model = peft.PeftModel.from_pretrained(
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "alone"
    )
    again = model.merge_and_unload().state_dict()
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)
    text = "\n".join(inspect_checkpoint(str(named)).lines(width=120))
    assert f"{len(alone)} tensors" in text and "to-peft" in text, text


def test_ms_swifts_directory_above_the_starts(tmp_path: Path) -> None:
    """One start is meant; of several, one must be named."""
    ms_swift(tmp_path / "run")
    zckpt.to_peft(tmp_path / "run", tmp_path / "alone", progress=False)
    save(tmp_path / "run" / "v1-20261127-111213" / "checkpoint-4", 5, 4)
    with pytest.raises(zckpt.ZckptError, match=r"v[01]-2026"):
        zckpt.to_peft(tmp_path / "run", tmp_path / "no", progress=False)
