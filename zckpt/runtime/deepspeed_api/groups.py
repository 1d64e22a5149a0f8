"""Groups of ranks and of parameters, as scripts ask for them: all ranks are data parallel, every other axis has one rank, and a
dense model has no parameter groups of experts.

Source: DeepSpeed 0.19.8, utils/groups.py, moe/utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zckpt.base.errors import UsageError
from zckpt.runtime.names.table import refuse

Groups = list[dict[str, Any]]


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Makes groups of experts in DeepSpeed. Raises UnsupportedError if experts should lie on more than one rank."""
    if ep_size > 1:
        refuse("MoE")


def get_data_parallel_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


get_data_parallel_world_size, get_data_parallel_rank = dist.get_world_size, dist.get_rank


def get_model_parallel_world_size() -> int:
    """1: no parameter is cut for the computation."""
    return 1


def get_model_parallel_rank() -> int:
    """0, since there is one model-parallel rank."""
    return 0


get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_data_parallel_group = get_data_parallel_group
_get_sequence_data_parallel_rank = get_data_parallel_rank
_get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_rank = get_model_parallel_rank
_get_expert_model_parallel_world_size = get_model_parallel_world_size


def _get_data_parallel_group_ranks() -> list[int]:
    """All ranks."""
    return list(range(dist.get_world_size()))


def _get_sequence_parallel_group() -> None:
    """None: no sequence is cut."""


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter belongs to an expert of DeepSpeed's: it is marked with `allreduce = False`."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a parameter group consists of experts."""
    return bool(param_group.get("moe", False))


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers of experts of DeepSpeed's, and how many experts: (False, 0)."""
    return any(is_moe_param(p) for p in m.parameters()), 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | Groups, max_group_size: float = 178956971
) -> Groups:
    """Parameter groups with those of experts split off: of a dense model, the groups as they are, as a list.
    `param_groups`: one or several; `max_group_size`: of groups of experts, in elements. Raises UsageError for what is no
    parameter group, UnsupportedError if a parameter is an expert's.
    """
    if not isinstance(param_groups, dict | tuple | list):
        raise UsageError(
            "param_groups is neither a parameter group nor a list of them", found=f"a {type(param_groups).__name__}",
            remedy='Pass a dict, such as {"params": list(model.parameters()), "name": "parameters"}.',
        )  # fmt: skip
    groups: Groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = _dense(group["params"])
    return groups


def configure_moe_param_groups(model_parameters: Iterable[Any]) -> Groups:
    """The parameters, or groups of them, as one list of groups. Raises UnsupportedError if a parameter is an expert's."""
    given = list(model_parameters)
    if given and isinstance(given[0], dict):
        return split_params_into_different_moe_groups_for_optimizer(given)
    return [{"params": _dense(given), "name": "dense-params"}]


def split_params_into_shared_and_expert_params(params: Iterable[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Those of no expert, and those of one, as two lists. Raises UnsupportedError if a parameter is an expert's."""
    return _dense(params), []


def _dense(params: Iterable[Any]) -> list[Any]:
    params = list(params)
    if any(is_moe_param(p) for p in params):
        refuse("MoE")
    return params
