"""The files of a save in rows and columns, as they are drawn: a row for each rank, a column for each kind of file.

For `checkpoint_map`. The state of each file is what `jobs.rank_files` found. A file that is missing is as long as its fellows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from statistics import median_low

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import Catalog, Topology
from zckpt.core.fragments import ComputedStore, Fragment
from zckpt.core.stores import FileStore
from zckpt.jobs.inspection import Inspection
from zckpt.jobs.rank_files import Cell, Grid, other_files, place_of

GONE = ("missing", "empty", "unreadable", "other save")
"""States of files without usable elements."""

STATES = {"ok": "here", "extra": "left over", "other save": "of another save"}
"""State of a file -> the words for it, where they are others."""

KINDS = {"model": "model", "optim": "optimizer", "": "weights"}
"""Kind of file in families -> the word for it in a map, where they differ or there is none."""
_AXES = {"mp": "tensor rank", "tp": "tensor rank", "pp": "stage", "ep": "expert rank", "dp": "rank"}
_MOST_COLUMNS = 3


def shown_kind(kind: str) -> str:
    """The word for a kind of file in a map."""
    return KINDS.get(kind, kind.rstrip("_"))


@dataclass(slots=True)
class MappedFile:
    """A file.

    Attributes:
        name: below the save's directory; of a missing one, what is known of it.
        kind: of file, as it is shown.
        nbytes: its size; 0 if it is missing.
        expected: bytes that a missing or empty one probably had: as many as most of its kind have.
        state: as in `rank_files.Cell`.
        reason: for the state, in a few words.
        contents: bytes by what they are, such as "weights"; filled in when the tensors are known. Of a file that is gone, what
            it would hold.
    """

    name: str
    kind: str
    nbytes: int
    expected: int = 0
    state: str = "ok"
    reason: str = ""
    contents: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def gone(self) -> bool:
        """Whether no element of the file is usable."""
        return self.state in GONE


FileRow = tuple[str, tuple[int | None, ...]]
"""A row: its label, and numbers of files; with columns, one number for each (None: no file belongs there)."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that belong together, such as those of a pipeline stage.

    Attributes:
        title: of the group.
        columns: kinds of files, if each kind has a column of its own.
        rows: of the group.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[FileRow, ...]


