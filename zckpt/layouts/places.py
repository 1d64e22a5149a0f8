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
from zckpt.base.errors import IncompleteError, NotACheckpointError, ZckptError
from zckpt.base.words import count, examples
from zckpt.layouts import directories
from zckpt.layouts.directories import Look, laid_over, listing_of
from zckpt.layouts.directories import Place as Place
from zckpt.layouts.run.steps import POINTERS_OF_STEPS, step_pointer
from zckpt.layouts.save import trainers
from zckpt.layouts.save.companions import home_of
from zckpt.layouts.save.folder import Folder, list_folder
from zckpt.layouts.save.foreign import ForeignFormat, foreign_format, foreign_save
from zckpt.layouts.save.listing import UNIVERSAL_POINTER, Listing
from zckpt.layouts.save.pointers import read_pointer
from zckpt.layouts.search import POINTERS, has_weights, holds_save, look_below, pointer_in, tags_in
from zckpt.storage.location import Location

if TYPE_CHECKING:
    from zckpt.layouts.parts import PlacedPart
    from zckpt.layouts.save.weight_files import WeightFiles


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
    place = _find(path.refreshed(), tag, also, as_part=as_part)
    if as_part and not place.listing.part:
        note = f"{path!r} is not a part of a save, as far as names say: --as-part takes it as it is."
        return replace(place, notes=(*place.notes, note))
    return place


def _find(path: Location, tag: str | None, also: Sequence[Location], *, as_part: bool) -> Place:
    path = next(filter(None, (family.above_ranks(path) for family in layouts.FAMILIES)), path)
    for root in also:
        if not root.is_dir():
            raise NotACheckpointError("no such directory", file=root, remedy="Give --also a directory that exists.")
    over = [list_folder(root) for root in also]
    if path.is_file():
        name, folder = path.name, list_folder(path.parent)
        layouts.admit(folder.names)
        if name in POINTERS:
            tag = tag or (read_pointer(path) if name == UNIVERSAL_POINTER else None)
        elif (
            name not in POINTERS_OF_STEPS and (place := _find_by_file(folder, name, over, as_part=as_part)) is not None
        ):
            return place
        path = folder.path
    if not path.is_dir():
        from zckpt.layouts.near import missing_error

        raise missing_error(path)
    tag = None if trainers.FOLDER.fullmatch(path.absolute().name) and tag == path.absolute().name else tag
    return _find_whole(Look(list_folder(path), tag, over, _enter, as_part))


def _find_by_file(folder: Folder, name: str, also: Sequence[Folder], *, as_part: bool) -> Place | None:
    """The save that a file of a directory stands for; None where the directory itself decides."""
    from zckpt.layouts.parts import model_of_file, part_error, rank_part_of
    from zckpt.layouts.save.apart import is_alone, one_of
    from zckpt.layouts.save.weight_files import is_weights

    file = folder.path / name
    if as_part and (place := _find_part_alone(folder, name, also)) is not None:
        return place
    for family in layouts.FAMILIES:
        if (save := family.save_of(name)) is not None:
            listing = one_of(listing_of(folder, save, also), family, save)
            if not is_alone(listing, family) and family.match(listing) is None:
                return Place(listing, folder.path)
    if layouts.is_of_save(name) or _is_of_family(folder, name):
        return None
    if foreign := foreign_save([name]) if is_weights(name) else foreign_format([name]):
        raise _foreign_error(file, foreign)
    if model := model_of_file(name, folder):
        return _place_of_model(folder, model, also, given=name)
    if (target := file.resolved()).name != name and not file.is_remote:
        home = list_folder(target.parent)
        if (model := model_of_file(target.name, home)) or layouts.is_of_save(target.name):
            return (
                _place_of_model(home, model, also, given=target.name)
                if model
                else _find(target, None, [], as_part=False)
            )
    if part := rank_part_of(file, [root.path for root in also], holds_save):
        if part.below or len(part.parts) == 1:
            raise part_error(part)
        listing = listing_of(folder, "", also)
        if all(family.match(listing) is not None for family in layouts.FAMILIES[:-1]):
            raise part_error(part)
        return Place(listing, folder.path, (), (f"{name!r} is {part.words}: all are read.",))
    return Place(Listing(file, "", {name: file}), folder.path)


