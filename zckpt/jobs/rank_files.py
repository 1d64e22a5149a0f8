"""Finds which file of a save holds which part (data x tensor x pipeline x expert), and the state of each file.

For `inspection`. Also of a checkpoint that cannot be read: which files are missing, damaged, left over, or of another save.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zckpt import layouts
from zckpt.base import limits
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import ZckptError
from zckpt.core.catalog import Catalog, TensorEntry, Topology
from zckpt.core.fragments import Fragment
from zckpt.core.stores import FileStore
from zckpt.layouts.save.family import Family, NamedFile, RankFacts
from zckpt.layouts.save.listing import Listing

SWAP = "swap"
"""The beginning of the kinds of swap files; their names follow."""

Rows = Mapping[int, Mapping[str, "Cell"]]
"""Data-parallel rank -> kind of file ("model", "optim") -> its state."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One file of one rank.

    Attributes:
        file: its name; empty when it is missing.
        nbytes: its size.
        state: "ok", "missing", "empty", "unreadable", "extra" or "other save".
        reason: why, in a few words.
        lost: the name that a missing file would have; empty where it is not known.
    """

    file: str
    nbytes: int = 0
    state: str = "ok"
    reason: str = ""
    lost: str = ""


Grid = Mapping[int, Rows]
"""Model-parallel rank -> its files."""


def grid_of(listing: Listing, catalog: Catalog | None, lost: Iterable[str] = ()) -> dict[int, Rows]:
    """All files of ranks, by model-parallel rank; nothing for files that are not a rank's.

    Where every rank has files, those that are missing, left over or of another save are found. Of other families, such as
    torch.distributed.checkpoint, it is the files that are there, and those of `lost`, which the save names and which are missing.
    """
    family = layouts.family_by_names(listing)
    found: dict[int, list[_RankFile]] = {}
    for file in family.named_files(listing.files):
        if file.of_rank:
            if family.axes is not None:
                file = file._replace(axes=family.axes(listing, file.name))
            found.setdefault(file.axes.get("mp", 0), []).append(_looked_at(listing, family, file))
    for file in family.named_files(lost):
        if file.of_rank:
            cell = Cell("", state="missing", reason=f"no file {file.name}", lost=file.name)
            held = found.setdefault(file.axes.get("mp", 0), [])
            held.append(_RankFile(file.kind, file.axes.get("dp"), cell, RankFacts()))
    topology = None if catalog is None else catalog.topology
    if topology is not None and found and family.every_rank:
        for mp_rank in range(topology.tp * topology.pp):
            found.setdefault(mp_rank, [])
    shared = [kind for kind, pattern, of_rank in family.files if of_rank and "dp" not in pattern.groupindex]
    grid = {
        mp_rank: _complete(files, shared, topology, family) if family.every_rank else _present(files)
        for mp_rank, files in sorted(found.items())
    }
    swapped = {mp_rank: _with_swapped(listing, found[mp_rank], rows) for mp_rank, rows in grid.items()}
    return _with_names(swapped, family) if family.every_rank else swapped


def _with_swapped(listing: Listing, files: Sequence[_RankFile], rows: Rows) -> Rows:
    """The rows, with the swap files that optimizer files name."""
    swapped = {file.rank: file.facts.swapped for file in files if file.facts.swapped}
    return {
        rank: {
            **cells,
            **{f"{SWAP} {os.path.basename(name)}": _swap_file(listing, name) for name in swapped.get(rank, ())},
        }
        for rank, cells in rows.items()
    }


def _swap_file(listing: Listing, name: str) -> Cell:
    if name not in listing.files:
        return Cell("", state="missing", lost=name)
    nbytes = listing.files[name].size()
    return Cell(name, nbytes) if nbytes else Cell(name, 0, "empty", "0 bytes")


class _RankFile(NamedTuple):
    """A file of a kind, and the data-parallel rank that it belongs to; None where all ranks share it. `cell`: its state, as
    far as it can be seen without the other files; `facts`: what it says of its save.
    """

    kind: str
    rank: int | None
    cell: Cell
    facts: RankFacts


def _looked_at(listing: Listing, family: Family, file: NamedFile) -> _RankFile:
    nbytes, facts = listing.files[file.name].size(), RankFacts()
    cell = Cell(file.name, nbytes) if nbytes else Cell(file.name, 0, "empty", "0 bytes")
    try:
        if nbytes and family.facts is not None:
            facts = family.facts(listing, file.name)
    except ZckptError as error:
        cell = Cell(file.name, nbytes, "unreadable", error.what)
    return _RankFile(file.kind, file.axes.get("dp"), cell, facts)


def _present(files: Sequence[_RankFile]) -> Rows:
    rows: dict[int, dict[str, Cell]] = {}
    for file in files:
        rows.setdefault(file.rank or 0, {})[file.kind] = file.cell
    return dict(sorted(rows.items()))


def lost_files(listing: Listing) -> dict[str, list[str]]:
    """The missing files that the save names, each with the tensors that are known by name only.

    Nothing where it cannot be read which files it names.
    """
    try:
        named = layouts.family_by_names(listing).named_data(listing)
    except ZckptError:
        return {}
    return {name: tensors for name, tensors in named.items() if name not in listing.files}


def _lost_name(family: Family, fellows: Iterable[str], axis: str, number: int) -> str:
    """The name of a file with this number of an axis, like its kind's other files, with as many digits."""
    digits, made = 0, ""
    for name in fellows:
        for _, pattern, _ in family.files:
            if axis in pattern.groupindex and (match := pattern.fullmatch(name)) is not None:
                start, end = match.span(axis)
                digits = max(digits, len(match[axis]) if match[axis].startswith("0") else 0)
                made = f"{name[:start]}{number:0{digits}d}{name[end:]}"
                break
    return made


