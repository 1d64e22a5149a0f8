"""What a directory may be: a save, the home of tags, a step of a run, a trainer's output, saves side by side.

For `places`, which asks these questions in their order. Each is a function of what was listed, which returns the place of the
save, an entry of the directory in which the search goes on, or None for "this is something else".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from zckpt import layouts
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, NotACheckpointError, UsageError
from zckpt.base.words import count, examples
from zckpt.layouts.run.steps import OF_MEGATRON, TRACKER, read_step, step_pointer
from zckpt.layouts.save import trainers
from zckpt.layouts.save.companions import home_of
from zckpt.layouts.save.family import Family
from zckpt.layouts.save.folder import Folder, list_folder
from zckpt.layouts.save.listing import Listing, lay_over, natural
from zckpt.layouts.save.pointers import check_tag, read_pointer
from zckpt.layouts.search import (
    foreign_error,
    foreign_format,
    foreign_save,
    has_saves,
    has_weights,
    holds_save,
    look_below,
    pointer_in,
    tag_meant,
    tags_in,
)
from zckpt.output.saves import find_displaced
from zckpt.storage.location import Location, locate

if TYPE_CHECKING:
    from zckpt.layouts.parts import PlacedPart


@dataclass(frozen=True, slots=True)
class Place:
    """A save that was found.

    Attributes:
        listing: its files.
        home: the directory that has config and tokenizer files, and the tag directories.
        tags: all tags there, in natural order.
        notes: what was chosen on the way, as sentences.
        named: the path that a person gave; None where none did.
    """

    listing: Listing
    home: Location
    tags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    named: Location | None = None


class Look(NamedTuple):
    """A directory that is searched for a save.

    Attributes:
        folder: it, listed.
        tag: which save is wanted, if the user says it.
        also: directories laid over it.
        as_part: whether a part of a save is wanted.
        best: whether the run's best save is wanted.
        file: the name of a file in it, where that is what the user gave; else empty.
    """

    folder: Folder
    tag: str | None
    also: Sequence[Folder]
    as_part: bool = False
    best: bool = False
    file: str = ""

    @property
    def path(self) -> Location:
        """The path of the directory."""
        return self.folder.path

    @property
    def names(self) -> Sequence[str]:
        """The names in the directory, in natural order."""
        return self.folder.names


class NextEntry(NamedTuple):
    """An entry of a directory in which the search goes on.

    Attributes:
        name: of the entry.
        tag: which save in it is wanted.
        tags: the saves among which it was chosen; none where those in it count.
        notes: what was chosen, as sentences.
        folder: the directory in which the search goes on, where that lies deeper in the entry; else None.
    """

    name: str
    tag: str | None = None
    tags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    folder: Folder | None = None


def as_best(look: Look) -> NextEntry | None:
    """The run's output directory as the folder of its best save, where that is wanted.

    Raises:
        UsageError: nothing there says which save is the best. IncompleteError: the best one is not there any more.
        ZckptError: the run's record cannot be read.
    """
    if not look.best:
        return None
    name = trainers.best_in(look.folder)
    if name is None:
        raise no_best_error(look.path)
    if name not in look.names:
        raise IncompleteError(
            f"does not hold the best save, {name!r}", file=look.path,
            found=examples(look.folder.directories(trainers.FOLDER)) or "no checkpoint-N folder",
            remedy="Copy that folder here, or leave --best out.",
        )  # fmt: skip
    return NextEntry(name, look.tag)


def no_best_error(path: Location) -> UsageError:
    """The error for a run's output directory that says of no save that it is the best."""
    return UsageError(
        "says of no save that it is the best", file=path,
        expected=f"best_model_checkpoint in the {trainers.STATE} of a checkpoint-N folder, as load_best_model_at_end leaves it",
        remedy="Leave --best out, or give the folder that you want.",
    )  # fmt: skip


