"""A save that lacks files, as far as the files that are there say what would lie where: for `checkpoint_map`.

[Note: what is taken for a missing file] A save of torch.distributed.checkpoint says in its metadata what every file holds, an
index of safetensors at least the names; of DTensors and ShardedTensors the other ranks' parts leave what the missing rank had. In
ZeRO and its kin, files of one kind that ranks of the same model-parallel rank write are built alike; so there a file that is
missing, empty, damaged or of another save is taken to be built as one of its fellows, the largest or else the smallest,
if that gives a save without contradictions: all checks of the layout stay. Where a model-parallel rank has no such file left, the
fellows are those of the other ones, but not in a pipeline, where stages have other layers. Nothing but headers is read, and of
a file that is gone there is never more than a picture: its `StandIn` has no elements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from zckpt import layouts
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import ZckptError
from zckpt.core.catalog import Catalog
from zckpt.core.stores import FileStore
from zckpt.jobs.inspection import Inspection
from zckpt.jobs.rank_files import Cell, Grid, other_files
from zckpt.layouts.save.listing import Listing, natural
from zckpt.pictures.pieces import PieceLayer, unfold_pieces
from zckpt.pictures.rows import GONE, FileGrid
from zckpt.storage.location import Location, OpenFile


@dataclass(frozen=True, repr=False)
class StandIn(Location):
    """A missing file with the headers of `fellow`. Its stores name `path`, so reading elements from them fails.
    `fellow`: a file that is there.
    """

    fellow: Location

    @property
    def fellow_path(self) -> str:  # noqa: D102
        return self.fellow.path

    @property
    def parent(self) -> Location:  # noqa: D102
        return self.fellow.parent

    def __truediv__(self, name: str) -> Location:
        return self.fellow / name

    def absolute(self) -> Location:  # noqa: D102
        return self

    def resolved(self) -> Location:  # noqa: D102
        return self

    def refreshed(self) -> Location:  # noqa: D102
        return self

    def is_file(self) -> bool:  # noqa: D102
        return True

    def is_dir(self) -> bool:  # noqa: D102
        return False

    def is_readable(self) -> bool:  # noqa: D102
        return False

    def names(self) -> list[str]:  # noqa: D102
        return []

    def kinds(self) -> dict[str, str]:  # noqa: D102
        return {}

    def file_names(self, below: Sequence[str] = ()) -> list[str]:  # noqa: D102
        return []

    def size(self) -> int:  # noqa: D102
        return self.fellow.size()

    def state(self) -> tuple[int, ...]:  # noqa: D102
        return self.fellow.state()

    def written_s(self) -> float | None:  # noqa: D102
        return None

    def open(self) -> OpenFile:  # noqa: D102
        return self.fellow.open()

    def read(self, nbytes: int | None = None, offset: int = 0) -> bytes:  # noqa: D102
        return self.fellow.read(nbytes, offset)

    def store(self, byteorder: Literal["little", "big"] = "little") -> FileStore:  # noqa: D102
        return FileStore(self.path, self.size(), byteorder=byteorder, fellow=self.fellow.path)

    def relative_to(self, directory: Location) -> str:  # noqa: D102
        return self.name

    def is_within(self, directory: Location) -> bool:  # noqa: D102
        return self.path == directory.path


def incomplete(inspection: Inspection) -> tuple[Listing, Catalog] | None:
    """A save that has lost files, with a file for each of them, and its catalog as it is saved; None where the others do not say
    what these held. `inspection`: of the save; without a catalog.
    """
    for listing in _attempts(inspection.place.listing, inspection.grid, inspection.lost):
        with suppress(ZckptError, OSError):
            return listing, layouts.family_of(listing).read(listing)
    return None


def _attempts(listing: Listing, grid: Grid, lost: Collection[str]) -> Iterator[Listing]:
    """The ways to read the save without the missing files: as absent, or with other files in their place."""
    gone: dict[tuple[int, str], list[str]] = {}
    sound: dict[tuple[int, str], list[Cell]] = {}
    extra: set[str] = set()
    for mp_rank, rows in grid.items():
        for kind, cell in ((kind, cell) for cells in rows.values() for kind, cell in cells.items()):
            if cell.state == "ok":
                sound.setdefault((mp_rank, kind), []).append(cell)
            elif cell.state in GONE and (name := cell.file or cell.lost):
                gone.setdefault((mp_rank, kind), []).append(name)
            elif cell.state == "extra":
                extra.add(cell.file)
    names = {*lost, *(name for names in gone.values() for name in names)}
    there = {name: where for name, where in listing.files.items() if name not in names | extra}

    def of(files: Mapping[str, Location], absent: Mapping[str, Location] | None = None) -> Listing:
        return Listing(listing.directory, listing.tag, files, listing.options, absent or {})

    if layouts.family_by_names(listing).reads_absent:
        yield of(there, {name: listing.where(name) for name in names})
        return
    staged = any(file.kind.startswith("layer") for file in other_files(listing))
    tried: list[dict[str, str]] = []
    for choose in (max, min):
        chosen: dict[str, str] = {}
        for (mp_rank, kind), own in gone.items():
            fellows = sound.get((mp_rank, kind))
            if not fellows and not staged:
                fellows = [cell for (_, other), cells in sound.items() if other == kind for cell in cells]
            if fellows:
                chosen |= dict.fromkeys(own, choose(fellows, key=lambda cell: cell.nbytes).file)
        if chosen not in tried:
            tried.append(chosen)
            found = {name: StandIn(listing.where(name).path, listing.files[own]) for name, own in chosen.items()}
            merged = {**there, **found}
            yield of({name: merged[name] for name in sorted(merged, key=natural)})


@dataclass(frozen=True, slots=True)
class Lack:
    """The missing part of a tensor.

    Attributes:
        tensor: its number.
        numel: elements that lie in files that are gone.
        pieces: first element and elements of each run in those files, its rows and the elements from one row to the next.
        files: numbers of these files, in the order of the elements.
        spare: the model's own copy, often in half precision, is whole.
    """

    tensor: int
    numel: int
    pieces: tuple[tuple[int, int, int, int], ...]
    files: tuple[int, ...]
    spare: bool


def lacking(layers: Sequence[PieceLayer], grid: FileGrid) -> list[Lack]:
    """The tensors with weights in files that are gone."""
    gone = {number for number, file in enumerate(grid.files) if file.gone}
    if not gone or not layers:
        return []
    copies = next((layer.pieces for layer in layers if layer.purpose == "module"), {})
    found: list[Lack] = []
    for tensor, (_, pieces) in layers[0].pieces.items():
        own = [piece for piece in unfold_pieces(pieces) if piece[0] in gone]
        if own:
            numel = sum(piece[3] * piece[4] for piece in own)
            spare = tensor in copies and not any(piece[0] in gone for piece in unfold_pieces(copies[tensor][1]))
            places = tuple((piece[2], piece[3], piece[4], piece[5]) for piece in own)
            found.append(Lack(tensor, numel, places, tuple(dict.fromkeys(piece[0] for piece in own)), spare))
    return found


def make_room(layers: Sequence[PieceLayer], grid: FileGrid) -> None:
    """Makes missing files at least as long as their contents."""
    for layer in layers:
        for dtype, pieces in layer.pieces.values():
            for file, byte, _, many, rows, _, pitch, step in unfold_pieces(pieces):
                if file >= 0 and grid.files[file].gone:
                    end = byte + ((rows - 1) * pitch + (many - 1) * step + 1) * dtype.itemsize
                    grid.files[file].expected = max(grid.files[file].expected, end)
