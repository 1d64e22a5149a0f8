"""Answers scripts that ask for parameter groups of experts, and also train dense models: a dense model has none.

Source: DeepSpeed 0.19.8, moe/utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zckpt.base.errors import UsageError
from zckpt.runtime.names.unbuilt import refuse

Groups = list[dict[str, Any]]


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

    Args:
        param_groups: one or several.
        max_group_size: of groups of experts, in elements.

    Raises:
        UsageError: not parameter groups.
        UnsupportedError: a parameter is an expert's.
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


def split_params_into_shared_and_expert_params(
    params: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters that are not an expert's, and those that are. Raises UnsupportedError if a parameter is an
    expert's.
    """
    return _dense(params), []


def _dense(params: Iterable[Any]) -> list[Any]:
    params = list(params)
    if any(is_moe_param(p) for p in params):
        refuse("MoE")
    return params
