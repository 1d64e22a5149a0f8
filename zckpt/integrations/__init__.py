"""Callbacks for the training loops of other libraries: consolidated weights beside every checkpoint that the loop saves.

    from zckpt.integrations import TrainerWeights  # transformers' Trainer
    from zckpt.integrations import LightningWeights  # lightning's Trainer

Each is imported, with its library, when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zckpt.integrations.lightning_weights import LightningWeights
    from zckpt.integrations.trainer_weights import TrainerWeights

__all__ = ["LightningWeights", "TrainerWeights"]

_HOMES = {"LightningWeights": "lightning_weights", "TrainerWeights": "trainer_weights"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
