"""transformers' Trainer and accelerate's Accelerator as users write them, on this engine or on DeepSpeed itself.

Arguments: a directory, and `zckpt` (under `zckpt run`) or `deepspeed`. Both are started at the same time, on ranks of their own.
Each trains; when both have saved, each resumes from what the other has saved.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed_on_cpu
import gloo
from ending import share_imports
from hangs import HANG_S

HOME, ENGINE = Path(sys.argv[1]), (*sys.argv, "deepspeed")[2]
STEPS, SAVED = 4, 2
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64,
)  # fmt: skip


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in tokens]


def ds_config(stage: int, *, optimizer: bool = True) -> dict[str, Any]:
    """As transformers' documentation has it: all that the Trainer knows is "auto"."""
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto") | {"torch_adam": True}
    schedule = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    buckets = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, **dict.fromkeys(buckets, "auto")}
    config = {**dict.fromkeys(sizes, "auto"), "zero_optimization": zero, "bf16": {"enabled": "auto"}}
    if optimizer:
        config["optimizer"] = {"type": "AdamW", "params": params}
        config["scheduler"] = {"type": "WarmupLR", "params": schedule}
    return config


def trainer_of(out: Path, config: dict[str, Any] | None, *, lora: bool = False, **more: Any) -> Trainer:
    usual: dict[str, Any] = {
        "deepspeed": config, "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "save_steps": SAVED, "eval_steps": SAVED, "eval_strategy": "steps", "logging_steps": 1, "learning_rate": 5e-3,
        "warmup_steps": 2, "max_grad_norm": 0.5, "seed": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "log_level": "error", "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }  # fmt: skip
    args = TrainingArguments(str(out), **{**usual, **more})
    torch.manual_seed(7)
    model = LlamaForCausalLM(copy.deepcopy(CONFIG)) if lora else AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG))
    if lora:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    return Trainer(model, args, train_dataset=samples(32), eval_dataset=samples(8))


def history(trainer: Trainer) -> list[list[float]]:
    """Step, loss, norm of gradients and learning rate of each step of this run; then those of evaluations."""
    log = trainer.state.log_history
    steps = [[one["step"], one["loss"], one.get("grad_norm"), one["learning_rate"]] for one in log if "loss" in one]
    return steps + [[one["step"], one["eval_loss"]] for one in log if "eval_loss" in one]


def train(
    out: Path, config: dict[str, Any] | None, resume: Path | None = None, *, save_final: bool = True, **more: Any
) -> dict[str, Any]:
    """A run, or the end of one, with the worst checkpoint loaded at the end, as this metric calls it the best."""
    trainer = trainer_of(out, config, **more)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    facts = {"history": history(trainer), "best": trainer.evaluate()["eval_loss"], "steps": trainer.state.global_step}
    if save_final:
        trainer.save_model(str(out / "final"))
    dist.barrier()
    return facts


def reloaded(out: Path, *, lora: bool = False) -> float:
    """The evaluation loss of what `save_model` wrote, by transformers and peft alone; each rank by itself."""
    unset_hf_deepspeed_config()
    if lora:
        torch.manual_seed(7)
        model: Any = PeftModel.from_pretrained(LlamaForCausalLM(copy.deepcopy(CONFIG)), str(out / "final"))
    else:
        model = LlamaForCausalLM.from_pretrained(str(out / "final"), dtype=torch.float32)
    tokens = torch.stack([one["input_ids"] for one in samples(8)])
    return model.eval()(input_ids=tokens, labels=tokens).loss.item()


def accelerated(out: Path, stage: int, *, rows: int = 2, load: Path | None = None, **config: Any) -> dict[str, Any]:
    """A loop of one's own: micro batches by `accumulate`, clipping, a state that is saved and loaded again, or only loaded."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState(cpu=True)  # accelerate counts the ranks of CPUs only when it is asked to
    offload = dict.fromkeys(("offload_param_device", "offload_optimizer_device"), "none")
    save = {"zero3_init_flag": False, "zero3_save_16bit_model": True}
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=0.5, **offload, **save)
    plugin.deepspeed_config.update(config)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(7)
    model = LlamaForCausalLM(copy.deepcopy(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader([one["input_ids"] for one in samples(32)], batch_size=rows)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    def loop(count: int) -> list[list[float]]:
        seen = []
        for tokens, _ in zip(loader, range(count), strict=False):
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean").item()
            seen.append([mean, *([float(norm), schedule.get_last_lr()[0]] if norm is not None else [])])
        return seen

    if load is not None:
        accelerator.load_state(str(load))
        return {"again": loop(4)}
    first = loop(4)
    accelerator.save_state(str(out))
    second = loop(4)
    whole = accelerator.get_state_dict(model)
    shapes = accelerator.is_main_process and {name: list(value.shape) for name, value in whole.items()}
    accelerator.load_state(str(out))
    return {
        "losses": first + second, "again": loop(4), "shapes": shapes, "kind": type(accelerator.unwrap_model(model)).__name__,
    }  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    share_imports()  # a Trainer looks for garbage again and again
    if ENGINE == "deepspeed":
        deepspeed_on_cpu.initialize()
    results: dict[str, Any] = {}
    mine, theirs = (HOME / name for name in ((ENGINE, "deepspeed") if ENGINE == "zckpt" else (ENGINE, "zckpt")))
    kinds: dict[str, dict[str, Any]] = {f"stage {stage}": {"config": ds_config(stage)} for stage in range(4)}
    kinds["LoRA 3"] = {"config": ds_config(3), "lora": True}
    for name, kind in kinds.items():
        results[name] = train(mine / name, **kind)
    (mine / f"saved_{dist.get_rank()}").touch()
    if ENGINE == "zckpt":
        for name, kind in kinds.items():
            results[f"{name} weights"] = reloaded(mine / name, lora="lora" in kind)
        kind = {"config": ds_config(3, optimizer=False), "bf16": True}
        results["bf16, the Trainer's optimizer"] = train(mine / "bf16", **kind)
        results["bf16, the Trainer's optimizer, resumed"] = train(
            mine / "bf16 again", resume=mine / "bf16" / f"checkpoint-{SAVED}", **kind
        )
    for stage in (2, 3):
        results[f"accelerate {stage}"] = accelerated(mine / f"accelerate {stage}", stage)
    until = time.monotonic() + HANG_S
    while len(list(theirs.glob("saved_*"))) < dist.get_world_size():
        if time.monotonic() > until:
            raise TimeoutError("the other engine has not saved")
        time.sleep(0.1)
    for name, kind in kinds.items():
        results[f"{name} resumed"] = train(
            mine / f"{name} resumed", resume=theirs / name / f"checkpoint-{SAVED}", **kind
        )
    (HOME / f"{ENGINE}_{dist.get_rank()}.json").write_text(json.dumps(results))
    gloo.end()


if __name__ == "__main__":
    main()
