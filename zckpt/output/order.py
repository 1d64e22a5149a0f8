"""Orders for outputs: what will be written, what was written, the manifest, and the fingerprint of a job.

For `publish`, `files` and the jobs that make orders.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CastError
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.base.version import __version__
from zckpt.base.words import count, join_words
from zckpt.core.catalog import Catalog, TensorEntry, TensorPart
from zckpt.core.dtypes import SHORT_NAMES, DType
from zckpt.core.fragments import ComputedStore
from zckpt.core.ledger import Fate
from zckpt.core.plan import Plan, WrittenFile
from zckpt.core.recipes import DerivedStore
from zckpt.core.stores import FileStore, MemoryStore, Store
from zckpt.engine.move import MoveOptions
from zckpt.output.manifest import Manifest
from zckpt.storage import fsspec_io
from zckpt.storage.location import Location, location_of

if TYPE_CHECKING:
    from zckpt.output.signature import Signing

Overflow = Literal["error", "inf", "clamp"]


@dataclass(frozen=True, slots=True)
class Order:
    """An output that a job writes.

    Attributes:
        plan: where every byte goes.
        out: the output's path or address.
        catalog: of the input.
        dtype: that floating numbers are cast to; None to keep their dtypes.
        options: further options that change the output; they are written to the manifest.
        single: whether the output is one file.
        copies: (location, name in the output) of small files to copy.
        overflow: what to do with numbers too large for the dtype.
        overwrite: replace an existing output.
        merge: put the files into an existing directory instead of replacing it.
        buffer: bytes that each thread gathers and writes at once; None for the default.
        pace: threads and I/O settings.
        signing: with which key the output is signed; None for none.
        left_out: tensors of the input that are not in the output, and why.
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
    signing: Signing | None = None
    left_out: tuple[Fate, ...] = ()

    @property
    def how(self) -> MoveOptions:
        """The options of the engine's run."""
        return {"overflow": self.overflow, "window": self.buffer, **self.pace}

    @property
    def bytes_written(self) -> int:
        """Bytes of all files, without the manifest."""
        return self.plan.bytes_written + sum(file.size() for file, _ in self.copies)

    @property
    def names(self) -> list[str]:
        """The names of all files, without the manifest."""
        return [output.path for output, _ in self.plan.files] + [name for _, name in self.copies]


@dataclass(frozen=True, slots=True)
class OutputReport:
    """An output that was written.

    Attributes:
        files: (path relative to the output, bytes), without the manifest.
        engine: "native" or "reference".
        kept: how many of the files an earlier run had finished.
        overflows: tensor name -> (elements that became infinite or were clamped, the largest of them).
        notes: sentences for a person.
        already_done: whether an earlier run of the same job had made the output, so that nothing was written.
    """

    files: tuple[tuple[str, int], ...]
    engine: str
    kept: int
    overflows: dict[str, tuple[int, float]]
    notes: tuple[str, ...]
    already_done: bool = False

    @property
    def bytes_written(self) -> int:
        """Bytes of all files; 0 if the output was already done."""
        return 0 if self.already_done else sum(nbytes for _, nbytes in self.files)


def manifest_of(order: Order, made: Iterable[WrittenFile]) -> Manifest:
    """The manifest of an order's output."""
    return Manifest(
        version=__version__,
        source=order.catalog.source_facts(),
        dtype="" if order.dtype is None else SHORT_NAMES[order.dtype],
        options=order.options,
        tensors=len(order.catalog),
        numel=order.catalog.numel,
        files=tuple(made),
        left_out=tuple(map(Fate.as_json, order.left_out)),
    )


def fingerprint(
    plan: Plan,
    copies: Sequence[tuple[Location, str]],
    *options: object,
    state: Callable[[Store], tuple[object, ...]] | None = None,
) -> str:
    """A SHA-256 of everything that the output's bytes depend on: the plan, the state of its sources, and the options.

    Args:
        plan: of the output.
        copies: (location, name in the output) of small files to copy.
        options: everything else that changes bytes.
        state: the facts of a source that count; by default, all that change when it is written again.
    """
    from hashlib import sha256

    digest = sha256()

    def add(*facts: object) -> None:
        digest.update(repr(facts).encode("utf-8", "surrogatepass"))

    add(__version__, *options)
    for output, _ in plan.files:
        add(output.path, output.size, output.checksums)
        for offset, data in output.literals:
            add(offset, len(data))
            digest.update(data)
    numbers: dict[int, int] = {}
    state = state or _states(plan)
    for source, destination in plan.pairs:
        add(source.name, source.dtype.name, destination.dtype.name)
        for entry in (source, destination):
            places: list[tuple[object, ...]] = []
            for fragment in entry.fragments:
                store = fragment.store
                if id(store) not in numbers:
                    numbers[id(store)] = len(numbers)
                    add(state(store) if entry is source else str(store))
                places.append((numbers[id(store)], _GEOMETRY(fragment)))
            add(places)
    for file, name in copies:
        add(name, *file.state())
    return digest.hexdigest()


