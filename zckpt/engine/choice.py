"""Chooses the engine, native (C++) or reference (the slow one in Python that it must equal), and the number of threads."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from itertools import islice
from typing import Literal

from zckpt.base.errors import UnsupportedError
from zckpt.base.pace import DISTANT_THREADS, thread_count
from zckpt.core.catalog import TensorEntry, TensorPart
from zckpt.core.recipes import DerivedStore
from zckpt.core.stores import FileStore
from zckpt.storage.identity import is_distant

_LOOKED_AT = 64
"""The number of tensors that show on which file systems the files lie."""


def choose(engine: Literal["auto", "native", "reference"], *, built: bool) -> Literal["native", "reference"]:
    """The engine that works; "auto" is the native one where it was built, otherwise the slow one, with a warning.
    Raises UnsupportedError if "native" is wanted and was not built.
    """
    if engine == "native" and not built:
        raise UnsupportedError(
            "the C++ engine was not built", found="zckpt._core cannot be imported",
            remedy="Install zckpt with a C++ compiler, or leave out the choice of an engine.",
        )  # fmt: skip
    if engine == "auto" and not built:
        warnings.warn("zckpt's C++ engine was not built: the slow Python one is used.", RuntimeWarning, stacklevel=4)
    return "native" if built and engine != "reference" else "reference"


def threads_for(wanted: int | None, tensors: Iterable[TensorEntry | TensorPart], *places: str) -> int:
    """The number of threads: `wanted`, or the default for the file systems of some tensors' files and of other places.
    Where the engine computes while it reads, twice as many: half of them then wait for the disk. Raises UsageError as
    `thread_count`.
    """
    if wanted is not None:
        return thread_count(wanted)
    known = list(islice(tensors, _LOOKED_AT))
    directories = {os.path.dirname(path) for entry in known for path in _files_of(entry)}
    if any(map(is_distant, (*places, *directories))):
        return DISTANT_THREADS
    for entry in known:
        for fragment in entry.fragments[:_LOOKED_AT]:
            if isinstance(fragment.store, DerivedStore) and fragment.store.steps:
                return 2 * thread_count(None)
    return thread_count(None)


def _files_of(entry: TensorEntry | TensorPart) -> Iterable[str]:
    for fragment in entry.fragments[:_LOOKED_AT]:
        store = fragment.store
        if isinstance(store, FileStore) and store.at_hand:
            yield store.path
        elif isinstance(store, DerivedStore):
            for given in store.recipe.inputs[:_LOOKED_AT]:
                yield from _files_of(given)
