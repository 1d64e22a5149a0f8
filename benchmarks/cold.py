"""Conversions whose sources are not in the page cache, beside the disk alone; and outputs that share blocks with their sources.

The disk alone: a thread reads the checkpoint's files, another writes as many bytes as the output has, both past the page cache,
in order, and what is written is synced. XFS lies in a file that is mounted, where this machine lets us.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from limits import limits
from measure import PYTHON, ZCKPT, Job, Row, file_bytes, in_turn, optimizer_bytes, remove, write

WEIGHTS = {"to-fp32": ["to-fp32"], "to-bf16": ["to-bf16"]}
TRAINING = {"reshard, 8 ranks to 5": ["reshard", "--world-size", "5"], "to-universal": ["to-universal"]}
ALONE = """
import mmap, os, sys, threading
from pathlib import Path

PIECE = 4 << 20

def read(files):
    room = mmap.mmap(-1, PIECE)
    for file in files:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        while os.readv(fd, [room]) == PIECE:
            pass
        os.close(fd)

def write(path, nbytes):
    room = mmap.mmap(-1, PIECE)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for _ in range(-(-nbytes // PIECE)):
        os.write(fd, room)
    os.fsync(fd)

def files(root):
    return [path for path in Path(root).rglob("*") if path.is_file()]

sources = sorted(path for path in files(sys.argv[1]) if "optim" in path.name)
threads = [threading.Thread(target=read, args=[sources]),
           threading.Thread(target=write, args=[sys.argv[3], sum(path.stat().st_size for path in files(sys.argv[2]))])]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Of ZeRO-3: of weights alone for plain weights, with moments for what training resumes from."""
    rows: list[Row] = []
    for moments in (False, True):
        checkpoint = write(work / "ckpt", 3, "--layers", str(layers), *(["--moments"] if moments else []))
        for what, words in (TRAINING if moments else WEIGHTS).items():
            rows.append(_cold(what, words, checkpoint, work, rounds))
        if moments:
            rows += _shared(checkpoint, work, rounds)
        remove(checkpoint)
    return rows


def _cold(what: str, words: list[str], checkpoint: Path, work: Path, rounds: int) -> Row:
    out, alone = work / "out", work / "alone"
    command = [*ZCKPT, words[0], str(checkpoint), str(out), *words[1:], "--quiet"]
    disk = [*PYTHON, "-c", ALONE, str(checkpoint), str(out), str(alone)]
    jobs = {
        "ours": Job(command, clears=(out,), cools=checkpoint),
        "disk": Job(disk, clears=(alone,), drops=(alone,), cools=checkpoint),
    }
    taken = in_turn(jobs, rounds)
    least = limits(work).least(read=optimizer_bytes(checkpoint), written=file_bytes(out))
    remove(out)
    return Row(
        f"{what}, cold", taken["ours"], "the disk alone: the same bytes read and written", taken["disk"], least=least
    )


def _shared(checkpoint: Path, work: Path, rounds: int) -> list[Row]:
    """`to-universal` on XFS; nothing where it cannot be mounted."""
    image, place = work / "image", work / "xfs"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(6 * file_bytes(checkpoint) + (1 << 30))
    try:
        for command in (["mkfs.xfs", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"left out: XFS: {error}", file=sys.stderr)
        image.unlink()
        return []
    try:
        source, out = Path(shutil.copytree(checkpoint, place / "ckpt")), place / "out"
        copy = place / "copy"
        script = "cp -r --reflink=never $0 $1 && sync $(find $1)"
        jobs = {
            "ours": Job([*ZCKPT, "to-universal", str(source), str(out), "--quiet"], (out,)),
            "cp": Job(["sh", "-c", script, str(out), str(copy)], (copy,), (copy,)),
        }
        taken = in_turn(jobs, rounds)
        what = "to-universal on XFS, whose files share blocks"
        return [Row(what, taken["ours"], "`cp` and `sync` of the same bytes", taken["cp"])]
    finally:
        subprocess.run(["umount", str(place)], check=True)
        image.unlink()
