"""A move in parts, where several processes write the same files: one makes them, each moves its part, one seals them.

For `partition`. Everything else is as in `engine.move`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping

from zckpt.base.dataclass import dataclass
from zckpt.core.plan import OutputFile, Plan
from zckpt.core.stores import FileStore
from zckpt.engine import checksums
from zckpt.engine.batches import batches, element_bytes
from zckpt.engine.checksums import Partial
from zckpt.engine.move import CastLoss, Mover, refuse
from zckpt.engine.output_files import create, open_output_files, output_failed
from zckpt.storage.descriptors import write_all
from zckpt.storage.fsync_queue import make_durable


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """The bytes that one process wrote to a file; they are durable.

    Attributes:
        path: of the file, as in the plan.
        nbytes: bytes of elements.
        crcs: of its parts; None where the engine computes none while it writes.
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
        root: an existing work directory.
        done: paths of files that exist already.

    Raises:
        ZckptError: as in `move.run`.
    """
    refuse(plan)
    paths = _paths(plan, root)
    with open_output_files(plan, root, paths, give_back=False) as files:
        for output, store in plan.files:
            if output.path not in done:
                create(paths[id(store)], output.size)
                fd, _ = files.of(store)
                for offset, data in output.literals:
                    write_all(fd, data, offset)
                files.close(paths[id(store)])


def move(
    mover: Mover,
    part: Plan,
    root: str,
    moved: Callable[[WrittenPart], None],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Moves one process's part into files that `begin` made. Literals and checksums are left alone.

    Args:
        mover: of the part.
        part: only files that it moves something into are in it.
        root: where they are.
        moved: called with what was put into each file, as soon as it is durable.
        progress: called with the bytes moved so far.

    Raises:
        ZckptError: as in `move.run`.
    """
    nbytes, paths = element_bytes(part), _paths(part, root)

    def finish(output: OutputFile, store: FileStore) -> WrittenPart:
        crcs = mover.crcs(store)
        taken = None if crcs is None else tuple(crcs)
        return WrittenPart(output.path, nbytes[id(store)], taken, mover.lost(store))

    with open_output_files(part, root, paths, give_back=mover.give_back) as files:
        mover.carry_out(batches(part, bare=True), files, paths, finish, moved, progress=progress)


def seal(plan: Plan, output: OutputFile, root: str, crcs: Iterable[Partial] | None) -> tuple[int, dict[int, bytes]]:
    """Fills in the checksums of a file that all processes have moved their parts into, and makes it durable.

    Args:
        plan: the whole.
        output: the file.
        root: where it is.
        crcs: of all its parts; None to read it again.

    Returns:
        The CRC of the whole file, and by byte offset what was filled in.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        with open(os.path.join(root, output.path), "r+b", buffering=0) as file:
            sealed = checksums.seal(file.fileno(), output, crcs)
            make_durable(file.fileno())
            return sealed
    except OSError as error:
        output_failed(error, root, plan)


def _paths(plan: Plan, root: str) -> dict[int, str]:
    return {id(store): os.path.join(root, output.path) for output, store in plan.files}
