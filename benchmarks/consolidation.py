"""Plain weights out of ZeRO shards, beside `cp` of the bytes written and DeepSpeed's `zero_to_fp32.py`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from limits import least_time
from measure import PYTHON, ZCKPT, Job, Row, Taken, copying, in_turn, optimizer_bytes, remove, write

DEEPSPEED = (
    "import sys; from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as f;"
    "f(sys.argv[1], sys.argv[2], safe_serialization=True)"
)
JOBS = {
    "to-fp32, safetensors directory": ("to-fp32", "weights"),
    "to-fp32, one .bin": ("to-fp32", "weights.bin"),
    "to-bf16, safetensors directory": ("to-bf16", "weights"),
    "to-bf16, one .bin": ("to-bf16", "weights.bin"),
}


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Both stages, on the disk and where no disk counts."""
    rows: list[Row] = []
    for stage in (2, 3):
        checkpoint = write(work / "ckpt", stage, "--layers", str(layers))
        nbytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
        rows += _on(work, f"ZeRO-{stage} ", checkpoint, rounds, durable=True)
        memory = Path("/dev/shm")
        if shutil.disk_usage(memory).free > 3.2 * nbytes:
            with tempfile.TemporaryDirectory(dir=memory) as place:
                source = Path(shutil.copytree(checkpoint, Path(place) / "ckpt"))
                rows += _on(Path(place), f"ZeRO-{stage} in memory, ", source, rounds, durable=False)
        shutil.rmtree(checkpoint)
    return rows


def _on(place: Path, prefix: str, checkpoint: Path, rounds: int, *, durable: bool) -> list[Row]:
    """All conversions on one file system; a conversion to bf16 is also held against a copy of the fp32 weights."""
    rows: list[Row] = []
    cp = "`cp` and `sync`" if durable else "`cp`"
    of_fp32: Taken | None = None
    for what, (command, name) in JOBS.items():
        out, theirs = place / name, place / "theirs"
        jobs = {
            "ours": Job([*ZCKPT, command, str(checkpoint), str(out), "--quiet"], clears=(out,)),
            "cp": copying(out, place / f"copy-{name}", durable=durable),
        }
        if durable and (command, name) == ("to-fp32", "weights"):
            script = [*PYTHON, "-c", DEEPSPEED, str(checkpoint), str(theirs)]
            jobs["deepspeed"] = Job(script, clears=(out, theirs), drops=(theirs,))
        taken = in_turn(jobs, rounds)
        read = optimizer_bytes(checkpoint)
        least = least_time(place, read=read, written=read if command == "to-fp32" else read // 2)
        rows.append(Row(prefix + what, taken["ours"], f"{cp} of the same bytes", taken["cp"], least=least))
        if "deepspeed" in taken:
            note = "not durable"
            rows.append(Row(prefix + what, taken["ours"], "`zero_to_fp32.py`", taken["deepspeed"], note, least=least))
        if (command, name) == ("to-fp32", "weights"):
            of_fp32 = taken["cp"]
        elif command == "to-bf16":
            rows.append(Row(prefix + what, taken["ours"], f"{cp} of the fp32 weights", of_fp32, least=least))
        remove(out)
    return rows
