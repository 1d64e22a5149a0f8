"""Trains with transformers' Trainer and its callback, on every rank: callbacks_worker.py HOME (WAY ...).

Ways: fsdp2, and ours1 .. ours3 or theirs1 .. theirs3 for a stage of zckpt's trainer or of DeepSpeed.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

HOME, WAYS = Path(sys.argv[1]), os.environ["WAYS"].split()

if any(way.startswith("ours") for way in WAYS):
    import zckpt.runtime

    zckpt.runtime.as_deepspeed()

if any(way.startswith("theirs") for way in WAYS):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from deepspeed_on_cpu import initialize

    initialize()

import torch
import transformers as t
from accelerate.state import AcceleratorState
from torch import distributed as dist
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fsdp_on_cpu

from zckpt.integrations import TrainerWeights
from zckpt.live import consolidate

STAGES = {f"{whose}{stage}": stage for whose in ("ours", "theirs") for stage in (1, 2, 3)}


class Recorder(t.TrainerCallback):  # type: ignore[misc]
    """Gathers the whole weights when a checkpoint is saved, to compare with."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, torch.Tensor]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen[state.global_step] = consolidate(kwargs["model"], "bf16")


def arguments(way: str, home: Path) -> t.TrainingArguments:
    more: dict[str, Any] = {}
    if way in STAGES:
        zero = {"stage": STAGES[way]}
        more["deepspeed"] = {
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
        }  # fmt: skip
    if way == "fsdp2":
        fsdp_on_cpu.initialize()
        more["fsdp"] = True
        more["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                               "state_dict_type": "SHARDED_STATE_DICT"}  # fmt: skip
    return t.TrainingArguments(
        str(home), per_device_train_batch_size=1, max_steps=4, save_steps=2, save_total_limit=1, report_to=[],
        learning_rate=1e-2, bf16=True, use_cpu=True, logging_steps=10, disable_tqdm=True, **more,
    )  # fmt: skip


def train(way: str) -> dict[str, Any]:
    torch.manual_seed(0)
    args = arguments(way, HOME / way)
    config = t.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = t.LlamaForCausalLM(config)
    data = [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(16)]
    recorder, weights = Recorder(), TrainerWeights()
    failing = TrainerWeights(dtype="bf16", directory="weights/config.json/no", on_error="log")
    trainer = t.Trainer(model, args, train_dataset=data, callbacks=[recorder, weights, failing])
    trainer.train()
    assert way != "fsdp2" or type(model).__name__.startswith("FSDP")
    unset_hf_deepspeed_config()
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        os.environ.pop(name, None)
    out: dict[str, Any] = {"failed": [str(e) for e in weights.failures.values()], "logged": len(failing.failures)}
    if not dist.is_initialized() or dist.get_rank() == 0:
        out["left"] = sorted(path.name for path in (HOME / way).glob("checkpoint-*"))
        loaded = t.AutoModelForCausalLM.from_pretrained(HOME / way / "checkpoint-4" / "weights", dtype="auto")
        wanted = recorder.seen[4]
        state = loaded.state_dict()
        out["equal"] = state.keys() == wanted.keys() and all(torch.equal(state[n], wanted[n]) for n in state)
        out["dtype"] = str(loaded.dtype)
    return out


def main() -> None:
    results: dict[str, Any] = {}
    for way in WAYS:
        try:
            results[way] = train(way)
        except BaseException:
            results[way] = traceback.format_exc()
            break
        AcceleratorState._reset_state(reset_partial_state=False)
    rank = os.environ.get("RANK", "0")
    (HOME / f"rank_{rank}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        import gloo

        gloo.end()


if __name__ == "__main__":
    main()
