"""The trainer on a GPU beside other libraries: torch's `fully_shard`, DeepSpeed, and transformers' models and Trainer."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_bench import LARGE, TOLERANCES, Bench, config, distance, start, train

LLAMA = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 1024, "use_cache": False,
}  # fmt: skip


def check_speed(bench: Bench) -> None:
    """A step against plain `fully_shard` in bf16, with torch's fused AdamW: the same collectives, time and memory."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not bench.on_gpu:
        bench.add("step time", "left out", "plain fully_shard is compared on GPUs")
        return
    bench.large = True
    batches = [torch.randint(0, 64, (8, LARGE["n_positions"]), device=bench.device) for _ in range(4)]
    for stage, reshard in ((2, False), (3, True)):
        before = bench.held()
        engine = start(bench, config(stage, "bf16", gradient_clipping=0.0))
        train(engine, iter(batches))
        ours, memory = bench.peak(
            lambda engine=engine: bench.seconds(lambda: train(engine, iter(batches)), 5) / len(batches), before
        )
        engine.destroy()
        del engine
        before = bench.held()
        model = bench.model()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.transformer.h:
            fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            for tokens in batches:
                model(tokens, labels=tokens)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()

        step()
        theirs, plain = bench.peak(lambda step=step: bench.seconds(step, 5) / len(batches), before)
        del model, optimizer, step
        right = ours <= 1.25 * theirs and memory <= 1.15 * plain
        figures = (
            f"{ours * 1e3:.1f} ms, {memory / 2**20:,.0f} MiB; plain {theirs * 1e3:.1f} ms, {plain / 2**20:,.0f} MiB"
        )
        bench.add(f"step, stage {stage}, bf16", "right" if right else "WRONG", figures)
    bench.large = False


def check_deepspeed(bench: Bench) -> None:
    """The same run by DeepSpeed and here, each in a process of its own: losses, and what step, save and load take."""
    import torch.distributed as dist

    if dist.get_world_size() > 1 or importlib.util.find_spec("deepspeed") is None:
        bench.add("beside DeepSpeed", "left out", "needs one rank, and DeepSpeed installed")
        return
    script = str(Path(__file__).with_name("gpu_beside.py"))
    found = []
    for home in ("zckpt.runtime", "deepspeed"):
        command = [sys.executable, script, home, *([] if bench.on_gpu else ["--cpu"])]
        environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        if not bench.on_gpu:
            environment["DS_ACCELERATOR"] = "cpu"
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{home}: {done.stderr.strip().splitlines()[-1]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    for ours, theirs in zip(*found, strict=True):
        # At stage 0 in bf16 DeepSpeed begins with a step on gradients that are zero.
        limit = 5e-2 if ours["case"].startswith("stage 0, bf16") else TOLERANCES[ours["case"].split(", ")[1]]
        far = distance(ours["losses"], theirs["losses"])
        figures = f"losses within {far:.1e}; here and there: " + ", ".join(
            f"{what} {ours[what]:,.0f}, {theirs[what]:,.0f} {unit}"
            for what, unit in (("step", "ms"), ("memory", "MiB"), ("save", "ms"), ("first load", "ms"), ("load", "ms"))
        )
        bench.add(f"beside DeepSpeed, {ours['case']}", "right" if far <= limit else "WRONG", figures)


def check_estimate(bench: Bench) -> None:
    """What the estimate says of a Llama, and what a step takes at most."""
    import torch
    import torch.distributed as dist

    import zckpt.runtime

    if not bench.on_gpu or importlib.util.find_spec("transformers") is None:
        bench.add("estimate of memory", "left out", "needs a GPU, and transformers installed")
        return
    import transformers

    cases = [
        (stage, precision, what) for precision in ("bf16", "fp32") for stage in (0, 2, 3) for what in ("", "offload")
    ]
    cases += [(2, "bf16", "checkpointing"), (3, "bf16", "checkpointing"), (3, "fp32", "one key per query")]
    for stage, precision, what in cases:
        if (stage, what) == (0, "offload"):
            continue
        size = {**LLAMA, "num_key_value_heads": 16 if what == "one key per query" else 4}
        before = bench.held()
        with bench.device:
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
        zero = {"offload_optimizer": {"device": "cpu"}} if what == "offload" else {}
        zero |= {"offload_param": {"device": "cpu"}} if zero and stage == 3 else {}
        settings = config(stage, precision, zero=zero)
        found = zckpt.runtime.estimate(model, settings, gpus=dist.get_world_size())
        again = what == "checkpointing"
        wanted = (stage, precision, "cpu" if zero else "none", again)
        peak = next(
            c.peak.device for c in found.choices if (c.stage, c.precision, c.offload, c.checkpointing) == wanted
        )
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        engine = zckpt.runtime.initialize(model=model, config=settings)[0]
        tokens = torch.randint(0, 32000, (2, 1024), device=bench.device)

        def step(engine: Any = engine, tokens: Any = tokens) -> None:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            del loss
            engine.step()

        step()
        _, taken = bench.peak(step, before)
        engine.destroy()
        del engine, model, step
        right = 0.9 <= peak / taken <= 1.1
        figures = f"{taken / 2**20:,.0f} MiB, estimated {peak / 2**20:,.0f} ({peak / taken:.2f})"
        bench.add(f"memory, stage {stage}, {precision}{what and ', '}{what}", "right" if right else "WRONG", figures)


def check_libraries(bench: Bench) -> None:
    """transformers' Trainer by DeepSpeed's config, on this engine: losses fall, and the last save is converted."""
    import torch

    import zckpt
    import zckpt.runtime
    from zckpt.runtime.engine import Engine

    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
        bench.add("transformers' Trainer", "left out", "needs transformers and accelerate")
        return
    zckpt.runtime.as_deepspeed()
    import transformers as t

    size = {**LLAMA, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    samples = [{"input_ids": [(7 * i + j) % 128 for j in range(32)]} for i in range(64)]
    samples = [{**sample, "labels": sample["input_ids"]} for sample in samples]
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    settings = {**auto, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}
    torch.manual_seed(0)
    options = t.TrainingArguments(
        str(bench.home / "trainer"), deepspeed=settings, bf16=True, use_cpu=not bench.on_gpu, max_steps=6, logging_steps=1,
        learning_rate=0.01, lr_scheduler_type="constant", per_device_train_batch_size=4, save_steps=6, report_to=[],
        disable_tqdm=True, log_level="error",
    )  # fmt: skip
    model = t.LlamaForCausalLM(t.LlamaConfig(**size))
    trainer = t.Trainer(model, options, train_dataset=samples, data_collator=t.default_data_collator)
    with contextlib.redirect_stdout(sys.stderr):  # it prints each loss
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    where = {p.device.type for p in trainer.model_wrapped.module.parameters()}
    saved = zckpt.open_checkpoint(str(bench.home / "trainer" / "checkpoint-6"))
    right = (
        type(trainer.model_wrapped) is Engine and losses[-1] < losses[0] and where == {bench.device.type} and len(saved)
    )
    figures = f"transformers {t.__version__}: loss {losses[0]:.2f}, {losses[-1]:.2f} after 6 steps; saved {len(saved)} tensors"
    bench.add("transformers' Trainer, stage 3, bf16", "right" if right else "WRONG", figures)
