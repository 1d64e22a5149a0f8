"""Part or whole: whether a path is one part of a save, and what the others are.

For `places`, which takes the whole instead, or says what is missing. [Note: what makes a part] A file is one of several if an
index beside it names it with others, if its name counts ("1 of 2"), or if files beside it differ from it in an unknown number
and none of their tensors' names is its own. A file or directory is one rank's if its name, or that of a directory above it, has
a word of a place with a number (`rank_0`, `node_1`, `consolidated.00`) and the same is there with another number. Words of time
(`step_100`) make saves of their own, and so does what zckpt wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zckpt.base.errors import IncompleteError, ZckptError
from zckpt.base.patterns import compile_late
from zckpt.base.words import count, examples
from zckpt.containers import open_container
from zckpt.layouts.save.folder import Folder, list_folder
from zckpt.layouts.save.listing import natural
from zckpt.layouts.save.module_states import flatten
from zckpt.layouts.save.series import is_not_first, is_one_word, is_rank, numbers_in, series_of
from zckpt.layouts.save.weight_files import WeightFiles, files_counted_with, files_of_index, is_weights
from zckpt.layouts.search import holds_save
from zckpt.output.manifest import NAME as MANIFEST
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location

_SLICE = compile_late(r"(consolidated\.)(\d+)(\.pth)")
_PARAMS = "params.json"
_MOST_BYTES = 1 << 20

_HIGHEST = 3
"""The number of names at a path's end that are looked at: the rank's own, and those of directories in its directory."""


class PlacedPart(NamedTuple):
    """A file or directory that one rank or node wrote.

    Attributes:
        path: of it.
        above: the directory of all parts.
        parts: names in it of those that are there, its own included.
        below: what the path is in the part, as names; empty where it is the part itself.
    """

    path: Location
    above: Folder
    parts: tuple[str, ...]
    below: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The kind of part, in words."""
        return f"one of {len(self.parts):,} parts" if len(self.parts) > 1 else "one part of several"

    def others(self) -> list[Location]:
        """The same path in each of the other parts."""
        own = self.path.absolute()
        paths = (self.at(name) for name in self.parts)
        return [path for path in paths if path.absolute() != own]

    def at(self, part: str) -> Location:
        """The same path in a given part."""
        place = self.above.path / part
        for name in self.below:
            place = place / name
        return place


def model_of_file(name: str, folder: Folder) -> WeightFiles | None:
    """The files of the model that a file belongs to; None for a file that is a model by itself, as far as names and
    tensors say.
    """
    model = files_of_index(name, folder) or files_counted_with(name, folder.names)
    return model or (_find_numbered(name, folder) if is_weights(name) else None) or _find_slices(name, folder)


