"""Whether an interrupted job can be gone on with: is it the same job, and is what it finished still sound?

For every job that writes many files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from zckpt.batches import progress_after
from zckpt.errors import CorruptError
from zckpt.fragments import FileStore, Store
from zckpt.journal import Finished
from zckpt.plan import Plan
from zckpt.publish import Staging
from zckpt.scan import Sum, looks_at_bytes, scan
from zckpt.sums import join
from zckpt.tuning import Pace
from zckpt.version import __version__


def fingerprint(plan: Plan, copies: Sequence[tuple[str, str]], *options: object) -> str:
    """What changes whenever the output's bytes could: the plan, the state of its sources, and the options.

    Args:
        plan: what goes where.
        copies: (path, name) of small files copied beside.
        options: whatever else changes bytes.
    """
    from hashlib import sha256

    digest = sha256()

    def say(*facts: object) -> None:
        digest.update(repr(facts).encode("utf-8", "surrogatepass"))

    say(__version__, *options)
    for output, _ in plan.files:
        say(output.path, output.size, output.checksums)
        for offset, data in output.literals:
            say(offset, len(data))
            digest.update(data)
    numbers: dict[int, int] = {}
    for source, destination in plan.pairs:
        say(source.name, source.dtype.name, destination.dtype.name)
        for entry in (source, destination):
            for fragment in entry.fragments:
                store = fragment.store
                if id(store) not in numbers:
                    numbers[id(store)] = len(numbers)
                    say(_state(store) if entry is source else str(store))
                say(numbers[id(store)], *(getattr(fragment, name) for name in _GEOMETRY))
    for path, name in copies:
        stat = os.stat(path)
        say(name, stat.st_size, stat.st_mtime_ns)
    return digest.hexdigest()


_GEOMETRY = ("byte_offset", "start", "count", "rows", "pitch", "store_pitch")


def _state(store: Store) -> tuple[object, ...]:
    """What changes when a file is written again, whatever is done to its modification time."""
    stat = os.stat(str(store))
    path = os.path.realpath(str(store))
    return path, store.byteorder, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


def still_sound(staging: Staging, pace: Pace, progress: Callable[[int], None] | None = None) -> dict[str, Finished]:
    """What an earlier run finished and is still what it wrote: every byte of it is read again."""
    sound: dict[str, Finished] = {}
    read = 0
    for path, file in staging.left.items():
        store = FileStore.of(os.path.join(staging.directory, path))
        try:
            report = scan(
                [looks_at_bytes(store, 0, store.size)] if store.size else [],
                [Sum(store, 0, store.size)],
                progress=progress_after(progress, read),
                **pace,
            )
        except CorruptError:
            continue
        if join(report.sums.get(0, ()), 0, store.size) == file.crc32:
            sound[path] = file
            read += store.size
    return sound


def overflows_of(files: Iterable[Finished]) -> dict[str, tuple[int, float]]:
    """Tensor name -> (elements whose cast overflowed, the largest of them), over all files."""
    lost: dict[str, tuple[int, float]] = {}
    for file in files:
        for name, (count, largest) in file.overflows.items():
            before = lost.get(name, (0, 0.0))
            lost[name] = (max(before[0], count), max(before[1], largest))
    return lost