def as_save(look: Look) -> Place | None:
    """The directory as a save itself: a tag directory beside others, or a save without tags."""
    for family in layouts.FAMILIES:
        if _is_of(look, family):
            break
    else:
        return None
    name, home = look.folder.name, look.path.absolute().parent
    if look.tag not in (None, name):
        raise UsageError(
            f"is itself a save, and not {look.tag!r}", file=look.path, found=f"--tag {look.tag}",
            remedy="Leave --tag out, or give the directory above it.",
        )  # fmt: skip
    if family.tagged:
        siblings = tags_in(look.folder.above()) if home.is_readable() else (name,)
        return Place(listing_of(look.folder, name, laid_over(look, name)), home, siblings)
    return Place(listing_of(look.folder, "", look.also), home_of(look.path))


def _is_of(look: Look, family: Family) -> bool:
    """Whether the directory is a save of a family; without tags, all files may be in directories laid over this one."""
    roots = [look.folder]
    if look.also and not (family.tagged or family.fallback or step_pointer(look.names)):
        roots += look.also
    names = [name for root in roots for name in root.names]
    if family.fallback or not family.is_save(names):
        return False
    held = [name for name in names if family.holds_files(name)] if not family.mark else []
    inner = (f"{name}/{file}" for name in held for root in roots if (at := root.inside(name)) for file in at.names)
    return not held or any(map(family.owns, (*names, *inner)))


def as_pointed(look: Look) -> Place | NextEntry | None:
    """The directory that holds saves, where `latest` in it names the newest one, or is it, as a directory or a link to it: that
    counts before what entries are called.
    """
    pointer = pointer_in(look.names)
    if look.tag is not None or pointer is None:
        return None
    if look.folder.has_file(pointer):
        return as_home(look)
    inner = look.folder.inside(pointer)
    if inner is None or not holds_save(inner):
        return None
    tags = tuple(name for name in tags_in(look.folder, look.also) if name != pointer)
    return NextEntry(pointer, None, tags, _note(look, (pointer, *tags), count(len(tags), "save"), repr(pointer)))


def _note(look: Look, among: Sequence[str], what: str, chosen: str) -> tuple[str, ...]:
    """A sentence on what is taken of several, if nobody said which; none otherwise."""
    if len(among) < 2 or look.tag:
        return ()
    return (f"{look.path!r} holds {what}: {chosen} is taken. Pass --tag for another.",)


def as_accelerate(look: Look) -> Place | None:
    """The directory as the output of accelerate's `save_state` for an FSDP run: models and optimizers in directories of
    their own.
    """
    models = look.folder.directories(trainers.FSDP_MODEL)
    name = look.tag or next(iter(models), "")
    inner = look.folder.inside(name) if name in models else None
    if inner is None:
        return None
    notes = _note(look, models, f"{len(models)} models", repr(name))
    return Place(listing_of(inner, "", laid_over(look, name)), look.path, tuple(models), notes)


def as_role(look: Look) -> NextEntry | None:
    """The directory as a step of a run with one directory for each model: the first of `trainers.ROLES`, or `--tag`."""
    roles = _roles_in(look.folder)
    name = look.tag or next(iter(roles), "")
    if name not in roles:
        return None
    return NextEntry(name, None, tuple(roles), _note(look, roles, examples(roles), repr(name)))


def _roles_in(folder: Folder) -> list[str]:
    """The directories of a step's models that are a save, or hold one that Megatron-Core wrote, as verl's do."""
    found: list[str] = []
    for name in trainers.ROLES:
        if (inner := folder.inside(name)) is None:
            continue
        places = [at for at in (inner, inner.inside(trainers.INNER)) if at is not None]
        if any(family.is_save(at.names) for at in places for family in layouts.FAMILIES):
            found.append(name)
    return found


