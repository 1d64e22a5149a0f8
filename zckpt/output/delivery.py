"""Carries a plan out and delivers what it makes, whole, with its manifest; goes on where an interrupted run ended.

For every job that writes files. An interrupted run is gone on with when it was the same job, and only with files that are
still what it wrote.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, Literal

from zckpt.base.errors import CastError, CorruptError, InconsistentError, UsageError
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.base.version import __version__
from zckpt.core.catalog import Catalog
from zckpt.core.dtypes import SHORT_NAMES, DType
from zckpt.core.fragments import FileStore, Store
from zckpt.core.plan import Plan
from zckpt.engine.batches import progress_after
from zckpt.engine.checksums import join
from zckpt.engine.move import CastLoss as Overflowed
from zckpt.engine.move import Written, run
from zckpt.engine.scan import scan
from zckpt.engine.scan_requests import CrcRange, request_of_bytes
from zckpt.output.checks import check_space
from zckpt.output.journal import Finished
from zckpt.output.manifest import Manifest
from zckpt.output.staging import Staging, is_there
from zckpt.storage import paths as files
from zckpt.team.partition import follow, lead
from zckpt.team.together import Team, team

Overflow = Literal["error", "inf", "clamp"]


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be delivered.

    Attributes:
        plan: where every byte goes.
        out: the output's path.
        catalog: what it is made from.
        dtype: that floating numbers are cast to; None where they keep theirs.
        options: what was asked for beyond that and changes the output; they stand in the manifest.
        single: whether the output is one file.
        copies: (path, name) of small files copied beside.
        overflow: what to do with numbers too large for the dtype.
        overwrite: replace an existing output.
        merge: put the files into an existing directory instead of replacing it.
        buffer: bytes that each thread gathers and writes at once; None for the default.
        pace: how hard to work.
    """

    plan: Plan
    out: str
    catalog: Catalog
    dtype: DType | None = None
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    single: bool = False
    copies: tuple[tuple[str, str], ...] = ()
    overflow: Overflow = "error"
    overwrite: bool = False
    merge: bool = False
    buffer: int | None = None
    pace: Pace = field(default_factory=lambda: DEFAULT_PACE)

    @property
    def bytes_written(self) -> int:
        """Bytes of all files, the manifest left out."""
        return self.plan.bytes_written + sum(files.size(path) for path, _ in self.copies)

    @property
    def names(self) -> set[str]:
        """The names of all files, the manifest left out."""
        return {output.path for output, _ in self.plan.files} | {name for _, name in self.copies}


@dataclass(frozen=True, slots=True)
class Delivered:
    """What was delivered.

    Attributes:
        files: (path relative to the output, bytes), the manifest left out.
        engine: "native" or "reference".
        kept: how many of them an earlier run had finished.
        overflows: tensor name -> (elements that became infinite or were clamped, the largest of them).
        notes: sentences a person should see.
        already_done: whether this very job had made the output before, so that nothing was written.
    """

    files: tuple[tuple[str, int], ...]
    engine: str
    kept: int
    overflows: dict[str, tuple[int, float]]
    notes: tuple[str, ...]
    already_done: bool = False

    @property
    def bytes_written(self) -> int:
        """Bytes of all files; none where it was already done."""
        return 0 if self.already_done else sum(nbytes for _, nbytes in self.files)


def deliver(order: Order, progress: Callable[[int], None] | None = None) -> Delivered:
    """Moves, publishes, and goes on with what is left of an interrupted run of the same job.

    Raises:
        ZckptError: one of its kinds says what is wrong; nothing stands under the output's name then that did not before.
    """
    check_space(order.out, order.bytes_written)
    with team(order.out) as those:
        if those.size > 1:
            _agree(those, order)
        if those.rank == 0:
            return _lead(those, order, progress)
        follow(those, order.plan, overflow=order.overflow, window=order.buffer, pace=order.pace)
        return _delivered_elsewhere(those.meet()[0])


