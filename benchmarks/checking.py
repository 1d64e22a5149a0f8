"""`zckpt verify` and `zckpt diff`, beside reading the same bytes with `cat` and comparing them with `cmp`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from measure import ZCKPT, Job, Row, in_turn, write


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """A checkpoint by itself, against its conversion, and two conversions against each other."""
    rows = []
    for stage in (2, 3):
        checkpoint = write(work / "ckpt", stage, "--layers", str(layers))
        one, other, half = work / "one", work / "other.bin", work / "half"
        for command, out in (("to-fp32", one), ("to-fp32", other), ("to-bf16", half)):
            subprocess.run([*ZCKPT, command, str(checkpoint), str(out), "--quiet"], check=True)
        copy = Path(shutil.copytree(one, work / "copy"))
        read = Job(["sh", "-c", "find $0 -type f -exec cat {} + > /dev/null", str(checkpoint)])
        both = Job(["sh", "-c", "find $0 $1 -type f -exec cat {} + > /dev/null", str(checkpoint), str(one)])
        compare = Job(["sh", "-c", 'for f in $0/*.safetensors; do cmp "$f" "$1/${f##*/}"; done', str(one), str(copy)])
        taken = in_turn(
            {
                "verify": Job([*ZCKPT, "verify", str(checkpoint)]),
                "deep": Job([*ZCKPT, "verify", str(checkpoint), "--deep"]),
                "cat": read,
                "fp32": Job([*ZCKPT, "verify", str(checkpoint), str(one)]),
                "bf16": Job([*ZCKPT, "verify", str(checkpoint), str(half)]),
                "both": both,
                "diff": Job([*ZCKPT, "diff", str(one), str(copy)]),
                "cmp": compare,
                "across": Job([*ZCKPT, "diff", str(checkpoint), str(other)]),
            },
            rounds,
        )
        name = f"ZeRO-{stage}: "
        rows += [
            Row(name + "`verify`", taken["verify"], "`cat` of the checkpoint", taken["cat"]),
            Row(name + "`verify --deep`", taken["deep"], "`cat` of the checkpoint", taken["cat"]),
            Row(name + "`verify` of its fp32 weights", taken["fp32"], "`cat` of both", taken["both"]),
            Row(name + "`verify` of its bf16 weights", taken["bf16"], "`cat` of both", taken["both"], "of fp32"),
            Row(name + "`diff` of two safetensors directories", taken["diff"], "`cmp` of both", taken["cmp"]),
            Row(name + "`diff` of the shards and a .bin", taken["across"], "`cmp` of as many bytes", taken["cmp"]),
        ]
        for path in (checkpoint, one, half, copy):
            shutil.rmtree(path)
        other.unlink()
    return rows
