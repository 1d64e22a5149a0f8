"""Operations, parameters and times of a model's forward, module by module; DeepSpeed's names.

from zckpt.runtime.observe.flops_profiler import get_model_profile

flops, macs, params = get_model_profile(model, input_shape=(1, 3, 224, 224))
"""

from zckpt.runtime.observe.flops_profiler.profiler import FlopsProfiler, get_model_profile
from zckpt.runtime.observe.flops_profiler.units import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)

__all__ = [
    "FlopsProfiler",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]
