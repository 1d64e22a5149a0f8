"""Formats a save's files, experts and slices for `zckpt inspect`; the values are those of `rank_files`.

For `inspection`. Ranks with files in the same state share a line, so that a save of a thousand ranks takes a few lines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from zckpt.base.words import count, ranges, row, size, wrap_text
from zckpt.core.catalog import TensorEntry, Topology
from zckpt.core.fragments import Fragment
from zckpt.jobs.rank_files import SWAP, Cell, Grid, Rows, file_of, other_files
from zckpt.layouts.save.listing import Listing

_KINDS = {"model": "model", "optim": "optimizer"}
_MOST_EXPERTS = 8


def file_rows(grid: Grid, listing: Listing, topology: Topology | None, width: int | None) -> Iterator[str]:
    """The files of ranks, and how many other files there are.

    Args:
        grid: the state of each rank's files.
        listing: all files of the save.
        topology: the parallelism of the run, if it is known.
        width: as in `words.row`.
    """
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
