"""A map of a checkpoint: which rank's file holds which part of each tensor, and what is missing.

For `zckpt map`. Reads indexes only, kilobytes per file, as `inspect` does; a checkpoint that is incomplete is drawn as far as its
files say what they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from zckpt import layouts
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import ZckptError
from zckpt.core.catalog import TensorEntry
from zckpt.jobs.declarations import RESHARD
from zckpt.jobs.inspection import Inspection, inspect_checkpoint
from zckpt.jobs.open import Opened, states_of, strip_wrappers
from zckpt.jobs.rank_files import experts_as_json
from zckpt.layouts.save.listing import ReadOptions
from zckpt.pictures.incomplete import Lack, incomplete, lacking, make_room
from zckpt.pictures.pieces import PieceLayer, contents_of, state_layers, weight_layers
from zckpt.pictures.resharded import Resharded, preview_reshard
from zckpt.pictures.rows import FileGrid, file_grid

ROLES = {"parameter": "trainable", "frozen": "frozen", "buffer": "buffer"}
"""Role -> the word for it in a map."""


Totals = dict[str, int]
"""How many tensors there are of a kind, their elements ("numel") and bytes."""


@dataclass(frozen=True, slots=True)
class CheckpointMap:
    """The contents of a map.

    Attributes:
        inspection: what `inspect` says of the checkpoint; of one that lacks files, with the catalog that the others describe.
        grid: its files.
        layers: what lies where in them; empty where the tensors cannot be known.
        after: the checkpoint as `reshard` would write it; None if that was not asked for.
        unread: why the optimizer's states are not drawn; empty if they are.
        lacking: tensors with weights in files that are gone.
        unseen: names of tensors that only a missing file says more of -> that file.
    """

    inspection: Inspection
    grid: FileGrid
    layers: tuple[PieceLayer, ...]
    after: Resharded | None = None
    unread: str = ""
    lacking: tuple[Lack, ...] = ()
    unseen: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def tensors(self) -> Sequence[TensorEntry]:
        """All tensors, in the order in which layers number them."""
        catalog = self.inspection.catalog
        return () if catalog is None else tuple(catalog.tensors.values())

    def roles(self) -> dict[str, Totals]:
        """Role -> the tensors that have it."""
        return _totals((ROLES[entry.role], entry) for entry in self.tensors)

    def dtypes(self) -> dict[str, Totals]:
        """Name of a dtype -> the tensors that are stored in it."""
        return _totals((entry.dtype.name, entry) for entry in self.tensors)

    def contents(self) -> dict[str, int]:
        """Kind of contents of the files -> bytes, with `pieces.OTHER` at the end."""
        return contents_of(self.grid, self.layers)

    def _lacking_json(self) -> Iterator[dict[str, object]]:
        for lack in self.lacking:
            entry, files = self.tensors[lack.tensor], [self.grid.files[number].name for number in lack.files]
            facts: dict[str, object] = {"tensor": entry.name, "elements": lack.numel, "of": entry.numel}
            yield {**facts, "files": files, "copy": lack.spare}
        for name, file in self.unseen.items():
            yield {"tensor": name, "elements": None, "of": None, "files": [file], "copy": False}

    def as_json(self) -> dict[str, object]:
        """What `zckpt map --json` prints, as a dict."""
        inspection = self.inspection
        listing, catalog = inspection.place.listing, inspection.catalog
        facts: dict[str, object] = {"path": listing.directory.path, "tag": listing.tag}
        if catalog is not None:
            topology = catalog.topology
            facts |= {
                "layout": catalog.source.layout,
                "topology": {"dp": topology.dp, "tp": topology.tp, "pp": topology.pp, "ep": topology.ep},
                "experts": experts_as_json(topology),
                "tensors": len(catalog),
                "numel": catalog.numel,
                "roles": self.roles(),
                "dtypes": self.dtypes(),
            }
        facts |= {
            "bytes": self.grid.nbytes,
            "contents": self.contents(),
            "files": _files_json(self.grid),
            "complete": {"ok": inspection.complete, "reason": inspection.exportable.reason},
            "lacking": list(self._lacking_json()),
            "reshard": None,
        }
        if (after := self.after) is not None:
            facts["reshard"] = {
                "world_size": after.world_size, "stage": after.stage, "bytes": after.grid.nbytes,
                "contents": after.contents(), "files": _files_json(after.grid),
            }  # fmt: skip
        return facts


def _totals(entries: Iterable[tuple[str, TensorEntry]]) -> dict[str, Totals]:
    found: dict[str, Totals] = {}
    for name, entry in entries:
        own = found.setdefault(name, {"tensors": 0, "numel": 0, "bytes": 0})
        own["tensors"] += 1
        own["numel"] += entry.numel
        own["bytes"] += entry.nbytes
    return found


def _files_json(grid: FileGrid) -> list[dict[str, object]]:
    return [
        {"group": group.title, "row": label, "file": file.name, "kind": file.kind, "bytes": file.nbytes,
         "state": file.state, "reason": file.reason, "contents": dict(file.contents)}
        for group in grid.groups
        for label, cells in group.rows
        for number in cells
        if number is not None
        for file in (grid.files[number],)
    ]  # fmt: skip


def checkpoint_map(
    path: str | os.PathLike[str],
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    read_options: ReadOptions | None = None,
    *,
    world_size: int | None = None,
    stage: int | None = None,
    as_part: bool = False,
) -> CheckpointMap:
    """Reads all that is drawn; no element but step counters. Arguments and errors as for `zckpt.map`."""
    inspection = inspect_checkpoint(path, tag, also, read_options, as_part=as_part)
    place = inspection.place
    known = incomplete(inspection) if inspection.catalog is None else None
    if known is not None:
        listing, raw = known
        place = replace(place, listing=listing)
        inspection = replace(inspection, catalog=strip_wrappers(raw)[0])
    grid = file_grid(inspection)
    catalog = inspection.catalog
    layers: list[PieceLayer] = []
    names: list[str] = []
    unread = ""
    if catalog is not None:
        layers = weight_layers(catalog, grid)
        if known is None:
            raw = layouts.read(place.listing)
        names = list(raw.tensors)
        try:
            named = states_of(Opened(raw, place))
        except ZckptError as error:
            unread = error.what
        else:
            numbers = {name: number for number, name in enumerate(catalog.tensors)}
            states = {
                state: {numbers[name]: entry for name, entry in own.items() if name in numbers}
                for state, own in named.entries.items()
            }
            layers += state_layers(states, grid)
    lacks: list[Lack] = []
    if known is not None:
        make_room(layers, grid)
        lacks = lacking(layers, grid)
    after = None
    if world_size is not None:
        asked = RESHARD.ask(tag=tag, also=also, read_options=read_options, world_size=world_size, stage=stage)
        after = preview_reshard(os.fspath(path), asked, names)
    unseen = {} if known is None else {tensor: name for name, own in inspection.lost.items() for tensor in own}
    return CheckpointMap(inspection, grid, tuple(layers), after, unread, tuple(lacks), unseen)
