"""Everything claimed about speed and memory, measured side by side in one run.

    python benchmarks/run.py [--layers 48] [--rounds 3] [--work DIR] [--tmpfs DIR] [--no-deepspeed]

Each conversion runs in turn with its rival, `cp` of the same output bytes followed by `sync` of the copy (durable against
durable), round after round; medians and ratios are printed as a table. On a memory file system only the code counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ZCKPT = [sys.executable, "-m", "zckpt"]


def timed(command: list[str]) -> tuple[float, int]:
    """Wall seconds and peak memory (KiB) of a command, measured from outside."""
    seconds, usage = watched(command)
    return seconds, usage.ru_maxrss


def watched(command: list[str]) -> tuple[float, resource.struct_rusage]:
    """Wall seconds of a command, and what else the system knows of it."""
    began = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command}: {errors.decode()[-500:]}")
    return time.perf_counter() - began, usage


def write(dest: Path, stage: int, layers: int) -> Path:
    """A checkpoint, by a process of its own: a child's peak memory starts from its parent's, so this one stays small."""
    script = str(ROOT / "benchmarks" / "synth.py")
    subprocess.run([sys.executable, script, str(dest), "--stage", str(stage), "--layers", str(layers)], check=True)
    return dest


def remove(path: Path) -> None:
    """Whatever is there."""
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def against_cp(
    name: str, convert: Callable[[Path], list[str]], out: Path, rounds: int, durable: bool
) -> tuple[str, float, float, int]:
    """Medians of a conversion and of copying what it wrote, in turn."""
    ours, theirs, peaks = [], [], []
    copy = out.with_name("copy-" + out.name)
    for _ in range(rounds):
        remove(out)
        remove(copy)
        subprocess.run(["sync"], check=True)
        seconds, peak = timed(convert(out))
        ours.append(seconds)
        peaks.append(peak)
        subprocess.run(["sync"], check=True)
        script = "cp -r $0 $1" + (" && sync $(find $1)" if durable else "")
        theirs.append(timed(["sh", "-c", script, str(out), str(copy)])[0])
    remove(out)
    remove(copy)
    return name, statistics.median(ours), statistics.median(theirs), max(peaks)


def main() -> None:
    """Runs it all and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--no-deepspeed", action="store_true")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results.md")
    options = parser.parse_args()
    rows: list[str] = []
    with tempfile.TemporaryDirectory(dir=_made(options.work)) as work:
        for stage in (2, 3):
            rows += stage_rows(stage, Path(work), options)
    table = "\n".join(
        [
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, "
            f"Python {platform.python_version()}; GPT-2 shape, {options.layers} layers of 1,600, world size 8; "
            f"medians of {options.rounds} rounds, in turn with the rival.",
            "",
            "| what | zckpt, s | rival | rival, s | ratio | peak memory of zckpt |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(table)
    options.results.write_text(table + "\n")


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def stage_rows(stage: int, work: Path, options: argparse.Namespace) -> list[str]:
    """All rows of one ZeRO stage."""
    checkpoint = write(work / "ckpt", stage, options.layers)
    jobs: list[tuple[str, list[str], str, float]] = [
        ("to-fp32, safetensors directory", ["to-fp32"], "weights", 1.0),
        ("to-fp32, one .bin", ["to-fp32"], "weights.bin", 1.0),
        ("to-bf16, safetensors directory", ["to-bf16"], "weights", 0.75),
    ]
    rows = []
    fp32_copy = {}
    for place, durable in ((work, True), (options.tmpfs, False)):
        if not durable and shutil.disk_usage(place).free < 3 * 4.2e9 * options.layers / 32:
            continue
        for name, command, out, _ in jobs:
            with tempfile.TemporaryDirectory(dir=place) as directory:
                source = checkpoint
                if not durable:
                    source = Path(directory) / "ckpt"
                    shutil.copytree(checkpoint, source)
                run = lambda to, c=command, s=source: [*ZCKPT, *c, str(s), str(to), "--quiet"]  # noqa: E731
                _, ours, theirs, peak = against_cp(name, run, Path(directory) / out, options.rounds, durable)
            rival = "cp and sync" if durable else "cp, tmpfs"
            if command == ["to-fp32"] and out == "weights":
                fp32_copy[durable] = theirs
            if command == ["to-bf16"]:
                rival, theirs = f"{rival} of fp32", fp32_copy[durable]
            rows.append(row(f"ZeRO-{stage} {name}", ours, rival, theirs, peak))
    if not options.no_deepspeed:
        rows += deepspeed_rows(stage, checkpoint, work)
    for name, command in (("--help", ["--help"]), ("inspect", ["inspect", str(checkpoint)])):
        runs = [timed([*ZCKPT, *command]) for _ in range(5)]
        peak = max(peak for _, peak in runs)
        rows.append(row(f"ZeRO-{stage} zckpt {name}", statistics.median(s for s, _ in runs), "", None, peak))
    shutil.rmtree(checkpoint)
    if stage == 3:
        small = write(work / "small", stage, max(options.layers // 10, 1))
        done = subprocess.run(
            [*ZCKPT, "to-fp32", str(small), str(work / "small.bin"), "--json", "--quiet"],
            capture_output=True, check=True, cwd=ROOT,
        )  # fmt: skip
        facts = json.loads(done.stdout)
        rows.append(row("the same, a model of a tenth", facts["seconds"], "", None, facts["peak_rss_bytes"] >> 10))
        shutil.rmtree(small)
    return rows


def deepspeed_rows(stage: int, checkpoint: Path, work: Path) -> list[str]:
    """DeepSpeed's own script, once each."""
    code = (
        "import sys; from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as f;"
        "f(sys.argv[1], sys.argv[2], safe_serialization=True)"
    )
    out = work / "theirs"
    environment = {"DS_ACCELERATOR": "cpu"}
    os.environ.update(environment)
    try:
        seconds, peak = timed([sys.executable, "-W", "ignore", "-c", code, str(checkpoint), str(out)])
    except SystemExit as error:
        return [f"| ZeRO-{stage} to-fp32 | | zero_to_fp32.py | failed: {str(error)[-80:]!r} | | |"]
    finally:
        remove(out)
    ours, mine = timed([*ZCKPT, "to-fp32", str(checkpoint), str(out), "--quiet"])
    remove(out)
    rival = f"zero_to_fp32.py (not durable, {peak / 1024:,.0f} MiB)"
    return [row(f"ZeRO-{stage} to-fp32, safetensors directory", ours, rival, seconds, mine)]


def row(name: str, ours: float, rival: str, theirs: float | None, peak: int) -> str:
    """One line of the table."""
    compared = f"{theirs:.2f} | **{ours / theirs:.2f}**" if theirs else " | "
    return f"| {name} | {ours:.2f} | {rival} | {compared} | {peak / 1024:.0f} MiB |"


if __name__ == "__main__":
    main()