def as_run(look: Look) -> NextEntry | None:
    """The directory as a run of verl or Megatron: the step that a file names, or the newest one.

    Megatron-DeepSpeed writes such a file beside `latest`, which is then what counts.
    """
    if pointer_in(look.names) is not None:
        return None
    pointer = step_pointer(look.names)
    steps = look.folder.directories(trainers.STEP)
    if pointer is None:
        steps = [name for name in steps if (inner := look.folder.inside(name)) is not None and _roles_in(inner)]
    if not steps:
        return None
    newest = steps[-1]
    if pointer is not None and look.tag is None:
        said = read_step(look.path / pointer)
        newest = next((name for name in steps if said in (name, trainers.STEP.sub(r"\g<number>", name))), "")
        if not newest:
            raise IncompleteError(
                f"has no save of the step that {pointer!r} names", file=look.path, found=examples(steps),
                expected=f"a directory of step {said:.40}", remedy="Choose one with --tag.",
            )  # fmt: skip
    step, _, role = (look.tag or newest).partition("/")
    if step not in steps:
        return None
    notes = _note(look, steps, count(len(steps), "step"), f"the newest, {step!r},")
    return NextEntry(step, role or None, tuple(steps), notes)


def as_home(look: Look) -> Place | None:
    """The directory that holds tags: the tag asked for, the one that `latest` names, the only one, or the last one."""
    path, tags = look.path, tags_in(look.folder, look.also)
    pointer = pointer_in(look.names)
    if look.tag is None and pointer is None and not tags:
        return None
    notes: tuple[str, ...] = ()
    tag, origin = look.tag, "--tag"
    if tag is None:
        if pointer is not None:
            tag, origin = read_pointer(path / pointer), repr(pointer)
        elif len(tags) == 1:
            tag = tags[0]
            lacking = _pointer_of(look.folder, tags)
            notes = (f"There is no {lacking!r} in {path!r}: its only tag, {tag!r}, is taken.",) if lacking else ()
        elif _are_steps(look.folder, tags):
            tag = tags[-1]
            notes = _note(look, tags, f"{len(tags)} saves", f"the last, {tag!r},")
        else:
            raise IncompleteError(
                f"has no file {_pointer_of(look.folder, tags) or 'latest'!r} to say which save is meant", file=path,
                found=f"{count(len(tags), 'tag')}: {', '.join(tags)}",
                remedy=f"Choose one: --tag {tags[-1]}.",
            )  # fmt: skip
    check_tag(tag, path, origin)
    folder, roots = look.folder.inside(tag), laid_over(look, tag)
    if folder is None:
        directory = path / tag
        if not path.is_remote and not directory.is_dir():
            directory = locate(find_displaced(path.path).get(tag, directory))
        if directory.is_dir():
            folder = list_folder(directory)
        elif roots := [inner for root in look.also if (inner := root.inside(tag)) is not None] or roots:
            folder = roots.pop(0)
        else:
            tags = tags or tuple(look.folder.directories(trainers.FOLDER))
            raise IncompleteError(
                f"has no tag {tag!r}, which {origin} names", file=path, found=f"no directory {tag!r}",
                expected=f"one of the tags {', '.join(tags)}" if tags else "",
                remedy=tag_meant(tag, tags) if tags else "Copy the tag directory here.",
            )  # fmt: skip
    has_config = folder.has_file("config.json") and not look.folder.has_file("config.json")
    return Place(listing_of(folder, tag, roots), folder.path if has_config else path, tags, notes)


