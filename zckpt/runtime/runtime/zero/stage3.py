"""`deepspeed.runtime.zero.stage3`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zckpt.runtime.zero import GatheredParameters

__all__ = ["unwrap_model_for_generation"]


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The model inside an engine, with all parameters whole: for generating on all ranks."""
    with GatheredParameters(model.parameters()):
        yield getattr(model, "module", model)
