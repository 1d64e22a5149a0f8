"""DeepSpeed's universal checkpoints, read and written."""

from dataclasses import replace

from zckpt.layouts import zero
from zckpt.layouts.save.family import later
from zckpt.layouts.save.listing import UNIVERSAL
from zckpt.layouts.universal.files import match

FAMILY = replace(
    zero.FAMILY,
    name="universal",
    match=match,
    read=later("universal.read", "read"),
    second=later("universal.second", "find_again"),
    read_training=later("universal.read", "read_training"),
    directory=UNIVERSAL,
    keeps_model_files=True,
    every_rank=False,  # its model files are copies of those of the run that it was made from, whatever its ranks were
)
