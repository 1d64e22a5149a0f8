"""From the path a person gives to the files of one save: `latest`, tags, trainers' folders, shards on several disks.

For `jobs.open`, and for the trainer. What a save looks like, the families say (`layouts.FAMILIES`). A path may be: the
directory with `latest`; a tag directory itself; a trainer's output directory with `checkpoint-500/` in it; an Accelerate
`pytorch_model/` or Lightning `*.ckpt/checkpoint/` folder; one rank's file; a save of torch.distributed.checkpoint, a directory
of such (`step-100/`), or accelerate's with `pytorch_model_fsdp_0/` in it; plain weights, as a file, one shard, an index or a
directory; or a directory with one save at most four directories below. The file `latest` itself means the tag that it names.
Whether a path is a part of a save, and what the whole is, says `parts`.
Source: DeepSpeed runtime/engine.py `load_checkpoint` (`latest`); transformers trainer_utils.py `get_last_checkpoint`;
accelerate accelerator.py `save_state`; Lightning strategies/deepspeed.py `save_checkpoint` (tag "checkpoint").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt import layouts
from zckpt.base.errors import NotACheckpointError, ZckptError
from zckpt.base.words import count, examples
from zckpt.layouts.directories import QUESTIONS, Look, NextEntry, laid_over
from zckpt.layouts.directories import Place as Place
from zckpt.layouts.run.steps import POINTERS_OF_STEPS
from zckpt.layouts.save import trainers
from zckpt.layouts.save.folder import Folder, list_folder
from zckpt.layouts.save.listing import UNIVERSAL_POINTER
from zckpt.layouts.save.pointers import read_pointer
from zckpt.layouts.search import POINTERS, foreign_error, foreign_format, look_below, missing_error
from zckpt.storage.location import Location

if TYPE_CHECKING:
    from zckpt.layouts.parts import PlacedPart


def find(path: Location, tag: str | None = None, also: Sequence[Location] = (), *, as_part: bool = False) -> Place:
    """The save that `path` means.

    Args:
        path: any of the forms above.
        tag: which save, where there are several.
        also: directories with files that are laid over it: the same checkpoint's parts on other nodes' disks.
        as_part: take a part of a save alone, as if it were one.

    Raises:
        NotACheckpointError: there is nothing to read.
        IncompleteError: `latest` is missing and there are several tags, or it names a tag that is not there; or `path` is a part
            of a save, and the others are missing or cannot be joined with it.
        UnsafeError: `latest` or `tag` points outside the directory.
    """
    for root in also:
        if not root.is_dir():
            raise NotACheckpointError("no such directory", file=root, remedy="Give --also a directory that exists.")
    place = _find_at(path.refreshed(), tag, list(map(list_folder, also)), as_part=as_part)
    if as_part and not place.listing.part:
        note = f"{path!r} is not a part of a save, as far as names say: --as-part takes it as it is."
        return replace(place, notes=(*place.notes, note))
    return place


def _find_at(path: Location, tag: str | None, also: Sequence[Folder], *, as_part: bool) -> Place:
    """As `find`, for directories laid over it that are listed."""
    for family in layouts.FAMILIES:
        if (above := family.above_ranks(path)) is not None:
            path = above
            break
    if path.is_file():
        name, folder = path.name, list_folder(path.parent)
        layouts.admit(folder.names)
        if name == UNIVERSAL_POINTER:
            tag = tag or read_pointer(path)
        elif name not in (*POINTERS, *POINTERS_OF_STEPS):
            from zckpt.layouts.files import save_of_file

            found = save_of_file(folder, name, also, as_part=as_part)
            if found is not None:
                return found if isinstance(found, Place) else _find_at(found, None, (), as_part=False)
    elif path.is_dir():
        folder = list_folder(path)
    else:
        raise missing_error(path)
    tag = None if trainers.FOLDER.fullmatch(folder.name) and tag == folder.name else tag
    return _find_whole(Look(folder, tag, also, as_part))


def _find_whole(look: Look) -> Place:
    """The save in a directory, with the other parts of it if the directory is one part."""
    place = _find_in_directory(look)
    if place.listing.part or any(family.tagged and family.is_save(place.listing.files) for family in layouts.FAMILIES):
        return place
    from zckpt.layouts.parts import part_error, rank_part_of

    found = place.listing.directory
    parts = (rank_part_of(at, look.also, found) for at in dict.fromkeys((look.path, found)))
    part = next(filter(None, parts), None)
    if look.as_part:
        return place if part is None else replace(place, listing=replace(place.listing, part=part.words))
    if part is None:
        return place
    if part.below or len(part.parts) == 1:
        raise part_error(part)
    note = f"{part.path.name!r} is {part.words}: all are read."
    place = _join_parts(part, look)
    return replace(place, notes=(note, *place.notes))


def _enter(look: Look, entry: NextEntry) -> Place:
    """The save in an entry of a directory."""
    inner, over = look.folder.inside(entry.name), laid_over(look, entry.name)
    if inner is None:
        place = _find_at(look.path / entry.name, entry.tag, over, as_part=look.as_part)
    else:
        place = _find_whole(Look(inner, entry.tag, over, look.as_part))
    return replace(place, tags=entry.tags or place.tags, notes=(*entry.notes, *place.notes))


def _join_parts(part: PlacedPart, look: Look) -> Place:
    """The save with parts in the directories of ranks or nodes. Raises IncompleteError if they cannot be joined."""
    from zckpt.layouts.parts import part_error

    own = [inner for name in part.parts if (inner := part.above.inside(name)) is not None]
    over = [*own[1:], *look.also]
    if clash := _clash_of(own):
        raise part_error(part, clash)
    try:
        place = _find_whole(Look(own[0], look.tag, over))
    except ZckptError as error:
        raise part_error(part, f"{error.what}, {error.found}" if error.found else error.what) from error
    unused = [root.name for root in own if not any(f.is_within(root.path) for f in place.listing.files.values())]
    if unused:
        raise part_error(part, f"together, nothing in {examples(unused)} is read")
    return replace(
        place, notes=(f"{part.above.path!r} holds one save in {len(own)} parts: all are read.", *place.notes)
    )


def _clash_of(folders: Sequence[Folder]) -> str:
    """The name of a file of a save that two directories hold with different contents; empty if there is none."""
    from zckpt.layouts.save.weight_files import is_weights

    seen: dict[str, Location] = {}
    for folder in folders:
        for name in folder.names:
            if not is_weights(name) and not layouts.is_of_save(name):
                continue
            file = folder.path / name
            if file.is_file() and not seen.setdefault(name, file).has_bytes_of(file):
                return f"{name!r} is in two of them, and differs"
    return ""


def _find_in_directory(look: Look) -> Place:
    """The save in a directory, or the only save below it."""
    layouts.admit(look.names)
    for question in (*QUESTIONS, _as_weights):
        if (answer := question(look)) is not None:
            if isinstance(answer, Place):
                return answer
            return _enter(look, answer) if isinstance(answer, NextEntry) else _join_parts(answer, look)
    from zckpt.layouts.save.series import meaning_of

    if foreign := foreign_format(look.names):
        raise foreign_error(look.path, foreign)
    below = look_below(look.folder)
    if below.saves and meaning_of(names := _names_that_differ(look, below.saves)) == "moment":
        newest = [save for save, name in zip(below.saves, names, strict=True) if name == names[-1]]
        below = below._replace(saves=newest)
    if len(below.saves) == 1:
        found = below.saves[0].path
        place = _find_whole(Look(below.saves[0], look.tag, look.also, look.as_part))
        return replace(place, notes=(f"{look.path!r} holds no save itself: {found!r} is taken.", *place.notes))
    if below.foreign and not below.saves:
        raise foreign_error(below.foreign[0][0].path, below.foreign[0][1])
    raise _no_save_error(look, [save.path for save in below.saves])


def _as_weights(look: Look) -> Place | None:
    """The weights in a directory that is nothing else."""
    from zckpt.layouts.files import weights_in

    return weights_in(look)


def _names_that_differ(look: Look, saves: Sequence[Folder]) -> list[str]:
    """Of directories further below, the first names on the way to them that are not all the same."""
    paths = [save.path.relative_to(look.path).replace("\\", "/").split("/") for save in saves]
    return next((list(names) for names in zip(*paths, strict=False) if len({*names}) > 1), [path[0] for path in paths])


def _no_save_error(look: Look, below: Sequence[Location]) -> NotACheckpointError:
    is_deepspeeds = "zero_to_fp32.py" in look.names or any(name.startswith("global_step") for name in look.names)
    found = count(len(look.names), "entry", "entries") + (f" such as {examples(look.names)}" if look.names else "")
    found = found if look.names else "an empty directory"
    if unfinished := [name for name in (look.folder.name, *look.names) if trainers.UNFINISHED in name]:
        found = f"a save that was not finished, {examples(unfinished, 1)}"
    return NotACheckpointError(
        "holds no checkpoint" + (" itself" if below else ""), file=look.path,
        found=f"{count(len(below), 'save')} further below" if below else found,
        expected="'latest', a tag directory with *_states.pt or *.distcp files, checkpoint-N folders, or weights files",
        remedy=f"Give one of the directories that hold saves: {examples(below, 6)}." if below
        else "Put files that were moved out of their global_step* directory back into it." if is_deepspeeds
        else "Give the directory that holds the save, or the file with the weights.",
    )  # fmt: skip
