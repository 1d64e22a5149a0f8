"""What a checkpoint is: a value first, text second. `zckpt inspect` prints it.

Two verdicts come with reasons: can it be exported (consolidated), and can training resume from it, at which world size.
A checkpoint that cannot be read is reported too: the `grid` of ranks and files shows what is missing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zckpt.base.errors import ZckptError
from zckpt.base.words import ranges
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import CAST_TARGETS, SHORT_NAMES
from zckpt.jobs.convert import output_dtype
from zckpt.jobs.open import open_catalog, strip_wrappers
from zckpt.jobs.rank_files import (
    Grid,
    bad_ranks,
    expert_lines,
    experts_as_json,
    files_as_json,
    grid_lines,
    grid_of,
    slice_lines,
    slices_as_json,
)
from zckpt.layouts.dcp import read as dcp
from zckpt.layouts.plain import read as huggingface
from zckpt.layouts.run import agreement
from zckpt.layouts.save.listing import EXPERT_NAME, EXPERT_OPTIMIZER_NAME, LAYER_NAME, UNIVERSAL_POINTER, ReadOptions
from zckpt.layouts.save.places import Place, find
from zckpt.storage import paths


@dataclass(frozen=True, slots=True)
class Verdict:
    """Yes or no, and why."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `zckpt inspect` reports of a checkpoint.

    `exportable.ok` and `resumable.ok` answer the two questions that a program asks most; `as_json()` has every fact under the
    names of `zckpt inspect --json`; `lines()` is what `zckpt inspect` prints.

    Attributes:
        exportable: whether whole weights can be made (`ok`), and why or why not (`reason`).
        resumable: whether training can resume (`ok`), and at which world size, or why not (`reason`).
        notes: sentences a person should see.
        place: which save was found, and where.
        catalog: names, shapes, dtypes and places of all tensors; None when they cannot be known.
        grid: model-parallel rank -> data-parallel rank -> kind of file ("model", "optim") -> its state.
    """

    place: Place
    catalog: Catalog | None
    grid: Grid
    exportable: Verdict
    resumable: Verdict
    notes: tuple[str, ...]

    def lines(self, *, tensors: bool = False) -> Iterator[str]:
        """What `zckpt inspect` prints; with `tensors`, also every tensor, and which files hold its elements."""
        return describe(self, tensors=tensors)

    def as_json(self, *, slices: bool = False) -> dict[str, object]:
        """What `zckpt inspect --json` prints, as a dict; with `slices`, also which files hold each tensor's elements."""
        listing, catalog = self.place.listing, self.catalog
        facts: dict[str, object] = {"path": listing.directory, "tag": listing.tag, "tags": list(self.place.tags)}
        if catalog is not None:
            source, topology = catalog.source, catalog.topology
            facts |= {
                "layout": source.layout,
                "zero_stage": source.zero_stage,
                "framework": {"name": source.framework[0], "version": source.framework[1]},
                "topology": {"dp": topology.dp, "tp": topology.tp, "pp": topology.pp, "ep": topology.ep},
                "experts": experts_as_json(topology),
                "parameters": sum(entry.role != "buffer" for entry in catalog.tensors.values()),
                "numel": catalog.numel,
                "trainable_numel": _numel(catalog, "parameter"),
                "frozen_numel": _numel(catalog, "frozen"),
                "bytes": output_bytes(catalog),
                "aliases": dict(catalog.aliases),
                "optimizer": list(source.optimizer_states),
                "steps": source.global_steps,
                "tensors": [_tensor_json(entry, slices) for entry in catalog.tensors.values()],
            }
        facts["files"] = files_as_json(listing, self.grid, catalog.topology if catalog else None)
        for name, verdict in (("exportable", self.exportable), ("resumable", self.resumable)):
            facts[name] = {"ok": verdict.ok, "reason": verdict.reason}
        facts["notes"] = list(self.notes)
        return facts


def _numel(catalog: Catalog, role: str) -> int:
    return sum(entry.numel for entry in catalog.tensors.values() if entry.role == role)


def _tensor_json(entry: TensorEntry, slices: bool) -> dict[str, object]:
    facts: dict[str, object] = {
        "name": entry.name,
        "shape": list(entry.shape),
        "dtype": entry.dtype.name,
        "role": entry.role,
    }
    return {**facts, "slices": slices_as_json(entry)} if slices else facts


def output_bytes(catalog: Catalog) -> dict[str, int]:
    """Bytes of all tensors, tied ones once, per output dtype."""
    return {
        SHORT_NAMES[dtype]: sum(e.numel * output_dtype(e, dtype).itemsize for e in catalog.tensors.values())
        for dtype in CAST_TARGETS
    }


