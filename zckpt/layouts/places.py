"""From the path a person gives to the files of one save: `latest`, tags, trainers' folders, shards on several disks.

For `jobs.open`, and for the trainer. What a save looks like, the families say (`layouts.FAMILIES`). A path may be: the
directory with `latest`; a tag directory itself; a trainer's output directory with `checkpoint-500/` in it; an Accelerate
`pytorch_model/` or Lightning `*.ckpt/checkpoint/` folder; one rank's file; a save of torch.distributed.checkpoint, a directory
of such (`step-100/`), or accelerate's with `pytorch_model_fsdp_0/` in it; or plain weights, as a file or a directory. The file
`latest` itself means the tag that it names.
Source: DeepSpeed runtime/engine.py `load_checkpoint` (`latest`); transformers trainer_utils.py `get_last_checkpoint`;
accelerate accelerator.py `save_state`; Lightning strategies/deepspeed.py `save_checkpoint` (tag "checkpoint").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from zckpt import layouts
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, NotACheckpointError, UsageError
from zckpt.base.words import count, examples
from zckpt.layouts.run.steps import OF_MEGATRON, TRACKER, read_step, step_pointer
from zckpt.layouts.save import accelerate, trainers
from zckpt.layouts.save.apart import is_alone, last_of, one_of, saves_in
from zckpt.layouts.save.companions import home_of
from zckpt.layouts.save.family import Family
from zckpt.layouts.save.listing import UNIVERSAL_POINTER, Listing, list_files, listed, natural
from zckpt.layouts.save.pointers import check_tag, read_pointer
from zckpt.output.saves import displaced
from zckpt.storage.location import Location, locate

_STEP = re.compile(r"(?:(?:global_step|iter|step)[_-]?)?0*(?P<number>\d+)|release")
_ROLES = ("actor", "critic", "ref", "model", "weights", "dist_ckpt")
"""Directories in a step of a run that hold one of its models: of verl the first three; of others the only one."""
_INNER = "dist_ckpt"
_POINTERS = ("latest", UNIVERSAL_POINTER)
_MOST_LOOKED_INTO = 100  # directories, to suggest one that holds a checkpoint


@dataclass(frozen=True, slots=True)
class Place:
    """One save, found.

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


class _Look(NamedTuple):
    """A directory that is searched for a save.

    Attributes:
        path: of the directory.
        tag: which save is wanted, if the user says it.
        also: directories laid over it.
        names: of what is in it, in natural order.
    """

    path: Location
    tag: str | None
    also: Sequence[Location]
    names: Sequence[str]


def find(path: Location, tag: str | None = None, also: Sequence[Location] = ()) -> Place:
    """The save that `path` means.

    Args:
        path: any of the forms above.
        tag: which save, where there are several.
        also: directories whose files are laid over it: the same checkpoint's parts on other nodes' disks.

    Raises:
        NotACheckpointError: there is nothing to read.
        IncompleteError: `latest` is missing and there are several tags, or it names a tag that is not there.
        UnsafeError: `latest` or `tag` points outside the directory.
    """
    path = path.refreshed()
    path = next(filter(None, (family.above_ranks(path) for family in layouts.FAMILIES)), path)
    if path.is_file():
        name, path = path.name, path.parent
        file = path / name
        if name in _POINTERS:
            return find(path, tag or (read_pointer(file) if name == UNIVERSAL_POINTER else None), also)
        for family in layouts.FAMILIES:
            if (save := family.save_of(name)) is not None:
                listing = one_of(_listing(path, save, also), family, save)
                if not is_alone(listing, family) and family.match(listing) is None:
                    return Place(listing, path)
        if name.endswith(".safetensors") or not layouts.is_of_save(name):
            return Place(Listing(file, "", {name: file}), path)
    if not path.is_dir():
        raise NotACheckpointError(
            "no such file or directory", file=path,
            remedy="Give the directory that holds 'latest', a tag directory such as global_step500, or a weights file.",
        )  # fmt: skip
    for root in also:
        if not root.is_dir():
            raise NotACheckpointError("no such directory", file=root, remedy="Give --also a directory that exists.")
    tag = None if trainers.FOLDER.fullmatch(path.absolute().name) and tag == path.absolute().name else tag
    look = _Look(path, tag, also, listed(path))
    for what in (_save, _accelerate, _role, _run, _by_trainer, _wanted, _home, _trainers, _several, _weights):
        if (place := what(look)) is not None:
            return place
    below = [] if path.is_remote else [path / name for name in look.names[:_MOST_LOOKED_INTO]]
    below = [inner for inner in below if inner.is_dir() and has_saves(inner)]
    raise NotACheckpointError(
        "holds no checkpoint" + (" itself" if below else ""),
        file=path,
        found=count(len(look.names), "entry", "entries") + (f" such as {examples(look.names)}" if look.names else ""),
        expected="'latest', a tag directory with *_states.pt or *.distcp files, checkpoint-N folders, or weights files",
        remedy=f"Give the checkpoint's own directory: {examples(below)}." if below
        else "Put files that were moved out of their global_step* directory back into it.",
    )  # fmt: skip


