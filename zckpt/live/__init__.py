"""Loads checkpoints into models in memory, and saves the consolidated weights of a model while it trains.

`save_pretrained` and `consolidate` are for training scripts, `load_into` for `drop_in` and other callers with a catalog and a
module. Only this package, `drop_in` and `runtime` import torch at module level.
"""

from zckpt.live import old_torch  # noqa: F401  # says so before the others fail
from zckpt.live.delta import HeldWeights, export_delta
from zckpt.live.export import consolidate, save_pretrained, small_files
from zckpt.live.loading import LoadReport, load_into, move

__all__ = [
    "HeldWeights",
    "LoadReport",
    "consolidate",
    "export_delta",
    "load_into",
    "move",
    "save_pretrained",
    "small_files",
]
