"""`zckpt verify` and `zckpt diff`, beside reading the same bytes with `cat` and comparing them with `cmp`.

What stands in memory and what on the disk is the same for both sides of a row: `verify` reads an output from the disk, whatever
the page cache has of it, so the `cat` beside it does; everything else is in the page cache. What is left where no disk counts
shows in memory.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from limits import limits
from measure import CAT, ZCKPT, Job, Row, file_bytes, in_turn, remove, write

IN_MEMORY = 16
"""Layers of the model whose checkpoint and outputs fit in memory together."""
CMP = ["sh", "-c", 'for f in $0/*.safetensors; do cmp "$f" "$1/${f##*/}"; done']


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """A checkpoint by itself, against its conversion, and two conversions against each other; and where no disk counts."""
    rows = []
    for stage in (2, 3):
        checkpoint = write(work / "ckpt", stage, "--layers", str(layers))
        rows += _rows(f"ZeRO-{stage}: ", checkpoint, work, rounds, durable=True)
        shutil.rmtree(checkpoint)
    few = min(layers, IN_MEMORY)
    for stage in (2, 3):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            checkpoint = write(Path(memory) / "ckpt", stage, "--layers", str(few))
            rows += _rows(f"ZeRO-{stage} in memory, {few} layers: ", checkpoint, Path(memory), rounds, durable=False)
    return rows


def _rows(name: str, checkpoint: Path, place: Path, rounds: int, *, durable: bool) -> list[Row]:
    """All comparisons on one file system."""
    one, other, half = place / "one", place / "other.bin", place / "half"
    for command, out in (("to-fp32", one), ("to-fp32", other), ("to-bf16", half)):
        subprocess.run([*ZCKPT, command, str(checkpoint), str(out), "--quiet"], check=True)
    copy = Path(shutil.copytree(one, place / "copy"))
    warm = (checkpoint,)
    on_disk = {"fp32": one, "bf16": half} if durable else {}
    taken = in_turn(
        {
            "verify": Job([*ZCKPT, "verify", str(checkpoint)], warms=warm),
            "deep": Job([*ZCKPT, "verify", str(checkpoint), "--deep"], warms=warm),
            "cat": Job([*CAT, str(checkpoint)], warms=warm),
            "fp32": Job([*ZCKPT, "verify", str(checkpoint), str(one)], warms=warm, cools=on_disk.get("fp32")),
            "both": Job([*CAT, str(checkpoint), str(one)], warms=warm, cools=on_disk.get("fp32")),
            "bf16": Job([*ZCKPT, "verify", str(checkpoint), str(half)], warms=warm, cools=on_disk.get("bf16")),
            "half": Job([*CAT, str(checkpoint), str(half)], warms=warm, cools=on_disk.get("bf16")),
            "diff": Job([*ZCKPT, "diff", str(one), str(copy)], warms=(one, copy)),
            "cmp": Job([*CMP, str(one), str(copy)], warms=(one, copy)),
            "across": Job([*ZCKPT, "diff", str(checkpoint), str(other)], warms=(checkpoint, other)),
        },
        rounds,
    )
    able = limits(place)
    whole, fp32, bf16 = (file_bytes(path) for path in (checkpoint, one, half))

    def least(source: int, output: int) -> float:
        return able.least(read=output, cached=source) if durable else able.least(cached=source + output)

    note = "the output from the disk" if durable else ""
    equal = able.least(cached=2 * fp32)
    rows = [
        Row("`verify`", taken["verify"], "`cat` of the checkpoint", taken["cat"]),
        Row("`verify --deep`", taken["deep"], "`cat` of the checkpoint", taken["cat"], least=able.least(cached=whole)),
        Row(
            "`verify` of its fp32 weights",
            taken["fp32"],
            "`cat` of both",
            taken["both"],
            note,
            least=least(whole, fp32),
        ),
        Row(
            "`verify` of its bf16 weights",
            taken["bf16"],
            "`cat` of both",
            taken["half"],
            note,
            least=least(whole, bf16),
        ),
        Row("`diff` of two safetensors directories", taken["diff"], "`cmp` of both", taken["cmp"], least=equal),
        Row("`diff` of the shards and a .bin", taken["across"], "`cmp` of as many bytes", taken["cmp"], least=equal),
    ]
    for row in rows:
        row.what = name + row.what
    for path in (one, half, copy, other):
        remove(path)
    return rows
