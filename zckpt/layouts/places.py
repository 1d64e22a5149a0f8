"""From the path a person gives to the files of one save: `latest`, tags, trainers' folders, shards on several disks.

For `checkpoint`. A path may be: the directory with `latest`; a tag directory itself; a trainer's output directory with
`checkpoint-500/` in it; an Accelerate `pytorch_model/` or Lightning `*.ckpt/checkpoint/` folder; one rank's file; a save
of torch.distributed.checkpoint, a directory of such (`step-100/`), or accelerate's with `pytorch_model_fsdp_0/` in it; or
plain weights, as a file or a directory. The file `latest` itself means the tag that it names.
Source: DeepSpeed runtime/engine.py `load_checkpoint` (`latest`); transformers trainer_utils.py `get_last_checkpoint`;
accelerate accelerator.py `save_state`; Lightning strategies/deepspeed.py `save_checkpoint` (tag "checkpoint").
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from zckpt.base.errors import IncompleteError, NotACheckpointError, UnsafeError, UsageError, ZckptError
from zckpt.base.words import examples
from zckpt.layouts.save.listing import (
    UNIVERSAL,
    UNIVERSAL_POINTER,
    Listing,
    is_dcp_file,
    is_deepspeed_file,
    list_files,
    natural,
)
from zckpt.output.saves import displaced
from zckpt.storage import fsspec_io, paths

_TRAINER = re.compile(r"checkpoint-\d+")
_ACCELERATE = re.compile(r"pytorch_model_fsdp_\d+")
_POINTERS = ("latest", UNIVERSAL_POINTER)
_PLAIN = re.compile(r"(?:model|pytorch_model|adapter_model)(?:\.safetensors|\.bin)(?:\.index\.json)?")


@dataclass(frozen=True, slots=True)
class Place:
    """One save, found.

    Attributes:
        listing: its files.
        home: the directory beside whose tag directories config and tokenizer files lie.
        tags: all tags there, in natural order.
        notes: what was chosen on the way, as sentences.
    """

    listing: Listing
    home: str
    tags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def find(path: str, tag: str | None = None, also: Sequence[str] = ()) -> Place:
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
    path = paths.local(path)
    if paths.is_remote(path):
        path = path.rstrip("/")
        fsspec_io.refresh(path)
    if paths.is_file(path):
        name = os.path.basename(path)
        if name in _POINTERS:
            return find(paths.parent(path), tag or (_latest(path) if name == UNIVERSAL_POINTER else None), also)
        if not is_deepspeed_file(name) and (name.endswith(".safetensors") or not _is_dcp(name)):
            return Place(Listing(path, "", {name: path}), paths.parent(path))
        path = paths.parent(path)
    if not paths.is_dir(path):
        raise NotACheckpointError(
            "no such file or directory", file=path,
            remedy="Give the directory that holds 'latest', a tag directory such as global_step500, or a weights file.",
        )  # fmt: skip
    for root in also:
        if not paths.is_dir(root):
            raise NotACheckpointError("no such directory", file=root, remedy="--also takes a directory.")
    names = _entries(path)
    if any(is_deepspeed_file(name) for name in names) or UNIVERSAL in names:
        return _tag_directory(path, tag, also)
    if any(map(_is_dcp, names)) or any(_is_dcp(name) for root in also for name in _entries(root)):
        return _dcp_directory(path, tag, also)
    models = [name for name in names if _ACCELERATE.fullmatch(name) and paths.is_dir(os.path.join(path, name))]
    if models and tag in (None, *models):
        return _accelerate(path, tag or models[0], models, also)
    tags = _tags(path, names, also)
    if tag is not None or _pointer(names) or tags:
        return _in_home(path, tag, tags, also, names)
    trainers = [name for name in names if _TRAINER.fullmatch(name) and paths.is_dir(os.path.join(path, name))]
    for newest in sorted(trainers, key=natural, reverse=True):
        inner = os.path.join(path, newest)
        inner_names = _entries(inner)
        if _pointer(inner_names) or _tags(inner, inner_names, ()):
            place = find(inner, tag, also)
            note = f"{path!r} holds {len(trainers)} trainer checkpoints: the newest, {newest!r}, is taken."
            return Place(place.listing, place.home, place.tags, (note, *place.notes))
    if any(_PLAIN.fullmatch(name) for name in names):
        return Place(list_files(path, "", also), path)
    raise NotACheckpointError(
        "no checkpoint",
        file=path,
        found=f"{len(names):,} entries" + (f" such as {examples(names)}" if names else ""),
        expected="'latest', a tag directory with *_states.pt or *.distcp files, checkpoint-N folders, or weights files are "
        "looked for",
        remedy="Files moved out of their global_step* directory must go back into it.",
    )


def has_saves(path: str) -> bool:
    """Whether there is anything that `find` would look into: false for a directory that a run is yet to fill."""
    if not os.path.isdir(path):
        return os.path.exists(path)
    names = _entries(path)
    if any(_is_of_save(name) or _PLAIN.fullmatch(name) for name in names) or UNIVERSAL in names:
        return True
    inner = (os.path.join(path, name) for name in names if _TRAINER.fullmatch(name))
    return bool(_pointer(names) or _tags(path, names, ())) or any(map(has_saves, inner))


def is_taken(name: str) -> bool:
    """Whether an entry of this name means something to `find`, so that no tag may have it."""
    fixed = ("latest", "latest_universal", UNIVERSAL)
    known = (_ACCELERATE, _PLAIN)
    return name.casefold() in fixed or _is_of_save(name) or any(pattern.fullmatch(name) for pattern in known)


def latest_of(path: str) -> str | None:
    """What `latest` in a directory says; None where there is none."""
    place = os.path.join(path, "latest")
    return _latest(place) if os.path.isfile(place) else None


def _entries(directory: str) -> list[str]:
    try:
        return sorted(paths.names(directory), key=natural)
    except ZckptError:
        raise
    except OSError as error:
        raise NotACheckpointError(
            "a directory that cannot be read", file=directory, found=error.strerror or str(error)
        ) from error


def _tags(path: str, names: Sequence[str], also: Sequence[str]) -> tuple[str, ...]:
    """Names of directories that hold a save's files, here or in the directories laid over this one."""
    found: set[str] = set() if paths.is_remote(path) else set(displaced(path))
    for root, entries in ((path, names), *((root, _entries(root)) for root in also)):
        for name in entries:
            inner = os.path.join(root, name)
            if name.startswith("."):  # a save that never came to its end
                continue
            if paths.is_dir(inner) and paths.is_readable(inner) and any(map(_is_of_save, paths.names(inner))):
                found.add(name)
    return tuple(sorted(found, key=natural))


