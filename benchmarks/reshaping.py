"""`zckpt to-universal` beside DeepSpeed's `ds_to_universal`, and `zckpt reshard` beside `cp` of what it writes.

The checkpoint has AdamW's moments. What zckpt writes is durable; DeepSpeed's converter is not made to sync.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from measure import PYTHON, ZCKPT, Job, Row, copying, in_turn, write


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Both comparisons at both stages."""
    rows = []
    for stage in (2, 3):
        checkpoint = write(work / "ckpt", stage, "--layers", str(layers), "--moments")
        out, theirs = work / "out", work / "theirs"
        jobs = {
            "ours": Job([*ZCKPT, "to-universal", str(checkpoint), str(out), "--quiet"], (out,), (out,)),
            "theirs": Job(
                [
                    *PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--no_strict",
                    "--input_folder", str(checkpoint / "global_step100"),
                    "--output_folder", str(theirs / "global_step100_universal"),
                ],
                (theirs,),
                (theirs,),
            ),
        }  # fmt: skip
        taken = in_turn(jobs, rounds)
        note = "not durable; memory per process, of several"
        rows.append(Row(f"ZeRO-{stage} to-universal", taken["ours"], "`ds_to_universal`", taken["theirs"], note))
        jobs = {
            "ours": Job([*ZCKPT, "reshard", str(checkpoint), str(out), "--world-size", "5", "--quiet"], (out,)),
            "cp": copying(out, work / "copy"),
        }
        taken = in_turn(jobs, rounds)
        what = f"ZeRO-{stage} reshard, 8 ranks to 5"
        rows.append(Row(what, taken["ours"], "`cp` and `sync` of the same bytes", taken["cp"]))
        shutil.rmtree(out)
        shutil.rmtree(checkpoint)
    return rows
