"""What is to be delivered, what was, its manifest, and the fingerprint that tells one job from another.

For the two ways of delivering, to a path of this machine and to an address, and for the jobs that order.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from zckpt.base.errors import CastError
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.base.version import __version__
from zckpt.base.words import count, joined
from zckpt.core.catalog import Catalog
from zckpt.core.dtypes import SHORT_NAMES, DType
from zckpt.core.fragments import FileStore, Store
from zckpt.core.plan import Plan
from zckpt.engine.move import CastLoss as Overflowed
from zckpt.engine.move import MoveOptions, Written
from zckpt.output.journal import Finished
from zckpt.output.manifest import Manifest
from zckpt.storage.location import Location, location_of

Overflow = Literal["error", "inf", "clamp"]


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be delivered.

    Attributes:
        plan: where every byte goes.
        out: where the output goes.
        catalog: what it is made from.
        dtype: that floating numbers are cast to; None where they keep theirs.
        options: what was asked for beyond that and changes the output; they stand in the manifest.
        single: whether the output is one file.
        copies: (where it is, name) of small files copied beside.
        overflow: what to do with numbers too large for the dtype.
        overwrite: replace an existing output.
        merge: put the files into an existing directory instead of replacing it.
        buffer: bytes that each thread gathers and writes at once; None for the default.
        pace: how hard to work.
    """

    plan: Plan
    out: Location
    catalog: Catalog
    dtype: DType | None = None
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    single: bool = False
    copies: tuple[tuple[Location, str], ...] = ()
    overflow: Overflow = "error"
    overwrite: bool = False
    merge: bool = False
    buffer: int | None = None
    pace: Pace = field(default_factory=lambda: DEFAULT_PACE)

    @property
    def how(self) -> MoveOptions:
        """The options of its move."""
        return {"overflow": self.overflow, "window": self.buffer, **self.pace}

    @property
    def bytes_written(self) -> int:
        """Bytes of all files, the manifest left out."""
        return self.plan.bytes_written + sum(file.size() for file, _ in self.copies)

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


def resumed(kept: int, order: Order) -> tuple[str, ...]:
    """The note that an interrupted run is resumed; nothing where none of its files could be kept."""
    if not kept:
        return ()
    verb = "is" if kept == 1 else "are"
    return (
        f"resuming an interrupted conversion: {kept:,} of {count(len(order.names), 'file')} {verb} already complete",
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
    copies: Sequence[tuple[Location, str]],
    *options: object,
    state: Callable[[Store], tuple[object, ...]] | None = None,
) -> str:
    """What changes whenever the output's bytes could: the plan, the state of its sources, and the options.

    Args:
        plan: what goes where.
        copies: (where it is, name) of small files copied beside.
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
    for file, name in copies:
        say(name, *file.state())
    return digest.hexdigest()


_GEOMETRY = attrgetter("byte_offset", "start", "count", "rows", "pitch", "store_pitch")


def _state(store: Store) -> tuple[object, ...]:
    """What changes when a file is written again, whatever is done to its modification time; of memory, its bytes."""
    if not isinstance(store, FileStore):
        from hashlib import sha256

        return (sha256(ctypes.string_at(store.address, store.size)).hexdigest(),)
    place = store.path if store.is_remote else os.path.realpath(store.path)
    return place, store.byteorder, *location_of(store).state()


def seen(store: Store) -> tuple[object, ...]:
    """Of a source's state, what machines that share a file system see alike."""
    return (str(store), store.size, store.identity[2] if isinstance(store, FileStore) else 0)


def overflows_of(
    made: Iterable[Mapping[str, tuple[int, float]]], plan: Plan, overflow: Overflow
) -> dict[str, tuple[int, float]]:
    """Tensor name -> (elements whose cast overflowed, the largest of them), over all files, from those of each.

    Raises:
        CastError: there are some, and `overflow` says that this is an error.
    """
    lost: dict[str, tuple[int, float]] = {}
    for file in made:
        for name, (number, largest) in file.items():
            before = lost.get(name, (0, 0.0))
            lost[name] = (max(before[0], number), max(before[1], largest))
    if lost and overflow == "error":
        raise overflow_error(lost, (entry.dtype for _, entry in plan.pairs if entry.name in lost))
    return lost


def overflow_error(overflows: Mapping[str, tuple[int, float]], dtypes: Iterable[DType]) -> CastError:
    """The error for numbers that a cast to these dtypes would make infinite."""
    targets = joined(sorted({dtype.torch_name for dtype in dtypes}))
    worst = sorted(overflows, key=lambda name: -overflows[name][1])
    found = ", ".join(f"{n!r} ({count(overflows[n][0], 'element')}, largest {overflows[n][1]:,.6g})" for n in worst[:5])
    more = f" and {len(worst) - 5:,} more" if len(worst) > 5 else ""
    return CastError(
        f"{count(len(worst), 'tensor has', 'tensors have')} numbers too large for {targets}",
        found=found + more,
        expected=f"numbers that {targets} can hold",
        remedy="Use to-bf16, or pass --overflow clamp or --overflow inf if that is what you want. Nothing was written.",
    )
