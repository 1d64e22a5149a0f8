"""The page of a map: what a browser shows of a `CheckpointMap`, and what a screen reader says.

Facts, totals and the table of files are HTML and need no script. The map and the list of tensors are drawn by the scripts
`map_logic.js`, which computes, and `map_view.js`, which shows, from the numbers that `data_of` makes.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from zckpt.base.dataclass import dataclass, public
from zckpt.base.errors import ZckptError
from zckpt.base.words import PAGE, Printed, count, join_words, ranges, short_count, shorten_text, size, wrap_text
from zckpt.core.catalog import Topology
from zckpt.core.dtypes import DType
from zckpt.layouts.save.companions import read_config
from zckpt.layouts.save.listing import ReadOptions
from zckpt.pictures.checkpoint_map import ROLES, CheckpointMap, Totals, checkpoint_map
from zckpt.pictures.lacks import lacks_said, wrong_section
from zckpt.pictures.page import asset, page, text, write_page
from zckpt.pictures.pieces import OTHER, PieceLayer
from zckpt.pictures.rows import GONE, STATES, FileGrid
from zckpt.pictures.terminal import Line, picture, visible

_MOST_ROWS = 2000
"""The most files in the table; further ones are in `--json`."""
_MOST_LAYERS, _MOST_EXPERTS = 200, 64
_COLOURS = {"weight": 0, "module": 1, "copy": 6}


@public
@dataclass(frozen=True, slots=True, repr=False)
class Map(Printed):
    """A map of a checkpoint. `print` shows it as bars, `save` writes it as a page for a browser.

    Attributes:
        drawn: all that is in it.
    """

    drawn: CheckpointMap

    def __repr__(self) -> str:
        listing = self.drawn.inspection.place.listing
        files, tensors = count(len(self.drawn.grid.files), "file"), count(len(self.drawn.tensors), "tensor")
        return f"<zckpt.Map {shorten_text(listing.directory.path)!r}: {files}, {tensors}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page, or replaces it; the page needs no network.

        Raises:
            OutputError: there is something else under this name, or no directory for it.
        """
        write_page(os.fspath(path), map_page(self.drawn))

    def as_json(self) -> dict[str, object]:
        """What `zckpt map --json` prints, as a dict."""
        return self.drawn.as_json()

    def lines(self, width: int | None = None) -> Iterator[str]:
        """What `zckpt map` prints, without colours."""
        return ("".join(word for word, _ in line).rstrip() for line in self.in_colours(width or PAGE))

    def in_colours(self, width: int) -> list[Line]:
        """The coloured lines that `zckpt map` prints in a terminal with `width` columns."""
        found = self.drawn
        path = visible(found.inspection.place.listing.directory.path)
        said = wrap_text(f"  {summary(found)}", width, "  ")
        lines: list[Line] = [[(path, "bold")], *([(line, "")] for line in said), []]
        lines += picture(found.grid, width, found.contents(), lead="  ")
        if (after := found.after) is not None:
            lines += [[], [(f"  {after.title}", "bold")], []]
            lines += picture(after.grid, width, after.contents(), lead="  ")
        if not found.inspection.exportable.ok:
            reason = wrap_text(f"  {visible(found.inspection.exportable.reason)}", width, "  ")
            lines += [[], *([(line, "red")] for line in reason)]
            if lacks := lacks_said(found):
                lines += [[], *([(line, "")] for line in wrap_text(f"  {lacks}", width, "  "))]
        return lines


def map(  # noqa: A001 - the command's name
    path: str | os.PathLike[str],
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    read_options: ReadOptions | None = None,
    *,
    world_size: int | None = None,
    stage: int | None = None,
    as_part: bool = False,
) -> Map:
    """Draws a checkpoint: which rank's file holds which part of each tensor, and what is missing. Reads indexes only.

    Args:
        path: anything zckpt reads; a checkpoint that is incomplete is drawn as far as its files say what they are.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        read_options: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.
        world_size: also draw what `reshard` would write for so many ranks.
        stage: of ZeRO, for that; None for the checkpoint's own.
        as_part: draw one part of a save alone.

    Returns:
        The map: `print` shows it, `save` writes a page, `as_json` gives every number.

    Raises:
        NotACheckpointError: there is no checkpoint at `path`.
        ZckptError: another kind, where the save cannot be chosen, or cannot be resharded.

    Example:
        >>> zckpt.map("run").save("map.html")
    """
    return Map(checkpoint_map(path, tag, also, read_options, world_size=world_size, stage=stage, as_part=as_part))