def has_saves(path: Location) -> bool:
    """Whether there is anything that `find` would look into: false for a directory that a run is yet to fill."""
    if not path.is_dir():
        return path.is_file()
    names = listed(path)
    if any(family.is_save(names) for family in layouts.FAMILIES):
        return True
    inner = (path / name for name in names if trainers.FOLDER.fullmatch(name))
    folder = trainers.folder_of(names)
    known = _pointer(names) or trainers.saves_of(names) or _tags(path, names, ())
    return bool(known) or (bool(folder) and has_saves(path / folder)) or any(map(has_saves, inner))


def is_taken(name: str) -> bool:
    """Whether an entry of this name means something to `find`, so that no tag may have it."""
    if name.casefold() in (*_POINTERS, *(family.directory for family in layouts.FAMILIES)):
        return True
    taken = (family.owns(name) or family.holds_files(name) for family in layouts.FAMILIES)
    return accelerate.MODEL.fullmatch(name) is not None or any(taken)


# ---- what a directory may be, in the order in which it is asked ---------------------------------------------------------


def _save(look: _Look) -> Place | None:
    """A save itself: a tag directory beside others, or one that has no tag."""
    family = next(filter(None, (_family_in(look, family) for family in layouts.FAMILIES)), None)
    if family is None:
        return None
    name, home = look.path.name, look.path.absolute().parent
    if look.tag not in (None, name):
        raise UsageError(
            f"is itself a save, and not {look.tag!r}", file=look.path, found=f"--tag {look.tag}",
            remedy="Leave --tag out, or give the directory above it.",
        )  # fmt: skip
    if family.tagged:
        siblings = _tags(home, listed(home), ()) if home.is_readable() else (name,)
        return Place(_listing(look.path, name, _laid_over(look, name)), home, siblings)
    return Place(_listing(look.path, "", look.also), home_of(look.path))


def _family_in(look: _Look, family: Family) -> Family | None:
    """The family, if the directory is one of its saves; without tags, all files may be in directories laid over this one."""
    over = () if family.tagged or family.fallback or step_pointer(look.names) else look.also
    names = [*look.names, *(name for root in over for name in listed(root))]
    return family if not family.fallback and family.is_save(names) else None


def _accelerate(look: _Look) -> Place | None:
    """What accelerate's `save_state` leaves of an FSDP run: models and optimizers in directories of their own."""
    models = _directories(look, accelerate.MODEL)
    name = look.tag or next(iter(models), "")
    if name not in models:
        return None
    several = f"{look.path!r} holds {len(models)} models: {name!r} is taken. Pass --tag for another."
    listing = _listing(look.path / name, "", _laid_over(look, name))
    return Place(listing, look.path, tuple(models), () if len(models) == 1 or look.tag else (several,))


def _role(look: _Look) -> Place | None:
    """A step of a run with a directory for each of its models: the first of `_ROLES`, or `--tag`."""
    roles = [name for name in _ROLES if name in look.names and _has_model(look.path / name)]
    name = look.tag or next(iter(roles), "")
    if name not in roles:
        return None
    several = f"{look.path!r} holds {examples(roles)}: {name!r} is taken. Pass --tag for another."
    place = find(look.path / name, None, _laid_over(look, name))
    return replace(
        place, tags=tuple(roles), notes=(*([several] if len(roles) > 1 and not look.tag else []), *place.notes)
    )


