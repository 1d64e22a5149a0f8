"""Which directories hold saves: tags, trainers' folders, weights, and what lies further below; what was meant where none does.

For `places`, and for the trainer. Every directory is listed once (`save.folder`), and families are asked about names alone. Where
a search found nothing, a neighbour of nearly the same name may be meant, or a model of the hub. Checkpoints of other programs,
which zckpt does not read, are known by the names of their files.
Source: fairseq2, checkpoint.py; torchsnapshot, snapshot.py; transformers 4.57, utils/__init__.py (TensorFlow, Flax, Rust).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from zckpt import layouts
from zckpt.base.errors import NotACheckpointError
from zckpt.base.patterns import compile_late
from zckpt.base.words import examples, join_words
from zckpt.layouts.save import trainers
from zckpt.layouts.save.folder import Folder, list_folder
from zckpt.layouts.save.listing import UNIVERSAL_POINTER, natural
from zckpt.output.saves import PREFIX, find_displaced
from zckpt.storage import fsspec_io
from zckpt.storage.location import Location


class ForeignFormat(NamedTuple):
    """A format that zckpt does not read.

    Attributes:
        name: as its users call it.
        mark: matches names of entries that no save has which zckpt reads; empty for none.
        hint: matches names that say it where there is nothing else to read.
        remedy: how its own program makes something that zckpt reads.
    """

    name: str
    mark: str
    hint: str
    remedy: str


_SAVE = "Load it there, and save the weights with safetensors or torch.save."
_OLDER = "Load it with a version of transformers before 5 that has {}, and save it with save_pretrained."

FORMATS = (
    ForeignFormat("fairseq2", r"sdp_\d+\.pt", "", "Load it with fairseq2, and save a Hugging Face model."),
    ForeignFormat("torchsnapshot", r"\.snapshot_metadata", "", _SAVE),
    ForeignFormat(
        "TensorFlow",
        "",
        r"tf_model.*\.h5(?:\.index\.json)?|saved_model\.pb|.*ckpt(?:-\d+)?\.(?:index|data-\d+-of-\d+|meta)"
        r"|.+\.(?:h5|keras|tflite)",
        _OLDER.format("TensorFlow's models"),
    ),
    ForeignFormat(
        "Flax (JAX)",
        "",
        r".+\.msgpack(?:\.index\.json)?|streaming_(?:params|train_state).*",
        _OLDER.format("Flax's models"),
    ),
    ForeignFormat("ONNX", "", r".+\.onnx(?:_data)?", "Use the checkpoint that it was exported from."),
    ForeignFormat("PaddlePaddle", "", r".+\.(?:pdparams|pdmodel|pdopt)", _SAVE),
    ForeignFormat("NumPy or MLX", "", r".+\.npz", "Save the arrays with safetensors.numpy.save_file."),
    ForeignFormat("rust-bert", "", r"rust_model\.ot", _SAVE),
    ForeignFormat("zarr", "", r"\.zarray|\.zgroup|zarr\.json", _SAVE),
)
"""The formats, in the order in which they are tried."""

_MARKS = "|".join(known.mark for known in FORMATS if known.mark)


def foreign_save(names: Iterable[str]) -> ForeignFormat | None:
    """The format of entries of these names, by marks that no save has which zckpt reads."""
    for name in names:
        if re.fullmatch(_MARKS, name):
            return next(f for f in FORMATS if f.mark and re.fullmatch(f.mark, name))
    return None


def foreign_format(names: Iterable[str]) -> ForeignFormat | None:
    """The format of entries of these names, by hints too; for a place without anything that zckpt reads."""
    every = list(names)
    hinted = (f for f in FORMATS if f.hint and any(re.fullmatch(f.hint, name) for name in every))
    return foreign_save(every) or next(hinted, None)


def foreign_error(path: Location, foreign: ForeignFormat) -> NotACheckpointError:
    """The error for a file or directory of a format that zckpt does not read."""
    return NotACheckpointError(
        f"is of {foreign.name}, which zckpt does not read", file=path,
        expected="a layout that docs/formats.md lists", remedy=foreign.remedy,
    )  # fmt: skip


POINTERS = ("latest", UNIVERSAL_POINTER)
_DEPTH = 4
_MOST_LOOKED_INTO = 100
_MOST_BEHIND_ADDRESSES = 30
"""The most directories that are listed to find saves further below an address; each takes a request."""


_OPTIMIZERS = ("optim", "optimizer")
"""Directories in which trainers keep an optimizer beside its model, such as NeMo Automodel's."""


def is_begun(path: Location) -> bool:
    """Whether there is anything that `find` would look into: false for a directory that a run is yet to fill."""
    return has_saves(list_folder(path)) if path.is_dir() else path.is_file()


def has_saves(folder: Folder) -> bool:
    """Whether there is a save in a directory, or further below where its trainer keeps them; weights alone are none."""
    names = folder.names
    if pointer_in(names):  # the usual case needs no pattern of any family
        return True
    layouts.admit(names)
    if any(family.is_save(names) for family in layouts.FAMILIES) or trainers.saves_of(names) or tags_in(folder):
        return True
    inner = [trainers.folder_of(names), *(name for name in names if trainers.FOLDER.fullmatch(name))]
    return any(has_saves(at) for name in inner if name and (at := folder.inside(name)) is not None)


def holds_save(folder: Folder) -> bool:
    """Whether a directory holds a save, or weights under any name."""
    from zckpt.layouts.save.weight_files import models_in

    return has_saves(folder) or bool(models_in(folder))


def has_weights(names: Sequence[str]) -> bool:
    """Whether files of these names are read as weights where there is no save."""
    return any(family.fallback and family.is_save(names) for family in layouts.FAMILIES)


