"""Arguments in the wrong order: OUT is a checkpoint, and CKPT what is made from one.

For `declarations.Job` and `zckpt push`, before anything is opened. Only an OUT that exists is looked at.
"""

from __future__ import annotations

import os

from zckpt.base.errors import UsageError
from zckpt.layouts.save.folder import list_folder
from zckpt.layouts.search import pointer_in, tags_in
from zckpt.output import manifest
from zckpt.storage.location import locate


def check_order(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Refuses arguments that seem to be swapped.

    Args:
        checkpoint: what is read.
        out: where the output is to go; it exists.

    Raises:
        UsageError: `out` holds saves of a training run, and `checkpoint` is missing, or an output of zckpt.
    """
    source, place = locate(checkpoint), locate(out)
    if source.is_remote or place.is_remote or not place.is_dir():
        return
    folder = list_folder(place)
    if not pointer_in(folder.names) and not tags_in(folder):
        return
    is_output = source.is_dir() and os.path.lexists(manifest.path_for(source.path, single=False))
    if source.is_dir() or source.is_file():
        if not is_output and not (source.is_file() and os.path.lexists(manifest.path_for(source.path, single=True))):
            return
        found = "an output of zckpt"
    else:
        found = "nothing"
    raise UsageError(
        "the arguments seem to be swapped", file=source, found=f"{found}; and {place.path!r} holds a checkpoint",
        expected="the checkpoint first", remedy=f"Type them the other way round: {place.path} {source.path}",
    )  # fmt: skip
