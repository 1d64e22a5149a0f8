"""Which directories of a run are its saves, in which order, and which of them the run's own files name.

For `usage` and `prune`. [Note: what is a save of a run] A directory in the run's directory that
  - holds files of a save by their names: DeepSpeed's tags, steps of torch.distributed.checkpoint, Megatron's `iter_*`, or
  - has a name that trainers give (`checkpoint-500`, `checkpoint_5`, `global_step_20`) and holds anything that zckpt opens.
Symbolic links, names that begin with a dot and everything else are not saves. Names that differ in their numbers alone are one
series; the last number of a name is its step.
Source: transformers trainer.py `_sorted_checkpoints`; accelerate accelerator.py `save_state`; DeepSpeed runtime/engine.py
`save_checkpoint`; Megatron-LM megatron/training/checkpointing.py `get_checkpoint_tracker_filename`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from zckpt import layouts
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import NotACheckpointError, ZckptError
from zckpt.layouts.places import find
from zckpt.layouts.run.steps import TRACKER
from zckpt.layouts.save import trainers
from zckpt.layouts.save.listing import UNIVERSAL_POINTER, list_names
from zckpt.layouts.save.pointers import read_pointer
from zckpt.storage.location import Location

_TRAINERS = re.compile(r"checkpoint[-_]\d+|(?:global_step|iter|step)[-_]?\d+")
_POINTERS = ("latest", UNIVERSAL_POINTER, TRACKER)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class RunSave:
    """A directory that is a save.

    Attributes:
        name: of the directory.
        path: of the directory.
        step: the last number in the name; None if there is none.
        series: the name with its numbers left out: saves of one series are alike.
    """

    name: str
    path: Location
    step: int | None
    series: str


def saves_of(run: Location) -> tuple[list[RunSave], list[str]]:
    """The saves of a run by step, and the names of symbolic links, which are left alone. Raises NotACheckpointError if
    `run` is not a directory, or is itself a save.
    """
    if not run.is_dir():
        raise NotACheckpointError(
            "no such directory", file=run, remedy="Give the directory that holds the run's saves."
        )
    names = list_names(run)
    if layouts.is_save(names):
        raise NotACheckpointError(
            "is itself a save", file=run, expected="the directory that holds a run's saves",
            remedy="Give the directory above it.",
        )  # fmt: skip
    links = [name for name in names if is_link(run / name)]
    found = [_save(run / name) for name in names if name not in links and _is_save(run, name)]
    return sorted(found, key=lambda save: (save.step is None, save.step or 0, save.name)), links


def is_link(path: Location) -> bool:
    """Whether a path is a symbolic link; a path behind an address is not."""
    return not path.is_remote and os.path.islink(path)


def _is_save(run: Location, name: str) -> bool:
    path = run / name
    if name.startswith(".") or trainers.FSDP_PARTS.fullmatch(name) or not path.is_dir() or not path.is_readable():
        return False
    if layouts.is_save(path.names()):
        return True
    if not _TRAINERS.fullmatch(name):
        return False
    try:
        find(path)
    except NotACheckpointError:
        return False
    except ZckptError:  # a save that lacks something
        pass
    return True


def _save(path: Location) -> RunSave:
    numbers = _NUMBER.findall(path.name)
    return RunSave(path.name, path, int(numbers[-1]) if numbers else None, _NUMBER.sub("#", path.name))


def named_by_pointers(run: Location, names: set[str]) -> tuple[Mapping[str, str], list[str]]:
    """The saves that the run's own files name.

    Returns:
        Name of a save -> the file that names it; and sentences about files that name none of them.
    """
    named: dict[str, str] = {}
    notes: list[str] = []
    for pointer in _POINTERS:
        if not (run / pointer).is_file():
            continue
        try:
            said = read_pointer(run / pointer)
        except ZckptError as error:
            notes.append(str(error))
            continue
        inner = os.path.relpath(os.path.join(run.path, said), run.path).partition("/")[0]
        wanted = {name for name in names if name == inner or (said.isdecimal() and _is_step(name, int(said)))}
        named |= dict.fromkeys(wanted, f"{pointer!r} names it")
        if not wanted:
            notes.append(f"{pointer!r} names {said[:100]!r}, which is not a save here.")
    return named, notes


def _is_step(name: str, step: int) -> bool:
    """Whether a save has the number that Megatron's or verl's file names."""
    numbers = _NUMBER.findall(name)
    return bool(numbers) and int(numbers[-1]) == step


def tags_in(save: RunSave) -> tuple[str | None, ...]:
    """The tags in a save's directory if there are several; otherwise None, which stands for the save itself. Raises
    ZckptError if it is not a save, or one that lacks something.
    """
    place = find(save.path)
    return place.tags if len(place.tags) > 1 and place.home.is_within(save.path) else (None,)