def as_trainers(look: Look) -> NextEntry | None:
    """A trainer's output: the newest of its `checkpoint-N` folders that holds saves, or plain weights if it has none itself."""
    folders = look.folder.directories(trainers.FOLDER)
    held = [inner for name in reversed(folders) if (inner := look.folder.inside(name)) is not None]
    saves = (one.name for one in held if pointer_in(one.names) or tags_in(one))
    alone = (one.name for one in held if not has_weights(look.names) and has_weights(one.names))
    if (newest := next(saves, None) or next(alone, None)) is None:
        return None
    note = f"{look.path!r} holds {count(len(folders), 'folder')} of a trainer's checkpoints: the newest, {newest!r}, is taken."
    if weights := name_weights(look.folder):
        note += f" The weights in {look.path!r} itself are not; to take these, give {weights!r}."
    best = trainers.name_best(look.folder)
    if best not in (None, newest):
        note += f" The best by trainer_state.json is {best!r}, which --best takes."
    return NextEntry(newest, look.tag, notes=(note,))


def name_weights(folder: Folder) -> str | None:
    """The path of the file that means the weights of usual names in a directory; None where it has none of its own."""
    from zckpt.layouts.save.weight_files import models_in

    models = models_in(folder) if has_weights(folder.names) else []
    return (folder.path / (models[0].named_by or models[0].files[0])).path if models else None


def as_by_trainer(look: Look) -> NextEntry | None:
    """The directory as a run of Lightning or Composer, or as the directory of its saves: the newest, or `--tag`."""
    if name := trainers.folder_of(look.names):
        inner = look.folder.inside(name)
        return NextEntry(name, look.tag) if inner is not None and has_saves(inner) else None
    saves = trainers.saves_of(look.names)
    if not saves or pointer_in(look.names) or layouts.FAMILIES[-1].is_save(look.names):
        return None
    if look.tag is not None and look.tag not in saves:
        return None
    chosen = look.tag or trainers.newest_of(saves)
    if not chosen:
        raise IncompleteError(
            "holds several saves, and no name says which is the newest", file=look.path, found=examples(saves),
            remedy=f"Choose one: --tag {saves[-1]}.",
        )  # fmt: skip
    notes = _note(look, saves, count(len(saves), "save"), f"the newest, {chosen!r},")
    return NextEntry(chosen, None, tuple(saves), notes)


def as_wanted(look: Look) -> Place | NextEntry | None:
    """The save among several, or among a trainer's folders, that `--tag` names."""
    if look.tag is None:
        return None
    if held := trainers.folder_with(look.path, look.folder.directories(trainers.FOLDER), look.tag):
        return NextEntry(*held)
    return as_several(look)


def refuse_foreign(look: Look) -> None:
    """Raises NotACheckpointError for a save of a format that zckpt does not read."""
    if foreign := foreign_save(look.names):
        raise foreign_error(look.path, foreign)


def as_parts(look: Look) -> PlacedPart | None:
    """The directories of ranks or nodes, each with a part of one save."""
    if look.tag is not None or step_pointer(look.names):
        return None
    from zckpt.layouts.parts import part_error, parts_in

    part = parts_in(look.folder)
    if part is None or not {*tags_in(look.folder)} <= {*part.parts}:
        return None
    if len(part.parts) == 1:
        raise part_error(part)
    return part


def as_several(look: Look) -> Place | None:
    """The directory as several saves with files under names of their own, such as `checkpoint_last-shard0.pt` and
    `checkpoint_2-shard0.pt`: the last one, or `--tag`. Which part of a name tells them apart says the family (`Family.apart`).
    """
    for family in layouts.FAMILIES:
        saves = _saves_in(look.names, family)
        if not saves or (look.tag is not None and look.tag not in saves):
            continue
        chosen = look.tag or _last_of(saves, look.path)
        place = Place(one_of(listing_of(look.folder, chosen, look.also), family, chosen), look.path)
        if family.match(place.listing) is not None:
            continue
        notes = _note(look, saves, count(len(saves), "save"), repr(chosen))
        return replace(place, tags=tuple(filter(None, saves)), notes=notes)
    return None


