"""Says that torch is too old for models in memory and for the trainer, before an import fails for that reason.

For `live`, which imports it first. torch 2.6 is the first with `torch.accelerator` and a public `fully_shard`.
"""

from __future__ import annotations

import torch

from zckpt.base.errors import UnsupportedError

if not hasattr(torch, "accelerator"):
    raise UnsupportedError(
        "this torch is too old for models in memory and for the trainer",
        found=f"torch {torch.__version__}",
        expected="torch 2.6 or later",
        remedy="Install it: pip install 'torch>=2.6'. Conversions between files need no torch.",
    )
