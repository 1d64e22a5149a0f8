"""What a checkpoint is: a value first, text second. `zckpt inspect` prints it.

Two verdicts come with reasons: can it be exported (consolidated), and can training resume from it, at which world size.
A checkpoint that cannot be read is reported too: the matrix of ranks and files shows what is missing, extra or of
another save.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zckpt import files
from zckpt.catalog import Catalog, TensorEntry
from zckpt.checkpoint import open_catalog, strip_wrappers
from zckpt.convert import output_dtype
from zckpt.dtypes import CAST_TARGETS
from zckpt.errors import ZckptError, ranges
from zckpt.layouts.listing import EXPERT_NAME, LAYER_NAME, MODEL_NAME, Listing, Wishes
from zckpt.layouts.module_states import as_mapping
from zckpt.layouts.places import Place, find

_SHORT = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


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


@dataclass(frozen=True, slots=True)
class Verdict:
    """Yes or no, and why."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything `inspect` tells.

    Attributes:
        place: what was looked at.
        catalog: its tensors, or None when they cannot be told.
        matrix: data-parallel rank -> kind of file ("model", "optim") -> its state.
        exportable: whether consolidated weights can be made.
        resumable: whether training can resume, and at which world size.
        notes: sentences a person should see.
    """

    place: Place
    catalog: Catalog | None
    matrix: Mapping[int, Mapping[str, Cell]]
    exportable: Verdict
    resumable: Verdict
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """One object for programs."""
        listing, catalog = self.place.listing, self.catalog
        facts: dict[str, object] = {"path": listing.directory, "tag": listing.tag, "tags": list(self.place.tags)}
        if catalog is not None:
            source, topology = catalog.source, catalog.topology
            facts |= {
                "layout": source.layout,
                "zero_stage": source.zero_stage,
                "framework": {"name": source.framework[0], "version": source.framework[1]},
                "topology": {"dp": topology.dp, "tp": topology.tp, "pp": topology.pp, "ep": topology.ep},
                "parameters": sum(entry.role != "buffer" for entry in catalog.tensors.values()),
                "numel": catalog.numel,
                "trainable_numel": _numel(catalog, "parameter"),
                "frozen_numel": _numel(catalog, "frozen"),
                "bytes": output_bytes(catalog),
                "aliases": dict(catalog.aliases),
                "optimizer": list(source.optimizer_states),
                "steps": source.global_steps,
                "tensors": [_tensor_json(entry) for entry in catalog.tensors.values()],
            }
        facts["files"] = [
            {
                "rank": rank,
                "kind": kind,
                "file": cell.file,
                "bytes": cell.nbytes,
                "state": cell.state,
                "reason": cell.reason,
            }
            for rank, cells in self.matrix.items()
            for kind, cell in cells.items()
        ]
        for name, verdict in (("exportable", self.exportable), ("resumable", self.resumable)):
            facts[name] = {"ok": verdict.ok, "reason": verdict.reason}
        facts["notes"] = list(self.notes)
        return facts


def _numel(catalog: Catalog, role: str) -> int:
    return sum(entry.numel for entry in catalog.tensors.values() if entry.role == role)


def _tensor_json(entry: TensorEntry) -> dict[str, object]:
    return {"name": entry.name, "shape": list(entry.shape), "dtype": entry.dtype.name, "role": entry.role}


def output_bytes(catalog: Catalog) -> dict[str, int]:
    """Bytes of all tensors, tied ones once, per output dtype."""
    return {
        _SHORT[dtype.name]: sum(e.numel * output_dtype(e, dtype).itemsize for e in catalog.tensors.values())
        for dtype in CAST_TARGETS
    }


def inspect_checkpoint(
    path: str, tag: str | None = None, also: Sequence[str] = (), wishes: Wishes | None = None
) -> Inspection:
    """Looks at a checkpoint or a weights file; reads indexes only.

    Raises:
        ZckptError: there is nothing to look at. What is there but broken is reported, not raised.
    """
    place = find(path, tag, also)
    catalog: Catalog | None = None
    notes: tuple[str, ...] = place.notes
    try:
        opened = open_catalog(path, tag, also, wishes=wishes)
    except ZckptError as error:
        exportable = Verdict(False, str(error))
    else:
        place = opened.place
        catalog, stripped = strip_wrappers(opened.catalog)
        notes = opened.catalog.source.notes + stripped
        exportable = Verdict(True, f"all elements of {len(catalog):,} tensors are there")
    matrix = _matrix(place.listing, catalog)
    return Inspection(place, catalog, matrix, exportable, _resumable(place, catalog, matrix, exportable), notes)


def _matrix(listing: Listing, catalog: Catalog | None) -> dict[int, dict[str, Cell]]:
    files = {kind: listing.shards(kind) for kind in ("model", "optim")}
    single = listing.matching(MODEL_NAME)
    columns = [kind for kind, names in files.items() if names]
    facts = {
        name: _facts(listing, name) for names in (*files.values(), dict(enumerate(single))) for name in names.values()
    }
    if not columns:
        return {0: {"model": facts[single[0]][0]}} if single else {}
    counts = Counter(count for _, count, _ in facts.values() if count)
    world_size = catalog.topology.dp if catalog else counts.most_common(1)[0][0] if counts else 0
    world_size = max(world_size, 1) if counts or catalog else 1 + max(max(files[kind]) for kind in columns)
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
    return matrix


def _facts(listing: Listing, name: str) -> tuple[Cell, int | None, object]:
    """A file's cell, the world size it names, and the step it names."""
    path = listing.files[name]
    nbytes = files.size(path)
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
    count = max((n for n in count if isinstance(n, int)), default=None) if isinstance(count, list | tuple) else count
    return count if isinstance(count, int) else None


