"""To a universal checkpoint: every parameter whole in files of its own, which DeepSpeed loads at any machine shape.

For `zckpt to-universal`. What is written is what DeepSpeed's own `ds_to_universal` writes, value for value, but in one pass
and without temporary files.
"""

from __future__ import annotations

import os
from typing import Unpack

from zckpt.base.errors import UsageError
from zckpt.jobs.convert import Report
from zckpt.jobs.reshard import How, PlannedReshard, execute, opened_run, planned
from zckpt.layouts.save.listing import UNIVERSAL_POINTER
from zckpt.layouts.universal.write import UniversalTarget, lay_out
from zckpt.storage.paths import local


def prepare(checkpoint: str, out: str, **how: Unpack[How]) -> PlannedReshard[UniversalTarget]:
    """Everything but the work. Writes nothing.

    Args:
        checkpoint: any form of a ZeRO checkpoint.
        out: the directory for the new one: `<tag>_universal/`, `latest_universal`, and what lies beside the old one.
        how: see `reshard.How`.

    Raises:
        ZckptError: one of its kinds says what is wrong.
    """
    out = local(out)
    opened, training = opened_run(checkpoint, out, **how)
    if opened.catalog.source.layout == "universal":
        raise UsageError("a checkpoint that is universal already", file=checkpoint)
    target = UniversalTarget(f"{opened.catalog.source.tag or 'global_step0'}_universal", training.precision)
    laid = lay_out(opened.catalog, training, opened.place.listing, target)
    return planned(opened, target, laid, out, UNIVERSAL_POINTER, overwrite=how.get("overwrite", False))


def to_universal(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    overwrite: bool = False,
) -> Report:
    """Writes a universal checkpoint; arguments and errors as in `prepare`.

    Example:
        zckpt.to_universal("out/checkpoint-500", "anywhere/")
    """
    return execute(prepare(os.fspath(checkpoint), os.fspath(out), tag=tag, overwrite=overwrite))
