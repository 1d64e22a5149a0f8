"""The trainer on CPU: model-state memory per rank against the ZeRO paper, step time side by side with DeepSpeed.

    python benchmarks/trainer.py [--steps N] [--world N]

Memory: bytes of parameters, gradients and optimizer states that a rank holds, the largest at any moment of a step, counted on
the tensors themselves. The paper's formula (mixed precision Adam, P parameters, N ranks): stage 0: 16 P, 1: 4 P + 12 P / N,
2: 2 P + 14 P / N, 3: 16 P / N. Stage 2 reduces the model in three parts here (`reduce_bucket_size`): DeepSpeed's
default, half a billion parameters, is all of so small a model.
Time: both engines train the same model on the same data in the same processes, turn by turn; medians of a step, of rank 0,
and processor time of all ranks, which other work on the machine disturbs less.
Loads: processor time of all ranks to load a checkpoint of the engine's own; the first, and the median of four more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FORMULAS = {
    0: lambda p, n: 16 * p,
    1: lambda p, n: 4 * p + 12 * p / n,
    2: lambda p, n: 2 * p + 14 * p / n,
    3: lambda p, n: 16 * p / n,
}


def main() -> None:
    """Launches the ranks and prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.steps)
        return
    out = Path(os.environ.get("TMPDIR", "/tmp")) / f"zckpt-trainer-{os.getpid()}.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.world}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launcher, __file__, "--worker", str(out), "--steps", str(options.steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not out.exists():
        sys.exit(done.stdout + done.stderr)
    found = json.loads(out.read_text())
    out.unlink()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {options.world} ranks, {found['versions']}"
    )
    print(f"\n{found['numel']:,} parameters, bf16\n")
    print("| stage | model states per rank | the paper's formula | ratio |\n|---|---|---|---|")
    for stage, measured in found["memory"].items():
        formula = FORMULAS[int(stage)](found["numel"], options.world)
        print(f"| {stage} | {measured / 2**20:.2f} MiB | {formula / 2**20:.2f} MiB | **{measured / formula:.2f}** |")
    print(
        "\n| stage | precision | zckpt, s per step | DeepSpeed | ratio | processor time of all ranks | DeepSpeed | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, figures in found["time"].items():
        cells = [f"{ours:.3f} | {theirs:.3f} | **{ours / theirs:.2f}**" for ours, theirs in figures]
        print("| " + " | ".join([*name.split(":"), *cells]) + " |")
    print("\n| stage | load | zckpt, processor time of all ranks | DeepSpeed | ratio |\n|---|---|---|---|---|")
    for stage, engines in found["loads"].items():
        for name, ours, theirs in zip(("first", "later"), *engines, strict=True):
            print(f"| {stage} | {name} | {ours:.3f} | {theirs:.3f} | **{ours / theirs:.2f}** |")
    print(f"\nLoad of the machine, these ranks among it: {found['load'][0]:.1f} before, {found['load'][1]:.1f} after.")


def work(out: str, steps: int) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    import deepspeed
    import torch
    import torch.distributed as dist

    from zckpt import runtime

    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    import deepspeed_on_cpu

    deepspeed_on_cpu.initialize()
    found: dict[str, Any] = {"memory": {}, "time": {}, "loads": {}}
    found["versions"] = f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}"
    found["numel"] = sum(p.numel() for p in model().parameters())
    bucket = found["numel"] * 2 // 5
    for stage in range(4):
        found["memory"][stage] = memory(runtime.initialize, stage, bucket)
    load = os.getloadavg()[0]
    for stage, title, asked in (
        (0, "0", None),
        (1, "1", None),
        (2, "2", None),
        (2, "2, in three parts", bucket),
        (3, "3", None),
    ):
        for precision in ("fp32", "bf16"):
            engines = [make(module.initialize, stage, precision, asked) for module in (runtime, deepspeed)]
            found["time"][f"{title}:{precision}"] = race(engines, steps)
    found["load"] = load, os.getloadavg()[0]
    for stage in (2, 3):
        found["loads"][stage] = [loads(module.initialize, stage, f"{out}-{stage}") for module in (runtime, deepspeed)]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def race(engines: Sequence[Any], steps: int) -> list[list[float]]:
    """Medians of a step: seconds of rank 0, by engine, and processor seconds of all ranks."""
    import torch
    import torch.distributed as dist

    wall: list[list[float]] = [[] for _ in engines]
    busy: list[list[float]] = [[] for _ in engines]
    turns = list(enumerate(engines))
    for step in range(steps + 2):
        for number, engine in turns[:: 1 if step % 2 else -1]:
            dist.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            train(engine, step)
            worked = time.process_time() - worked
            dist.barrier()
            wall[number].append(time.perf_counter() - begin)
            busy[number].append(worked)
    everyone = torch.tensor([statistics.median(seconds[2:]) for seconds in busy])
    dist.all_reduce(everyone)
    return [[statistics.median(seconds[2:]) for seconds in wall], everyone.tolist()]