def _run(look: _Look) -> Place | None:
    """The directory of a run of verl or Megatron: the step that a file names, or the newest one.

    Megatron-DeepSpeed writes such a file beside `latest`, which is then what counts.
    """
    if _pointer(look.names) is not None:
        return None
    steps = [name for name in _directories(look, _STEP) if any(_has_model(look.path / name / role) for role in _ROLES)]
    pointer = step_pointer(look.names)
    if pointer is not None:
        steps = _directories(look, _STEP)
    if not steps:
        return None
    newest = steps[-1]
    if pointer is not None and look.tag is None:
        said = read_step(look.path / pointer)
        newest = next((name for name in steps if said in (name, _STEP.sub(r"\g<number>", name))), "")
        if not newest:
            raise IncompleteError(
                f"has no save of the step that {pointer!r} names", file=look.path, found=examples(steps),
                expected=f"a directory of step {said:.40}", remedy="Choose one with --tag.",
            )  # fmt: skip
    step, _, role = (look.tag or newest).partition("/")
    if step not in steps:
        return None
    several = (
        f"{look.path!r} holds {count(len(steps), 'step')}: the newest, {step!r}, is taken. Pass --tag for another."
    )
    place = find(look.path / step, role or None, _laid_over(look, step))
    notes = (several, *place.notes) if len(steps) > 1 and look.tag is None else place.notes
    return replace(place, tags=tuple(steps), notes=notes)


def _has_model(path: Location) -> bool:
    """Whether a directory of one of a run's models is a save, or holds one, as verl's do that Megatron-Core wrote."""
    places = [place for place in (path, path / _INNER) if place.is_dir()]
    return any(family.is_save(place.names()) for place in places for family in layouts.FAMILIES)


def _home(look: _Look) -> Place | None:
    """The directory that holds tags: one is wanted, or named by `latest`, or the only or the last one."""
    path, tags = look.path, _tags(look.path, look.names, look.also)
    pointer = _pointer(look.names)
    if look.tag is None and pointer is None and not tags:
        return None
    notes: tuple[str, ...] = ()
    tag, origin = look.tag, "--tag"
    if tag is None:
        if pointer is not None:
            tag, origin = read_pointer(path / pointer), repr(pointer)
        elif len(tags) == 1:
            tag = tags[0]
            lacking = _pointer_of(path, tags)
            notes = (f"There is no {lacking!r} in {path!r}: its only tag, {tag!r}, is taken.",) if lacking else ()
        elif _are_steps(path, tags):
            tag = tags[-1]
            notes = (f"{path!r} holds {len(tags)} saves: the last, {tag!r}, is taken. Pass --tag for another.",)
        else:
            raise IncompleteError(
                f"has no file {_pointer_of(path, tags) or 'latest'!r} to say which save is meant", file=path,
                found=f"{count(len(tags), 'tag')}: {', '.join(tags)}",
                remedy=f"Choose one: --tag {tags[-1]}.",
            )  # fmt: skip
    check_tag(tag, path, origin)
    directory = path / tag
    roots = _laid_over(look, tag)
    if not path.is_remote and not directory.is_dir():
        directory = locate(displaced(path.path).get(tag, directory))
    if not directory.is_dir():
        roots = [root for root in roots if root.is_dir()]
        if not roots:
            tags = tags or tuple(_directories(look, trainers.FOLDER))
            raise IncompleteError(
                f"has no save of the tag that {origin} names", file=path, found=f"no directory {tag!r}",
                expected=f"one of the tags {', '.join(tags)}" if tags else "",
                remedy="Choose one with --tag." if tags else "Copy the tag directory here.",
            )  # fmt: skip
        directory = roots.pop(0)
    home = directory if (directory / "config.json").is_file() and not (path / "config.json").is_file() else path
    return Place(_listing(directory, tag, roots), home, tags, notes)


def _trainers(look: _Look) -> Place | None:
    """A trainer's output: the newest of its `checkpoint-N` folders that holds saves, or plain weights if it has none itself."""
    folders = _directories(look, trainers.FOLDER)
    held = [look.path / name for name in reversed(folders)]
    saves = (one.name for one in held if _pointer(names := listed(one)) or _tags(one, names, ()))
    alone = (one.name for one in held if not _has_weights(look.names) and _has_weights(listed(one)))
    if (newest := next(saves, None) or next(alone, None)) is None:
        return None
    place = find(look.path / newest, look.tag, look.also)
    note = f"{look.path!r} holds {count(len(folders), 'folder')} of a trainer's checkpoints: the newest, {newest!r}, is taken."
    return replace(place, notes=(note, *place.notes))


def _by_trainer(look: _Look) -> Place | None:
    """A run of Lightning or Composer, or the directory of its saves: the newest, or `--tag`."""
    if folder := trainers.folder_of(look.names):
        inner = look.path / folder
        return find(inner, look.tag, _laid_over(look, folder)) if inner.is_dir() and has_saves(inner) else None
    saves = trainers.saves_of(look.names)
    if not saves or _pointer(look.names) or layouts.FAMILIES[-1].is_save(look.names):
        return None
    if look.tag is not None and look.tag not in saves:
        return None
    chosen = look.tag or trainers.newest_of(saves)
    if not chosen:
        raise IncompleteError(
            "holds several saves, and no name says which is the newest", file=look.path, found=examples(saves),
            remedy=f"Choose one: --tag {saves[-1]}.",
        )  # fmt: skip
    several = (
        f"{look.path!r} holds {count(len(saves), 'save')}: the newest, {chosen!r}, is taken. Pass --tag for another."
    )
    place = find(look.path / chosen, None, _laid_over(look, chosen))
    notes = (several, *place.notes) if len(saves) > 1 and look.tag is None else place.notes
    return replace(place, tags=tuple(saves), notes=notes)


