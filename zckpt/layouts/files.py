"""The save that a file stands for: one of several in a directory, all files of one model, or the file alone.

For `places`, which asks these questions of a path that is a file, and `weights_in` of a directory that is nothing but weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt import layouts
from zckpt.base.errors import IncompleteError
from zckpt.base.words import count, examples
from zckpt.layouts.directories import Look, Place, listing_of, no_best_error, one_of
from zckpt.layouts.parts import PlacedPart, model_of_file, part_error, rank_part_of
from zckpt.layouts.run.steps import POINTERS_OF_STEPS
from zckpt.layouts.save import trainers
from zckpt.layouts.save.companions import home_of
from zckpt.layouts.save.family import Family
from zckpt.layouts.save.folder import Folder, list_folder
from zckpt.layouts.save.listing import UNIVERSAL_POINTER, Listing
from zckpt.layouts.save.pointers import read_pointer
from zckpt.layouts.save.series import series_of
from zckpt.layouts.save.weight_files import WeightFiles, is_weights, models_in
from zckpt.layouts.search import POINTERS, foreign_error, foreign_format, foreign_save, has_weights, look_below
from zckpt.storage.location import Location


def refuse_best(look: Look) -> None:
    """Raises UsageError if a run's best save is wanted, which no file names."""
    if look.best:
        raise no_best_error(look.path / look.file)


def as_pointer(look: Look) -> Look | None:
    """The directory of a file that names the newest save; of universal checkpoints, the tag that it names is wanted."""
    if look.file == UNIVERSAL_POINTER:
        return look._replace(file="", tag=look.tag or read_pointer(look.path / look.file))
    return look._replace(file="") if look.file in (*POINTERS, *POINTERS_OF_STEPS) else None


def as_part_alone(look: Look) -> Place | None:
    """A file that is a part of a save, read alone, where that is wanted."""
    if not look.as_part:
        return None
    file, model = look.path / look.file, model_of_file(look.file, look.folder)
    words = model.words if model and look.file != model.named_by else ""
    if not words and (part := rank_part_of(file, look.also)):
        words = part.words
    if not words or (layouts.is_of_save(look.file) and not is_weights(look.file)):
        return None
    return Place(Listing(file, "", {look.file: file}, part=words), look.path)


def as_one_of_several(look: Look) -> Place | None:
    """A file that bears the name of its save, one of several in the directory."""
    for family in layouts.FAMILIES:
        if (save := family.save_of(look.file)) is not None:
            listing = one_of(listing_of(look.folder, save, look.also), family, save)
            if not _is_alone(listing, family) and family.match(listing) is None:
                return Place(listing, look.path)
    return None


def as_file_of_save(look: Look) -> Look | None:
    """The directory of a file that belongs to a save by its name."""
    is_of_one = layouts.is_of_save(look.file) or _is_of_family(look.folder, look.file)
    return look._replace(file="") if is_of_one else None


def refuse_foreign(look: Look) -> None:
    """Raises NotACheckpointError for a file of a format that zckpt does not read."""
    names = [look.file]
    if foreign := foreign_save(names) if is_weights(look.file) else foreign_format(names):
        raise foreign_error(look.path / look.file, foreign)


def as_model(look: Look) -> Place | None:
    """The model that a file belongs to by its name, or by what it holds."""
    model = model_of_file(look.file, look.folder)
    return _place_of_model(look.folder, model, look.also, given=look.file) if model else None


def as_link(look: Look) -> Place | Location | None:
    """The model that the target of a link belongs to; the target itself, where it is of a save."""
    file = look.path / look.file
    if (target := file.resolved()).name == look.file or file.is_remote:
        return None
    home = list_folder(target.parent)
    if model := model_of_file(target.name, home):
        return _place_of_model(home, model, look.also, given=target.name)
    return target if layouts.is_of_save(target.name) else None


def as_rank_part(look: Look) -> Place | None:
    """The save of a file that one rank wrote, with the files of all ranks."""
    part = rank_part_of(look.path / look.file, look.also)
    if part is None:
        return None
    if part.below or len(part.parts) == 1:
        raise part_error(part)
    listing = listing_of(look.folder, "", look.also)
    if all(family.match(listing) is not None for family in layouts.FAMILIES[:-1]):
        raise part_error(part)
    return Place(listing, look.path, (), (f"{look.file!r} is {part.words}: all are read.",))


def as_one_file(look: Look) -> Place:
    """The file alone."""
    file = look.path / look.file
    return Place(Listing(file, "", {look.file: file}), look.path)


QUESTIONS = (
    refuse_best,
    as_pointer,
    as_part_alone,
    as_one_of_several,
    as_file_of_save,
    refuse_foreign,
    as_model,
    as_link,
    as_rank_part,
    as_one_file,
)
"""The questions about a file, in the order in which they are asked; the last has an answer. An answer is the place of a save,
another path, or the directory, which is then looked at itself.
"""


def _is_of_family(folder: Folder, name: str) -> bool:
    """Whether a file has a name that a family's saves have, beside one of its own marks."""
    kinds = ((family, kind) for family in layouts.FAMILIES if not family.fallback for kind in family.common)
    return any(kind.pattern.fullmatch(name) and family.is_save(folder.names) for family, kind in kinds)


def weights_in(look: Look) -> Place | None:
    """The weights in a directory; a note says so if a trainer's folders, which hold weights alone too, are beside them."""
    place, folders = _models_or_weights(look), look.folder.directories(trainers.FOLDER)
    if place is None or not folders:
        return place
    note = (
        f"{look.path!r} holds weights itself, which are taken, and not {folders[-1]!r}, the newest folder beside them."
    )
    return replace(place, notes=(note, *place.notes))


def _models_or_weights(look: Look) -> Place | None:
    """The files that are read where there is no other save: those of usual names, or of the only model under any name."""
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
    below = look_below(look.folder)[0] if len(models) == 1 else []
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
        part = rank_part_of(look.path / names[0], look.also)
        if part is not None and not part.below:
            raise part_error(part)
    return _place_of_model(look.folder, models[0], look.also) if models else whole


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


def _is_alone(listing: Listing, family: Family) -> bool:
    """Whether a save is one file that is the whole checkpoint, whatever lies beside it; see `Family.alone`."""
    return family.alone and sum(family.save_of(name) is not None for name in listing.files) == 1
