"""`zckpt inspect` and `--help`, beside Python that starts and ends, and beside `torch.load` of one file of the many."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from measure import PYTHON, ZCKPT, Job, Row, in_turn, write

RANKS = (8, 1024)
WIDTH = 64
"""Of the model: what is looked at are the pickles, whose size does not depend on it."""
LOAD = "import sys, torch; torch.load(sys.argv[1], map_location='cpu', weights_only=False, mmap=True)"


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """`--help`, and `inspect` of ZeRO-2 checkpoints of few ranks and of many."""
    taken = in_turn({"help": Job([*ZCKPT, "--help"]), "pass": Job([sys.executable, "-c", "pass"])}, rounds)
    rows = [Row("`--help`", taken["help"], "`python -c pass`", taken["pass"])]
    for ranks in RANKS:
        made = ("--layers", str(layers), "--width", str(WIDTH), "--world-size", str(ranks))
        checkpoint = write(work / "ckpt", 2, *made)
        one = checkpoint / "global_step100" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        jobs = {
            "inspect": Job([*ZCKPT, "inspect", str(checkpoint)], warms=(checkpoint,)),
            "load": Job([*PYTHON, "-c", LOAD, str(one)], warms=(checkpoint,)),
        }
        taken = in_turn(jobs, rounds)
        rows.append(Row(f"`inspect`, {ranks:,} ranks", taken["inspect"], "`torch.load` of one file", taken["load"]))
        shutil.rmtree(checkpoint)
    return rows
