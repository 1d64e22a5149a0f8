"""What the trainer and live models do on a GPU, checked and measured; `make gpu-check` runs it.

    python benchmarks/gpu_check.py [--ranks N] [--size BYTES] [--only NAME ...] [--dir DIR] [--json FILE]
    python benchmarks/gpu_check.py --cpu --ranks 2     # the same on CPUs, with a small model: that all of it runs

One rank per GPU, or with --ranks more that share them. Each row is printed when it is found. Exit status 0: everything is right.
1: something is wrong, and the table says what. 2: it could not be run. Training is held against a loop in plain torch on the same
device, times and memory against plain `fully_shard` and, where it is installed, DeepSpeed; the estimate of memory against what a
Llama takes; live export and loading against copies between the device and page-locked memory (the link) and against writes to the
same directory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_bench import ADAMW, STEPS, TOLERANCES, Bench, Row, config, distance, start, train
from gpu_libraries import check_deepspeed, check_estimate, check_libraries, check_speed


def main() -> int:
    """Starts one process per GPU, prints what rank 0 found, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="on CPUs")
    parser.add_argument("--ranks", type=int, help="processes; as many as there are GPUs")
    parser.add_argument(
        "--size", type=int, help="bytes of the weights of live export and loading; 4 GiB, on CPUs 32 MiB"
    )
    parser.add_argument("--only", nargs="+", choices=[*CHECKS], help="these checks")
    parser.add_argument("--dir", help="where files are written; a temporary directory")
    parser.add_argument("--json", help="a file for the rows, as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        import torch

        import zckpt.runtime  # noqa: F401
    except ImportError as error:
        print(f"error: {error}\n  fix       Run `make gpu-check`, which installs what is missing.", file=sys.stderr)
        return 2
    if options.worker:
        work(options)
        return 0
    seen = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if not seen and not options.cpu:
        print("error: torch sees no GPU\n  fix       Pass --cpu to run everything on CPUs.", file=sys.stderr)
        return 2
    options.ranks = options.ranks or (seen if not options.cpu else 2)
    home = Path(tempfile.mkdtemp(prefix="zckpt-gpu-check-", dir=options.dir))
    try:
        rows = _launched(options, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if rows is None:
        return 2
    wrong = sum(row[1] == "WRONG" for row in rows)
    print(
        f"\n{sum(row[1] == 'right' for row in rows)} right, {wrong} wrong, {sum(row[1] == 'left out' for row in rows)} left out."
    )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(wrong > 0)


def _launched(options: argparse.Namespace, home: Path) -> list[Row] | None:
    """The rows that rank 0 wrote; what came before a process ended, if one did; None without any."""
    out = home / "rows.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
    passed = ["--worker", str(home), *(["--cpu"] if options.cpu else [])]
    passed += ["--size", str(options.size or (32 << 20 if options.cpu else 4 << 30))]
    passed += ["--only", *(options.only or CHECKS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [_tree(), os.environ.get("PYTHONPATH")]))}
    environment.setdefault("OMP_NUM_THREADS", "1" if options.cpu else "4")
    if options.cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with (home / "stderr").open("w+") as said:
        done = subprocess.run([*launcher, __file__, *passed], env=environment, stderr=said, check=False)
        said.seek(0)
        last = (said.read().strip() or "no message").splitlines()[-30:]
    rows: list[Row] = [tuple(row) for row in json.loads(out.read_text())] if out.exists() else []
    if done.returncode:
        print("\n".join(last), file=sys.stderr)
        return [*rows, ("the processes", "WRONG", f"ended with status {done.returncode}")] if rows else None
    return rows


def _tree() -> str:
    """Where the package is, for the processes; nothing if it is installed."""
    return "" if __import__("zckpt").__spec__.origin.find("site-packages") >= 0 else str(Path(__file__).parent.parent)


def work(options: argparse.Namespace) -> None:
    """One rank: each check by itself, and an error in one is a row."""
    import torch
    import torch.distributed as dist

    from zckpt.base.errors import UnsupportedError
    from zckpt.runtime.world import join_world

    warnings.simplefilter("ignore")
    if not options.cpu and int(os.environ["WORLD_SIZE"]) > torch.accelerator.device_count():
        # NCCL refuses two ranks of one host on one GPU, so it is told that each has a host of its own.
        os.environ.setdefault("NCCL_HOSTID", f"rank {os.environ['RANK']}")
    world = join_world()
    sizes = (32, 2, 32) if options.cpu else (512, 4, 256)
    bench = Bench(world.device, Path(options.worker), options.size, *sizes)
    name = "CPU" if options.cpu else torch.get_device_module(world.device).get_device_name()
    bench.add("check", "result", "figures")
    bench.add("---", "---", "---")
    bench.add("machine", "right", f"{world.size} x {name}, torch {torch.__version__}, {dist.get_backend()}")
    for check in options.only:
        before = len(bench.rows)
        try:
            CHECKS[check](bench)
        except UnsupportedError as error:
            bench.add(check, "left out", str(error).splitlines()[0].replace("|", "/"))
        except Exception as error:
            traceback.print_exc()
            bench.add(check, "WRONG", f"{type(error).__name__}: {error}".splitlines()[0][:300].replace("|", "/"))
        fine = torch.tensor(float(all(row[1] != "WRONG" for row in bench.rows[before:])), device=world.device)
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        if not fine.item() and all(row[1] != "WRONG" for row in bench.rows[before:]):
            bench.add(check, "WRONG", "on another rank")
        if world.rank == 0:
            (bench.home / "rows.json").write_text(json.dumps(bench.rows))
    dist.barrier()
    dist.destroy_process_group()


def plain_losses(bench: Bench) -> list[float]:
    """Of the same run in plain torch, fp32."""
    import torch

    model = bench.model().to(bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, "betas": tuple(ADAMW["betas"])})
    losses = []
    for tokens in bench.batches(STEPS):
        loss = model(tokens, labels=tokens)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_training(bench: Bench) -> None:
    """Losses at each stage and precision, on the device and with parts in host memory."""
    expected = plain_losses(bench)
    for precision, tolerance in TOLERANCES.items():
        for stage in range(4):
            _compare(bench, f"stage {stage}, {precision}", config(stage, precision), expected, tolerance)