def _with_names(grid: Mapping[int, Rows], family: Family) -> dict[int, Rows]:
    """The grid, with names for missing files that data ranks share, like those of other model-parallel ranks."""
    there: dict[str, list[str]] = {}
    for rows in grid.values():
        for kind, cell in rows.get(0, {}).items():
            if cell.file:
                there.setdefault(kind, []).append(cell.file)
    named: dict[int, Rows] = {}
    for mp_rank, rows in grid.items():
        own = {
            kind: replace(cell, lost=_lost_name(family, there.get(kind, ()), "mp", mp_rank))
            if cell.state == "missing" and not cell.lost
            else cell
            for kind, cell in rows.get(0, {}).items()
        }
        named[mp_rank] = {**rows, 0: own} if own else rows
    return named


def _complete(files: Sequence[_RankFile], shared: Sequence[str], topology: Topology | None, family: Family) -> Rows:
    """The files of one model-parallel rank, present or missing; `shared`: kinds that all data ranks share."""
    own = {(file.rank, file.kind): file for file in files if file.rank is not None}
    if not own:
        return _present(files)
    kinds = list(dict.fromkeys(sorted(kind for _, kind in own)))
    world_size = _world_size(files, topology)
    steps = {kind: _usual(file.facts.step for file in own.values() if file.kind == kind) for kind in kinds}
    there = {kind: [file.cell.file for file in own.values() if file.kind == kind] for kind in kinds}
    rows: dict[int, dict[str, Cell]] = {}
    for rank in sorted({*range(world_size), *(file.rank for file in own.values() if file.rank is not None)}):
        rows[rank] = {}
        for kind in kinds:
            if (file := own.get((rank, kind))) is not None:
                rows[rank][kind] = _judge_file(file, rank, world_size, steps[kind])
            elif rank < world_size:
                rows[rank][kind] = Cell("", state="missing", lost=_lost_name(family, there[kind], "dp", rank))
    whole = {file.kind: file.cell for file in files if file.rank is None}
    missing = {kind: Cell("", state="missing") for kind in shared if kind not in (*kinds, *whole)}
    rows[0] = {**whole, **missing, **rows.get(0, {})}
    return rows