def _lead(those: Team, order: Order, progress: Callable[[int], None] | None) -> Delivered:
    """The work of one process alone, or of the one that leads others."""
    names = [entry.name for _, entry in order.plan.pairs]
    job = fingerprint(order.plan, order.copies, order.overflow, order.single)
    watch = progress if those.size == 1 else those.watched(None)
    with Staging(
        order.out, single=order.single, names=order.names, job=job, overwrite=order.overwrite, merge=order.merge
    ) as staging:
        those.sweep(order.out)
        if staging.published:
            kept = still_sound(staging.home, staging.left, order.pace, watch)
            if damaged := staging.left.keys() - kept.keys():
                staging.make_again(sorted(damaged))
        if not staging.published:
            kept = still_sound(staging.directory, staging.left, order.pace, watch)
        made, engine = dict(kept), "native"
        if not staging.published:
            staging.keep(kept)

            def finished(written: Written) -> None:
                made[written.path] = as_finished(written, names)
                staging.finished(made[written.path])

            if those.size > 1:
                engine = lead(
                    those, order.plan, staging.directory, done=kept, finished=finished, overflow=order.overflow,
                    progress=progress, window=order.buffer, pace=order.pace,
                )  # fmt: skip
            else:
                engine = run(
                    order.plan, staging.directory, overflow=order.overflow, progress=progress, window=order.buffer,
                    done=kept, finished=finished, **order.pace,
                ).engine  # fmt: skip
        else:
            those.meet()
        overflows = overflows_of((file.overflows for file in made.values()), order.plan, order.overflow)
        if not staging.published:
            made.update((name, staging.copy(path, name)) for path, name in order.copies)
            staging.commit(manifest_of(order, made.values()))
    sizes = [(file.path, file.size) for file, _ in order.plan.files]
    sizes += [(name, files.size(path)) for path, name in order.copies]
    delivered = Delivered(
        files=tuple(sizes),
        engine=engine,
        kept=len(sizes) if staging.published else len(kept),
        overflows=overflows,
        notes=staging.notes,
        already_done=staging.published,
    )
    those.meet(asdict(delivered))
    return delivered


def _delivered_elsewhere(told: Any) -> Delivered:
    """What process 0 says was delivered."""
    overflows = {name: (int(count), float(largest)) for name, (count, largest) in told["overflows"].items()}
    files = tuple((path, nbytes) for path, nbytes in told["files"])
    return Delivered(files, told["engine"], told["kept"], overflows, (), told["already_done"])


def _agree(those: Team, order: Order) -> None:
    """Makes sure that all processes are about to do the same.

    Raises:
        UsageError: they were asked for other things. InconsistentError: they see other files.
    """
    wishes = (order.overflow, order.single, order.overwrite, order.merge, order.dtype and order.dtype.name)
    job = fingerprint(order.plan, order.copies, *wishes, sorted(map(repr, order.options.items())), state=_seen)
    here = {"job": job, "out": os.path.realpath(order.out), "asked": sys.argv[1:], "host": os.uname().nodename}
    said = those.meet(here)
    for rank, other in enumerate(said):
        if (other["job"], other["out"]) == (said[0]["job"], said[0]["out"]):
            continue
        if other["asked"] != said[0]["asked"]:
            raise UsageError(
                "processes that were asked for different things",
                found=f"process {rank}: {shlex.join(other['asked'])}; process 0: {shlex.join(said[0]['asked'])}",
                remedy="Nothing was changed. Start all of them with the same arguments.",
            )
        raise InconsistentError(
            "processes that see different files",
            found=f"process {rank} on {other['host']} does not see what process 0 on {said[0]['host']} sees",
            expected="the same paths, sizes and modification times, and one output",
            remedy="Nothing was changed. Put the checkpoint and OUT on a file system that all machines share.",
        )


def as_finished(written: Written, names: Sequence[str]) -> Finished:
    """What goes on record of a file; `names` are those of the plan's tensors."""
    return Finished(written.path, written.nbytes, written.crc32, named(written.overflows, names))


