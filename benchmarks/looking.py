"""`zckpt inspect` and `--help`, beside Python that starts and ends, and beside `torch.load` of one file of the many."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from measure import PYTHON, ZCKPT, Job, Row, in_turn, write

SAVES = ((2, 8, 1), (3, 8, 1), (2, 1024, 1), (3, 1024, 4))
"""Stage, ranks, and which part of the layers: under ZeRO-3 each rank has a piece of every parameter, and two files."""
WIDTH = 64
"""Of the model: what is looked at are the pickles, whose size does not depend on it."""
LOAD = "import sys, torch; torch.load(sys.argv[1], map_location='cpu', weights_only=False, mmap=True)"


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """`--help`, and `inspect` of checkpoints of few ranks and of many."""
    taken = in_turn({"help": Job([*ZCKPT, "--help"]), "pass": Job([sys.executable, "-c", "pass"])}, rounds)
    rows = [Row("`--help`", taken["help"], "`python -c pass`", taken["pass"])]
    for stage, ranks, part in SAVES:
        few = max(layers // part, 1)
        made = ["--layers", str(few), "--width", str(WIDTH), "--world-size", str(ranks), *["--moments"] * (stage == 3)]
        checkpoint = write(work / "ckpt", stage, *made)
        one = checkpoint / "global_step100" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        jobs = {
            "inspect": Job([*ZCKPT, "inspect", str(checkpoint)], warms=(checkpoint,)),
            "load": Job([*PYTHON, "-c", LOAD, str(one)], warms=(checkpoint,)),
        }
        taken = in_turn(jobs, rounds)
        what = f"`inspect`, ZeRO-{stage} of {ranks:,} ranks, {few} layers"
        rows.append(Row(what, taken["inspect"], "`torch.load` of one file", taken["load"]))
        shutil.rmtree(checkpoint)
    return rows
