"""From the path a person gives to the files of one save: `latest`, tags, trainers' folders, shards on several disks.

For `jobs.open`, and for the trainer. What a save looks like, the families say (`layouts.FAMILIES`). A path may be: the
directory with `latest`; a tag directory itself; a trainer's output directory with `checkpoint-500/` in it; an Accelerate
`pytorch_model/` or Lightning `*.ckpt/checkpoint/` folder; one rank's file; a save of torch.distributed.checkpoint, a directory
of such (`step-100/`), or accelerate's with `pytorch_model_fsdp_0/` in it; plain weights, as a file, one shard, an index or a
directory; or a directory with one save at most four directories below. The file `latest` itself means the tag that it names; a
directory or link of that name is the newest save. Whether a path is a part of a save, and what the whole is, says `parts`.
Source: DeepSpeed runtime/engine.py `load_checkpoint` (`latest`); transformers trainer_utils.py `get_last_checkpoint`;
accelerate accelerator.py `save_state`; Lightning strategies/deepspeed.py `save_checkpoint` (tag "checkpoint").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt import layouts
from zckpt.base.errors import NotACheckpointError, ZckptError
from zckpt.base.words import examples
from zckpt.layouts.directories import QUESTIONS, Look, NextEntry, as_below, laid_over
from zckpt.layouts.directories import Place as Place
from zckpt.layouts.save import trainers
from zckpt.layouts.save.folder import Folder, list_folder
from zckpt.layouts.search import missing_error
from zckpt.storage.location import Location

if TYPE_CHECKING:
    from zckpt.layouts.parts import PlacedPart


def find(
    path: Location,
    tag: str | None = None,
    also: Sequence[Location] = (),
    *,
    as_part: bool = False,
    best: bool = False,
) -> Place:
    """The save that `path` means.

    Args:
        path: any of the forms above.
        tag: which save, where there are several.
        also: directories with files that are laid over it: the same checkpoint's parts on other nodes' disks.
        as_part: take a part of a save alone, as if it were one.
        best: of a run of transformers' Trainer, take the best save.

    Raises:
        NotACheckpointError: there is nothing to read.
        IncompleteError: `latest` is missing and there are several tags, or it names a tag that is not there; or `path` is a part
            of a save, and the others are missing or cannot be joined with it; or the best save is not there.
        UnsafeError: `latest` or `tag` points outside the directory.
        UsageError: nothing says which save is the best.
    """
    for root in also:
        if not root.is_dir():
            raise NotACheckpointError("no such directory", file=root, remedy="Give --also a directory that exists.")
    place = _find_at(path.refreshed(), tag, list(map(list_folder, also)), as_part=as_part, best=best)
    if as_part and not place.listing.part:
        note = f"{path!r} is not a part of a save, as far as names say: --as-part takes it as it is."
        return replace(place, notes=(*place.notes, note))
    return place


def _find_at(path: Location, tag: str | None, also: Sequence[Folder], *, as_part: bool, best: bool = False) -> Place:
    """As `find`, for directories laid over it that are listed."""
    for family in layouts.FAMILIES:
        if (above := family.above_ranks(path)) is not None:
            path = above
            break
    if path.is_dir():
        return _find_whole(Look(list_folder(path), tag, also, as_part, best))
    if not path.is_file():
        raise missing_error(path)
    from zckpt.layouts.files import QUESTIONS as OF_FILES

    look = Look(list_folder(path.parent), tag, also, as_part, best, path.name)
    layouts.admit(look.names)
    answers = (question(look) for question in OF_FILES)
    answer = next(one for one in answers if one is not None)
    if isinstance(answer, Place):
        return answer
    return _find_whole(answer) if isinstance(answer, Look) else _find_at(answer, None, (), as_part=False)


def _find_whole(look: Look) -> Place:
    """The save in a directory, with the other parts of it if the directory is one part."""
    if trainers.FOLDER.fullmatch(look.folder.name) and look.tag == look.folder.name:
        look = look._replace(tag=None)
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
    inner, over = entry.folder or look.folder.inside(entry.name), laid_over(look, entry.name)
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


def _as_weights(look: Look) -> Place | None:
    """The weights in a directory that is nothing else."""
    from zckpt.layouts.files import weights_in

    return weights_in(look)


def _find_in_directory(look: Look) -> Place:
    """The save in a directory, or the only save below it."""
    layouts.admit(look.names)
    answers = (question(look) for question in (*QUESTIONS, _as_weights, as_below))
    answer = next(one for one in answers if one is not None)
    if isinstance(answer, Place):
        return answer
    return _enter(look, answer) if isinstance(answer, NextEntry) else _join_parts(answer, look)
