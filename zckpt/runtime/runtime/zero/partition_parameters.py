"""`deepspeed.runtime.zero.partition_parameters`."""

from collections.abc import Callable
from typing import Any

import torch

from zckpt.runtime.accelerator import get_accelerator
from zckpt.runtime.sharding.external import register_external_parameter, unregister_external_parameter
from zckpt.runtime.sharding.labels import ZeroParamStatus, ZeroParamType
from zckpt.runtime.zero import GatheredParameters, Init

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: torch.dtype | None = None, target_device: torch.device | None = None
) -> Callable[..., Any]:
    """The constructor of tensors as it is, for transformers, which replaces this function around `zero.Init`.

    DeepSpeed's casts what a constructor makes. `Init` casts the parameters of a module, and no other tensor.
    """
    del target_fp_dtype, target_device
    return fn
