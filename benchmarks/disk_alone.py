"""Moves bytes as fast as the disk can, as a rival that converts nothing:

    python benchmarks/disk_alone.py SOURCE LIKE OUT [PATTERN]

The files below SOURCE whose names match (of optimizer states, by default) are read while as many bytes as LIKE has are written to
OUT, in order, past the page cache, with as many requests at once on each side as `limits` has; what is written is synced.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from limits import BLOCK, in_parts
from measure import file_bytes


def main(source: Path, like: Path, out: Path, pattern: Path = Path("*optim_states.pt")) -> None:
    """Ends when all is read and durable."""
    reads = [
        (os.open(path, os.O_RDONLY | os.O_DIRECT), at)
        for path in sorted(source.rglob(str(pattern)))
        for at in range(0, path.stat().st_size, BLOCK)
    ]
    nbytes = file_bytes(like)
    fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, -(-nbytes // BLOCK) * BLOCK)
    reading = threading.Thread(
        target=in_parts, args=(reads, lambda buffer, place: os.preadv(place[0], [buffer], place[1]))
    )
    reading.start()
    in_parts(range(0, nbytes, BLOCK), lambda buffer, at: os.pwritev(fd, [buffer], at))
    os.fsync(fd)
    reading.join()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