def _resumable(
    place: Place, catalog: Catalog | None, matrix: Mapping[int, Mapping[str, Cell]], exportable: Verdict
) -> Verdict:
    if catalog is None:
        return Verdict(False, f"it cannot be read whole: {exportable.reason}")
    if catalog.source.zero_stage is None:
        return Verdict(False, "plain weights hold no optimizer states")
    bad = [rank for rank, cells in matrix.items() if any(cell.state != "ok" for cell in cells.values())]
    if bad:
        return Verdict(False, f"files of ranks {ranges(bad)} are missing or of another save")
    if not catalog.source.optimizer_states:
        return Verdict(True, f"at world size {catalog.topology.dp}; the optimizer keeps no state per element")
    size = "any data-parallel world size" if catalog.source.zero_stage == 0 else f"world size {catalog.topology.dp}"
    latest = os.path.join(place.home, "latest")
    pointer = "" if files.is_file(latest) else " (there is no 'latest': name the tag when loading)"
    return Verdict(True, f"at {size}{pointer}")


def describe(inspection: Inspection, *, tensors: bool = False) -> Iterator[str]:
    """The inspection as lines for a person."""
    place, catalog = inspection.place, inspection.catalog
    yield place.listing.directory
    if catalog is not None:
        source, topology = catalog.source, catalog.topology
        name = " ".join(source.framework).strip()
        steps = "" if source.global_steps is None else f", step {source.global_steps:,}"
        yield f"  layout      {source.layout}{f', written by {name}' if name else ''}{steps}"
        if place.listing.tag:
            yield f"  tag         {place.listing.tag}" + (
                f"  (tags here: {', '.join(place.tags)})" if len(place.tags) > 1 else ""
            )
        yield f"  topology    data {topology.dp}, tensor {topology.tp}, pipeline {topology.pp}, expert {topology.ep}"
        roles = Counter(entry.role for entry in catalog.tensors.values())
        trained, frozen = _numel(catalog, "parameter"), _numel(catalog, "frozen")
        yield f"  tensors     {len(catalog):,}: {roles['parameter']:,} trainable ({trained:,} elements), " + (
            f"{roles['frozen']:,} frozen ({frozen:,} elements), {roles['buffer']:,} buffers"
        )
        yield "  size        " + ", ".join(f"{n:,} bytes as {dtype}" for dtype, n in output_bytes(catalog).items())
        for dropped, kept in catalog.aliases.items():
            yield f"  tied        {dropped} = {kept}"
        if source.optimizer_states:
            yield f"  optimizer   {', '.join(source.optimizer_states)}"
    elif place.tags:
        yield f"  tags        {', '.join(place.tags)}"
    yield from _matrix_lines(inspection.matrix)
    strange = [n for n in place.listing.files if LAYER_NAME.fullmatch(n) or EXPERT_NAME.fullmatch(n)]
    if strange:
        yield f"  other files {', '.join(strange[:3])}{f' and {len(strange) - 3:,} more' if len(strange) > 3 else ''}"
    for note in inspection.notes:
        yield f"  note        {note}"
    yield f"  export      {'yes' if inspection.exportable.ok else 'no'}: {inspection.exportable.reason}"
    yield f"  resume      {'yes' if inspection.resumable.ok else 'no'}: {inspection.resumable.reason}"
    if tensors and catalog is not None:
        for entry in catalog.tensors.values():
            yield f"  {entry.role:<10} {entry.dtype.name:<5} {list(entry.shape)!s:<20} {entry.name}"


def _matrix_lines(matrix: Mapping[int, Mapping[str, Cell]]) -> Iterator[str]:
    """One line per run of ranks in the same state."""
    rows: list[tuple[list[int], tuple[tuple[str, str, str], ...], int]] = []
    for rank, cells in matrix.items():
        key = tuple((kind, cell.state, cell.reason) for kind, cell in cells.items())
        nbytes = sum(cell.nbytes for cell in cells.values())
        if rows and rows[-1][1] == key:
            rows[-1] = ([*rows[-1][0], rank], key, rows[-1][2] + nbytes)
        else:
            rows.append(([rank], key, nbytes))
    for numbers, key, nbytes in rows:
        states = ", ".join(f"{kind} {state}{f' ({reason})' if reason else ''}" for kind, state, reason in key)
        yield f"  rank {ranges(numbers):<6} {states}; {nbytes:,} bytes"
