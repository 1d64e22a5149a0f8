"""`zckpt to-universal` against DeepSpeed's `ds_to_universal`, and `zckpt reshard` against `cp` of what it writes.

    python benchmarks/reshaping.py [--layers 48] [--rounds 3] [--work DIR]

A GPT-2 shaped checkpoint with AdamW's moments, world size 8. Rivals run in turn; `cp` is followed by `sync` of the copy, since
what zckpt writes is durable too; DeepSpeed's converter is not made to sync.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from run import ROOT, ZCKPT, against_cp, remove, timed


def write(dest: Path, stage: int, layers: int) -> Path:
    """A checkpoint with moments, by a process of its own."""
    script = [
        sys.executable,
        str(ROOT / "benchmarks" / "synth.py"),
        str(dest),
        "--stage",
        str(stage),
        "--layers",
        str(layers),
    ]
    subprocess.run([*script, "--moments"], check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    return dest


def main() -> None:
    """Runs it all and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results_reshaping.md")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    rows = []
    for stage in (2, 3):
        with tempfile.TemporaryDirectory(dir=options.work) as work:
            rows += stage_rows(stage, Path(work), options)
    table = "\n".join(
        [
            f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}; GPT-2 shape, {options.layers} layers of "
            f"1,600 with AdamW's moments, world size 8; medians of {options.rounds} rounds, in turn with the "
            f"rival; load average before: {os.getloadavg()[0]:.1f}.",
            "",
            "| what | zckpt, s | rival | rival, s | ratio | peak memory of zckpt, of the rival |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(table)
    options.results.write_text(table + "\n")


def stage_rows(stage: int, work: Path, options: argparse.Namespace) -> list[str]:
    """Both comparisons at one stage."""
    checkpoint = write(work / "ckpt", stage, options.layers)
    ours, theirs, peaks, rival_peaks = [], [], [], []
    universal = work / "universal"
    for _ in range(options.rounds):
        subprocess.run(["sync"], check=True)
        seconds, peak = timed([*ZCKPT, "to-universal", str(checkpoint), str(universal)])
        ours.append(seconds)
        peaks.append(peak)
        remove(universal)
        subprocess.run(["sync"], check=True)
        script = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--no_strict"]
        folders = [
            "--input_folder",
            str(checkpoint / "global_step100"),
            "--output_folder",
            str(universal / "global_step100_universal"),
        ]
        universal.mkdir()
        seconds, peak = timed([sys.executable, *script, *folders])
        theirs.append(seconds)
        rival_peaks.append(peak)
        remove(universal)
    a, b = statistics.median(ours), statistics.median(theirs)
    rows = [
        f"| ZeRO-{stage}: to-universal | {a:.1f} | ds_to_universal | {b:.1f} | **{a / b:.3f}** | "
        f"{max(peaks) / 1024:.0f} MiB, {max(rival_peaks) / 1024:,.0f} MiB per process |"
    ]
    name, a, b, peak = against_cp(
        "reshard",
        lambda out: [*ZCKPT, "reshard", str(checkpoint), str(out), "--world-size", "5"],
        work / "out",
        options.rounds,
        True,
    )
    rows.append(
        f"| ZeRO-{stage}: {name} 8 to 5 ranks | {a:.1f} | cp, sync | {b:.1f} | **{a / b:.2f}** | {peak / 1024:.0f} MiB |"
    )
    shutil.rmtree(checkpoint)
    return rows


if __name__ == "__main__":
    main()