def named(overflows: Mapping[int, Overflowed], names: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Tensor name -> (elements whose cast overflowed, the largest of them); `names` are those of the plan's tensors."""
    return {names[number]: (found.count, found.largest) for number, found in overflows.items()}


def manifest_of(order: Order, made: Iterable[Finished]) -> Manifest:
    """The manifest that goes with an order's files."""
    return Manifest(
        version=__version__,
        source=order.catalog.source.as_json(order.catalog.topology),
        dtype="" if order.dtype is None else SHORT_NAMES[order.dtype],
        options=order.options,
        tensors=len(order.catalog),
        numel=order.catalog.numel,
        files=tuple(made),
    )


def fingerprint(
    plan: Plan,
    copies: Sequence[tuple[str, str]],
    *options: object,
    state: Callable[[Store], tuple[object, ...]] | None = None,
) -> str:
    """What changes whenever the output's bytes could: the plan, the state of its sources, and the options.

    Args:
        plan: what goes where.
        copies: (path, name) of small files copied beside.
        options: whatever else changes bytes.
        state: what to say of a source; by default, all that changes when it is written again.
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
            places: list[tuple[object, ...]] = []
            for fragment in entry.fragments:
                store = fragment.store
                if id(store) not in numbers:
                    numbers[id(store)] = len(numbers)
                    say((state or _state)(store) if entry is source else str(store))
                places.append((numbers[id(store)], _GEOMETRY(fragment)))
            say(places)
    for path, name in copies:
        say(name, *files.state(path))
    return digest.hexdigest()


_GEOMETRY = attrgetter("byte_offset", "start", "count", "rows", "pitch", "store_pitch")


def _state(store: Store) -> tuple[object, ...]:
    """What changes when a file is written again, whatever is done to its modification time; of memory, its bytes."""
    if not isinstance(store, FileStore):
        from hashlib import sha256

        return (sha256(ctypes.string_at(store.address, store.size)).hexdigest(),)
    path = str(store)
    place = path if files.is_remote(path) else os.path.realpath(path)
    return place, store.byteorder, *files.state(path)


def _seen(store: Store) -> tuple[object, ...]:
    """Of a source's state, what machines that share a file system see alike."""
    return (str(store), store.size, store.identity[2] if isinstance(store, FileStore) else 0)


def still_sound(
    directory: str, left: Mapping[str, Finished], pace: Pace, progress: Callable[[int], None] | None = None
) -> dict[str, Finished]:
    """What an earlier run finished and is still what it wrote: every byte of it is read again."""
    sound: dict[str, Finished] = {}
    read = 0
    for path, file in left.items():
        if not is_there(directory, file):
            continue
        store = files.file_store(os.path.join(directory, path))
        try:
            report = scan(
                [request_of_bytes(store, 0, store.size)] if store.size else [],
                [CrcRange(store, 0, store.size)],
                progress=progress_after(progress, read),
                **pace,
            )
        except CorruptError:
            continue
        if join(report.crcs.get(0, ()), 0, store.size) == file.crc32:
            sound[path] = file
            read += store.size
    return sound


def overflows_of(
    made: Iterable[Mapping[str, tuple[int, float]]], plan: Plan, overflow: Overflow
) -> dict[str, tuple[int, float]]:
    """Tensor name -> (elements whose cast overflowed, the largest of them), over all files, from those of each.

    Raises:
        CastError: there are some, and `overflow` says that this is an error.
    """
    lost: dict[str, tuple[int, float]] = {}
    for file in made:
        for name, (count, largest) in file.items():
            before = lost.get(name, (0, 0.0))
            lost[name] = (max(before[0], count), max(before[1], largest))
    if lost and overflow == "error":
        raise overflow_error(lost, (entry.dtype for _, entry in plan.pairs if entry.name in lost))
    return lost


def overflow_error(overflows: Mapping[str, tuple[int, float]], dtypes: Iterable[DType]) -> CastError:
    """The error for numbers that a cast to these dtypes would make infinite."""
    targets = sorted({dtype.torch_name for dtype in dtypes})
    worst = sorted(overflows, key=lambda name: -overflows[name][1])
    told = ", ".join(f"{n!r} ({overflows[n][0]:,} elements, largest {overflows[n][1]:,.6g})" for n in worst[:5])
    more = f" and {len(worst) - 5:,} more" if len(worst) > 5 else ""
    return CastError(
        f"{len(worst):,} tensors with numbers too large for {' and '.join(targets)}",
        found=told + more,
        remedy="Nothing was published. Use to-bf16, or --overflow clamp or --overflow inf if that is what you want.",
    )
