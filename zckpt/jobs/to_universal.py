"""To a universal checkpoint: every parameter whole in files of its own, which DeepSpeed loads at any machine shape.

For `zckpt to-universal`. What is written is what DeepSpeed's own `ds_to_universal` writes, value for value, but in one pass
and without temporary files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from zckpt.base.errors import UsageError
from zckpt.base.progress import Progress
from zckpt.jobs.declarations import TO_UNIVERSAL, Asked
from zckpt.jobs.planned import Report, carry_out
from zckpt.jobs.reshard import PlannedReshard, opened_run, plan_reshard, tag_of
from zckpt.layouts.save.listing import UNIVERSAL_POINTER, ReadOptions
from zckpt.layouts.universal.write import lay_out
from zckpt.storage.location import locate

_ACCELERATE = re.compile(r"pytorch_model(?:_\d+)?")
"""Tags that accelerate's `load_state` requests by name, whatever `latest` names; an output keeps them."""


def prepare(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[object]) -> PlannedReshard:
    """Plans a conversion; arguments as for `to_universal`. Writes nothing."""
    source, place = locate(checkpoint), locate(out)
    opened, training = opened_run(source, place, asked)
    if opened.catalog.source.layout == "universal":
        raise UsageError(
            "is universal already", file=source,
            remedy="Load it as it is, or use reshard to write a checkpoint for one world size.",
        )  # fmt: skip
    tag = tag_of(opened.catalog.source, training)
    tag = tag if _ACCELERATE.fullmatch(tag) else f"{tag}_universal"
    precision = training.precision
    laid = lay_out(opened.catalog, training, opened.place.listing, tag)
    recorded = {"precision": precision.torch_name}
    return plan_reshard(opened, laid, place, UNIVERSAL_POINTER, asked, tag, precision, recorded)


def to_universal(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    allow_unknown_layout: bool = False,
    read_options: ReadOptions | None = None,
    progress: Progress = None,
) -> Report:
    """Writes DeepSpeed's universal checkpoint, which loads at any world size.

    Args:
        checkpoint: a checkpoint with optimizer states, in any layout that zckpt resumes from.
        out: the directory for the new one: `latest_universal`, `<tag>_universal/`, and the small files beside the old one.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        overwrite: replace an existing output: the files that its `zckpt.json` lists.
        allow_unknown_layout: continue although an optimizer file holds keys that zckpt does not know.
        read_options: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.
        progress: as for `zckpt.convert`, with the bytes written so far.

    Returns:
        What was written: files, tensors, bytes, seconds, and notes for a person.

    Raises:
        UsageError: the checkpoint is universal already.
        UnsupportedError: its states have no universal form, such as DeepSpeed's experts over several ranks.
        OutputError: `out` exists, cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> zckpt.to_universal("run", "universal", progress=False).out
        'universal'
    """
    asked = TO_UNIVERSAL.ask(
        tag=tag, also=also, overwrite=overwrite, allow_unknown_layout=allow_unknown_layout, read_options=read_options
    )
    return carry_out(lambda: prepare(checkpoint, out, asked), progress, "to universal")
