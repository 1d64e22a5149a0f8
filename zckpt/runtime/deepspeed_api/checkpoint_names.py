"""Names of a checkpoint's files, and tensors that are copied before they are saved.

Source: DeepSpeed 0.19.8, checkpoint/utils.py.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_HOST = torch.device("cpu")


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """The path of a model-parallel rank's model file."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """The path of a rank's optimizer file."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """The path of a layer's file in a pipeline's checkpoint."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _HOST) -> Any:
    """The same lists, tuples and dicts with copies of their tensors, each in memory of its own."""
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list | tuple):
        return type(item)([clone_tensors_for_torch_save(one, device) for one in item])
    if isinstance(item, dict):
        return type(item)({name: clone_tensors_for_torch_save(one, device) for name, one in item.items()})
    return item