def _is_dcp(name: str) -> bool:
    return is_dcp_file(name) or name.endswith(".distcp")


def _is_of_save(name: str) -> bool:
    return is_deepspeed_file(name) or _is_dcp(name)


def _dcp_directory(path: str, tag: str | None, also: Sequence[str]) -> Place:
    """A save of torch.distributed.checkpoint; the model's config lies in it or beside it."""
    real = paths.absolute(path)
    if tag is not None and tag != os.path.basename(real):
        raise UsageError(
            "a tag that is not in the checkpoint", file=path, found=f"--tag {tag}",
            remedy="This directory is itself a save: leave --tag out, or give its parent.",
        )  # fmt: skip
    places = (path, paths.parent(real))
    has_config = [place for place in places if paths.is_file(os.path.join(place, "config.json"))]
    return Place(list_files(path, "", also), has_config[0] if has_config else path)


def _accelerate(path: str, name: str, models: Sequence[str], also: Sequence[str]) -> Place:
    """What accelerate's `save_state` leaves of an FSDP run: models and optimizers in directories of their own."""
    roots = [_overlay(root, name) for root in also]
    notes = (
        () if len(models) == 1 else (f"{path!r} holds {len(models)} models: {name!r} is taken; --tag takes another.",)
    )
    return Place(list_files(os.path.join(path, name), "", roots), path, tuple(models), notes)


