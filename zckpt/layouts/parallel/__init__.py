"""Models split over tensor- and pipeline-parallel ranks: the files of each rank are a save of slices."""

from dataclasses import replace

from zckpt.layouts import zero
from zckpt.layouts.parallel import read as _read

FAMILY = replace(
    zero.FAMILY, name="model parallel", match=_read.match, read=_read.read, read_training=_read.read_training
)