def loads(initialize: Any, stage: int, home: str) -> list[float]:
    """Processor seconds of all ranks: of the first load, and the median of four more."""
    import torch
    import torch.distributed as dist

    engine = make(initialize, stage, "bf16")
    train(engine, 0)
    engine.save_checkpoint(home)
    busy = []
    for _ in range(5):
        dist.barrier()
        began = time.process_time()
        engine.load_checkpoint(home)
        busy.append(time.process_time() - began)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(home)
    everyone = torch.tensor([busy[0], statistics.median(busy[1:])])
    dist.all_reduce(everyone)
    return everyone.tolist()


def model(width: int = 128, blocks: int = 16) -> Any:
    """A small transformer with a language model's head."""
    import torch
    from torch import nn

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(512, width)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(blocks)
            )
            self.head = nn.Linear(width, 512, bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.head(x).float()
            return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 512), tokens[:, 1:].reshape(-1))

    torch.manual_seed(0)
    return LanguageModel()


def make(initialize: Any, stage: int, precision: str, bucket: int | None = None) -> Any:
    """An engine."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **({"reduce_bucket_size": bucket} if bucket else {})},
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    whole = model()
    return initialize(model=whole, model_parameters=list(whole.parameters()), config=config)[0]


def train(engine: Any, step: int) -> None:
    """One step."""
    import torch

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 512, (2, 64), generator=generator)
    engine.backward(engine(tokens))
    engine.step()


def memory(initialize: Any, stage: int, bucket: int) -> int:
    """The most bytes of parameters, gradients and optimizer states at any moment of a step."""
    engine = make(initialize, stage, "bf16", bucket)
    train(engine, 0)
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, held_bytes(engine))

    for module in engine.module.modules():
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    engine.optimizer.register_step_pre_hook(look)
    engine.optimizer.register_step_post_hook(look)
    train(engine, 1)
    look()
    return most


def held_bytes(engine: Any) -> int:
    """Bytes of the distinct storages of parameters, gradients and optimizer states."""
    import torch
    from torch.distributed.tensor import DTensor

    tensors: list[Any] = []
    for held in engine.sharded.parameters:
        tensors += [held.weight, held.weight.grad, held.master, None if held.master is None else held.master.grad]
        for module, name in held.holders:
            registered = module._parameters[name]
            tensors += [registered, None if registered is None else registered.grad]
    for module in engine.module.modules():
        for group in getattr(getattr(module, "_get_fsdp_state", lambda: None)(), "_fsdp_param_groups", ()):
            for part in group.fsdp_params:
                tensors += [*part.all_gather_outputs, part.unsharded_accumulated_grad]
                tensors.append(getattr(getattr(part, "_unsharded_param", None), "grad", None))
    for state in engine.optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    main()
