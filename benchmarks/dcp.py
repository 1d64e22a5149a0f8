"""Saves of torch.distributed.checkpoint, to and fro, side by side with torch's own `format_utils`.

    python benchmarks/dcp.py [--layers 12] [--rounds 3] [--work DIR]

Two ranks write a model of GPT-2's shape, sharded as `fully_shard` does, once alone and once with the states of AdamW. Then
each conversion runs in turn with torch's: zckpt's output is durable, torch's is not; torch's holds the optimizer too.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from run import ZCKPT, remove, timed  # noqa: E402

THEIRS = [sys.executable, "-W", "ignore", "-m", "torch.distributed.checkpoint.format_utils"]
WIDTH, WORDS = 768, 32_000


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model."""
    made: dict[str, tuple[int, ...]] = {"wte.weight": (WORDS, WIDTH), "wpe.weight": (1024, WIDTH)}
    for n in range(layers):
        made |= {
            f"h.{n}.ln.weight": (WIDTH,),
            f"h.{n}.attn.weight": (WIDTH, 4 * WIDTH),
            f"h.{n}.attn.bias": (4 * WIDTH,),
        }
        made |= {f"h.{n}.up.weight": (WIDTH, 4 * WIDTH), f"h.{n}.down.weight": (4 * WIDTH, WIDTH)}
    return made


def write(work: Path, layers: int) -> None:
    """One of two ranks."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def sharded(shape: tuple[int, ...]) -> DTensor:
        rows = shape[0] // 2
        here = torch.randn(rows, *shape[1:])
        return DTensor.from_local(here, mesh, [Shard(0)], run_check=False)

    model = {name: sharded(shape) for name, shape in shapes(layers).items()}
    dcp.save({"model": model}, checkpoint_id=work / "weights")
    state = {n: {"step": torch.tensor(1.0), "exp_avg": t * 0.1, "exp_avg_sq": t * t} for n, t in model.items()}
    groups = [{"lr": 0.1, "params": list(model)}]
    dcp.save({"model": model, "optim": {"state": state, "param_groups": groups}}, checkpoint_id=work / "run")
    dist.destroy_process_group()


def in_turn(ours: list[str], theirs: list[str], outputs: list[Path], rounds: int) -> tuple[float, float, int, int]:
    """Median seconds and largest peak memory (KiB) of both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    peaks = [0, 0]
    for _ in range(rounds):
        for which, command in enumerate((ours, theirs)):
            for path in outputs:
                remove(path)
            subprocess.run(["sync"], check=True)
            took, peak = timed(command)
            seconds[which].append(took)
            peaks[which] = max(peaks[which], peak)
    return statistics.median(seconds[0]), statistics.median(seconds[1]), peaks[0], peaks[1]


def main() -> None:
    """Runs it all and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = options.work.absolute() / "dcp"
    if options.worker:
        write(work, options.layers)
        return
    remove(work)
    work.mkdir(parents=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    arguments = ["--worker", "--layers", str(options.layers), "--work", str(options.work)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, *arguments], check=True, env=environment, stderr=subprocess.DEVNULL)
    mine, other = work / "ours.bin", work / "theirs.pt"
    rows: list[tuple[str, float, float, int, int]] = []
    for name, what in (("weights", "weights alone"), ("run", "weights, of a save with AdamW's states")):
        ours = [*ZCKPT, "to-fp32", str(work / name), str(mine), "--quiet"]
        theirs = [*THEIRS, "dcp_to_torch", str(work / name), str(other)]
        rows.append((f"to one file, {what}", *in_turn(ours, theirs, [mine, other], options.rounds)))
    subprocess.run([*ZCKPT, "to-fp32", str(work / "weights"), str(mine), "--quiet"], check=True, cwd=ROOT)
    written = [work / "to", work / "from"]
    ours = [*ZCKPT, "to-dcp", str(mine), str(written[0]), "--quiet"]
    theirs = [*THEIRS, "torch_to_dcp", str(mine), str(written[1])]
    rows.append(("from one file", *in_turn(ours, theirs, written, options.rounds)))
    nbytes = mine.stat().st_size
    saved = sum(path.stat().st_size for path in (work / "run").iterdir())
    shutil.rmtree(work)

    import torch

    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{machine}; weights of {nbytes / 1e6:,.0f} MB, with AdamW's states {saved / 1e6:,.0f} MB, by 2 ranks;")
    print(f"medians of {options.rounds} rounds in turn.\n")
    print("| what | zckpt, s | torch, s | ratio | peak of zckpt | peak of torch |\n|---|---|---|---|---|---|")
    for what, a, b, peak, their_peak in rows:
        print(f"| {what} | {a:.2f} | {b:.2f} | **{a / b:.2f}** | {peak >> 10:,} MiB | {their_peak >> 10:,} MiB |")


if __name__ == "__main__":
    main()