def map_page(found: CheckpointMap) -> str:
    """Makes the HTML of a checkpoint's map."""
    title = f"{' '.join(dict.fromkeys((model_name(found), _name(found))))} - zckpt map"
    return page(
        title, "\n".join(_body(found)), data_of(found), styles=["map.css"], scripts=["map_logic.js", "map_view.js"]
    )


def data_of(found: CheckpointMap) -> dict[str, object]:
    """The numbers that the scripts draw: each name once, and all other values by number."""
    entries = found.tensors
    dtypes: dict[DType, int] = {}
    shapes: dict[tuple[int, ...], int] = {}
    roles = {role: number for number, role in enumerate(ROLES)}
    grids = [_side(found.grid, found.layers, "As it is", len(entries), dtypes)]
    if found.after is not None:
        grids.append(_side(found.after.grid, found.after.layers, found.after.title, len(entries), dtypes))
    catalog = found.inspection.catalog
    return {
        "tensors": {
            "names": [entry.name for entry in entries],
            "shapes": [shapes.setdefault(entry.shape, len(shapes)) for entry in entries],
            "dtypes": [dtypes.setdefault(entry.dtype, len(dtypes)) for entry in entries],
            "roles": [roles[entry.role] for entry in entries],
        },
        "aliases": [] if catalog is None else [[dropped, kept] for dropped, kept in catalog.aliases.items()],
        "shapes": [list(shape) for shape in shapes],
        "roles": list(ROLES.values()),
        "gone": GONE,
        "sides": grids,
        "dtypes": [[dtype.name, dtype.itemsize] for dtype in dtypes],
        "colours": palette(found),
    }


def palette(found: CheckpointMap) -> dict[str, int]:
    """Kind of contents -> the number of its colour, the same in the map, in bars and in tables."""
    after = () if found.after is None else found.after.layers
    colours: dict[str, int] = {}
    states = itertools.cycle((2, 3, 4, 5, 7))
    for layer in (*found.layers, *after):
        if layer.name not in colours:
            colours[layer.name] = next(states) if layer.purpose == "state" else _COLOURS[layer.purpose]
    return colours


def _side(
    grid: FileGrid, layers: Sequence[PieceLayer], title: str, tensors: int, dtypes: dict[DType, int]
) -> dict[str, object]:
    files = grid.files
    return {
        "title": title,
        "files": {
            "names": [file.name for file in files],
            "kinds": [file.kind for file in files],
            "bytes": [file.nbytes for file in files],
            "expected": [file.expected for file in files],
            "states": [file.state for file in files],
            "reasons": [file.reason for file in files],
        },
        "groups": [{"title": group.title, "columns": group.columns, "rows": group.rows} for group in grid.groups],
        "layers": [
            {
                "name": layer.name,
                "purpose": layer.purpose,
                "tensors": list(layer.pieces) if len(layer.pieces) < tensors else None,
                "dtypes": [dtypes.setdefault(dtype, len(dtypes)) for dtype, _ in layer.pieces.values()],
                "pieces": [pieces for _, pieces in layer.pieces.values()],
            }
            for layer in layers
        ],
    }


def _name(found: CheckpointMap) -> str:
    listing = found.inspection.place.listing
    return listing.tag or listing.directory.name or listing.directory.path


def model_name(found: CheckpointMap) -> str:
    """The model's name by its config: its origin, class or kind; the save's own name if the config has none of these."""
    try:
        config = read_config(found.inspection.place.home) or {}
    except ZckptError:
        config = {}
    origin, classes = config.get("_name_or_path"), config.get("architectures")
    name = re.split(r"[/\\]", origin.rstrip("/\\"))[-1] if isinstance(origin, str) else ""
    if not name and isinstance(classes, list) and classes and isinstance(classes[0], str):
        name = classes[0]
    return name or str(config.get("model_type") or "") or _name(found)


def layout_name(layout: str) -> str:
    """The layout's name as its authors spell it: `ZeRO-3`."""
    return re.sub(r"^zero(?=\d)", "ZeRO-", layout)