def _tag_directory(path: str, tag: str | None, also: Sequence[str]) -> Place:
    real = paths.absolute(path)
    name, home = os.path.basename(real), paths.parent(real)
    if tag is not None and tag != name:
        raise UsageError(
            "a tag that is not in the checkpoint", file=path, found=f"--tag {tag}",
            remedy="This directory is itself a tag directory: leave --tag out, or give its parent.",
        )  # fmt: skip
    roots = [_overlay(root, name) for root in also]
    siblings = _tags(home, _entries(home), ()) if paths.is_readable(home) else (name,)
    return Place(list_files(path, name, roots), home, siblings)


def _in_home(path: str, tag: str | None, tags: tuple[str, ...], also: Sequence[str], names: Sequence[str]) -> Place:
    notes: tuple[str, ...] = ()
    origin = "--tag"
    if tag is None:
        if pointer := _pointer(names):
            tag, origin = _latest(os.path.join(path, pointer)), repr(pointer)
        elif len(tags) == 1:
            tag = tags[0]
            notes = (f"There is no 'latest' in {path!r}: its only tag, {tag!r}, is taken.",)
        elif _are_steps(path, tags):
            tag = tags[-1]
            notes = (f"{path!r} holds {len(tags)} saves: the last, {tag!r}, is taken; --tag takes another.",)
        else:
            raise IncompleteError(
                "no 'latest'", file=path, found=f"{len(tags)} tags ({', '.join(tags)})",
                remedy=f"Choose one: --tag {tags[-1]}.",
            )  # fmt: skip
    _check_tag(tag, path, origin)
    directory = os.path.join(path, tag)
    roots = [_overlay(root, tag) for root in also]
    if not paths.is_dir(directory) and not paths.is_remote(path):
        directory = displaced(path).get(tag, directory)
    if not paths.is_dir(directory):
        roots = [root for root in roots if paths.is_dir(root)]
        if not roots:
            raise IncompleteError(
                f"no save of the tag that {origin} names", file=path, found=f"{tag!r} is not there",
                expected=f"tags {', '.join(tags)} are" if tags else "",
                remedy="Choose one with --tag." if tags else "Copy the tag directory here.",
            )  # fmt: skip
        directory = roots.pop(0)
    return Place(list_files(directory, tag, roots), path, tags, notes)


def _are_steps(path: str, tags: Sequence[str]) -> bool:
    """Whether saves of torch.distributed.checkpoint are numbered (`step-100`): they have no `latest`."""
    inner = [os.path.join(path, tag) for tag in tags]
    if not all(paths.is_dir(place) and any(map(_is_dcp, paths.names(place))) for place in inner):
        return False
    return len({re.sub(r"\d+", "#", tag) for tag in tags}) == 1


def _pointer(names: Sequence[str]) -> str | None:
    """The file that names the newest tag: `latest`, or that of universal checkpoints where there is no other."""
    return next((pointer for pointer in _POINTERS if pointer in names), None)


def _overlay(root: str, tag: str) -> str:
    """A further root may be the checkpoint's directory on another disk, or its tag directory."""
    inner = os.path.join(root, tag)
    return inner if paths.is_dir(inner) else root


def _latest(path: str) -> str:
    try:
        text = paths.read(path, 4096).decode().strip()
    except ZckptError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise NotACheckpointError("a 'latest' that cannot be read", file=path, found=str(error)) from error
    if not text:
        raise IncompleteError("an empty 'latest'", file=path, remedy="Choose a tag with --tag.")
    return text


def _check_tag(tag: str, path: str, origin: str) -> None:
    parts = tag.replace("\\", "/").split("/")
    if os.path.isabs(tag) or "\0" in tag or "\n" in tag or any(part in ("", ".", "..") for part in parts):
        raise UnsafeError(
            f"a tag that points elsewhere, from {origin}",
            file=path,
            found=f"{tag!r:.200}",
            expected="a tag is the name of a directory beside 'latest'",
            remedy="Nothing was read from there. Correct it, or choose a tag with --tag.",
        )
