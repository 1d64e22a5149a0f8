"""Models split over tensor- and pipeline-parallel ranks: the files of each rank are a save of slices."""

from dataclasses import replace

from zckpt.layouts import zero
from zckpt.layouts.parallel.files import match
from zckpt.layouts.save.family import later

FAMILY = replace(
    zero.FAMILY,
    name="model parallel",
    match=match,
    read=later("parallel.read", "read"),
    second=later("parallel.second", "find_again"),
    read_training=later("parallel.read", "read_training"),
)
