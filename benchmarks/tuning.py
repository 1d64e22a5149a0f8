"""What threads, buffers and the page cache make of a conversion: the defaults beside their neighbours."""

from __future__ import annotations

import shutil
from pathlib import Path

from measure import ZCKPT, Job, Row, in_turn, write

SETTINGS: dict[str, list[str]] = {
    "the defaults": [],
    "1 thread": ["--threads", "1"],
    "2 threads": ["--threads", "2"],
    "4 threads": ["--threads", "4"],
    "8 threads": ["--threads", "8"],
    "buffers of 1 MiB": ["--buffer", "1MiB"],
    "buffers of 16 MiB": ["--buffer", "16MiB"],
    "keeping the page cache": ["--keep-cache"],
    "giving the page cache back": ["--no-cache-pollution"],
}


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Each setting in turn, of `to-fp32` of a ZeRO-3 checkpoint that lies on the disk, and not in memory."""
    checkpoint, out = write(work / "ckpt", 3, "--layers", str(layers)), work / "out"
    jobs = {
        name: Job([*ZCKPT, "to-fp32", str(checkpoint), str(out), "--quiet", *setting], (out,), (out,), cools=checkpoint)
        for name, setting in SETTINGS.items()
    }
    taken = in_turn(jobs, rounds)
    shutil.rmtree(checkpoint)
    first, *others = SETTINGS
    return [Row(first, taken[first]), *(Row(first, taken[first], name, taken[name]) for name in others)]
