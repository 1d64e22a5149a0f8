"""One mount that limits each request, read by one process and by four: `benchmarks/results_mounts.md`.

    python benchmarks/mounts.py [--rate 1] [--mbytes 2560] [--counts 0 1 2 4] [--page FILE]

The mount is tests/slow_mount.py: each request of at most 1 MiB waits 10 ms and moves `--rate` MB a second, whatever the others
do, so that the processors of this machine are not the limit. The rival is `cp` of one of eight shards. The
processes are started as srun starts them, find each other by notes beside the output, and write a local directory. It takes root.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import PYTHON, ROOT, ZCKPT, machine, remove, wait_for_all

PAGE = ROOT / "benchmarks" / "results_mounts.md"
SHARDS = 8


def write(dest: Path, mbytes: int) -> None:
    """A model of that many MB in shards, of random bf16."""
    import torch
    from safetensors.torch import save_file

    dest.mkdir()
    rows = mbytes * 1_000_000 // (SHARDS * 4 * 2 * 1024)
    for shard in range(SHARDS):
        tensors = {f"{shard}.{n}": torch.randint(0, 1 << 15, (rows, 1024), dtype=torch.int16) for n in range(4)}
        held = {name: tensor.view(torch.bfloat16) for name, tensor in tensors.items()}
        save_file(held, dest / f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors")


def timed(
    source: Path, work: Path, rate: float, commands: list[tuple[list[str], dict[str, str]]]
) -> tuple[float, float, str]:
    """Seconds of these commands together on a fresh mount of a directory, their processor seconds, and the mount's last words."""
    place = work / "mount"
    serve = [*PYTHON, str(ROOT / "tests" / "slow_mount.py"), str(source), str(place), "--rate", str(rate)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        if server.stdout.readline() != "mounted\n":
            raise SystemExit("mounts are not allowed here")
        try:
            began = time.perf_counter()
            running = [subprocess.Popen(c, env={**os.environ, **more}, cwd=ROOT) for c, more in commands]
            busy = wait_for_all(running, f"{len(commands)} on a mount")
            seconds = time.perf_counter() - began
        finally:
            server.terminate()
        return seconds, busy, server.stdout.read().strip().rpartition(" ")[2]


def main() -> None:
    """`cp`, and every number of processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1, help="MB a second of each request")
    parser.add_argument("--mbytes", type=int, default=2560)
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 1, 2, 4], help="processes; 0 is `cp`")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        work = Path(memory)
        script = (
            f"import mounts; from pathlib import Path; mounts.write(Path({str(work / 'source')!r}), {options.mbytes})"
        )
        subprocess.run([*PYTHON, "-c", script], check=True, cwd=ROOT / "benchmarks")
        nbytes = sum(path.stat().st_size for path in (work / "source").iterdir())
        load, out = os.getloadavg()[0], work / "out"
        subprocess.run([*ZCKPT, "to-bf16", str(work / "source"), str(out), "--quiet"], check=True, cwd=ROOT)
        wanted = (out / "model.safetensors").read_bytes()
        alone = 0.0
        for count in options.counts:
            remove(out)
            seen, shard = work / "mount", work / "mount" / f"model-00001-of-{SHARDS:05d}.safetensors"
            command = [*ZCKPT, "to-bf16", str(seen), str(out), "--quiet"] if count else ["cp", str(shard), str(out)]
            slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(count)}
            started = [(command, {**slurm, "SLURM_PROCID": str(n)} if count > 1 else {}) for n in range(max(count, 1))]
            seconds, busy, most = timed(work / "source", work, options.rate, started)
            alone = seconds if count == 1 else alone
            part = f"{alone / seconds:.2f}" if count else ""
            moved = nbytes if count else (work / "source" / shard.name).stat().st_size
            what = f"`zckpt to-bf16`, {count} process{'es' * (count > 1)}" if count else "`cp` of one shard"
            lines.append(f"| {what} | {seconds:.1f} | {moved / seconds / 1e6:.1f} | {part} | {most} | {busy:.1f} |")
            print(lines[-1], file=sys.stderr, flush=True)
            if count and (out / "model.safetensors").read_bytes() != wanted:
                raise SystemExit("the output is not that of the conversion of the directory itself")
    options.page.write_text(
        f"""# One mount that limits each request

By `benchmarks/mounts.py`: a mount (`tests/slow_mount.py`) where each request of at most 1 MiB waits 10 ms and moves
{options.rate:g} MB/s, however many there are. {nbytes / 1e6:.0f} MB of bf16 in {SHARDS} shards, on a fresh mount each time, to a
directory in memory; all outputs are the same bytes. {machine()}; one round; load before {load:.1f}.
Processes that others run on this machine make the start of four programs longer: at a load above 2, the row of four is too low.

| what | seconds | MB/s | times one process | requests at once | processor s |
| --- | --- | --- | --- | --- | --- |
"""
        + "\n".join(lines)
        + "\n"
    )


if __name__ == "__main__":
    main()
