"""Words for the missing parts of a save's tensors, for the page of a map and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zckpt.base.words import count, join_words, size
from zckpt.pictures.checkpoint_map import CheckpointMap
from zckpt.pictures.incomplete import Lack
from zckpt.pictures.page import text
from zckpt.pictures.rows import STATES

_MOST_FILES, _MOST_TENSORS, _MOST_PARTS = 20, 50, 3


def lacks_said(found: CheckpointMap) -> str:
    """A sentence or two on how much of how many tensors is in missing files; empty if that is not known."""
    if not found.grid.wrong or found.inspection.catalog is None:
        return ""
    lacks = found.lacking
    numel = sum(lack.numel for lack in lacks)
    nbytes = sum(lack.numel * found.tensors[lack.tensor].dtype.itemsize for lack in lacks)
    said = []
    if lacks:
        of = f"{len(lacks):,} of {count(len(found.tensors), 'tensor')}"
        held = f"{count(numel, 'element')} of the weights ({size(nbytes)}) lie only there"
        said.append(f"As the other files say, {held}: {of} {'lacks' if len(lacks) == 1 else 'lack'} some.")
        if spare := sum(lack.spare for lack in lacks):
            these = "all of them" if spare == len(lacks) else count(spare, "tensor")
            said.append(f"The weights as the model itself uses them are whole for {these}.")
    elif not found.unseen:
        said.append("As the other files say, no element of the weights lies only there.")
    if found.unseen:
        said.append(f"Of {count(len(found.unseen), 'further tensor')} only the names are known.")
    return " ".join(said)


def part_said(shape: tuple[int, ...], lack: Lack) -> str:
    """The missing part of a tensor, in words: `rows 12 to 17 of [64, 32]`."""
    if lack.numel == math.prod(shape):
        return f"all of {list(shape)}"
    parts = [_piece_said(shape, *piece) for piece in lack.pieces[:_MOST_PARTS]]
    if len(lack.pieces) > _MOST_PARTS:
        parts.append(count(len(lack.pieces) - _MOST_PARTS, "more part"))
    return f"{join_words(parts)} of {list(shape)}"


def _piece_said(shape: tuple[int, ...], start: int, many: int, rows: int, pitch: int) -> str:
    numel, stop = many * rows, start + (rows - 1) * pitch + many
    if stop - start != numel:  # rows of a part that is cut in another dimension than the first
        return f"{numel:,} of the elements {start:,} to {stop - 1:,}"
    width = math.prod(shape[1:])
    if start % width or numel % width:
        return f"{count(numel, 'element')} from {start:,} on"
    first, last = start // width, stop // width - 1
    what = "row" if len(shape) > 1 else "element"
    return f"{what} {first:,}" if first == last else f"{what}s {first:,} to {last:,}"


def wrong_section(found: CheckpointMap) -> Iterator[str]:
    """The files that are missing or bad, and what tensors lack because of them, as HTML; empty if all is well."""
    if not (wrong := found.grid.wrong):
        return
    yield '<section class="card alarm" aria-labelledby="wrong-title"><h2 id="wrong-title">What is wrong</h2><ul>'
    for file in wrong[:_MOST_FILES]:
        yield f"<li><b>{text(STATES.get(file.state, file.state))}</b>: <bdi>{text(file.name)}</bdi> "
        yield f"<span class='soft'><bdi>{text(file.reason)}</bdi></span></li>"
    yield "</ul>"
    if len(wrong) > _MOST_FILES:
        yield f"<p>And {len(wrong) - _MOST_FILES:,} more, in the table below.</p>"
    if said := lacks_said(found):
        yield f"<p>{text(said)}</p>"
    if found.lacking or found.unseen:
        yield '<details><summary>What tensors lack</summary><div class="scroll" tabindex="0" role="region" '
        yield 'aria-label="What tensors lack"><table aria-label="What tensors lack">'
        yield '<thead><tr><th scope="col">Tensor</th><th scope="col">Lacks</th>'
        yield '<th scope="col">In</th></tr></thead><tbody>'
        for name, part, files in _rows(found):
            cells = "".join(f"<td><bdi>{text(cell)}</bdi></td>" for cell in (part, files))
            yield f'<tr><th scope="row"><bdi class="mono">{text(name)}</bdi></th>{cells}</tr>'
        yield "</tbody></table></div></details>"
        left = len(found.lacking) + len(found.unseen) - _MOST_TENSORS
        if left > 0:
            yield f"<p>And {left:,} more: zckpt map --json lists all.</p>"
    yield "</section>"


def _rows(found: CheckpointMap) -> Iterator[tuple[str, str, str]]:
    left = _MOST_TENSORS - min(len(found.lacking), _MOST_TENSORS)
    for lack in found.lacking[:_MOST_TENSORS]:
        files = [found.grid.files[number].name for number in lack.files[:_MOST_PARTS]]
        more = [f"{len(lack.files) - _MOST_PARTS:,} more"] if len(lack.files) > _MOST_PARTS else []
        entry = found.tensors[lack.tensor]
        yield entry.name, part_said(entry.shape, lack), join_words(files + more)
    for name, file in list(found.unseen.items())[:left]:
        yield name, "all of it", file
