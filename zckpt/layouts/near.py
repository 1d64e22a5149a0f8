"""What a person meant with a path or tag that does not exist: a neighbour of nearly the same name, or a model of the hub.

For `places` and `directories`, where a search found nothing.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence

from zckpt.base.errors import NotACheckpointError
from zckpt.base.patterns import compile_late
from zckpt.base.words import examples, join_words
from zckpt.storage import fsspec_io
from zckpt.storage.location import Location

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