def is_taken(name: str) -> bool:
    """Whether an entry of this name means something to `find`, so that no tag may have it."""
    if name.casefold() in (*POINTERS, *(family.directory for family in layouts.FAMILIES)):
        return True
    taken = (family.owns(name) or family.holds_files(name, ()) for family in layouts.FAMILIES)
    return trainers.FSDP_MODEL.fullmatch(name) is not None or any(taken)


def pointer_in(names: Sequence[str]) -> str | None:
    """The file that names the newest tag: `latest`, or that of universal checkpoints where there is no other."""
    return next((name for name in POINTERS if name in names), None)


def tags_in(folder: Folder, also: Sequence[Folder] = ()) -> tuple[str, ...]:
    """Names of directories that hold a save's files, here or in the directories laid over this one."""
    is_displaced = not folder.path.is_remote and any(name.startswith(PREFIX) for name in folder.names)
    found = set(find_displaced(folder.path.path)) if is_displaced else set[str]()
    for root in (folder, *also):
        for name in root.names:
            if name[:1] == "." or name in _OPTIMIZERS or trainers.UNFINISHED in name:  # not finished, or of no model
                continue
            inner = root.inside(name)
            if inner is not None and layouts.is_save(inner.names):
                found.add(name)
    return tuple(sorted(found, key=natural))


def look_below(folder: Folder) -> tuple[list[Folder], list[tuple[Folder, ForeignFormat]]]:
    """What lies at most four directories below one that holds no save itself, not in those of optimizers, logs and the like:
    the directories that hold saves, and those of formats that zckpt does not read.
    """
    saves: list[Folder] = []
    others: list[tuple[Folder, ForeignFormat]] = []
    rest = _MOST_BEHIND_ADDRESSES if folder.path.is_remote else _MOST_LOOKED_INTO
    level = [folder]
    for _ in range(_DEPTH):
        deeper: list[Folder] = []
        for inner in (inner for above in level for inner in _directories(above)):
            rest -= 1
            if rest < 0:
                return saves, others
            if not foreign_save(inner.names) and holds_save(inner):
                saves.append(inner)
            elif foreign := foreign_format(inner.names):
                others.append((inner, foreign))
            else:
                deeper.append(inner)
        level = deeper
    return saves, others


def _directories(folder: Folder) -> Iterator[Folder]:
    """The directories within one that may hold a model; for a link to one of them, such as `LATEST`, that directory
    itself.
    """
    found: dict[str, Folder] = {}
    for inner in (folder.inside(name) for name in folder.names if trainers.may_hold_model(name)):
        if inner is not None:
            target = inner.path.resolved().absolute().path
            if target not in found or inner.path.absolute().path == target:
                found.pop(target, None)
                found[target] = inner
    return iter(found.values())


_HUB_NAME = compile_late(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_GENERAL = "Give the directory that holds 'latest', a tag directory such as global_step500, or a weights file."
_MOST_COMPARED = 10_000


def missing_error(path: Location) -> NotACheckpointError:
    """The error for a path that leads to nothing; its remedy names what is near."""
    if not path.is_remote and (path.path == "-" or _is_pipe(path.path)):
        return NotACheckpointError(
            "is a pipe or a device, and weights cannot be read from one", file=path,
            remedy="Save it to a file first: readers of weights go back and forth in it.",
        )  # fmt: skip
    if path.is_remote and fsspec_io.is_hidden_at_hub(path.path):
        return NotACheckpointError(
            "the hub has no such repository, or does not show it to this token", file=path,
            found=fsspec_io.token_owner(),
            remedy="Check the name. If it is private, set HF_TOKEN to a token of an account that may read it.",
        )  # fmt: skip
    entries = _entries_beside(path)
    remedy = _GENERAL
    if near := _nearest(path.name, entries):
        directory = os.path.dirname(path.path.rstrip("/"))
        remedy = f"Did you mean {join_words([repr(os.path.join(directory, name)) for name in near], 'or')}?"
    elif same := _same_kind(path.name, entries):
        remedy = f"Beside it are {examples(same, 6)}."
    elif not path.is_remote and _HUB_NAME.fullmatch(path.path) and not os.path.isdir(path.path.partition("/")[0]):
        remedy = f"If it is a model of the Hugging Face hub, write 'hf://{path.path}'. {_GENERAL}"
    return NotACheckpointError("no such file or directory", file=path, remedy=remedy)


def tag_meant(tag: str, tags: Sequence[str]) -> str:
    """The remedy for a tag that does not exist."""
    near = _nearest(tag, tags)
    return f"Did you mean --tag {near[0]}?" if len(near) == 1 else "Choose one with --tag."


def _is_pipe(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


def _entries_beside(path: Location) -> list[str]:
    """Names in the directory that a path would be in; empty if the directory cannot be listed."""
    if path.is_remote:
        return []
    try:
        return sorted(path.parent.names())[:_MOST_COMPARED]
    except (OSError, ValueError):
        return []


def _nearest(name: str, others: Sequence[str]) -> list[str]:
    """The names, at most three, that have nearly the letters of a name and the same numbers."""
    import difflib

    numbers = re.findall(r"\d+", name)
    alike = [other for other in others if [int(n) for n in re.findall(r"\d+", other)] == [int(n) for n in numbers]]
    return difflib.get_close_matches(name, alike, n=3, cutoff=0.75)


def _same_kind(name: str, others: Sequence[str]) -> list[str]:
    """The names that differ from a name in numbers alone, in the order of these numbers."""
    kind = re.sub(r"\d+", "0", name)
    same = [other for other in others if kind != name and re.sub(r"\d+", "0", other) == kind]
    return sorted(same, key=lambda other: [int(number) for number in re.findall(r"\d+", other)])