def _wanted(look: _Look) -> Place | None:
    """One of several saves in a directory or of a trainer's folders, by `--tag`."""
    if look.tag is None:
        return None
    if held := trainers.folder_with(look.path, _directories(look, trainers.FOLDER), look.tag):
        return find(look.path / held[0], held[1], _laid_over(look, held[0]))
    return _several(look)


def _several(look: _Look) -> Place | None:
    """Saves whose files lie in one directory, each under names of its own: the last one, or `--tag`."""
    for family in layouts.FAMILIES:
        saves = saves_in(look.names, family)
        if not saves or (look.tag is not None and look.tag not in saves):
            continue
        chosen = look.tag or last_of(saves, look.path)
        place = Place(one_of(_listing(look.path, chosen, look.also), family, chosen), look.path)
        if family.match(place.listing) is not None:
            continue
        several = f"{look.path!r} holds {count(len(saves), 'save')}: {chosen!r} is taken. Pass --tag for another."
        notes = (several,) if len(saves) > 1 and look.tag is None else ()
        return replace(place, tags=tuple(filter(None, saves)), notes=notes)
    return None


def _weights(look: _Look) -> Place | None:
    """Files that are read where there is nothing else."""
    if not _has_weights(look.names):
        return None
    return Place(_listing(look.path, "", look.also), home_of(look.path, plain=True))


def _has_weights(names: Sequence[str]) -> bool:
    return any(family.fallback and family.is_save(names) for family in layouts.FAMILIES)


def _listing(directory: Location, tag: str, also: Sequence[Location]) -> Listing:
    families = layouts.FAMILIES
    below = [name for family in families for name in (family.directory, family.raw_directory) if name]
    entries = dict.fromkeys(name for root in (directory, *also) for name in listed(root))
    below += (name for name in entries if any(family.holds_files(name) for family in families))
    return list_files(directory, tag, also, layouts.is_of_save, tuple(dict.fromkeys(below)))


def _laid_over(look: _Look, tag: str) -> list[Location]:
    """Further roots: each may be the checkpoint's directory on another disk, or its tag directory."""
    return [inner if (inner := root / tag).is_dir() else root for root in look.also]


def _directories(look: _Look, pattern: re.Pattern[str]) -> list[str]:
    """Names of the directories there that match, in natural order."""
    return [n for n in look.names if pattern.fullmatch(n) and (look.path / n).is_dir()]


def _tags(path: Location, names: Sequence[str], also: Sequence[Location]) -> tuple[str, ...]:
    """Names of directories that hold a save's files, here or in the directories laid over this one."""
    found: set[str] = set() if path.is_remote else set(displaced(path.path))
    for root, entries in ((path, names), *((root, listed(root)) for root in also)):
        for name in entries:
            if name.startswith("."):  # a save that was not finished
                continue
            inner = root / name
            if inner.is_dir() and inner.is_readable() and layouts.is_save(inner.names()):
                found.add(name)
    return tuple(sorted(found, key=natural))


def _are_steps(path: Location, tags: Sequence[str]) -> bool:
    """Whether tags are saves of families without `latest`, numbered alike (`step-100`, `step-200`)."""
    untagged = [family for family in layouts.FAMILIES if not family.tagged and not family.fallback]
    saves = (path / tag for tag in tags)
    all_are = all(save.is_dir() and any(family.is_save(save.names()) for family in untagged) for save in saves)
    return all_are and len({re.sub(r"\d+", "#", tag) for tag in tags}) == 1


def _pointer_of(path: Location, tags: Sequence[str]) -> str:
    """The file that would name the newest of some saves, by what they look like; empty where their trainer writes none."""
    if all(OF_MEGATRON.fullmatch(tag) for tag in tags):
        return TRACKER
    return "latest" if any(f.tagged and f.is_save(listed(path / tag)) for f in layouts.FAMILIES for tag in tags) else ""


def _pointer(names: Sequence[str]) -> str | None:
    """The file that names the newest tag: `latest`, or that of universal checkpoints where there is no other."""
    return next((name for name in _POINTERS if name in names), None)
