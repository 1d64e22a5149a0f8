"""Which save of a trainer's run is the best, by its own record of evaluations.

For `jobs.open`, where a person asks for the best one, and for `directories`, which names it where another is taken.
Source: transformers trainer_callback.py `TrainerState.best_model_checkpoint`, in the `trainer_state.json` of each
`checkpoint-N` and, after training, of the output directory. The path in it is of the machine that trained: its last part counts.
"""

from __future__ import annotations

import re

from zckpt.base.errors import IncompleteError, UsageError, ZckptError
from zckpt.base.words import examples
from zckpt.layouts.save import trainers
from zckpt.layouts.save.folder import Folder, list_folder
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location

_STATE = "trainer_state.json"
_MOST_BYTES = 64 << 20


def find_best(path: Location) -> Location:
    """The folder of the best save of a run. `path`: the run's output directory. Raises UsageError if nothing there says
    which save is the best, IncompleteError if the best one is not there any more, ZckptError if the run's record cannot
    be read.
    """
    folder = list_folder(path) if path.is_dir() else None
    name = None if folder is None else _best_in(folder)
    if folder is None or name is None:
        raise UsageError(
            "says of no save that it is the best", file=path,
            expected=f"best_model_checkpoint in the {_STATE} of a checkpoint-N folder, as load_best_model_at_end leaves it",
            remedy="Leave --best out, or give the folder that you want.",
        )  # fmt: skip
    if name not in folder.names:
        raise IncompleteError(
            f"does not hold the best save, {name!r}", file=path,
            found=examples(folder.directories(trainers.FOLDER)) or "no checkpoint-N folder",
            remedy="Copy that folder here, or leave --best out.",
        )  # fmt: skip
    return path / name


def name_best(folder: Folder) -> str | None:
    """The name of the best save's folder, for a note; None where nothing says it, or what says it cannot be read."""
    try:
        return _best_in(folder)
    except ZckptError:
        return None


def _best_in(folder: Folder) -> str | None:
    """The name of the best save's folder, by the run's newest record; None where there is no record, or none that says it."""
    inner = (folder.inside(name) for name in reversed(folder.directories(trainers.FOLDER)))
    home = next((home for home in (folder, *inner) if home is not None and home.has_file(_STATE)), None)
    if home is None:
        return None
    said = read_json(home.path / _STATE, _MOST_BYTES, "a trainer's state")
    best = said.get("best_model_checkpoint") if isinstance(said, dict) else None
    name = re.split(r"[/\\]", best.rstrip("/\\"))[-1] if isinstance(best, str) else ""
    return name if trainers.FOLDER.fullmatch(name) else None