def _is_of_family(folder: Folder, name: str) -> bool:
    """Whether a file has a name that a family's saves have, beside one of its own marks."""
    kinds = ((family, kind) for family in layouts.FAMILIES if not family.fallback for kind in family.common)
    return any(kind.pattern.fullmatch(name) and family.is_save(folder.names) for family, kind in kinds)


def _find_part_alone(folder: Folder, name: str, also: Sequence[Folder]) -> Place | None:
    """The place of a file that is a part of a save, read alone; None for any other file."""
    from zckpt.layouts.parts import model_of_file, rank_part_of
    from zckpt.layouts.save.weight_files import is_weights

    file, model = folder.path / name, model_of_file(name, folder)
    words = model.words if model and name != model.named_by else ""
    if not words and (part := rank_part_of(file, [root.path for root in also], holds_save)):
        words = part.words
    if not words or (layouts.is_of_save(name) and not is_weights(name)):
        return None
    return Place(Listing(file, "", {name: file}, part=words), folder.path)


def _place_of_model(folder: Folder, model: WeightFiles, also: Sequence[Folder], given: str = "") -> Place:
    """The files of one model; `given`: the name of one that the user gave. Raises IncompleteError if a file was given,
    and others are missing.
    """
    listing = listing_of(folder, "", also)
    missing = [name for name in model.missing if name not in listing.files]
    if missing and given and given != model.named_by:
        raise IncompleteError(
            f"is {model.words}, and not all are there", file=folder.path / given,
            found=f"{count(len(model.files), 'file')}: {examples(model.files)}", expected=f"{examples(missing, 8)} too",
            remedy="Copy them to this directory, or give the one that has them with --also. --as-part exports this file alone.",
        )  # fmt: skip
    names = {*model.files, *model.missing, model.named_by}
    notes = (f"{given!r} is {model.words}: all are read.",) if given not in ("", model.named_by) else ()
    kept = {name: file for name, file in listing.files.items() if name in names}
    if len(kept) == 1 and not model.missing and not model.named_by:
        ((name, file),) = kept.items()
        return Place(Listing(file, "", {name: file}), home_of(folder.path, plain=True), (), notes)
    return Place(replace(listing, files=kept, is_one_model=True), home_of(folder.path, plain=True), (), notes)


def _find_whole(look: Look) -> Place:
    """The save in a directory, with the other parts of it if the directory is one part."""
    place = _find_in_directory(look)
    if place.listing.part or any(family.tagged and family.is_save(place.listing.files) for family in layouts.FAMILIES):
        return place
    from zckpt.layouts.parts import part_error, rank_part_of

    over = [root.path for root in look.also]
    found = place.listing.directory
    parts = (rank_part_of(at, over, holds_save, found) for at in dict.fromkeys((look.path, found)))
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


def _enter(look: Look, name: str, tag: str | None) -> Place:
    """The save in an entry of a directory."""
    inner, over = look.folder.inside(name), laid_over(look, name)
    if inner is None:
        return _find(look.path / name, tag, [root.path for root in over], as_part=look.as_part)
    return _find_whole(Look(inner, tag, over, _enter, look.as_part))


def _join_parts(part: PlacedPart, look: Look) -> Place:
    """The save with parts in the directories of ranks or nodes. Raises IncompleteError if they cannot be joined."""
    from zckpt.layouts.parts import part_error

    own = [inner for name in part.parts if (inner := part.above.inside(name)) is not None]
    over = [*own[1:], *look.also]
    if clash := _clash_of(own):
        raise part_error(part, clash)
    try:
        place = _find(own[0].path, look.tag, [root.path for root in over], as_part=False)
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
    for question in _QUESTIONS:
        if (place := question(look)) is not None:
            return place
    if foreign := foreign_format(look.names):
        raise _foreign_error(look.path, foreign)
    from zckpt.layouts.save.series import meaning_of

    below = look_below(look.folder)
    if below.saves and meaning_of(names := _names_that_differ(look, below.saves)) == "moment":
        newest = [save for save, name in zip(below.saves, names, strict=True) if name == names[-1]]
        below = below._replace(saves=newest)
    if len(below.saves) == 1:
        found = below.saves[0].path
        place = _find_whole(Look(below.saves[0], look.tag, look.also, _enter, look.as_part))
        return replace(place, notes=(f"{look.path!r} holds no save itself: {found!r} is taken.", *place.notes))
    if below.foreign and not below.saves:
        raise _foreign_error(*below.foreign[0])
    raise _no_save_error(look, [save.path for save in below.saves])


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


