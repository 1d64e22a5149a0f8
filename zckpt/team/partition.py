"""Divides a plan among processes: which of them moves which bytes of the output, and when a file has all of its bytes.

For `output.files`. Every process makes the same plan, and so knows its own part of it: a range of the output's bytes, of as much
work as the others'. Process 0 makes the files; each process moves its part, as `engine.move` does; process 0 completes each file
as soon as all parts of it are there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from zckpt.base.dataclass import dataclass
from zckpt.base.pace import gives_back
from zckpt.core.catalog import TensorPart
from zckpt.core.fragments import Fragment
from zckpt.core.plan import OutputFile, Plan, WrittenFile
from zckpt.core.stores import FileStore
from zckpt.engine import checksums
from zckpt.engine.batches import batches, element_bytes, progress_after
from zckpt.engine.checksums import Partial
from zckpt.engine.move import MoveOptions, Mover, refuse
from zckpt.engine.output_files import create, open_output_files, output_failed
from zckpt.storage.descriptors import write_all
from zckpt.storage.fsync_queue import make_durable
from zckpt.team.together import Team


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """The bytes that one process wrote to a file; they are durable.

    Attributes:
        path: of the file, as in the plan.
        nbytes: bytes of elements.
        crcs: of its parts; None where the engine computes none while it writes.
        overflows: tensor name -> (elements with a cast of this process that overflowed, the largest of them), so far.
    """

    path: str
    nbytes: int
    crcs: tuple[Partial, ...] | None
    overflows: Mapping[str, tuple[int, float]]


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
        return WrittenPart(output.path, nbytes[id(store)], taken, mover.overflows(store))

    with open_output_files(part, root, paths, give_back=mover.give_back) as files:
        mover.carry_out(batches(part, ranges=mover.ranges, bare=True), files, paths, finish, moved, progress=progress)


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


GRAIN = 4096
"""The multiple at which parts meet in a file: pages belong to one process, as network file systems need it."""


def part_of(plan: Plan, index: int, count: int, done: Collection[str] = ()) -> Plan:
    """One of `count` parts of a plan: together they are the plan, and no byte is in two of them.

    Args:
        plan: the whole.
        index: which part, from 0.
        count: how many there are.
        done: paths of files that need nothing more.

    Returns:
        A plan of the files in which the part has elements. Its pairs have the numbers of those of the whole.
    """
    order = {id(store): n for n, (output, store) in enumerate(plan.files) if output.path not in done}
    itemsizes = [to.dtype.itemsize for _, to in plan.pairs]
    costs = [source.dtype.itemsize + to.dtype.itemsize for source, to in plan.pairs]
    places = sorted(
        ((order[id(fragment.store)], fragment.byte_offset, number, fragment) for number, fragment in _fragments(plan)
         if id(fragment.store) in order),
        key=lambda place: place[:3],
    )  # fmt: skip
    work = [fragment.numel * costs[number] for _, _, number, fragment in places]
    total = sum(work)
    borders = [_border(places, work, costs, itemsizes, total * number // count) for number in (index, index + 1)]
    mine: dict[int, list[Fragment]] = {}
    for file, _, number, fragment in places:
        itemsize = itemsizes[number]
        first, last = (_elements_before(fragment, file, itemsize, border) for border in borders)
        if first < last:
            mine.setdefault(number, []).append(_between(fragment, itemsize, first, last))
    stores = {id(fragment.store) for fragments in mine.values() for fragment in fragments}
    return Plan(
        tuple(file for file in plan.files if id(file[1]) in stores),
        [
            (source, TensorPart(to.name, to.shape, to.dtype, tuple(mine.get(number, ()))))
            for number, (source, to) in enumerate(plan.pairs)
        ],
    )


_Place = tuple[int, int, int, Fragment]
"""Number of the file, byte offset in it, number of the pair, and the fragment there."""


def _fragments(plan: Plan) -> Iterator[tuple[int, Fragment]]:
    return ((number, f) for number, (_, to) in enumerate(plan.pairs) for f in to.fragments if f.numel)


def _border(
    places: Sequence[_Place], work: Sequence[int], costs: Sequence[int], itemsizes: Sequence[int], before: int
) -> tuple[int, int]:
    """The file and the byte in it at which two parts meet, after `before` of the work."""
    for (file, byte_offset, number, fragment), nearby in zip(places, work, strict=True):
        if before < nearby:
            block = fragment.block()
            inside = before * itemsizes[number] // costs[number] if block.rows == 1 and block.step == 1 else 0
            return file, (byte_offset + inside) // GRAIN * GRAIN
        before -= nearby
    return places[-1][0] + 1 if places else 0, 0


def _elements_before(fragment: Fragment, file: int, itemsize: int, border: tuple[int, int]) -> int:
    """How many of a fragment's elements are before a border; rows that are apart are never divided."""
    if file != border[0]:
        return fragment.numel if file < border[0] else 0
    block = fragment.block()
    distance = border[1] - fragment.byte_offset
    if block.rows > 1 or block.step != 1:
        return fragment.numel if distance > 0 else 0
    return min(max(0, -(-distance // itemsize)), fragment.numel)


def _between(fragment: Fragment, itemsize: int, first: int, last: int) -> Fragment:
    if last - first == fragment.numel:
        return fragment
    return Fragment(fragment.store, fragment.byte_offset + first * itemsize, fragment.start + first, last - first)


class _Files:
    """The files that are being written, with their state."""

    def __init__(self, plan: Plan, root: str, done: Collection[str], finished: Callable[[WrittenFile], None]) -> None:
        self._plan = plan
        self._root = root
        self._finished = finished
        missing = element_bytes(plan)
        self.missing = {output.path: missing[id(store)] for output, store in plan.files if output.path not in done}
        self._outputs: dict[str, OutputFile] = {output.path: output for output, _ in plan.files}
        self._tensors: dict[str, set[str]] = {output.path: set() for output, _ in plan.files}
        paths = {id(store): output.path for output, store in plan.files}
        for _, to in plan.pairs:
            for fragment in to.fragments:
                self._tensors[paths[id(fragment.store)]].add(to.name)
        self._crcs: dict[str, list[Partial] | None] = {path: [] for path in self.missing}
        self._lost: dict[str, dict[int, tuple[int, float]]] = {}
        for path in [path for path, nbytes in self.missing.items() if not nbytes]:
            self._complete(path)

    def take(self, rank: int, part: WrittenPart) -> None:
        """Records that a process's part of a file is durable."""
        for name, lost in part.overflows.items():
            self._lost.setdefault(name, {})[rank] = lost
        crcs = self._crcs[part.path]
        if crcs is None or part.crcs is None:
            self._crcs[part.path] = None
        else:
            crcs += part.crcs
        self.missing[part.path] -= part.nbytes
        if not self.missing[part.path]:
            self._complete(part.path)

    def _complete(self, path: str) -> None:
        output, crcs = self._outputs[path], self._crcs.pop(path)
        crc, slots = seal(self._plan, output, self._root, crcs)
        del self.missing[path]
        overflows: dict[str, tuple[int, float]] = {}
        for name in sorted(self._lost.keys() & self._tensors[path]):
            counts, largest = zip(*self._lost[name].values(), strict=True)
            overflows[name] = sum(counts), max(largest)
        self._finished(WrittenFile(path, output.size, crc, overflows, slots))


def lead(
    team: Team,
    plan: Plan,
    root: str,
    how: MoveOptions,
    *,
    done: Collection[str],
    finished: Callable[[WrittenFile], None],
    progress: Callable[[int], None] | None,
) -> str:
    """Does process 0's work: creates the files, moves its own part, and completes files with all their parts.

    Args:
        team: the processes.
        plan: the whole.
        root: the work directory; empty but for the files of `done`.
        how: as `move.run` takes it, for each process; a limit on bytes per second is shared by all.
        done: paths of files that exist already.
        finished: called with each file as soon as it is complete and durable.
        progress: called with the bytes that all have moved.

    Returns:
        The engine, "native" or "reference".
    """
    begin(plan, root, done)
    files = _Files(plan, root, done, finished)

    def listen() -> None:
        for rank, (path, nbytes, crcs, lost) in team.news():
            files.take(rank, WrittenPart(path, nbytes, None if crcs is None else tuple(map(tuple, crcs)), lost))

    def moved(part: WrittenPart) -> None:
        files.take(0, part)
        listen()

    kept = sum(output.size for output, _ in plan.files if output.path in done)
    watch = team.watched(progress_after(progress, kept))
    team.meet({"root": root, "done": list(done)})
    engine = _move(team, plan, root, how, done, moved, watch)
    while files.missing:
        listen()
        watch(0)
        time.sleep(0.02)
    team.meet()  # every process has found its sources as they were
    return engine


def follow(team: Team, plan: Plan, how: MoveOptions) -> None:
    """Does the other processes' work; arguments as in `lead`."""
    begun = team.meet()[0]
    if begun is None:  # an earlier run has written all files
        return

    def moved(part: WrittenPart) -> None:
        team.post((part.path, part.nbytes, part.crcs, part.overflows))

    _move(team, plan, begun["root"], how, begun["done"], moved, team.watched(None))
    team.meet()


def _move(
    team: Team,
    plan: Plan,
    root: str,
    how: MoveOptions,
    done: Collection[str],
    moved: Callable[[WrittenPart], None],
    watch: Callable[[int], None],
) -> str:
    part = part_of(plan, team.rank, team.size, done)
    rate, forget = how["bytes_per_s"], gives_back(how["keep_cache"], plan.bytes_read + plan.bytes_written)
    mine: MoveOptions = {
        **how, "keep_cache": not forget, "bytes_per_s": None if rate is None else max(1, rate // team.size)
    }  # fmt: skip
    mover = Mover(part, **mine)
    move(mover, part, root, moved, watch)
    return mover.engine