@dataclass(slots=True)
class FileGrid:
    """All files of a save.

    Attributes:
        files: in no order that means anything; rows name them by number.
        groups: of rows.
        numbers: path of a file -> its number.
    """

    files: list[MappedFile] = field(default_factory=list[MappedFile])
    groups: list[RowGroup] = field(default_factory=list[RowGroup])
    numbers: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, file: MappedFile, path: str = "") -> int:
        """Adds a file; returns its number."""
        self.files.append(file)
        if path:
            self.numbers[path] = len(self.files) - 1
        return len(self.files) - 1

    def add_group(self, title: str, columns: Sequence[str], rows: Iterable[FileRow]) -> None:
        """Adds a group, unless there are no rows."""
        if found := tuple(rows):
            self.groups.append(RowGroup(title, tuple(columns), found))

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are there."""
        return sum(file.nbytes for file in self.files)

    @property
    def wrong(self) -> list[MappedFile]:
        """The files that are missing or bad."""
        return [file for file in self.files if file.state != "ok"]


def file_grid(inspection: Inspection, *, ranks_only: bool = False) -> FileGrid:
    """The files that an inspection found, and those that it missed. `ranks_only`: leave out files that belong to no rank; each
    has to be asked for its size.
    """
    listing, catalog = inspection.place.listing, inspection.catalog
    topology = None if catalog is None else catalog.topology
    found = FileGrid()

    def numbered(cell: Cell, kind: str, missing: str) -> int:
        path = str(listing.where(cell.file or cell.lost)) if cell.file or cell.lost else ""
        name = cell.file or missing
        reason = cell.reason or (f"no file {cell.lost}" if cell.lost else "")
        return found.add(MappedFile(name, shown_kind(kind), cell.nbytes, 0, cell.state, reason), path)

    _rank_rows(found, inspection.grid, topology, numbered)
    named_files = [] if ranks_only else other_files(listing)
    for kind, others in itertools.groupby(named_files, key=lambda file: file.kind.partition(" ")[0]):
        named = [(_place(file.axes), file.name) for file in others]
        labels = [label for label, _ in named]
        if "" in labels or len({*labels}) < len(labels):
            labels = [name for _, name in named]
        rows = []
        for label, (_, name) in zip(labels, named, strict=True):
            nbytes = listing.files[name].size()
            state, reason = ("ok", "") if nbytes else ("empty", "0 bytes")
            number = found.add(MappedFile(name, kind, nbytes, 0, state, reason), str(listing.files[name]))
            rows.append((label, (number,)))
        found.add_group(f"{kind} files".capitalize(), (kind,), rows)
    if not ranks_only:
        _further(found, inspection)
    _expect(found.files)
    return found


def _rank_rows(
    found: FileGrid, grid: Grid, topology: Topology | None, numbered: Callable[[Cell, str, str], int]
) -> None:
    """Adds the files of ranks, a group for each model-parallel rank; `numbered` adds a file: state, kind, name if
    missing.
    """
    kinds = [*dict.fromkeys(kind for rows in grid.values() for cells in rows.values() for kind in cells)]
    kinds.sort(key=lambda kind: [*KINDS].index(kind) if kind in KINDS else len(KINDS))
    columns = kinds if len(kinds) <= _MOST_COLUMNS else []
    for mp_rank, rows in grid.items():
        place = place_of(mp_rank, topology) if len(grid) > 1 else {}
        title = model_part(mp_rank, place, topology) if len(grid) > 1 else "Ranks"
        made = []
        for rank, cells in rows.items():
            label = f"{'data ' if len(grid) > 1 else ''}rank {rank}"
            named = f"{label}, {title[:1].lower()}{title[1:]}" if len(grid) > 1 else label
            held = [
                None if cells.get(kind) is None else numbered(cells[kind], kind, f"{shown_kind(kind)} file of {named}")
                for kind in (columns or cells)
            ]
            made.append((label, tuple(held)))
        found.add_group(title, [shown_kind(kind) for kind in columns], made)


def model_part(mp_rank: int, place: Mapping[str, int], topology: Topology | None) -> str:
    """The part of the model that a model-parallel rank holds, in words: its pipeline stage and tensor rank."""
    said = []
    if topology is not None and topology.pp > 1:
        said.append(f"pipeline stage {place['pp']}")
    if topology is not None and topology.tp > 1:
        said.append(f"tensor rank {place['tp']}")
    text = " · ".join(said) or f"model-parallel rank {mp_rank}"
    return text[:1].upper() + text[1:]


def _place(axes: Mapping[str, int]) -> str:
    return " · ".join(f"{_AXES.get(axis, axis)} {number}" for axis, number in axes.items())


def _further(found: FileGrid, inspection: Inspection) -> None:
    """Adds the files that belong to no rank: those with elements, then the others."""
    listing, catalog = inspection.place.listing, inspection.catalog
    stores = {} if catalog is None else stores_of(catalog)
    held = [path for path in stores if path not in found.numbers]
    names = {str(location): name for name, location in listing.files.items()}
    root = f"{listing.directory}/"
    made = []
    for path in held:
        name = names.get(path, path.removeprefix(root))
        there = name not in inspection.lost
        file = MappedFile(name, "weights", stores[path]) if there else _missing_file(name, "weights")
        made.append((name, (found.add(file, path),)))
    for name in inspection.lost:
        if (path := str(listing.where(name))) not in found.numbers:
            made.append((name, (found.add(_missing_file(name, "weights"), path),)))
    found.add_group("Weights" if len(made) < len(found.files) else "Files", ("weights",), made)
    rest = [(path, name) for path, name in names.items() if path not in found.numbers]
    small = []
    for path, name in rest:
        nbytes = listing.files[name].size()
        small.append((name, (found.add(MappedFile(name, "other", nbytes), path),)))
    found.add_group("Other files" if found.groups else "Files", ("other",), small)


def _missing_file(name: str, kind: str) -> MappedFile:
    return MappedFile(name, kind, 0, 0, "missing", "the save names it")


def stores_of(catalog: Catalog) -> dict[str, int]:
    """Path of each file that holds elements -> its bytes, in the order of the tensors."""
    found: dict[str, int] = {}
    for entry in catalog.tensors.values():
        for fragments in (entry.fragments, *(replica.fragments for replica in entry.replicas)):
            for fragment in sources_of(fragments):
                if isinstance(fragment.store, FileStore):
                    found.setdefault(fragment.store.path, fragment.store.size)
    return found


def sources_of(fragments: Iterable[Fragment]) -> Iterable[Fragment]:
    """Fragments, with the inputs of computed ones after them."""
    for fragment in fragments:
        yield fragment
        if isinstance(fragment.store, ComputedStore):
            for own, _ in fragment.store.sources:
                yield from own


def _expect(files: Sequence[MappedFile]) -> None:
    """Gives missing and empty files the usual size of their kind."""
    for kind in {file.kind for file in files if not file.nbytes}:
        sizes = [file.nbytes for file in files if file.kind == kind and file.state == "ok" and file.nbytes]
        usual = median_low(sizes) if sizes else math.ceil(sum(file.nbytes for file in files) / max(1, len(files)))
        for file in files:
            if file.kind == kind and not file.nbytes:
                file.expected = usual
