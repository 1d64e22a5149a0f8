"""What a checkpoint holds, what it lacks, and whether it can be exported and resumed from.

For `zckpt inspect`. A checkpoint that cannot be read is described too: `grid` says which files are missing or damaged.
Ranks with files in the same state (`rank_files`) share a line, so that a save of a thousand ranks takes a few lines.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace

from zckpt import layouts
from zckpt.base import words
from zckpt.base.dataclass import dataclass, public
from zckpt.base.errors import ZckptError
from zckpt.base.words import count, ranges, row, size, wrap_text
from zckpt.core.catalog import Catalog, Role, TensorEntry, TensorForm, Topology, alike, named_forms, passing
from zckpt.core.dtypes import CAST_TARGETS, SHORT_NAMES
from zckpt.core.fragments import Fragment
from zckpt.jobs.casting import output_dtype
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import Opened, find_save, open_place, strip_wrappers
from zckpt.jobs.opened import about, dequantise
from zckpt.jobs.rank_files import (
    SWAP,
    Cell,
    Grid,
    Rows,
    bad_ranks,
    experts_as_json,
    file_of,
    files_as_json,
    grid_of,
    lost_files,
    other_files,
    slices_as_json,
)
from zckpt.layouts.places import Place
from zckpt.layouts.run import agreement
from zckpt.layouts.run.values import refuse_odd_values
from zckpt.layouts.save.family import Family
from zckpt.layouts.save.listing import UNIVERSAL_POINTER, Listing, ReadOptions
from zckpt.naming.adapter_names import note_unmerged

_KINDS = {"model": "model", "optim": "optimizer"}
_MOST_EXPERTS = 8


def file_rows(grid: Grid, listing: Listing, topology: Topology | None, width: int | None) -> Iterator[str]:
    """The files of ranks, by the state of each in `grid`, and how many other files there are; `width` as in `words.row`."""
    table: list[tuple[str, str, str]] = []
    for mp_ranks, runs in _alike(grid):
        model_part = f"mp_rank {ranges(mp_ranks)}" if len(grid) > 1 else ""
        for ranks, states in runs.items():
            nbytes = sum(cell.nbytes for mp in mp_ranks for rank in ranks for cell in grid[mp][rank].values())
            files = f"{', '.join(states)}{f' ({size(nbytes)})' if nbytes else ''}"
            table.append((model_part, f"{'data ' if len(grid) > 1 else ''}{_ranks(ranks)}", files))
            model_part = ""
    widths = [max((len(line[at]) for line in table), default=0) for at in (0, 1)]
    indent = 14 + widths[1] + 2 + (widths[0] + 2 if widths[0] else 0)
    for number, (model_part, ranks_text, files) in enumerate(table):
        first = f"{model_part:<{widths[0]}}  " if widths[0] else ""
        text = f"  {'' if number else 'files':<11} {first}{ranks_text:<{widths[1]}}  {files}"
        yield from wrap_text(text, width, " " * indent)
    if len(grid) > 1 and topology is not None:
        yield from row("", f"mp_rank is {_numbering(topology)}", width)
    for what, others in itertools.groupby(other_files(listing), key=lambda file: file.kind.partition(" ")[0]):
        names = [file.name for file in others]
        yield from row("" if table else "files", f"{count(len(names), f'{what} file')} such as {names[0]}", width)


def _alike(grid: Grid) -> Iterator[tuple[list[int], dict[tuple[int, ...], list[str]]]]:
    """Runs of model-parallel ranks with files in the same states: the ranks, and their data-parallel ranks -> states."""
    found: list[tuple[list[int], dict[tuple[int, ...], list[str]]]] = []
    for mp_rank, rows in grid.items():
        runs = _runs(rows)
        if found and found[-1][1] == runs:
            found[-1][0].append(mp_rank)
        else:
            found.append(([mp_rank], runs))
    yield from found


def _runs(rows: Rows) -> dict[tuple[int, ...], list[str]]:
    """Runs of data-parallel ranks with files in the same states."""
    alike = itertools.groupby(rows, key=lambda rank: _states(rows[rank]))
    return {tuple(ranks): states for states, ranks in alike}


def _states(cells: Mapping[str, Cell]) -> list[str]:
    """The state of each kind of file; sound data files of DCP and swap files are counted."""
    sound = [kind for kind, cell in cells.items() if kind not in _KINDS and cell.state == "ok"]
    swapped = sum(kind.startswith(f"{SWAP} ") for kind in sound)
    states = [count(len(sound) - swapped, "data file")] if len(sound) > swapped else []
    for kind, cell in cells.items():
        reason = f" ({cell.reason})" if cell.reason else ""
        if cell.state != "ok":
            states.append(f"{_KINDS.get(kind) or cell.file or kind} {cell.state}{reason}")
        elif kind in _KINDS:
            states.append(_KINDS[kind])
    return states + [count(swapped, "swap file")] * bool(swapped)


def _numbering(topology: Topology) -> str:
    """The meaning of a model-parallel rank's number, in words."""
    if topology.tp == 1:
        return "the pipeline stage"
    return "the tensor rank" if topology.pp == 1 else f"{topology.tp} x the pipeline stage + the tensor rank"