def _find_slices(name: str, folder: Folder) -> WeightFiles | None:
    """The slices of Llama's original files; one says by its shapes and `params.json` how many there are.

    Source: llama-models, models/llama3/model.py (`wo` is row-parallel: n_heads x head_dim columns in all).
    """
    match = _SLICE.fullmatch(name)
    if match is None or not folder.has_file(_PARAMS):
        return None
    try:
        params = read_json(folder.path / _PARAMS, _MOST_BYTES, "a model's parameters")
        root = open_container((folder.path / name).path).root
        columns = root["layers.0.attention.wo.weight"].shape[1] if isinstance(root, Mapping) else 0
        width = params["n_heads"] * params.get("head_dim", params["dim"] // params["n_heads"])
        total = width // columns
    except (ZckptError, OSError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError):
        return None
    others = [f"{match[1]}{number:02d}{match[3]}" for number in range(total)]
    missing = tuple(other for other in others if other not in folder.names)
    return WeightFiles(tuple(other for other in others if other in folder.names), missing) if missing else None


def _find_numbered(name: str, folder: Folder) -> WeightFiles | None:
    """Files that differ in one number of no known meaning, and hold tensors of other names, as torchtune's shards do.
    Raises IncompleteError if a number is missing between them.
    """
    for word in numbers_in(name):
        if word.meaning != "unknown":
            continue
        head, tail = name[: word.start], name[word.stop :]
        group = {
            int(other[len(head) : len(other) - len(tail)]): other
            for other in folder.names
            if other.startswith(head) and other.endswith(tail) and other[len(head) : len(other) - len(tail)].isdecimal()
        }
        if len(group) < 2 or not _are_disjoint([folder.path / other for other in group.values()]):
            continue
        numbers = sorted(group)
        missing = sorted(set(range(min(numbers[0], 1), numbers[-1])) - set(numbers))
        names = tuple(f"{head}{number:0{word.stop - word.start}d}{tail}" for number in missing)
        return WeightFiles(tuple(group[number] for number in numbers), names)
    return None


def _are_disjoint(files: Iterable[Location]) -> bool:
    """Whether no two files hold a tensor of one name; false where one cannot be read."""
    seen: set[str] = set()
    for file in files:
        try:
            root = open_container(file.path).root
            names = set(flatten(root, [])) if isinstance(root, Mapping) else set[str]()
        except (ZckptError, OSError):
            return False
        if not names or names & seen:
            return False
        seen |= names
    return True


def rank_part_of(path: Location, also: Sequence[Folder], home: Location | None = None) -> PlacedPart | None:
    """The part of one rank that a path is or leads to; None for anything else, and if all other parts are in `also`.

    Args:
        path: a file or directory.
        also: directories that are laid over it.
        home: the save that the path leads to, where that is known.
    """
    spellings = [path.absolute()]
    if (target := path.resolved()).path != spellings[0].path:
        spellings.append(target.absolute())
    given = {root.path.resolved().path for root in also}
    for place in spellings:
        at, below = place, tuple[str, ...]()
        for _ in range(_HIGHEST):
            name, above = at.name, at.parent
            if (
                (series := series_of(name))
                and (not below or is_one_word(name))
                and not _is_model_alone(home or place, name)
            ):
                part = _parts_beside(place, above, name, series, below)
                if part is not None and any(other.resolved().path not in given for other in part.others()):
                    return part
                if part is not None and len(part.parts) == 1 and not below and not given and not _holds_adapter(place):
                    return part
            if above.path == at.path or not name:
                break
            at, below = above, (name, *below)
    return None


def _holds_adapter(path: Location) -> bool:
    """Whether a file holds an adapter; there, "rank" in the name means the rank of its matrices:
    `style_rank64.safetensors`.
    """
    if not path.is_file():
        return False
    try:
        root = open_container(path.path).root
        return isinstance(root, Mapping) and any(map(_OF_ADAPTERS.search, flatten(root, [])))
    except (ZckptError, OSError):  # which the reader tells
        return False


_OF_ADAPTERS = compile_late(r"lora|loha|lokr|hada", re.IGNORECASE)


def _is_model_alone(path: Location, name: str) -> bool:
    """Whether a path is a model of its own, with its config, though its name could be a part's: `stage2`, `part1`."""
    if is_rank(name):
        return False
    home = path.parent if path.is_file() else path
    return (home / "config.json").is_file()


def _parts_beside(
    place: Location, above: Location, name: str, series: str, below: tuple[str, ...]
) -> PlacedPart | None:
    try:
        folder = list_folder(above)
    except ZckptError:  # a directory that may be entered, and not listed
        return None
    is_file = place.is_file()
    part = PlacedPart(place, folder, (name,), below)
    parts = [name]
    for other in folder.names:
        if other != name and series_of(other) == series:
            at = part.at(other)
            if at.is_file() if is_file else _holds(at):
                parts.append(other)
    if len(parts) == 1 and not is_not_first(name):
        return None
    return part._replace(parts=tuple(sorted(parts, key=natural)))


def _holds(path: Location) -> bool:
    try:
        folder = list_folder(path) if path.is_dir() else None
    except ZckptError:
        return False
    return folder is not None and MANIFEST not in folder.names and holds_save(folder)


def parts_in(folder: Folder) -> PlacedPart | None:
    """The parts of one save, each in a directory of a rank or node; None for any other directories."""
    by_series: dict[str, list[str]] = {}
    for name in folder.names:
        if (series := series_of(name)) and not name.startswith("."):
            by_series.setdefault(series, []).append(name)
    for names in by_series.values():
        held = [name for name in names if (at := folder.inside(name)) is not None and holds_save(at)]
        if len(held) > 1 or any(map(is_not_first, held)):
            return PlacedPart(folder.path / held[-1], folder, tuple(held))
    return None


def part_error(part: PlacedPart, why: str = "") -> IncompleteError:
    """The error for a part that is not read with the others; `why`: what speaks against joining them."""
    if len(part.parts) == 1:
        return IncompleteError(
            "holds one part of a save", file=part.path, found=f"{part.parts[0]!r} alone",
            expected="the parts of other numbers too", remedy="Copy the other parts beside it. --as-part exports it alone.",
        )  # fmt: skip
    return IncompleteError(
        f"is one save in {count(len(part.parts), 'part')} that zckpt does not join", file=part.above.path,
        found=examples(part.parts, 8) + (f": {why}" if why else ""),
        expected="parts of a layout that says how they are joined",
        remedy="Join them with the program that wrote them. If they are files of one save from several nodes, give one part as "
        "CKPT and each other one with --also. --as-part exports one part alone.",
    )  # fmt: skip