def _foreign_error(path: Location | Folder, foreign: ForeignFormat) -> NotACheckpointError:
    return NotACheckpointError(
        f"is of {foreign.name}, which zckpt does not read", file=path.path,
        expected="a layout that docs/formats.md lists", remedy=foreign.remedy,
    )  # fmt: skip


def _refuse_foreign(look: Look) -> None:
    """Raises NotACheckpointError for a save of a format that zckpt does not read."""
    if foreign := foreign_save(look.names):
        raise _foreign_error(look.path, foreign)


def as_parts(look: Look) -> Place | None:
    """The directories of ranks or nodes, each with a part of one save."""
    if look.tag is not None or pointer_in(look.names) or step_pointer(look.names):
        return None
    from zckpt.layouts.parts import part_error, parts_in

    part = parts_in(look.folder, holds_save)
    if part is None or not {*tags_in(look.folder)} <= {*part.parts}:
        return None
    if len(part.parts) == 1:
        raise part_error(part)
    return _join_parts(part, look)


def as_weights(look: Look) -> Place | None:
    """The weights in a directory; a note says so if a trainer's folders, which hold weights alone too, are beside them."""
    place, folders = _weights_in(look), look.folder.directories(trainers.FOLDER)
    if place is None or not folders:
        return place
    note = (
        f"{look.path!r} holds weights itself, which are taken, and not {folders[-1]!r}, the newest folder beside them."
    )
    return replace(place, notes=(note, *place.notes))


def _weights_in(look: Look) -> Place | None:
    """The files that are read where there is no other save: those of usual names, or of the only model under any name."""
    from zckpt.layouts.parts import PlacedPart, model_of_file, part_error, rank_part_of
    from zckpt.layouts.save.series import series_of
    from zckpt.layouts.save.weight_files import models_in

    whole = (
        Place(listing_of(look.folder, "", look.also), home_of(look.path, plain=True))
        if has_weights(look.names)
        else None
    )
    if whole is not None and any(family.match(whole.listing) is None for family in layouts.FAMILIES):
        return whole
    models = models_in(look.folder)
    joined = model_of_file(models[0].files[0], look.folder) if len(models) > 1 else None
    if joined is not None and {*joined.files} >= {name for model in models for name in model.files}:
        models = [joined]
    names = [model.files[0] for model in models]
    if len(models) > 1 and len({series_of(name) or name for name in names}) == 1:
        raise part_error(PlacedPart(look.path / names[-1], look.folder, tuple(names)))
    below = look_below(look.folder).saves if len(models) == 1 else []
    if len(models) + len(below) > 1:
        named = [model.named_by or model.files[0] for model in models]
        raise IncompleteError(
            "holds several models, and nothing says which is meant", file=look.path,
            found=examples([*named, *(save.path.relative_to(look.path) for save in below)], 6),
            remedy=f"Give one of them, such as {(look.path / named[0]).path!r}.",
        )  # fmt: skip
    if len(models) == 1 and not models[0].named_by:
        if model := model_of_file(names[0], look.folder):
            return _place_of_model(look.folder, model, look.also, given="" if model == models[0] else names[0])
        part = rank_part_of(look.path / names[0], [root.path for root in look.also], holds_save)
        if part is not None and not part.below:
            raise part_error(part)
    return _place_of_model(look.folder, models[0], look.also) if models else whole


_QUESTIONS = (
    directories.as_save,
    _refuse_foreign,
    directories.as_accelerate,
    directories.as_role,
    directories.as_run,
    directories.as_by_trainer,
    directories.as_wanted,
    as_parts,
    directories.as_home,
    directories.as_trainers,
    directories.as_several,
    as_weights,
)
"""The questions about a directory, in the order in which they are asked."""