def expert_rows(topology: Topology, width: int | None) -> Iterator[str]:
    """Which ranks hold which experts, a row per run of layers with experts that are spread alike."""
    label = "experts"
    for spread, layers in itertools.groupby(range(len(topology.experts)), key=lambda layer: topology.experts[layer]):
        held = [f"{ranges(experts)} on {_ranks(ranks)}" for experts, ranks in spread[:_MOST_EXPERTS]]
        more = len(spread) - len(held)
        held += [f"others on {count(more, 'more group')} of ranks"] if more else []
        yield from row(label, f"layer {ranges(list(layers))}: {'; '.join(held)}", width)
        label = ""


def _ranks(numbers: Sequence[int]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {ranges(numbers)}"


def slice_lines(entry: TensorEntry) -> Iterator[str]:
    """Where a tensor's elements are stored, a line per fragment."""
    for fragment in entry.fragments:
        yield f"    {_part(fragment, entry.shape)}: {file_of(fragment)} from byte {fragment.byte_offset:,}"


def _part(fragment: Fragment, shape: Sequence[int]) -> str:
    """The part of a tensor that a fragment holds: a box such as `[0:4, 2:5]`, or runs of elements."""
    low, high = _indexes(fragment.start, shape), _indexes(fragment.stop - 1, shape)
    extents = [last - first + 1 for first, last in zip(low, high, strict=True)]
    if len(shape) > 1 and min(extents) > 0 and math.prod(extents) == fragment.numel:
        return f"[{', '.join(f'{first}:{last + 1}' for first, last in zip(low, high, strict=True))}]"
    block = fragment.block()
    last = block.start + block.count - 1
    what = f"elements {block.start:,}-{last:,}" if block.count > 1 else f"element {block.start:,}"
    return what + (f", and {count(block.rows - 1, 'more run')}, each {block.pitch:,} further" if block.rows > 1 else "")


def _indexes(number: int, shape: Sequence[int]) -> list[int]:
    """The indexes of an element, from its number."""
    indexes: list[int] = []
    for extent in reversed(shape):
        number, index = divmod(number, extent)
        indexes.append(index)
    return indexes[::-1]


_ROLES: tuple[tuple[Role, str], ...] = (("parameter", "trainable"), ("frozen", "frozen"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer, yes or no, with its reason."""

    ok: bool
    reason: str

    def __str__(self) -> str:
        return f"{'yes' if self.ok else 'no'}: {self.reason}"


@public
@dataclass(frozen=True, slots=True, repr=False)
class Inspection(words.Printed):
    """What `zckpt inspect` reports of a checkpoint.

    `exportable.ok` and `resumable.ok` answer the two questions that a program asks most; `as_json()` has every fact under the
    names of `zckpt inspect --json`; `print(inspection)` prints what `zckpt inspect` prints.

    Attributes:
        exportable: whether consolidated weights can be made (`ok`), and why or why not (`reason`).
        resumable: whether training can resume (`ok`), and at which world size, or why not (`reason`).
        notes: sentences a person should see.
        place: which save was found, and where.
        catalog: names, shapes, dtypes and places of all tensors; None when they cannot be known.
        grid: model-parallel rank -> data-parallel rank -> kind of file ("model", "optim") -> its state.
        lost: names of files that an index or metadata name and that are missing, each with the tensors that nothing
        else is
            known of; looked for only where the weights cannot be exported.
        numbers: the catalog with the tensors that quantised ones stand for: of these are all counts of parameters and bytes.
    """

    place: Place
    catalog: Catalog | None
    grid: Grid
    exportable: Verdict
    resumable: Verdict
    notes: tuple[str, ...]
    lost: Mapping[str, list[str]] = field(default_factory=dict[str, "list[str]"])
    numbers: Catalog | None = None

    def __repr__(self) -> str:
        layout = "unreadable" if self.catalog is None else self.catalog.source.layout
        held = "" if self.catalog is None else f", {count(len(self.catalog), 'tensor')}"
        answers = f"export {'yes' if self.exportable.ok else 'no'}, resume {'yes' if self.resumable.ok else 'no'}"
        return (
            f"<zckpt.Inspection {words.shorten_text(self.place.listing.directory.path)!r}: {layout}{held}, {answers}>"
        )

    @property
    def complete(self) -> bool | None:
        """Whether all weights are here: None where nothing says what the whole model is."""
        return self.catalog.evidence.complete if self.exportable.ok and self.catalog is not None else False

    def as_json(self, *, slices: bool = False) -> dict[str, object]:
        """What `zckpt inspect --json` prints, as a dict; with `slices`, also which files hold each tensor's elements."""
        return {key: list(value) if isinstance(value, Iterator) else value for key, value in self.facts(slices).items()}

    def facts(self, slices: bool) -> dict[str, object]:
        """The same, with an iterator over the tensors, which may be a million."""
        listing, catalog = self.place.listing, self.catalog
        facts: dict[str, object] = {"path": listing.directory.path, "tag": listing.tag, "tags": list(self.place.tags)}
        if catalog is not None:
            source, topology = catalog.source, catalog.topology
            numbers = self.numbers or catalog
            facts |= {
                "layout": source.layout,
                "zero_stage": source.zero_stage,
                "framework": {"name": source.framework[0], "version": source.framework[1]},
                "topology": {"dp": topology.dp, "tp": topology.tp, "pp": topology.pp, "ep": topology.ep},
                "evidence": catalog.evidence.as_json(),
                "experts": experts_as_json(topology),
                "parameters": sum(n for entry, n in alike(numbers.tensors) if entry.role != "buffer"),
                "numel": numbers.numel,
                "trainable_numel": _numel(numbers, "parameter"),
                "frozen_numel": _numel(numbers, "frozen"),
                "bytes": output_bytes(numbers),
                "aliases": dict(catalog.aliases),
                "optimizer": list(source.optimizer_states),
                "steps": source.global_steps,
                "details": dict(source.details),
                "tensors": map(_with_slices, passing(catalog.tensors))
                if slices
                else itertools.starmap(_tensor_json, named_forms(catalog.tensors)),
            }
        facts["complete"] = self.complete
        facts["files"] = files_as_json(listing, self.grid, catalog.topology if catalog else None)
        for name, verdict in (("exportable", self.exportable), ("resumable", self.resumable)):
            facts[name] = {"ok": verdict.ok, "reason": verdict.reason}
        facts["notes"] = list(self.notes)
        return facts

    def lines(self, *, tensors: bool = False, width: int | None = None) -> Iterator[str]:
        """What `zckpt inspect` prints: with `tensors`, each of them too, and which files hold its elements; `width` as in
        `words.row`.
        """
        listing, catalog = self.place.listing, self.catalog
        topology = None
        yield listing.directory.path
        if catalog is not None:
            topology = None if catalog.source.layout == "universal" else catalog.topology
            yield from _catalog_rows(catalog, self.numbers or catalog, self.place, width)
        elif self.place.tags:
            yield from row("tags", ", ".join(self.place.tags), width)
        yield from file_rows(self.grid, listing, topology, width)
        if catalog is not None:
            yield from expert_rows(catalog.topology, width)
        for note in self.notes:
            yield from row("note", note, width)
        yield from row("export", str(self.exportable), width)
        yield from row("resume", str(self.resumable), width)
        if tensors and catalog is not None:
            for entry in passing(catalog.tensors):
                yield f"  {entry.role:<10} {entry.dtype.name:<5} {list(entry.shape)!s:<20} {entry.name}"
                yield from slice_lines(entry)


def _catalog_rows(catalog: Catalog, numbers: Catalog, place: Place, width: int | None) -> Iterator[str]:
    """Rows on the tensors, and on the run that saved them."""
    source, topology = catalog.source, catalog.topology
    writer = " ".join(source.framework).strip()
    layout = [source.layout, *([f"written by {writer}"] if writer else [])]
    layout += [] if source.global_steps is None else [f"step {source.global_steps:,}"]
    yield from row("layout", ", ".join(layout), width)
    if place.listing.tag:
        others = f" (tags here: {', '.join(place.tags)})" if len(place.tags) > 1 else ""
        yield from row("tag", f"{place.listing.tag}{others}", width)
    axes = (("data", topology.dp), ("tensor", topology.tp), ("pipeline", topology.pp), ("expert", topology.ep))
    ranks = ", ".join(f"{axis} {number:,}" for axis, number in axes if number > 1) or "1 rank"
    if source.layout == "universal":
        ranks = "any: each parameter is stored whole"
    if source.layout != "plain":
        yield from row("parallelism", ranks, width)
    for label, text in source.details:
        yield from row(label, text, width)
    roles: Counter[str] = Counter()
    for entry, number in alike(numbers.tensors):
        roles[entry.role] += number
    kinds = [
        f"{roles[role]:,} {word} ({count(_numel(numbers, role), 'element')})" for role, word in _ROLES if roles[role]
    ]
    buffers = [count(roles["buffer"], "buffer")] if roles["buffer"] else []
    yield from row("tensors", f"{len(numbers):,}: {', '.join(kinds + buffers)}", width)
    yield from row("size", ", ".join(f"{size(n)} as {dtype}" for dtype, n in output_bytes(numbers).items()), width)
    for dropped, kept in catalog.aliases.items():
        if (
            source.layout == "megatron-core"
        ):  # no model's weights: names that two forms of Megatron's modules have for one norm
            yield from row("two names", f"{kept} is also called {dropped}", width)
        else:
            yield from row("tied", f"{dropped} = {kept}", width)
    if source.optimizer_states:
        yield from row("optimizer", ", ".join(source.optimizer_states), width)


def _numel(catalog: Catalog, role: Role) -> int:
    return sum(entry.numel * number for entry, number in alike(catalog.tensors) if entry.role == role)


def _tensor_json(name: str, one: TensorEntry | TensorForm) -> dict[str, object]:
    return {"name": name, "shape": list(one.shape), "dtype": one.dtype.name, "role": one.role}


def _with_slices(entry: TensorEntry) -> dict[str, object]:
    return {**_tensor_json(entry.name, entry), "slices": slices_as_json(entry)}


def output_bytes(catalog: Catalog) -> dict[str, int]:
    """Bytes of all tensors, tied ones once, per output dtype."""
    return {
        SHORT_NAMES[dtype]: sum(e.numel * n * output_dtype(e, dtype).itemsize for e, n in alike(catalog.tensors))
        for dtype in CAST_TARGETS
    }


def inspect_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    read_options: ReadOptions | None = None,
    *,
    as_part: bool = False,
) -> Inspection:
    """Reports what a checkpoint or a weights file holds; reads indexes only, kilobytes per file.

    Args:
        path: a checkpoint directory, tag directory, trainer's output directory, weights, or an address (`s3://...`).
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        read_options: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.
        as_part: look at one part of a save (a shard, one rank's file or directory) alone.

    Returns:
        The facts. A checkpoint that is damaged or incomplete is reported, not raised: `exportable.reason` says what is wrong.

    Raises:
        NotACheckpointError: there is no checkpoint at `path`.
        ZckptError: another kind, where the save cannot be chosen: `latest` is missing and there are several tags.

    Example:
        >>> found = zckpt.inspect_checkpoint("run")
        >>> found.exportable.ok, found.resumable.ok
        (True, True)
    """
    reading = Reading(tag=tag, also=also, read_options=read_options, as_part=as_part)
    place = find_save(path, reading)
    catalog: Catalog | None = None
    notes: tuple[str, ...] = place.notes
    try:
        opened = open_place(place, reading, as_stored=True)
        numbers = dequantise(opened)
    except ZckptError as error:
        exportable = _refusal(error, place)
    else:
        catalog, stripped = strip_wrappers(opened.catalog)
        now = numbers.catalog.tensors
        was = opened.catalog.tensors
        stand_for = [name for name, entry in was.items() if now.get(name, entry) is not entry] if was is not now else []
        if text := about(opened, stand_for):
            details = (*catalog.source.details, ("quantized", text))
            catalog = replace(catalog, source=replace(catalog.source, details=details))
        notes = opened.catalog.source.notes + stripped + tuple(filter(None, [note_unmerged(catalog)]))
        exportable = _judge_packed(numbers) or Verdict(True, _wholeness(catalog))
    lost = lost_files(place.listing) if catalog is None else {}
    grid = grid_of(place.listing, catalog, lost)
    whole = None if catalog is None else numbers.catalog
    return Inspection(place, catalog, grid, exportable, _resumable(place, catalog, grid), notes, lost, whole)


def _wholeness(catalog: Catalog) -> str:
    if catalog.evidence.left_out:
        return f"{count(len(catalog), 'trained tensor')}; {catalog.evidence}"
    if catalog.evidence.complete:
        return f"{count(len(catalog), 'tensor is', 'tensors are')} complete"
    return f"{count(len(catalog), 'tensor')}, as far as the files say: {catalog.evidence}"


def _refusal(error: ZckptError, place: Place) -> Verdict:
    return Verdict(False, str(error).replace(place.listing.directory.path + os.sep, ""))


def _judge_packed(numbers: Opened) -> Verdict | None:
    """Why consolidated weights cannot be made, if their quantisation is the reason; None if it is not."""
    try:
        numbers.check_read(numbers.catalog.tensors.values())
    except ZckptError as error:
        return _refusal(error, numbers.place)
    return None


def _resumable(place: Place, catalog: Catalog | None, grid: Grid) -> Verdict:
    if catalog is None:
        return Verdict(False, "the checkpoint cannot be read (see export)")
    source = catalog.source
    if source.zero_stage is None:
        return _resumable_elsewhere(layouts.family_of(place.listing), place, catalog)
    if source.zero_stage and source.layout != "universal" and not agreement.files_of_optimizers(place.listing):
        return Verdict(False, "every optimizer file is missing")
    if bad := bad_ranks(grid):
        return Verdict(False, f"files of {words.ranks(bad)} are missing, damaged or of another save")
    try:
        with refuse_odd_values(place.listing):
            contradictions = agreement.contradictions(place.listing)
    except ZckptError as error:
        return Verdict(False, str(error))
    if contradictions:
        more = f" (and {count(len(contradictions) - 1, 'more contradiction')})" if len(contradictions) > 1 else ""
        return Verdict(False, f"optimizer files disagree: {contradictions[0]}{more}")
    if source.layout == "universal":
        return Verdict(True, _resumable_universal(place, catalog))
    begins = (
        "" if source.optimizer_states else "; there are no states of elements, so the optimizer begins from the start"
    )
    pointer = "" if (place.home / "latest").is_file() else "; there is no 'latest', so pass the tag to load_checkpoint"
    if source.zero_stage == 0:
        return Verdict(True, f"at any data-parallel world size{begins}{pointer}")
    split = "and the same tensor and pipeline split " if catalog.topology.tp * catalog.topology.pp > 1 else ""
    others = "for others, run zckpt reshard or zckpt to-universal first"
    return Verdict(True, f"at data-parallel world size {catalog.topology.dp} {split}({others}){begins}{pointer}")


def _resumable_elsewhere(family: Family, place: Place, catalog: Catalog) -> Verdict:
    """Whether training can resume from a save of another framework than DeepSpeed."""
    if catalog.source.optimizer_states:
        return Verdict(bool(family.resumes), family.resumes or f"no program is known that resumes from {family.name}")
    try:
        with refuse_odd_values(place.listing):
            unread = family.unread_states(place.listing)
    except ZckptError as error:
        return Verdict(False, str(error))
    if unread:
        return Verdict(False, f"there are optimizer states that zckpt does not read: {unread}")
    return Verdict(False, "weights alone, without optimizer states")


def _resumable_universal(place: Place, catalog: Catalog) -> str:
    """How training resumes from a universal checkpoint, in words."""
    stages = "ZeRO stage 3" if catalog.source.zero_stage == 3 else "ZeRO stages 1 and 2"
    has_pointer = (place.home / UNIVERSAL_POINTER).is_file()
    how = "" if has_pointer else f"; there is no {UNIVERSAL_POINTER!r}, so pass the tag to load_checkpoint"
    return f"at any world size, with {stages} (set checkpoint.load_universal in DeepSpeed's config{how})"
