"""Time and memory of a conversion as the model grows, from a tenth of a billion parameters to ten billion."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from consolidation import DEEPSPEED
from limits import least_time
from measure import PYTHON, ROOT, ZCKPT, Job, Row, in_turn, optimizer_bytes, write

SIZES = ((12, 768), (24, 1024), (48, 1600), (36, 2880), (48, 4096))
"""Layers and width."""
LARGEST_FOR_DEEPSPEED = 2_000_000_000
"""Parameters: beyond, its script needs more memory than this benchmark will ask a machine for."""

PIECEWISE = 'for f in $0/*; do cp "$f" $1 && sync $1 && rm $1; done'
"""A copy that needs the room of one file."""


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """`to-fp32` and `to-bf16` of ZeRO-3 at every size that the disk has room for, up to the one of `layers` where fewer."""
    rows: list[Row] = []
    for deep, width in SIZES:
        numel = _numel(deep, width)
        if deep > layers or shutil.disk_usage(work).free < 7 * numel:
            print(f"left out: {numel:,} parameters", file=sys.stderr)
            continue
        checkpoint = write(work / "ckpt", 3, "--layers", str(deep), "--width", str(width))
        for command, size in (("to-fp32", 4), ("to-bf16", 2)):
            if shutil.disk_usage(work).free < (size + 1) * numel:
                print(f"left out: {command} of {numel:,} parameters", file=sys.stderr)
                continue
            out, copy, theirs = work / "out", work / "copy", work / "theirs"
            jobs = {
                "ours": Job([*ZCKPT, command, str(checkpoint), str(out), "--quiet"], (out,)),
                "cp": Job(["sh", "-c", PIECEWISE, str(out), str(copy)], (copy,)),
            }
            if command == "to-fp32" and numel < LARGEST_FOR_DEEPSPEED:
                script = [*PYTHON, "-c", DEEPSPEED, str(checkpoint), str(theirs)]
                jobs["deepspeed"] = Job(script, (theirs, out), (theirs,))
            taken = in_turn(jobs, rounds if numel < LARGEST_FOR_DEEPSPEED else 1)
            least = least_time(work, read=optimizer_bytes(checkpoint), written=size * numel)
            of_this = partial(Row, command, taken["ours"], numel=numel, least=least)
            rows.append(of_this("`cp` and `sync` of each file", taken["cp"]))
            if "deepspeed" in taken:
                rows.append(of_this("`zero_to_fp32.py`", taken["deepspeed"], "not durable"))
            shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(checkpoint)
    return rows


def _numel(layers: int, width: int) -> int:
    """Parameters of the model; asked of another process, since it takes torch to be asked."""
    script = f"from synth import shapes; import math; print(sum(map(math.prod, shapes({layers}, {width}).values())))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "benchmarks", capture_output=True, check=True)
    return int(done.stdout)
