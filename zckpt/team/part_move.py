"""The mover's work in pieces, where several processes write the same files: one makes them, each moves its part, one seals.

For `shares`. Everything else is as in `mover`.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from zckpt.base.pace import gives_back, thread_count, window_bytes
from zckpt.core.plan import OutputFile, Plan
from zckpt.engine.batches import batches, element_bytes, progress_after
from zckpt.engine.checksums import Partial, element_ranges, file_checksums, join, joined
from zckpt.engine.move import (
    CastLoss,
    Work,
    choose,
    crc_of_file,
    create,
    opened,
    output_failed,
    raise_file_limit,
    refuse,
    write,
)
from zckpt.engine.prefetch import localized, moved_near
from zckpt.storage.descriptors import OpenFiles
from zckpt.storage.fsync_queue import Syncing, make_durable


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """What one process put into a file; it is durable.

    Attributes:
        path: of the file, as in the plan.
        nbytes: bytes of elements.
        crcs: of its parts; None where the engine takes none while it writes.
        overflows: number of the pair in the plan -> what this process's casts have lost of it so far.
    """

    path: str
    nbytes: int
    crcs: tuple[Partial, ...] | None
    overflows: Mapping[int, CastLoss]


def begin(plan: Plan, root: str, done: Collection[str] = ()) -> None:
    """Makes the files, at full size and with their literals.

    Args:
        plan: the whole.
        root: an existing private directory.
        done: paths of files that are there already.

    Raises:
        ZckptError: as in `mover.run`.
    """
    refuse(plan, {})
    with _opened(plan, root, give_back=False) as (files, outputs):
        for output, store in plan.files:
            if output.path not in done:
                create(outputs[id(store)], output.size)
                fd, _ = files.of(store)
                for offset, data in output.literals:
                    write(fd, data, offset)
                files.close(outputs[id(store)])


def move(
    part: Plan,
    root: str,
    *,
    moved: Callable[[WrittenPart], None],
    overflow: Literal["error", "inf", "clamp"] = "error",
    engine: Literal["auto", "native", "reference"] = "auto",
    progress: Callable[[int], None] | None = None,
    window: int | None = None,
    threads: int | None = None,
    keep_cache: bool | None = None,
    bytes_per_s: int | None = None,
) -> str:
    """Moves one process's part into files that `begin` made. Literals and CRC slots are left alone.

    Args:
        part: only files that it moves something into are in it.
        root: where they are.
        moved: called with each file's piece as soon as it is durable.
        overflow: as in `mover.run`, like all that follow.
        engine: which.
        progress: told of bytes.
        window: bytes written at once.
        threads: of the engine.
        keep_cache: whether it keeps what is read.
        bytes_per_s: at most.

    Returns:
        The engine, "native" or "reference".

    Raises:
        ZckptError: as in `mover.run`.
    """
    chosen = choose(engine)
    give_back = gives_back(keep_cache, part.bytes_read + part.bytes_written)
    clamp, rate = overflow == "clamp", bytes_per_s or 0
    work = Work(part, chosen, clamp, thread_count(threads), window_bytes(window), give_back, rate)
    nbytes, written = element_bytes(part), 0
    with _opened(part, root, give_back=give_back) as (files, outputs), Syncing(moved) as syncing:
        for batch in localized(batches(part, bare=True), moved_near):
            work.do(batch, files, progress_after(progress, written))
            written += batch.nbytes
            syncing.settle(wait=False)
            for output, store in batch.finished:
                numbers = (number for number, _, _ in work.ranges.get(id(store), ()))
                crcs = tuple(crc for number in numbers for crc in joined(work.parts.pop(number, ())))
                taken = None if chosen == "reference" else crcs
                syncing.add(WrittenPart(output.path, nbytes[id(store)], taken, work.lost(store)), files.of(store)[0])
                files.close(outputs[id(store)])
    return chosen


def seal(plan: Plan, output: OutputFile, root: str, crcs: Iterable[Partial] | None) -> tuple[int, dict[int, bytes]]:
    """Fills in the CRCs of a file that all have moved their parts into, and makes it durable.

    Args:
        plan: the whole.
        output: the file.
        root: where it is.
        crcs: of all its pieces; None to read it again.

    Returns:
        The CRC of the whole file, and by byte offset what was filled in.

    Raises:
        OutputError: it cannot be written.
    """
    parts = None if crcs is None else sorted(crcs)
    try:
        fd = os.open(os.path.join(root, output.path), os.O_RDWR | os.O_CLOEXEC)
        try:
            found: dict[int, int] = {}
            for start, nbytes in element_ranges(output):
                if parts is None:
                    found[start] = crc_of_file(fd, start, nbytes)
                else:
                    here = parts[bisect_left(parts, (start,)) : bisect_left(parts, (start + nbytes,))]
                    found[start] = join(here, start, nbytes)
            crc, slots = file_checksums(output, found)
            for slot, data in slots.items():
                write(fd, data, slot)
            make_durable(fd)
            return crc, slots
        finally:
            os.close(fd)
    except OSError as error:
        output_failed(error, root, plan)


@contextmanager
def _opened(plan: Plan, root: str, *, give_back: bool) -> Iterator[tuple[OpenFiles, dict[int, str]]]:
    """As `mover.opened`, with the outputs' paths by store."""
    raise_file_limit()
    outputs = {id(store): os.path.join(root, output.path) for output, store in plan.files}
    with opened(plan, root, outputs, give_back=give_back) as files:
        yield files, outputs