def inspect_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    wishes: ReadOptions | None = None,
) -> Inspection:
    """Reports what a checkpoint or a weights file holds; reads indexes only, kilobytes per file.

    Args:
        path: a checkpoint directory, tag directory, trainer's output directory, weights, or an address (`s3://...`).
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        wishes: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.

    Returns:
        The facts. A checkpoint that is damaged or incomplete is reported, not raised: `exportable.reason` says what is wrong.

    Raises:
        NotACheckpointError: there is no checkpoint at `path`.
        ZckptError: another kind, where the save cannot be chosen: `latest` is missing and there are several tags.

    Example:
        found = zckpt.inspect_checkpoint("out/checkpoint-500")
        if found.exportable.ok:
            print(found.as_json()["numel"], "parameters")
    """
    place = find(os.fspath(path), tag, [os.fspath(root) for root in also])
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
    grid = grid_of(place.listing, catalog)
    return Inspection(place, catalog, grid, exportable, _resumable(place, catalog, grid, exportable), notes)


def _resumable(place: Place, catalog: Catalog | None, grid: Grid, exportable: Verdict) -> Verdict:
    if catalog is None:
        return Verdict(False, f"it cannot be read whole: {exportable.reason}")
    if catalog.source.layout == "dcp" and catalog.source.optimizer_states:
        return Verdict(True, "by torch.distributed.checkpoint.load, on any number of ranks")
    if catalog.source.zero_stage is None:
        layout = dcp if catalog.source.layout == "dcp" else huggingface
        if unread := layout.unread_states(place.listing):
            return Verdict(False, f"zckpt does not read the optimizer states that are there: {unread}")
        return Verdict(False, "weights alone: no optimizer states are in them or beside them")
    if bad := bad_ranks(grid):
        return Verdict(False, f"files of ranks {ranges(bad)} are missing, damaged or of another save")
    try:
        contradictions = agreement.contradictions(place.listing)
    except ZckptError as error:
        return Verdict(False, str(error))
    if contradictions:
        more = f" ({len(contradictions) - 1:,} more such places)" if len(contradictions) > 1 else ""
        return Verdict(False, f"optimizer files disagree: {contradictions[0]}{more}")
    if catalog.source.layout == "universal":
        return Verdict(True, _resumable_universal(place, catalog))
    if not catalog.source.optimizer_states:
        return Verdict(True, f"at world size {catalog.topology.dp}; the optimizer keeps no state per element")
    size = "any data-parallel world size" if catalog.source.zero_stage == 0 else f"world size {catalog.topology.dp}"
    latest = os.path.join(place.home, "latest")
    pointer = "" if paths.is_file(latest) else " (there is no 'latest': name the tag when loading)"
    return Verdict(True, f"at {size}{pointer}")


def _resumable_universal(place: Place, catalog: Catalog) -> str:
    """How a run goes on from a universal checkpoint."""
    stages = "ZeRO stage 3" if catalog.source.zero_stage == 3 else "ZeRO stages 1 and 2"
    pointer = os.path.join(place.home, UNIVERSAL_POINTER)
    how = "" if paths.is_file(pointer) else f"; there is no {UNIVERSAL_POINTER!r}: name the tag when loading"
    return f"at any world size, with {stages} (DeepSpeed: checkpoint.load_universal{how})"


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
        axes = f"data {topology.dp}, tensor {topology.tp}, pipeline {topology.pp}, expert {topology.ep}"
        yield f"  topology    {'any: every parameter lies whole' if source.layout == 'universal' else axes}"
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
    cut = catalog if catalog is not None and catalog.source.layout != "universal" else None
    yield from grid_lines(inspection.grid, cut.topology if cut else None)
    if catalog is not None:
        yield from expert_lines(catalog.topology)
    others = (LAYER_NAME, EXPERT_NAME, EXPERT_OPTIMIZER_NAME)
    strange = [name for pattern in others for name in place.listing.matching(pattern)]
    if strange:
        yield f"  other files {', '.join(strange[:3])}{f' and {len(strange) - 3:,} more' if len(strange) > 3 else ''}"
    for note in inspection.notes:
        yield f"  note        {note}"
    yield f"  export      {'yes' if inspection.exportable.ok else 'no'}: {inspection.exportable.reason}"
    yield f"  resume      {'yes' if inspection.resumable.ok else 'no'}: {inspection.resumable.reason}"
    if tensors and catalog is not None:
        for entry in catalog.tensors.values():
            yield f"  {entry.role:<10} {entry.dtype.name:<5} {list(entry.shape)!s:<20} {entry.name}"
            yield from slice_lines(entry)