_GEOMETRY = attrgetter("byte_offset", "start", "count", "rows", "pitch", "store_pitch", "step")


def _states(plan: Plan) -> Callable[[Store], tuple[object, ...]]:
    """Returns facts that change when a file is written again, even if its modification time is reset; for memory, a hash of it.

    Each file's are asked for once, and those of all addresses at a time.
    """
    known: dict[int, tuple[object, ...]] = {}
    found: dict[str, FileStore] = {}

    def state(store: Store) -> tuple[object, ...]:
        if isinstance(store, DerivedStore):
            return _of_recipe(store, state)
        if id(store) in known:
            return known[id(store)]
        if not isinstance(store, FileStore):
            assert isinstance(store, MemoryStore | ComputedStore)
            from hashlib import sha256

            facts: tuple[object, ...] = (sha256(ctypes.string_at(store.address, store.size)).hexdigest(),)
        elif store.is_remote:
            if not found:
                found.update(fsspec_io.statuses(_addresses_of(plan)))
            status = found[store.path]
            facts = store.path, store.byteorder, status.size, *status.identity
        else:
            facts = os.path.realpath(store.path), store.byteorder, *location_of(store).state()
        return known.setdefault(id(store), facts)

    return state


def _addresses_of(plan: Plan) -> list[str]:
    """The addresses of all files behind addresses that a plan reads."""
    stores = (store for source, _ in plan.pairs for store in _stores(source))
    return list(dict.fromkeys(store.path for store in stores if isinstance(store, FileStore) and store.is_remote))


def _stores(entry: TensorEntry | TensorPart) -> Iterator[Store]:
    """The files and memory that hold an entry's elements."""
    for fragment in entry.fragments:
        if isinstance(fragment.store, DerivedStore):
            for source in fragment.store.recipe.inputs:
                yield from _stores(source)
        else:
            yield fragment.store


def _of_recipe(store: DerivedStore, state: Callable[[Store], tuple[object, ...]]) -> tuple[object, ...]:
    """What computed elements depend on."""
    return *store.recipe.facts, *(
        (entry.name, entry.dtype.name, entry.shape, [(state(f.store), _GEOMETRY(f)) for f in entry.fragments])
        for entry in store.recipe.inputs
    )


def facts_seen_by_all(store: Store) -> tuple[object, ...]:
    """The facts of a source that are the same on all machines that share a file system."""
    if isinstance(store, DerivedStore):
        return _of_recipe(store, facts_seen_by_all)
    return (str(store), store.size, store.identity[2] if isinstance(store, FileStore) else 0)


def overflows_of(files: Iterable[WrittenFile], plan: Plan, overflow: Overflow) -> dict[str, tuple[int, float]]:
    """Tensor name -> (elements with a cast that overflowed, the largest of them) over all files.

    Args:
        files: that were written.
        plan: of all files.
        overflow: what to do with such numbers.

    Raises:
        CastError: there are such numbers, and `overflow` is "error".
    """
    lost: dict[str, tuple[int, float]] = {}
    for file in files:
        for name, (number, largest) in file.overflows.items():
            before = lost.get(name, (0, 0.0))
            lost[name] = (max(before[0], number), max(before[1], largest))
    if lost and overflow == "error":
        raise overflow_error(lost, (entry.dtype for _, entry in plan.pairs if entry.name in lost))
    return lost


def overflow_error(overflows: Mapping[str, tuple[int, float]], dtypes: Iterable[DType]) -> CastError:
    """The error for numbers that a cast to these dtypes would make infinite."""
    targets = join_words(sorted({dtype.torch_name for dtype in dtypes}))
    worst = sorted(overflows, key=lambda name: -overflows[name][1])
    found = ", ".join(f"{n!r} ({count(overflows[n][0], 'element')}, largest {overflows[n][1]:,.6g})" for n in worst[:5])
    more = f" and {len(worst) - 5:,} more" if len(worst) > 5 else ""
    return CastError(
        f"{count(len(worst), 'tensor has', 'tensors have')} numbers too large for {targets}",
        found=found + more,
        expected=f"numbers that {targets} can hold",
        remedy="Use to-bf16, or pass --overflow clamp or --overflow inf if that is what you want. Nothing was written.",
    )