def as_below(look: Look) -> NextEntry:
    """The only save further below a directory that holds none itself, or the newest of several of one run.

    Raises:
        NotACheckpointError: there is none, or there are several, or only formats that zckpt does not read.
    """
    from zckpt.layouts.save.series import meaning_of

    if foreign := foreign_format(look.names):
        raise foreign_error(look.path, foreign)
    saves, others = look_below(look.folder)
    if saves and meaning_of(names := _names_that_differ(look, saves)) == "moment":
        saves = [save for save, name in zip(saves, names, strict=True) if name == names[-1]]
    if len(saves) == 1:
        found = saves[0]
        note = f"{look.path!r} holds no save itself: {found.path!r} is taken."
        return NextEntry("", look.tag, (), (note,), found)
    if others and not saves:
        raise foreign_error(others[0][0].path, others[0][1])
    raise _no_save_error(look, [save.path for save in saves])


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


def _saves_in(names: Iterable[str], family: Family) -> list[str]:
    """The saves of a family among files of these names, in natural order."""
    return sorted({save for name in names if (save := family.save_of(name)) is not None}, key=natural)


def _last_of(saves: list[str], directory: Location) -> str:
    """The save, among several in one directory, that is called the last or has the greatest number. Raises
    IncompleteError if their names do not say which is the last.
    """
    called = [save for save in saves if save.endswith("last")]
    if called or len({re.sub(r"\d+", "#", save) for save in saves}) == 1:
        return (called or saves)[-1]
    raise IncompleteError(
        "holds several saves, and no name says which is the last", file=directory, found=examples(saves),
        remedy=f"Choose one: --tag {saves[-1]}.",
    )  # fmt: skip


def one_of(listing: Listing, family: Family, save: str) -> Listing:
    """The files of one save, with those that belong to no save."""
    files = {name: file for name, file in listing.files.items() if family.save_of(name) in (save, None)}
    return replace(listing, files=files)


def listing_of(folder: Folder, tag: str, also: Sequence[Folder]) -> Listing:
    """The files of a save in a directory, with those of directories laid over it."""
    entries = dict.fromkeys(name for root in (folder, *also) for name in root.names)
    inner: dict[str, None] = {}
    for family in layouts.FAMILIES:
        own = (family.directory, family.raw_directory)
        inner |= dict.fromkeys(name for name in entries if name in own or family.holds_files(name, entries))
    roots = [(root.path, root.files(tuple(inner))) for root in (folder, *also)]
    return lay_over(folder.path, tag, roots, layouts.is_of_save)


def laid_over(look: Look, tag: str) -> list[Folder]:
    """Further roots of the checkpoint: each is its directory, or its tag directory, on another disk."""
    return [root.inside(tag) or root for root in look.also]


def _are_steps(folder: Folder, tags: Sequence[str]) -> bool:
    """Whether the tags are steps of one run (`step-100`, `step-200`), in families without `latest`."""
    from zckpt.layouts.save.series import meaning_of

    untagged = [family for family in layouts.FAMILIES if not family.tagged and not family.fallback]
    saves = [folder.inside(tag) for tag in tags]
    all_are = all(save is not None and any(family.is_save(save.names) for family in untagged) for save in saves)
    return all_are and meaning_of(tags) == "moment"


def _pointer_of(folder: Folder, tags: Sequence[str]) -> str:
    """The name of the file that names the newest of some saves, by what they look like; empty where their trainer
    writes none.
    """
    if all(OF_MEGATRON.fullmatch(tag) for tag in tags):
        return TRACKER
    saves = [save for tag in tags if (save := folder.inside(tag)) is not None]
    return "latest" if any(f.tagged and f.is_save(save.names) for f in layouts.FAMILIES for save in saves) else ""


QUESTIONS = (
    as_best,
    as_save,
    refuse_foreign,
    as_pointed,
    as_accelerate,
    as_role,
    as_run,
    as_by_trainer,
    as_wanted,
    as_parts,
    as_home,
    as_trainers,
    as_several,
)
"""The questions about a directory, in the order in which they are asked. After them comes whether it holds weights (`files`), and
`as_below`.
"""