def check_offload(bench: Bench) -> None:
    """The same with optimizer, or all parts, in host memory."""
    expected = plain_losses(bench)
    for stage, what in ((2, ["offload_optimizer"]), (3, ["offload_optimizer", "offload_param"])):
        for precision in ("fp32", "bf16"):
            zero = {name: {"device": "cpu", "pin_memory": True} for name in what}
            settings = config(stage, precision, zero=zero)
            _compare(
                bench,
                f"stage {stage}, {precision}, {' and '.join(what)}: cpu",
                settings,
                expected,
                TOLERANCES[precision],
            )


def check_nvme(bench: Bench) -> None:
    """The same with optimizer, or all parts, in files."""
    expected = plain_losses(bench)
    for stage, what in ((2, ["offload_optimizer"]), (3, ["offload_optimizer", "offload_param"])):
        zero = {name: {"device": "nvme", "nvme_path": str(bench.home)} for name in what}
        _compare(
            bench, f"stage {stage}, bf16, {' and '.join(what)}: nvme", config(stage, "bf16", zero=zero), expected, 3e-2
        )


def _compare(bench: Bench, what: str, settings: dict[str, Any], expected: list[float], tolerance: float) -> None:
    before = bench.held()
    engine = start(bench, settings)
    losses, peak = bench.peak(lambda: train(engine, bench.batches(STEPS)), before)
    far = distance(losses, expected)
    right = far <= tolerance and engine.skipped_steps == 0 and losses[-1] < losses[0]
    memory = f", {peak / 2**20:,.0f} MiB at most" if peak else ""
    bench.add(
        what, "right" if right else "WRONG", f"losses within {far:.1e} of plain torch (limit {tolerance:.0e}){memory}"
    )


def check_saves(bench: Bench) -> None:
    """A run that continues from a save is the uninterrupted one bit for bit; also of a save in the background."""
    for stage in (0, 2, 3):
        for precision, background in (("bf16", False), ("fp16", False), ("bf16", True)):
            settings = config(stage, precision, checkpoint={"async_save": background})
            run = bench.home / f"run {stage} {precision} {background}"
            engine = start(bench, settings)
            train(engine, bench.batches(3))
            bench.sync()
            began = time.perf_counter()
            engine.save_checkpoint(run)
            returned = time.perf_counter() - began
            expected = train(engine, bench.batches(3, 3))
            engine.wait_for_checkpoint()
            again = start(bench, settings)
            again.load_checkpoint(run)
            same = train(again, bench.batches(3, 3)) == expected
            figures = f"continues bit for bit; save_checkpoint returned after {returned:.2f} s"
            what = f"save and resume, stage {stage}, {precision}{', in the background' if background else ''}"
            bench.add(what, "right" if same else "WRONG", figures if same else "other losses after the resume")
            shutil.rmtree(run, ignore_errors=True)