def _body(found: CheckpointMap) -> Iterator[str]:
    inspection = found.inspection
    yield '<a class="skip" href="#map-title">Skip to the map</a>'
    yield '<header class="top"><div class="wrap bar"><strong class="brand">zckpt <span>map</span></strong>'
    yield f'<span class="path mono" title="{text(inspection.place.listing.directory.path)}"><bdi>'
    yield f"{text(inspection.place.listing.directory.path)}</bdi></span>"
    yield '<button type="button" id="theme">Theme: auto</button></div></header>'
    yield '<main class="wrap">'
    yield f'<section class="hero"><h1><bdi>{text(model_name(found))}</bdi></h1><p class="lead">{text(summary(found))}</p>'
    yield from _verdicts(found)
    yield "</section>"
    yield from _cards(found)
    yield from wrong_section(found)
    row = "rank" if found.inspection.grid else "file"
    yield asset("map.html").format(row=row, inside=_INSIDE if found.layers else "")
    if found.tensors:
        yield asset("tensors.html")
    if found.layers:
        yield '<div class="two">'
        yield from _totals(found)
        yield "</div>"
    if inspection.catalog is not None:
        yield from _experts(inspection.catalog.topology)
    yield from _tables(found)
    yield from _notes(found)
    yield '</main><footer class="wrap soft">'
    yield "Drawn by zckpt from the indexes of the files. This page is complete: it loads nothing.</footer>"
    yield "<div id='tip' class='tip' hidden></div><p class='unseen' id='live' aria-live='polite'></p>"
    yield "<noscript><p class='wrap'>The map itself needs JavaScript. Totals and the table of files do not.</p></noscript>"


def summary(found: CheckpointMap) -> str:
    """Sentences that explain the map to somebody who sees one for the first time."""
    catalog = found.inspection.catalog
    there = [file for file in found.grid.files if file.nbytes]
    files = f"{count(len(there), 'file')} of {size(found.grid.nbytes)}"
    gone = sum(file.gone for file in found.grid.files)
    if catalog is not None and gone:
        files += f"; {count(gone, 'file is', 'files are')} missing or damaged"
    if catalog is None:
        if found.grid.wrong:
            return f"{files}. What tensors they hold cannot be known while files are missing or damaged."
        return f"{files}. What tensors they hold cannot be said: see the reason."
    numel = sum(entry.numel for entry in found.tensors if entry.role != "buffer")
    topology = catalog.topology
    ranks = topology.dp * topology.tp * topology.pp
    held = f"{count(len(found.tensors), 'tensor')} with {count(numel, 'parameter')}"
    if ranks > 1 and catalog.source.layout not in ("plain", "universal", "gguf"):
        saved = f"saved by {count(ranks, 'process', 'processes')} (ranks) in {files}"
        return f"A model of {held}, {saved}. Each rank holds a part of it."
    return f"A model of {held}, in {files}."


def _verdicts(found: CheckpointMap) -> Iterator[str]:
    inspection = found.inspection
    unreadable = "are not complete" if found.grid.wrong else "cannot be read"
    here = "All weights are here" if inspection.complete else "Weights can be read"
    pairs = (
        (here, f"The weights {unreadable}", inspection.exportable),
        ("Training can resume", "Training cannot resume", inspection.resumable),
    )
    yield '<ul class="verdicts">'
    for number, (yes, no, verdict) in enumerate(pairs):
        sure = verdict.ok and (bool(number) or inspection.complete is True)
        kind = "good" if sure else ("warn" if number or verdict.ok else "bad")
        sign = "\u2713" if sure else ("?" if verdict.ok else "\u2717")
        yield f'<li><span class="pill {kind}"><span aria-hidden="true">{sign}</span>{yes if verdict.ok else no}</span>'
        reason = verdict.reason if inspection.catalog is not None or not number else "while that is so"
        yield f'<span class="soft"><bdi>{text(reason)}</bdi></span></li>'
    yield "</ul>"


