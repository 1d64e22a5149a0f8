"""Checkpoints and live weights on CPU: seconds to save and to load, side by side with DeepSpeed and with `cp` of the same bytes.

    python benchmarks/checkpoints.py [--width N] [--world N] [--rounds N] [--dir DIR]

Both engines hold the same model and states in the same processes and take turns; medians, of the slowest rank. zckpt's saves are
synced; DeepSpeed's are not, so it is measured as it is and with its files synced afterwards, and `cp` is followed by a sync.
Before a load, and before its `cp`, the files are dropped from the page cache.
Live weights: `save_16bit_model` of both, which at stage 3 DeepSpeed gathers; and of a model under plain `fully_shard`
`zckpt.live.save_pretrained` beside torch's own full state dict, saved by rank 0. Their `cp` has its source in the page cache, as
a live save has in memory.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from limits import Limits, limits

CASES = ((1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "bf16"))


def main() -> None:
    """Launches the ranks and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=os.environ.get("TMPDIR", "/tmp"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Path(options.worker), options.width, options.rounds)
        return
    home = Path(options.dir) / f"zckpt-checkpoints-{os.getpid()}"
    home.mkdir()
    try:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.world}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        arguments = ["--worker", str(home), "--width", str(options.width), "--rounds", str(options.rounds)]
        command = [*launcher, __file__, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        show(json.loads((home / "found.json").read_text()), options.world, limits(home))
    finally:
        shutil.rmtree(home, ignore_errors=True)


def show(found: dict[str, Any], world: int, able: Limits) -> None:
    """Prints the tables; what is loaded comes from the disk, and live weights from memory."""
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {world} ranks, {found['versions']}, "
        f"{found['numel']:,} parameters\n"
    )
    print(
        "| stage | | MB | zckpt, s | DeepSpeed | and sync | cp and sync | MB/s of zckpt | to DeepSpeed, synced | to cp | "
        "part of the limit |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, case in found["cases"].items():
        for what in ("save", "load"):
            ours, theirs, synced, cp = (case[what].get(key) for key in ("zckpt", "deepspeed", "synced", "cp"))
            rival = synced or theirs
            least = able.least(written=case["bytes"]) if what == "save" else able.least(read=case["bytes"])
            print(
                f"| {name} | {what} | {case['bytes'] / 1e6:,.0f} | {ours:.2f} | {theirs:.2f} | "
                f"{f'{synced:.2f}' if synced else ''} | {cp:.2f} | {case['bytes'] / ours / 1e6:,.0f} | "
                f"**{ours / rival:.2f}** | **{ours / cp:.2f}** | {least / ours:.0%} |"
            )
    print(
        "\n| live weights | MB | zckpt, s | the other | and sync | cp and sync | to the other, synced | to cp | "
        "part of the limit |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, case in found["live"].items():
        ours, theirs, synced, cp = (case[key] for key in ("zckpt", "other", "synced", "cp"))
        cells = f"{ours:.2f} | {theirs:.2f} | {synced:.2f} | {cp:.2f} | **{ours / synced:.2f}** | **{ours / cp:.2f}**"
        least = able.least(written=case["bytes"], cached=case["bytes"])
        print(f"| {name} | {case['bytes'] / 1e6:,.0f} | {cells} | {least / ours:.0%} |")
    print(f"\nMemory beside the run while saving, the most of any rank: {found['memory']:.0f} MiB")


def work(home: Path, width: int, rounds: int) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    import deepspeed
    import torch
    import torch.distributed as dist

    from zckpt import runtime

    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    import deepspeed_on_cpu

    deepspeed_on_cpu.initialize()
    rank = dist.get_rank()
    found: dict[str, Any] = {"cases": {}, "live": {}, "memory": 0.0}
    found["versions"] = f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}"

    for stage, precision in CASES:
        engines = {"zckpt": make(runtime.initialize, stage, precision, width)}
        engines["deepspeed"] = make(deepspeed.initialize, stage, precision, width)
        found["numel"] = sum(held.shape.numel() for held in engines["zckpt"].sharded.parameters)
        times: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}}
        for number in range(rounds + 1):
            for name, engine in engines.items():
                where = home / f"{name}{number}"
                before = memory("VmRSS", fresh=True)
                took = timed(lambda engine=engine, where=where: engine.save_checkpoint(str(where), tag="t"))
                if name == "zckpt":
                    found["memory"] = max(found["memory"], most(memory("VmHWM") - before))
                times["save"].setdefault(name, []).append(took)
                if name == "deepspeed":
                    times["save"].setdefault("synced", []).append(
                        took + timed(on_rank_0(lambda where=where: sync(where)))
                    )
            place = home / f"zckpt{number}"
            timed(on_rank_0(lambda: forget(home)))
            copied = timed(on_rank_0(lambda place=place: copy(place, home / "copy")))
            for what in times.values():
                what.setdefault("cp", []).append(copied)
            for name, engine in engines.items():
                timed(on_rank_0(lambda: forget(home)))
                where = home / f"{name}{number}"
                times["load"].setdefault(name, []).append(
                    timed(lambda engine=engine, where=where: engine.load_checkpoint(str(where), tag="t"))
                )
            if rank == 0:
                nbytes = sum(path.stat().st_size for path in (place / "t").iterdir())
                for path in home.iterdir():
                    shutil.rmtree(path)
            dist.barrier()
        case = {what: {key: statistics.median(t[1:]) for key, t in kinds.items()} for what, kinds in times.items()}
        if rank == 0:
            found["cases"][f"{stage} {precision}"] = {**case, "bytes": nbytes}
        found["live"][f"{stage} {precision}"] = race(
            home,
            lambda where, engine=engines["zckpt"]: engine.save_16bit_model(where),
            lambda where, engine=engines["deepspeed"]: engine.save_16bit_model(where),
            rounds,
        )
        engines["deepspeed"].destroy()
        del engines
    found["live"]["`fully_shard`, fp32 to bf16"] = plain(home, width, rounds)
    found["live"]["`fully_shard`, a larger one"] = plain(home, 8 * width // 3, rounds)
    if rank == 0:
        (home / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def timed(job: Callable[[], Any]) -> float:
    """Seconds of the slowest rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    job()
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def on_rank_0(job: Callable[[], None]) -> Callable[[], None]:
    import torch.distributed as dist

    return job if dist.get_rank() == 0 else lambda: None


def race(home: Path, ours: Callable[[str], Any], other: Callable[[str], Any], rounds: int) -> dict[str, float]:
    """Seconds to write whole weights into a directory: medians of two writers, of one of them synced, and of `cp`."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {"zckpt": [], "other": [], "synced": [], "cp": []}
    nbytes = 0
    for _ in range(rounds + 1):
        times["zckpt"].append(timed(lambda: ours(str(home / "ours"))))
        timed(on_rank_0(lambda: warm(home / "ours")))
        times["cp"].append(timed(on_rank_0(lambda: copy(home / "ours", home / "copy"))))
        times["other"].append(timed(lambda: other(str(home / "other"))))
        times["synced"].append(times["other"][-1] + timed(on_rank_0(lambda: sync(home / "other"))))
        if dist.get_rank() == 0:
            nbytes = sum(path.stat().st_size for path in files(home / "ours"))
            for path in home.iterdir():
                shutil.rmtree(path)
        dist.barrier()
    return {**{name: statistics.median(seconds[1:]) for name, seconds in times.items()}, "bytes": nbytes}


def plain(home: Path, width: int, rounds: int) -> dict[str, float]:
    """A model under `fully_shard`, without any engine."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    from zckpt import live

    model = nn.Sequential(*(fully_shard(nn.Linear(width, width)) for _ in range(16)))
    fully_shard(model)

    def gathered(where: str) -> None:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            Path(where).mkdir()
            torch.save({name: tensor.bfloat16() for name, tensor in state.items()}, f"{where}/pytorch_model.bin")

    return race(home, lambda where: live.save_pretrained(model, where, "bf16"), gathered, rounds)


def make(initialize: Any, stage: int, precision: str, width: int, layers: int = 16) -> Any:
    """An engine after one step."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine = initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    engine.backward(engine(torch.ones(1, width, dtype=dtype)).float().mean())
    engine.step()
    return engine


def memory(key: str, *, fresh: bool = False) -> float:
    """A figure of this process in MiB; `fresh` lets its peak begin anew."""
    if fresh:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":"))


def most(value: float) -> float:
    import torch
    import torch.distributed as dist

    found = torch.tensor(value)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def sync(directory: Path) -> None:
    for path in files(directory):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def warm(directory: Path) -> None:
    """Reads files into the page cache."""
    for path in files(directory):
        path.read_bytes()


def forget(directory: Path) -> None:
    """Drops files from the page cache."""
    sync(directory)
    for path in files(directory):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    sync(target)


if __name__ == "__main__":
    main()
