"""Conversions whose sources are not in the page cache, beside the disk alone; and outputs that share blocks with their sources.

The disk alone (`disk_alone`) reads the same files and writes as many bytes, with many requests at once. A disk that is fast for
two GiB may be slower for many, so the limit of these rows is not the one of `limits`: it is the least time that the disk alone
took. XFS lies in a file that is mounted, where this machine lets us.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from limits import limits
from measure import PYTHON, ROOT, ZCKPT, Job, Row, file_bytes, in_turn, remove, write

WEIGHTS = {"to-fp32": ["to-fp32"], "to-bf16": ["to-bf16"]}
TRAINING = {"reshard, 8 ranks to 5": ["reshard", "--world-size", "5"], "to-universal": ["to-universal"]}
ALONE = [*PYTHON, str(ROOT / "benchmarks" / "disk_alone.py")]


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Of ZeRO-3: of weights alone for plain weights, with moments for what training resumes from."""
    rows: list[Row] = []
    for moments in (False, True):
        checkpoint = write(work / "ckpt", 3, "--layers", str(layers), *(["--moments"] if moments else []))
        for what, words in (TRAINING if moments else WEIGHTS).items():
            rows.append(beside_the_disk(what, words, checkpoint, work / "out", rounds))
        remove(checkpoint)
    return [*rows, *_shared(work, layers // 3, rounds)]


def beside_the_disk(
    what: str, words: list[str], checkpoint: Path, out: Path, rounds: int, pattern: str = "*optim_states.pt"
) -> Row:
    """A conversion of a checkpoint that the page cache has nothing of, and the disk alone.

    Args:
        what: the row's name.
        words: of the command line; the first is the command.
        checkpoint: a directory.
        out: what is written.
        rounds: how often each.
        pattern: names of the checkpoint's files that are read.
    """
    command = [*ZCKPT, words[0], str(checkpoint), str(out), *words[1:], "--quiet"]
    clears, alone = (out, out.with_name(f"{out.name}.zckpt.json")), out.with_name("alone")
    jobs = {
        "ours": Job(command, clears=clears, cools=checkpoint),
        "disk": Job([*ALONE, str(checkpoint), str(out), str(alone), pattern], drops=(alone,), cools=checkpoint),
    }
    taken = in_turn(jobs, rounds)
    for path in clears:
        remove(path)
    ours, disk = taken["ours"], taken["disk"]
    return Row(f"{what}, cold", ours, "the disk alone: the same bytes read and written", disk, least=min(disk.seconds))


def _shared(work: Path, layers: int, rounds: int) -> list[Row]:
    """`to-universal` on XFS, of what fits in the page cache; nothing where XFS cannot be mounted."""
    image, place = work / "image", work / "xfs"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(1 << 36)
    try:
        for command in (["mkfs.xfs", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"left out: XFS: {error}", file=sys.stderr)
        image.unlink()
        return []
    try:
        source, out, copy = place / "ckpt", place / "out", place / "copy"
        write(source, 3, "--layers", str(layers), "--moments")
        script = "cp -r --reflink=never $0 $1 && sync $(find $1)"
        jobs = {
            "ours": Job([*ZCKPT, "to-universal", str(source), str(out), "--quiet"], (out,), warms=(source,)),
            "cp": Job(["sh", "-c", script, str(out), str(copy)], (copy,), (copy,), warms=(out,)),
        }
        taken = in_turn(jobs, rounds)
        what = "to-universal on XFS, which shares blocks of files"
        least = limits(work).least(cached=file_bytes(source))  # hardly anything is written
        return [Row(what, taken["ours"], "`cp` and `sync` of the same bytes", taken["cp"], least=least)]
    finally:
        subprocess.run(["umount", str(place)], check=True)
        image.unlink()
