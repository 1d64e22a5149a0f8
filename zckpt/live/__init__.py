"""Loads checkpoints into models in memory, and saves the consolidated weights of a model while it trains.

`save_pretrained` and `consolidate` are for training scripts, `load_into` for `drop_in` and other callers with a catalog and a
module. Only this package, `drop_in` and `runtime` import torch at module level.
"""

import torch

from zckpt.base.errors import UnsupportedError

if not hasattr(torch, "accelerator"):  # torch 2.6 is the first that has it, and a public `fully_shard`
    raise UnsupportedError(
        "this torch is too old for models in memory and for the trainer",
        found=f"torch {torch.__version__}",
        expected="torch 2.6 or later",
        remedy="Install it: pip install 'torch>=2.6'. Conversions between files need no torch.",
    )

from zckpt.live.delta import HeldWeights, export_delta  # imports of an older torch would fail
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
