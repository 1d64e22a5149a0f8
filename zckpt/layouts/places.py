"""From the path a person gives to the files of one save: `latest`, tags, trainers' folders, shards on several disks.

For `checkpoint`. A path may be: the directory with `latest`; a tag directory itself; a trainer's output directory with
`checkpoint-500/` in it; an Accelerate `pytorch_model/` or Lightning `*.ckpt/checkpoint/` folder; one rank's file; or plain
weights, as a file or a directory.
Source: DeepSpeed runtime/engine.py `load_checkpoint` (`latest`); transformers trainer_utils.py `get_last_checkpoint`;
accelerate accelerator.py `save_state`; Lightning strategies/deepspeed.py `save_checkpoint` (tag "checkpoint").
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from zckpt import files, remote
from zckpt.errors import IncompleteError, NotACheckpointError, UnsafeError, UsageError, ZckptError, some
from zckpt.layouts.listing import UNIVERSAL, Listing, is_deepspeed_file, list_files, natural

_TRAINER = re.compile(r"checkpoint-\d+")
_PLAIN = re.compile(r"(?:model|pytorch_model)(?:\.safetensors|\.bin)(?:\.index\.json)?")


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
    path = files.local(path)
    if files.is_remote(path):
        path = path.rstrip("/")
        remote.refresh(path)
    if files.is_file(path):
        name = os.path.basename(path)
        if not is_deepspeed_file(name):
            return Place(Listing(path, "", {name: path}), files.parent(path))
        path = files.parent(path)
    if not files.is_dir(path):
        raise NotACheckpointError(
            "no such file or directory", file=path,
            remedy="Give the directory that holds 'latest', a tag directory such as global_step500, or a weights file.",
        )  # fmt: skip
    for root in also:
        if not files.is_dir(root):
            raise NotACheckpointError("no such directory", file=root, remedy="--also takes a directory.")
    names = _entries(path)
    if any(is_deepspeed_file(name) for name in names) or UNIVERSAL in names:
        return _tag_directory(path, tag, also)
    tags = _tags(path, names, also)
    if tag is not None or _pointer(names) or tags:
        return _in_home(path, tag, tags, also, names)
    trainers = [name for name in names if _TRAINER.fullmatch(name) and files.is_dir(os.path.join(path, name))]
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
        found=f"{len(names):,} entries" + (f" such as {some(names)}" if names else ""),
        expected="'latest', a tag directory with *_states.pt files, checkpoint-N folders, or weights files are looked for",
        remedy="Files moved out of their global_step* directory must go back into it.",
    )


def has_saves(path: str) -> bool:
    """Whether there is anything at all that `find` could look into: false for a directory that a run is yet to fill."""
    if not os.path.isdir(path):
        return os.path.exists(path)
    names = [name for name in os.listdir(path) if not name.startswith(".")]
    return "latest" in names or any(
        is_deepspeed_file(name) or _PLAIN.fullmatch(name) or os.path.isdir(os.path.join(path, name)) for name in names
    )


def _entries(directory: str) -> list[str]:
    try:
        return sorted(files.names(directory), key=natural)
    except ZckptError:
        raise
    except OSError as error:
        raise NotACheckpointError(
            "a directory that cannot be read", file=directory, found=error.strerror or str(error)
        ) from error


def _tags(path: str, names: Sequence[str], also: Sequence[str]) -> tuple[str, ...]:
    """Names of directories that hold DeepSpeed files, here or in the directories laid over this one."""
    found: set[str] = set()
    for root, entries in ((path, names), *((root, _entries(root)) for root in also)):
        for name in entries:
            inner = os.path.join(root, name)
            if name.startswith("."):  # a save that never came to its end
                continue
            if files.is_dir(inner) and files.is_readable(inner) and any(map(is_deepspeed_file, files.names(inner))):
                found.add(name)
    return tuple(sorted(found, key=natural))


def _tag_directory(path: str, tag: str | None, also: Sequence[str]) -> Place:
    real = files.absolute(path)
    name, home = os.path.basename(real), files.parent(real)
    if tag is not None and tag != name:
        raise UsageError(
            "a tag that is not in the checkpoint", file=path, found=f"--tag {tag}",
            remedy="This directory is itself a tag directory: leave --tag out, or give its parent.",
        )  # fmt: skip
    roots = [_overlay(root, name) for root in also]
    siblings = _tags(home, _entries(home), ()) if files.is_readable(home) else (name,)
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
        else:
            raise IncompleteError(
                "no 'latest'", file=path, found=f"{len(tags)} tags ({', '.join(tags)})",
                remedy=f"Choose one: --tag {tags[-1]}.",
            )  # fmt: skip
    _check_tag(tag, path, origin)
    directory = os.path.join(path, tag)
    roots = [_overlay(root, tag) for root in also]
    if not files.is_dir(directory):
        roots = [root for root in roots if files.is_dir(root)]
        if not roots:
            raise IncompleteError(
                f"no save of the tag that {origin} names", file=path, found=f"{tag!r} is not there",
                expected=f"tags {', '.join(tags)} are" if tags else "",
                remedy="Choose one with --tag." if tags else "Copy the tag directory here.",
            )  # fmt: skip
        directory = roots.pop(0)
    return Place(list_files(directory, tag, roots), path, tags, notes)


def _pointer(names: Sequence[str]) -> str | None:
    """The file that names the newest tag: `latest`, or that of universal checkpoints where there is no other."""
    return next((pointer for pointer in ("latest", "latest_universal") if pointer in names), None)


def _overlay(root: str, tag: str) -> str:
    """A further root may be the checkpoint's directory on another disk, or its tag directory."""
    inner = os.path.join(root, tag)
    return inner if files.is_dir(inner) else root


def _latest(path: str) -> str:
    try:
        text = files.read(path, 4096).decode().strip()
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