def _cards(found: CheckpointMap) -> Iterator[str]:
    catalog, listing = found.inspection.catalog, found.inspection.place.listing
    facts: list[tuple[str, str, str]] = []
    if catalog is not None:
        source, topology = catalog.source, catalog.topology
        numel = sum(entry.numel for entry in found.tensors if entry.role != "buffer")
        facts.append(("Parameters", short_count(numel), f"{numel:,}" if numel >= 1000 else ""))
        facts.append(("Tensors", f"{len(found.tensors):,}", _roles_said(found)))
        facts.append(("Saved by", layout_name(source.layout), " ".join(source.framework).strip()))
        if source.global_steps is not None:
            facts.append(("Step", f"{source.global_steps:,}", f"tag {listing.tag}" if listing.tag else ""))
        axes = (("data", topology.dp), ("tensor", topology.tp), ("pipeline", topology.pp), ("expert", topology.ep))
        many = [(axis, number) for axis, number in axes if number > 1]
        if many and source.layout != "universal":
            ranks = topology.dp * topology.tp * topology.pp
            said = " \u00d7 ".join(f"{axis} {number}" for axis, number in many if axis != "expert")
            experts = f"experts over {topology.ep}" if topology.ep > 1 else ""
            facts.append(("Ranks", f"{ranks:,}", ", ".join(filter(None, [said, experts]))))
    wrong = found.grid.wrong
    there = sum(1 for file in found.grid.files if file.nbytes)
    state = (
        f"{len(wrong):,} not as they should be"
        if len(wrong) > 1
        else "1 not as it should be"
        if wrong
        else "all as they should be"
    )
    facts.append(("Files", f"{there:,}", f"{size(found.grid.nbytes)}, {state}"))
    yield '<dl class="cards">'
    for label, value, more in facts:
        yield f"<div class='card'><dt>{text(label)}</dt><dd><b><bdi>{text(value)}</bdi></b>"
        yield f"<span><bdi>{text(more)}</bdi></span></dd></div>"
    yield "</dl>"


def _roles_said(found: CheckpointMap) -> str:
    return ", ".join(f"{totals['tensors']:,} {role}" for role, totals in found.roles().items())


_INSIDE = (
    " Inside are the pieces of tensors that it holds. Point at a piece to see the same tensor everywhere; click to keep it, and "
    "the address of the page names it."
)


def _bar(shares: Sequence[tuple[str, int]], colours: Mapping[str, int]) -> str:
    """A bar in parts, as SVG; it is hidden from screen readers, because the table beside it has the same numbers."""
    total = sum(number for _, number in shares) or 1
    parts, at = [], 0.0
    for name, number in shares:
        width = 1000 * number / total
        colour = "rest" if name == OTHER else f"p{colours[name]}"
        parts.append(f'<rect class="{colour}" x="{at:.2f}" y="0" width="{max(0.0, width - 1):.2f}" height="16"/>')
        at += width
    return (
        f'<svg class="share" viewBox="0 0 1000 16" preserveAspectRatio="none" aria-hidden="true">{"".join(parts)}</svg>'
    )


def _totals(found: CheckpointMap) -> Iterator[str]:
    sides = [("", found.contents())]
    if found.after is not None:
        sides = [("As it is", found.contents()), (found.after.title, found.after.contents())]
    colours = palette(found)
    yield '<section class="card" aria-labelledby="bytes-title"><h2 id="bytes-title">What the bytes are</h2>'
    for title, contents in sides:
        shares = [(name, number) for name, number in contents.items() if number]
        yield (f"<h3>{text(title)}</h3>" if title else "") + _bar(shares, colours)
        rows = [(name, size(number), f"{number:,}") for name, number in shares]
        yield _table("What the files hold", ("", "Size", "Bytes"), rows, colours)
    why = f"; and the optimizer's states, for the save <bdi>{text(found.unread)}</bdi>" if found.unread else ""
    yield f"<p class='soft'>{OTHER.capitalize()} is what is not an element of a tensor: indexes, counters, padding{why}.</p>"
    yield "</section>"
    if found.tensors:
        yield '<section class="card" aria-labelledby="totals-title"><h2 id="totals-title">Roles and dtypes</h2>'
        for title, kinds in (("Role", found.roles()), ("dtype", found.dtypes())):
            numbers = {name: number % 8 for number, name in enumerate(kinds)}
            yield _bar([(name, totals["numel"]) for name, totals in kinds.items()], numbers)
            counted = [_totals_row(*each) for each in kinds.items()]
            yield _table(f"Tensors by {title}", (title, "Tensors", "Elements", "Size"), counted, numbers)
        yield "</section>"


def _totals_row(name: str, totals: Totals) -> tuple[str, ...]:
    """A row of a table of totals."""
    return name, f"{totals['tensors']:,}", f"{totals['numel']:,}", size(totals["bytes"])


def _table(caption: str, heads: Sequence[str], rows: Sequence[tuple[str, ...]], colours: Mapping[str, int]) -> str:
    """A table with numbers in all columns but the first, which has names with their colours."""
    top = "".join(f'<th scope="col"{" class=number" if at else ""}>{text(head)}</th>' for at, head in enumerate(heads))
    lines = []
    for name, *numbers in rows:
        colour = "rest" if name == OTHER else f"p{colours[name]}"
        cells = "".join(f'<td class="number">{text(number)}</td>' for number in numbers)
        first = f'<th scope="row"><i class="key {colour}" aria-hidden="true"></i><bdi>{text(name)}</bdi></th>'
        lines.append(f"<tr>{first}{cells}</tr>")
    head, rest = f"<caption class='unseen'>{text(caption)}</caption><thead><tr>{top}</tr></thead>", "".join(lines)
    return f"<table>{head}<tbody>{rest}</tbody></table>"


