"""DeepSpeed's universal checkpoints, read and written."""

from dataclasses import replace

from zckpt.layouts import zero
from zckpt.layouts.save.listing import UNIVERSAL
from zckpt.layouts.universal import read as _read

FAMILY = replace(
    zero.FAMILY,
    name="universal",
    match=_read.match,
    read=_read.read,
    read_training=_read.read_training,
    directory=UNIVERSAL,
    keeps_model_files=True,
    every_rank=False,  # its model files are copies of those of the run that it was made of, whatever its ranks were
)
