"""The save that a file stands for: one of several in a directory, all files of one model, or the file alone.

For `places`, for a path that is a file, and for a directory that is nothing but its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zckpt import layouts
from zckpt.base.errors import IncompleteError
from zckpt.base.words import count, examples
from zckpt.layouts.directories import Look, Place, listing_of, one_of
from zckpt.layouts.parts import PlacedPart, model_of_file, part_error, rank_part_of
from zckpt.layouts.save import trainers
from zckpt.layouts.save.companions import home_of
from zckpt.layouts.save.family import Family
from zckpt.layouts.save.folder import Folder, list_folder
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.series import series_of
from zckpt.layouts.save.weight_files import WeightFiles, is_weights, models_in
from zckpt.layouts.search import foreign_error, foreign_format, foreign_save, has_weights, look_below
from zckpt.storage.location import Location


def save_of_file(folder: Folder, name: str, also: Sequence[Folder], *, as_part: bool) -> Place | Location | None:
    """The save that a file of a directory stands for; for a link, the file that it leads to, where that one's directory
    decides; None where this directory decides.

    Raises:
        NotACheckpointError: it is of another program. IncompleteError: it is one of several, and the others are missing.
    """
    file = folder.path / name
    if as_part and (place := _find_part_alone(folder, name, also)) is not None:
        return place
    for family in layouts.FAMILIES:
        if (save := family.save_of(name)) is not None:
            listing = one_of(listing_of(folder, save, also), family, save)
            if not _is_alone(listing, family) and family.match(listing) is None:
                return Place(listing, folder.path)
    if layouts.is_of_save(name) or _is_of_family(folder, name):
        return None
    if foreign := foreign_save([name]) if is_weights(name) else foreign_format([name]):
        raise foreign_error(file, foreign)
    if model := model_of_file(name, folder):
        return _place_of_model(folder, model, also, given=name)
    if (target := file.resolved()).name != name and not file.is_remote:
        home = list_folder(target.parent)
        if (model := model_of_file(target.name, home)) or layouts.is_of_save(target.name):
            return _place_of_model(home, model, also, given=target.name) if model else target
    if part := rank_part_of(file, also):
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
    file, model = folder.path / name, model_of_file(name, folder)
    words = model.words if model and name != model.named_by else ""
    if not words and (part := rank_part_of(file, also)):
        words = part.words
    if not words or (layouts.is_of_save(name) and not is_weights(name)):
        return None
    return Place(Listing(file, "", {name: file}, part=words), folder.path)


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
