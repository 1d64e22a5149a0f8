"""Which file of a save holds which part: data x tensor x pipeline x expert, and the state each file is in.

For `inspection`. Also of a checkpoint that cannot be read: which files are missing, damaged, left over, or of another save.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zckpt.base import limits
from zckpt.base.errors import ZckptError
from zckpt.core.catalog import Catalog, TensorEntry, Topology
from zckpt.core.fragments import FileStore, Fragment
from zckpt.layouts.save.listing import (
    DCP_DATA,
    EXPERT_NAME,
    EXPERT_OPTIMIZER_NAME,
    LAYER_NAME,
    MODEL_NAME,
    SHARD_NAME,
    Listing,
)
from zckpt.layouts.save.module_states import as_mapping
from zckpt.layouts.universal import read as universal
from zckpt.storage.paths import size

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
    """

    file: str
    nbytes: int = 0
    state: str = "ok"
    reason: str = ""


Grid = Mapping[int, Rows]
"""Model-parallel rank -> its files."""


def grid_of(listing: Listing, catalog: Catalog | None) -> dict[int, Rows]:
    """All files of ranks, by model-parallel rank; nothing for what is no checkpoint."""
    if data := listing.matching(DCP_DATA):
        return {0: _data_files(listing, data)}
    if universal.match(listing) is None:
        return _copies(listing)
    ranks = set(listing.model_parallel_ranks())
    if catalog is not None and ranks:
        ranks |= set(range(catalog.topology.tp * catalog.topology.pp))
    return {rank: _rows(listing, catalog, rank) for rank in sorted(ranks)}


def _data_files(listing: Listing, names: list[str]) -> Rows:
    """What each rank wrote of a save of torch.distributed.checkpoint."""
    rows: dict[int, dict[str, Cell]] = {}
    for name in names:
        rank, number = name.removeprefix("__").removesuffix(".distcp").split("_")
        nbytes = size(listing.files[name])
        cell = Cell(name, nbytes) if nbytes else Cell(name, 0, "empty", "0 bytes")
        rows.setdefault(int(rank), {})[f"data {number}"] = cell
    return dict(sorted(rows.items()))


def _copies(listing: Listing) -> dict[int, Rows]:
    """The model files of a universal checkpoint: copies of those of the run that it was made of, whatever its shape was."""
    grid: dict[int, dict[int, dict[str, Cell]]] = {}
    for pattern in (MODEL_NAME, SHARD_NAME):
        for name in listing.matching(pattern):
            numbers = (match := pattern.fullmatch(name)) and match.groupdict()
            if numbers:
                rows = grid.setdefault(int(numbers["mp"]), {})
                rows[int(numbers.get("dp", 0))] = {"model": _facts(listing, name)[0]}
    return {rank: dict(sorted(rows.items())) for rank, rows in sorted(grid.items())}


def _rows(listing: Listing, catalog: Catalog | None, mp_rank: int) -> dict[int, dict[str, Cell]]:
    files = {kind: listing.shards(kind, mp_rank) for kind in ("model", "optim")}
    single = [n for n in listing.matching(MODEL_NAME) if int(n.split("_")[2]) == mp_rank]
    columns = [kind for kind, names in files.items() if names]
    facts = {
        name: _facts(listing, name) for names in (*files.values(), dict(enumerate(single))) for name in names.values()
    }
    if not columns:
        return {0: {"model": facts[single[0]][0]}} if single else {}
    counts = Counter(count for _, count, _ in facts.values() if count)
    world_size = catalog.topology.dp if catalog else counts.most_common(1)[0][0] if counts else 0
    world_size = max(world_size, 1) if counts or catalog else 1 + max(max(files[kind]) for kind in columns)
    world_size = min(world_size, limits.RANKS)
    usual = {
        kind: (Counter(facts[name][2] for name in files[kind].values()).most_common(1)[0][0], world_size)
        for kind in columns
    }
    matrix: dict[int, dict[str, Cell]] = {}
    for rank in sorted(set(range(world_size)).union(*(files[kind] for kind in columns))):
        row: dict[str, Cell] = {}
        for kind in columns:
            name = files[kind].get(rank)
            if name is None:
                if rank < world_size:
                    row[kind] = Cell("", state="missing")
                continue
            cell, count, step = facts[name]
            if cell.state == "ok" and rank >= world_size:
                cell = replace(cell, state="extra", reason=f"the save had world size {world_size}")
            elif cell.state == "ok" and (step != usual[kind][0] or (count is not None and count > world_size)):
                cell = replace(cell, state="other save", reason=f"step {step}, world size {count or 'not said'}")
            row[kind] = cell
        matrix[rank] = row
    if single:
        matrix[0] = {"model": facts[single[0]][0], **matrix.get(0, {})}
    elif not files["model"]:
        matrix[0] = {"model": Cell("", state="missing"), **matrix.get(0, {})}
    return matrix


def _facts(listing: Listing, name: str) -> tuple[Cell, int | None, object]:
    """A file's cell, the world size it names, and the step it names."""
    path = listing.files[name]
    nbytes = size(path)
    if not nbytes:
        return Cell(name, 0, "empty", "0 bytes"), None, None
    try:
        if name.endswith("_optim_states.pt"):
            return Cell(name, nbytes), _partition_count(listing.open(name).root, path), None
        numbers = listing.numbers(name, "dp_world_size", "global_steps")
    except ZckptError as error:
        return Cell(name, nbytes, "unreadable", error.what), None, None
    return Cell(name, nbytes), numbers.get("dp_world_size"), numbers.get("global_steps")


def _partition_count(root: object, path: str) -> int | None:
    state = as_mapping(root, "a checkpoint file", path).get("optimizer_state_dict")
    count = state.get("partition_count") if isinstance(state, Mapping) else None
    if isinstance(count, list | tuple):  # groups of experts, which come last, have others
        count = next(iter(count), None)
    return count if isinstance(count, int) else None


def bad_ranks(grid: Grid) -> list[int]:
    """Data-parallel ranks of which a file is not as it should be."""
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
    kinds = {"layer": LAYER_NAME, "expert": EXPERT_NAME, "expert optim": EXPERT_OPTIMIZER_NAME}
    for kind, pattern in kinds.items():
        for name in listing.matching(pattern):
            match = pattern.fullmatch(name)
            numbers = match.groupdict() if match else {}
            nbytes = size(listing.files[name])
            place = {axis: int(number) for axis, number in numbers.items() if number is not None}
            if "mp" in place:
                place["mp_rank"] = place.pop("mp")
            state, reason = ("ok", "") if nbytes else ("empty", "0 bytes")
            found.append({**place, "kind": kind, "file": name, "bytes": nbytes, "state": state, "reason": reason})
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
         "rows": fragment.rows, "pitch": fragment.pitch, "store_pitch": fragment.store_pitch}
        for fragment in entry.fragments
    ]  # fmt: skip


def file_of(fragment: Fragment) -> str:
    """The name of the file that holds a fragment."""
    store = fragment.store
    return os.path.basename(store.path) if isinstance(store, FileStore) else "computed from several files"