def _world_size(files: Sequence[_RankFile], topology: Topology | None) -> int:
    """The number of data-parallel ranks: as read, as most files record it, or as many as have files."""
    said = [file.facts.world_size for file in files if file.facts.world_size]
    if topology is not None:
        return min(topology.dp, limits.RANKS)
    return min(_usual(said) or 1 + max(file.rank or 0 for file in files), limits.RANKS)


def _usual(values: Iterable[int | None]) -> int | None:
    """The most frequent value; None for no values."""
    return next((value for value, _ in Counter(values).most_common(1)), None)


def _judge_file(file: _RankFile, rank: int, world_size: int, usual_step: int | None) -> Cell:
    """The state of a file, given the world size and the step of the save."""
    cell, count, step = file.cell, file.facts.world_size, file.facts.step
    if cell.state != "ok":
        return cell
    if rank >= world_size:
        return replace(cell, state="extra", reason=f"the save had world size {world_size}")
    if step != usual_step or (count is not None and count > world_size):
        said = [f"{what} {number}" for what, number in (("step", step), ("world size", count)) if number is not None]
        return replace(cell, state="other save", reason=", ".join(said) or "it names no step")
    return cell


def other_files(listing: Listing) -> list[NamedFile]:
    """Files of a save that are not one rank's, such as those of layers and experts, kind by kind."""
    family = layouts.family_by_names(listing)
    found = [file for file in family.named_files(listing.files) if not file.of_rank and file.kind]
    order = [kind.kind for kind in family.files]
    return sorted(found, key=lambda file: order.index(file.kind))


def bad_ranks(grid: Grid) -> list[int]:
    """Data-parallel ranks with a file that is missing or bad."""
    return sorted(
        {n for rows in grid.values() for n, cells in rows.items() if any(c.state != "ok" for c in cells.values())}
    )


def place_of(mp_rank: int, topology: Topology | None) -> dict[str, int]:
    """Pipeline stage and tensor rank of a model-parallel rank; nothing while the topology is not known."""
    return {} if topology is None else {"pp": mp_rank // topology.tp, "tp": mp_rank % topology.tp}


def files_as_json(listing: Listing, grid: Grid, topology: Topology | None) -> list[dict[str, object]]:
    """One object per file, with its place."""
    found: list[dict[str, object]] = [
        {"rank": rank, "mp_rank": mp_rank, **place_of(mp_rank, topology), "kind": kind, "file": cell.file,
         "bytes": cell.nbytes, "state": cell.state, "reason": cell.reason}
        for mp_rank, rows in grid.items()
        for rank, cells in rows.items()
        for kind, cell in cells.items()
    ]  # fmt: skip
    for file in other_files(listing):
        nbytes = listing.files[file.name].size()
        place = {"mp_rank" if axis == "mp" else axis: number for axis, number in file.axes.items()}
        state, reason = ("ok", "") if nbytes else ("empty", "0 bytes")
        found.append({**place, "kind": file.kind, "file": file.name, "bytes": nbytes, "state": state, "reason": reason})
    return found


def experts_as_json(topology: Topology) -> list[dict[str, object]]:
    """One object per layer of experts."""
    return [
        {"layer": number, "spread": [{"experts": list(experts), "ranks": list(ranks)} for experts, ranks in spread]}
        for number, spread in enumerate(topology.experts)
    ]


def slices_as_json(entry: TensorEntry) -> list[dict[str, object]]:
    """Where a tensor's elements are stored, one object per fragment, in the numbers of `fragments.Fragment`."""
    return [
        {"file": file_of(fragment), "byte_offset": fragment.byte_offset, "start": fragment.start, "count": fragment.count,
         "rows": fragment.rows, "pitch": fragment.pitch, "store_pitch": fragment.store_pitch, "step": fragment.step}
        for fragment in entry.fragments
    ]  # fmt: skip


def file_of(fragment: Fragment) -> str:
    """The name of the file that holds a fragment."""
    store = fragment.store
    return os.path.basename(store.path) if isinstance(store, FileStore) else "computed from several files"
