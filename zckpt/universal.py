"""To a universal checkpoint: every parameter whole in files of its own, which DeepSpeed loads at any machine shape.

For `zckpt to-universal`. What is written is what DeepSpeed's own `ds_to_universal` writes, value for value, but in one pass
and without temporary files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from zckpt import layouts
from zckpt.checkpoint import open_catalog
from zckpt.convert import Report, protected
from zckpt.errors import UsageError
from zckpt.layouts.listing import Wishes
from zckpt.layouts.universal_out import UniversalTarget, lay_out
from zckpt.publish import check_output
from zckpt.reshard import Prepared, execute, planned

POINTER = "latest_universal"


def prepare(
    checkpoint: str,
    out: str,
    *,
    tag: str | None = None,
    also: Sequence[str] = (),
    overwrite: bool = False,
    allow_unknown_layout: bool = False,
    wishes: Wishes | None = None,
) -> Prepared[UniversalTarget]:
    """Everything but the work. Writes nothing.

    Args:
        checkpoint: any form of a ZeRO checkpoint.
        out: the directory for the new one: `<tag>_universal/`, `latest_universal`, and what lies beside the old one.
        tag: which save, where there are several.
        also: directories laid over the checkpoint.
        overwrite: replace an existing output.
        allow_unknown_layout: go on though an optimizer file holds keys that zckpt does not know.
        wishes: what a person says of a model-parallel checkpoint that does not say it itself.

    Raises:
        ZckptError: one of its kinds says what is wrong.
    """
    opened = open_catalog(checkpoint, tag, also, allow_unknown_layout=allow_unknown_layout, wishes=wishes)
    if opened.catalog.source.layout == "universal":
        raise UsageError("a checkpoint that is universal already", file=checkpoint)
    training = layouts.read_training(opened.place.listing, allow_unknown=allow_unknown_layout)
    check_output(out, single=False, overwrite=overwrite, protected=protected(opened, checkpoint))
    target = UniversalTarget(f"{opened.catalog.source.tag or 'global_step0'}_universal", training.precision)
    laid = lay_out(opened.catalog, training, opened.place.listing, target)
    return planned(opened, target, laid, out, POINTER, overwrite=overwrite)


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
