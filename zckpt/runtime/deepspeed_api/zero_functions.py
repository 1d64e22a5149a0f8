"""Functions on models and parameters at stage 3, by DeepSpeed's names.

Source: DeepSpeed 0.19.8, runtime/zero/config.py, partition_parameters.py, stage3.py, stage_1_and_2.py, utils.py, and
utils/tensor_fragment.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch

from zckpt import drop_in
from zckpt.estimation.deepspeed_formula import parameters_of
from zckpt.live.parts import unwrap
from zckpt.live.slices import copies_of
from zckpt.runtime import parameters
from zckpt.runtime.init_context import GatheredParameters
from zckpt.runtime.optimizers.build import ELEMENTWISE

Directory = str | os.PathLike[str]


class ZeroStageEnum(IntEnum):
    """The stages by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def load_state_dict_from_zero_checkpoint(model: Any, checkpoint_dir: Directory, tag: str | None = None) -> Any:
    """Loads the consolidated fp32 weights into a model. A sharded model gets them as plain tensors on the CPU, on every
    rank.

    Its engine's parts are loaded too, and used again by the next forward that trains. `zckpt` has a function of this name that
    loads the parts alone.
    """
    drop_in.load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag)
    copies = copies_of(unwrap(model))
    if copies is not None:
        copies.make_plain(unwrap(model))
        drop_in.load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag)
    return model


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The model inside an engine, with whole parameters, for generating on all ranks."""
    with GatheredParameters(model.parameters()):
        yield getattr(model, "module", model)


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: torch.dtype | None = None, target_device: torch.device | None = None
) -> Callable[..., Any]:
    """Returns the constructor of tensors as it is; transformers replaces this function around `zero.Init`.

    DeepSpeed's casts what a constructor makes. `Init` casts the parameters of a module, and no other tensor.
    """
    del target_fp_dtype, target_device
    return fn


def model_to_params(model: Any) -> int:
    """Elements of a model's parameters, those that share memory once."""
    return parameters_of(model)[0]


def is_zero_param(parameter: torch.Tensor) -> bool:
    """Whether a parameter is sharded at stage 3."""
    return hasattr(parameter, "ds_id")


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to treat each element by itself, so that it may see shards."""
    return type(optimizer).__name__ in ELEMENTWISE


def get_full_hp_param(self: torch.Tensor, optim_state_key: str | None = None) -> torch.Tensor | None:
    """The whole fp32 weight of a parameter, or with a key one of its optimizer states."""
    if optim_state_key is None:
        return parameters.safe_get_full_fp32_param(self)
    return parameters.safe_get_full_optimizer_state(self, optim_state_key)


def set_full_hp_param(self: torch.Tensor, value: torch.Tensor, optim_state_key: str | None = None) -> None:
    """Sets the value that `get_full_hp_param` returns."""
    if optim_state_key is None:
        parameters.safe_set_full_fp32_param(self, value)
    else:
        parameters.safe_set_full_optimizer_state(self, value, optim_state_key)
