"""`deepspeed.runtime.zero.stage_1_and_2`."""

from __future__ import annotations

from typing import Any

from zckpt.estimate.deepspeed_formula import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    parameters_of,
)

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "model_to_params",
]


def model_to_params(model: Any) -> int:
    """Elements of a model's parameters, those that share memory once."""
    return parameters_of(model)[0]
