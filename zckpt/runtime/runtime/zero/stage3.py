"""`deepspeed.runtime.zero.stage3`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zckpt.estimate.deepspeed_formula import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zckpt.estimate.deepspeed_formula import parameters_of as model_to_params
from zckpt.runtime.zero import GatheredParameters

__all__ = [
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "model_to_params",
    "unwrap_model_for_generation",
]


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The model inside an engine, with all parameters whole: for generating on all ranks."""
    with GatheredParameters(model.parameters()):
        yield getattr(model, "module", model)