def _experts(topology: Topology) -> Iterator[str]:
    if not topology.experts:
        return
    yield '<section class="card" aria-labelledby="experts-title"><h2 id="experts-title">Experts</h2>'
    yield '<p class="soft">Which ranks hold which experts of each layer: a colour for each group of ranks.</p>'
    yield '<div class="scroll"><table class="experts" aria-labelledby="experts-title">'
    yield "<thead><tr><th scope='col'>Layer</th><th scope='col'>Experts, and the ranks that hold them</th></tr></thead><tbody>"
    groups: dict[tuple[int, ...], int] = {}
    for number, spread in enumerate(topology.experts[:_MOST_LAYERS]):
        yield f"<tr><th scope='row'>{number}</th><td><div class='experts'>"
        for experts, ranks in spread[:_MOST_EXPERTS]:
            colour = groups.setdefault(ranks, len(groups)) % 8
            key = f"<i class='key p{colour}' aria-hidden='true'></i>"
            chips = "".join(f"<span class='chip'>{key}{expert}</span>" for expert in experts[:_MOST_EXPERTS])
            more = f" and {len(experts) - _MOST_EXPERTS:,} more" if len(experts) > _MOST_EXPERTS else ""
            held = f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"
            yield f"<span class='owners'>{chips}{more} <span class='soft'>on {held}</span></span>"
        if len(spread) > _MOST_EXPERTS:
            yield f"and {len(spread) - _MOST_EXPERTS:,} more groups of ranks"
        yield "</div></td></tr>"
    yield "</tbody></table></div>"
    if len(topology.experts) > _MOST_LAYERS:
        yield f"<p>And {count(len(topology.experts) - _MOST_LAYERS, 'more layer')}.</p>"
    yield "</section>"


def _tables(found: CheckpointMap) -> Iterator[str]:
    sides = [("The files as a table", found.grid)]
    if found.after is not None:
        sides.append((f"The files as a table: {found.after.title}", found.after.grid))
    for title, grid in sides:
        rows = [
            (group.title, label, grid.files[number])
            for group in grid.groups
            for label, cells in group.rows
            for number in cells
            if number is not None
        ]
        yield f'<details class="card"><summary><h2>{text(title)}</h2></summary>'
        yield f'<div class="scroll" tabindex="0" role="region" aria-label="{text(title)}"><table>'
        yield f"<caption>{count(len(rows), 'file')}: where each belongs, its size, its state, and what it holds.</caption>"
        heads = ("Part", "Rank", "File", "Kind", "Size", "State", "Holds")
        yield f"<thead><tr>{''.join(f'<th scope=col>{head}</th>' for head in heads)}</tr></thead><tbody>"
        for part, label, file in rows[:_MOST_ROWS]:
            held = join_words([f"{size(number)} {name}" for name, number in file.contents.items()])
            held = f"would hold {held}" if file.gone and held else held
            state = STATES.get(file.state, file.state) + (f": {file.reason}" if file.reason else "")
            cells = (part, label, file.name, file.kind, size(file.nbytes), state, held)
            marked = ' class="wrong"' if file.state != "ok" else ""
            yield f"<tr{marked}>{''.join(f'<td><bdi>{text(cell)}</bdi></td>' for cell in cells)}</tr>"
        yield "</tbody></table></div>"
        if len(rows) > _MOST_ROWS:
            yield f"<p>And {len(rows) - _MOST_ROWS:,} more: zckpt map --json prints all.</p>"
        yield "</details>"


def _notes(found: CheckpointMap) -> Iterator[str]:
    catalog = found.inspection.catalog
    details = () if catalog is None else catalog.source.details
    if not (found.inspection.notes or details):
        return
    yield '<section class="card" aria-labelledby="notes-title"><h2 id="notes-title">Notes</h2><ul>'
    yield from (f"<li><b><bdi>{text(label)}</bdi></b>: <bdi>{text(said)}</bdi></li>" for label, said in details)
    yield from (f"<li><bdi>{text(note)}</bdi></li>" for note in found.inspection.notes)
    yield "</ul></section>"
