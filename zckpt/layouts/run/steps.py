"""The file by which a run of Megatron, Megatron Bridge, verl or nanotron names its newest step.

For `places`.
Source: Megatron-LM, megatron/training/checkpointing.py `get_checkpoint_tracker_filename`; Megatron Bridge 0.3.1,
training/checkpointing.py `_resolve_checkpoint_iteration`, training/state.py `TrainState.state_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from zckpt.base.errors import CorruptError
from zckpt.containers import open_container, value_at
from zckpt.layouts.run.values import step_of
from zckpt.layouts.save.pointers import read_pointer
from zckpt.storage.location import Location

TRACKER = "latest_checkpointed_iteration.txt"
"""The file of Megatron and verl: it holds a number, or `release`."""
_TRAIN_STATE = "latest_train_state.pt"
"""The file of Megatron Bridge, which is asked first: a torch file with the step. Versions before 0.2 write no other."""

_OF_NANOTRON = "latest.txt"
"""The file of nanotron: it holds a number."""

POINTERS_OF_STEPS = (_TRAIN_STATE, TRACKER, _OF_NANOTRON)

OF_MEGATRON = re.compile(r"iter_\d{7}|release")
"""The directories of steps that Megatron writes."""


def read_tracker(directory: str) -> str:
    """What `TRACKER` says of such a directory: its number, or `release`."""
    return directory.removeprefix("iter_").lstrip("0") or "0"


def step_pointer(names: Sequence[str]) -> str | None:
    """The file among `names` that names the newest step; None where there is none."""
    return next((pointer for pointer in POINTERS_OF_STEPS if pointer in names), None)


def read_step(path: Location) -> str:
    """The step that such a file names: a number, or a directory's name.

    Raises:
        CorruptError: it is Bridge's, and does not say a step. Others as in `read_pointer` and `open_container`.
    """
    if path.name != _TRAIN_STATE:
        return read_pointer(path)
    step = step_of(value_at(open_container(path.path).root, "step"))
    if step is None:
        raise CorruptError(
            "does not say which step it is of",
            file=path,
            expected="a state with a number called 'step'",
            remedy="Choose a step with --tag.",
        )
    return str(step)
