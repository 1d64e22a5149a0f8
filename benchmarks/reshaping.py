"""`zckpt to-universal` beside DeepSpeed's `ds_to_universal`, and `zckpt reshard` beside `cp` of what it writes.

The checkpoint has AdamW's moments. What zckpt writes is durable; DeepSpeed's converter is not made to sync. Both read and write
as many bytes as a disk can hardly bear: `cp` of the output says how soon anybody could be done, and a smaller model in
memory (a section of its own) what is left where no disk counts.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from limits import least_time
from measure import PYTHON, ROOT, ZCKPT, Job, Row, copying, file_bytes, in_turn, optimizer_bytes, remove, write

IN_MEMORY = 8
"""Layers of the model whose checkpoint, universal form and DeepSpeed's temporary files fit in memory together."""


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Both comparisons at both stages."""
    rows = []
    for stage in (2, 3):
        checkpoint = write(work / "ckpt", stage, "--layers", str(layers), "--moments")
        rows += _to_universal(f"ZeRO-{stage} to-universal", checkpoint, work, rounds)
        rows.append(_reshard(f"ZeRO-{stage} reshard, 8 ranks to 5", checkpoint, work / "out", rounds))
        shutil.rmtree(checkpoint)
    return rows


def in_memory(_: Path, layers: int, rounds: int) -> list[Row]:
    """`to-universal` at both stages, where no disk counts."""
    rows, few = [], min(layers, IN_MEMORY)
    for stage in (2, 3):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            checkpoint = write(Path(memory) / "ckpt", stage, "--layers", str(few), "--moments")
            what = f"ZeRO-{stage} to-universal, {few} layers"
            rows += _to_universal(what, checkpoint, Path(memory), rounds, touches=True)
    return rows


def _to_universal(what: str, checkpoint: Path, place: Path, rounds: int, *, touches: bool = False) -> list[Row]:
    out, theirs = place / "out", place / "theirs"
    script = [
        *PYTHON, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--no_strict",
        "--input_folder", str(checkpoint / "global_step100"),
        "--output_folder", str(theirs / "global_step100_universal"),
    ]  # fmt: skip
    jobs = {
        "ours": Job([*ZCKPT, "to-universal", str(checkpoint), str(out), "--quiet"], (out,), touches=touches),
        "cp": replace(copying(out, place / "copy", durable=False), touches=touches),
        "theirs": Job(script, (out, theirs), (theirs,), touches=touches),
    }
    jobs |= {} if touches else {"writer": _writer(out)}
    taken = in_turn(jobs, rounds)
    least = least_time(place, read=optimizer_bytes(checkpoint), written=optimizer_bytes(checkpoint))
    least = least if touches else max(least, min(taken["writer"].seconds))
    note = "memory per process, of several" if touches else "not durable; memory per process, of several"
    return [
        Row(what, taken["ours"], "`ds_to_universal`", taken["theirs"], note, least=least),
        Row(what, taken["ours"], "`cp` of the same bytes", taken["cp"], "" if touches else "not durable", least=least),
    ]


def _reshard(what: str, checkpoint: Path, out: Path, rounds: int) -> Row:
    jobs = {
        "ours": Job([*ZCKPT, "reshard", str(checkpoint), str(out), "--world-size", "5", "--quiet"], (out,)),
        "cp": copying(out, out.with_name("copy")),
        "writer": _writer(out),
    }
    taken = in_turn(jobs, rounds)
    least = least_time(out.parent, read=optimizer_bytes(checkpoint), written=file_bytes(out))
    least = max(least, min(taken["writer"].seconds))
    remove(out)
    return Row(what, taken["ours"], "`cp` and `sync` of the same bytes", taken["cp"], least=least)


def _writer(like: Path) -> Job:
    """Writes as many bytes as another output has, and reads none."""
    alone = like.with_name("alone")
    script = str(ROOT / "benchmarks" / "disk_alone.py")
    return Job([*PYTHON, script, str(like.with_name("nothing")), str(like), str(alone)], drops=(alone,))