def check_live(bench: Bench) -> None:
    """Weights out of a model on the device into files, and back into it: every byte, and how fast."""
    import torch
    import torch.distributed as dist

    import zckpt
    from zckpt import live

    rank, size = dist.get_rank(), dist.get_world_size()
    rows = max(1, bench.size // 4 // 4 // 4096)
    torch.manual_seed(11)
    model = torch.nn.Module()
    for number in range(4):
        weight = torch.randn(rows, 4096, device=bench.device)
        model.register_parameter(f"w{number}", torch.nn.Parameter(weight))
    model.register_parameter("odd", torch.nn.Parameter(torch.randn(300, 77, device=bench.device).t()))
    total = sum(p.numel() for p in model.parameters())
    link = _link(bench)
    out = [bench.home / "live"]
    for dtype, itemsize in (("fp32", 4), ("bf16", 2)):
        job = lambda dtype=dtype: live.save_pretrained(model, out[0], dtype)  # noqa: E731
        job()
        taken = bench.seconds(job)
        held = total * 4 / taken / 1e9
        disk = _disk(bench, total * itemsize) if rank == 0 else 0.0
        truth = {
            name: p.detach().to(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype]))
            for name, p in model.named_parameters()
        }
        written = zckpt.open_checkpoint(str(out[0]))
        same = set(written) == set(truth) and all(
            torch.equal(
                torch.as_tensor(_tensor(written, name)).view(torch.uint8), p.cpu().contiguous().view(torch.uint8)
            )
            for name, p in truth.items()
        )
        figures = (
            f"{held:.2f} GB/s of the device's memory; link {link[0]:.2f}; a plain write of these files {disk:.2f} GB/s"
        )
        bench.add(f"live export, {dtype}", "right" if same else "WRONG", figures if same else "other bytes")
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        load = lambda: zckpt.load_state_dict_from_zero_checkpoint(model, str(out[0]))  # noqa: E731
        load()
        bench.sync()
        same = all(torch.equal(p, truth[name].to(p.dtype)) for name, p in model.named_parameters())
        taken = bench.seconds(load)
        figures = f"{total * 4 / taken / 1e9:.2f} GB/s into the device's memory; link {link[1]:.2f}"
        bench.add(f"drop-in load, {dtype}", "right" if same else "WRONG", figures if same else "other numbers")
    if size == 1 or rank == 0:
        shutil.rmtree(out[0], ignore_errors=True)


def _tensor(catalog: Any, name: str) -> Any:
    found = catalog[name]
    return found.contiguous() if hasattr(found, "contiguous") else found


def _link(bench: Bench) -> tuple[float, float]:
    """GB/s from the device into page-locked memory, and back."""
    import torch

    from zckpt.live.device import host_buffer

    host = host_buffer(min(bench.size, 1 << 30), bench.device)
    there = torch.empty(host.numel(), dtype=torch.uint8, device=bench.device)
    host.copy_(there)
    out = bench.seconds(lambda: host.copy_(there, non_blocking=True))
    back = bench.seconds(lambda: there.copy_(host, non_blocking=True))
    return host.numel() / out / 1e9, host.numel() / back / 1e9


def _disk(bench: Bench, nbytes: int) -> float:
    """GB/s of one process that writes so many bytes to a new file, and syncs it."""
    data = os.urandom(min(nbytes, 8 << 20))
    path = bench.home / "plain write"
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(max(1, nbytes // len(data))):
            file.write(data)
        os.fsync(file.fileno())
    taken = time.perf_counter() - began
    path.unlink()
    return nbytes / taken / 1e9


def check_export(bench: Bench) -> None:
    """Weights of a run, sharded or with parts in host memory, without a checkpoint: those that a save of the same moment has."""
    import torch
    import torch.distributed as dist

    import zckpt

    for stage, zero in ((0, {}), (2, {}), (3, {}), (3, {"offload_optimizer": {"device": "cpu"}})):
        engine = start(bench, config(stage, "bf16", zero=zero))
        train(engine, bench.batches(2))
        weights, run = bench.home / "weights", bench.home / "run"
        engine.save_16bit_model(weights)
        engine.save_checkpoint(run)
        a, b = zckpt.open_checkpoint(str(weights)), zckpt.open_checkpoint(str(run))
        same = all(
            torch.equal(torch.as_tensor(_tensor(a, n)).float(), torch.as_tensor(_tensor(b, n)).bfloat16().float())
            for n in a
        )
        what = f"save_16bit_model, stage {stage}{', offloaded' if zero else ''}"
        bench.add(
            what, "right" if same and len(a) else "WRONG", f"{len(a)} tensors, as in a checkpoint of the same moment"
        )
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(weights)
            shutil.rmtree(run)
        dist.barrier()


CHECKS: dict[str, Callable[[Bench], None]] = {
    "training": check_training,
    "offload": check_offload,
    "nvme": check_nvme,
    "saves": check_saves,
    "export": check_export,
    "live": check_live,
    "speed": check_speed,
    "estimate": check_estimate,
    "deepspeed": check_deepspeed,
    "libraries": check_libraries,
}

if __name__ == "__main__":
    sys.exit(main())
