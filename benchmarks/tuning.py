"""What threads, buffers and the page cache make of a conversion: the defaults beside their neighbours.

A disk's rate drifts by more than the settings differ, so each round runs all of them in an order of its own, and a setting is
compared with the defaults of the same round. The defaults are among them twice: what their second run seems to differ by is
noise.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from limits import least_time
from measure import ZCKPT, Job, Row, in_turn, optimizer_bytes, paired, write

LEAST_ROUNDS = 8
SETTINGS: dict[str, list[str]] = {
    "the defaults": [],
    "the defaults, once more": [],
    "1 thread": ["--threads", "1"],
    "2 threads": ["--threads", "2"],
    "4 threads": ["--threads", "4"],
    "8 threads": ["--threads", "8"],
    "buffers of 1 MiB": ["--buffer", "1MiB"],
    "buffers of 2 MiB": ["--buffer", "2MiB"],
    "buffers of 8 MiB": ["--buffer", "8MiB"],
    "buffers of 16 MiB": ["--buffer", "16MiB"],
    "keeping the page cache": ["--keep-cache"],
    "giving the page cache back": ["--no-cache-pollution"],
}


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Each setting, of `to-fp32` of a ZeRO-3 checkpoint that lies on the disk, not in memory; the first run does not count."""
    checkpoint, out = write(work / "ckpt", 3, "--layers", str(layers)), work / "out"
    jobs = {
        name: Job([*ZCKPT, "to-fp32", str(checkpoint), str(out), "--quiet", *setting], (out,), (out,), cools=checkpoint)
        for name, setting in SETTINGS.items()
    }
    first, *others = SETTINGS
    in_turn({first: jobs[first]}, 1)
    taken = in_turn(jobs, max(rounds, LEAST_ROUNDS) if rounds > 1 else rounds, shuffled=True)
    nbytes = optimizer_bytes(checkpoint)
    least = least_time(work, read=nbytes, written=nbytes, cold=True)
    shutil.rmtree(checkpoint)
    ours = partial(Row, first, taken[first], least=least)
    return [ours(), *(ours(name, taken[name], paired=paired(taken[first], taken[name])) for name in others)]
