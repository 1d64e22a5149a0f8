"""torch.distributed by the names of DeepSpeed's `comm`, with its further arguments.

For scripts: `import zckpt.runtime.comm as dist`. `prof`, `log_name` and `debug` are for DeepSpeed's logger of collectives, and
change nothing; torch.profiler shows collectives.
Source: DeepSpeed 0.19.8, comm/comm.py and comm/torch.py.

Groups of ranks and of parameters are as scripts ask for them: all ranks are data parallel, every other axis has one rank, and a
dense model has no parameter groups of experts.
Source: DeepSpeed 0.19.8, utils/groups.py, moe/utils.py.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.runtime.names.table import refuse
from zckpt.runtime.world import default_pg_timeout as default_pg_timeout
from zckpt.runtime.world import init_distributed as init_distributed

GroupMember, P2POp, ProcessGroup = dist.GroupMember, dist.P2POp, dist.ProcessGroup
is_available, is_initialized, destroy_process_group = dist.is_available, dist.is_initialized, dist.destroy_process_group
get_backend, get_rank, get_world_size = dist.get_backend, dist.get_rank, dist.get_world_size


def _with_deepspeed_names(
    function: Callable[..., Any], names: str, more: str = "prof log_name debug"
) -> Callable[..., Any]:
    """A function of torch by DeepSpeed's names of its arguments. `names`: `parameter`, `parameter=default` of DeepSpeed's
    signature, in its order; `given:torchs` where torch's own name is another. `more`: further arguments, which change nothing.
    """
    parameters, torchs = [], {}
    for word in names.split():
        name, _, default = word.partition("=")
        name, _, other = name.partition(":")
        torchs[name] = other or name
        value = inspect.Parameter.empty if not default else _DEFAULTS.get(default, default)
        if isinstance(value, str) and value.lstrip("-").isdecimal():
            value = int(value)
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value))
    further = {"prof": False, "log_name": function.__name__, "debug": None}
    for name in more.split():
        parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=further[name]))
    signature = inspect.Signature(parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        return function(**{torchs[name]: value for name, value in bound.arguments.items() if name in torchs})

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


_DEFAULTS: dict[str, Any] = {"None": None, "False": False, "SUM": ReduceOp.SUM}

all_reduce = _with_deepspeed_names(dist.all_reduce, "tensor op=SUM group=None async_op=False")
inference_all_reduce = all_reduce
broadcast = _with_deepspeed_names(dist.broadcast, "tensor src group=None async_op=False")
broadcast_object_list = _with_deepspeed_names(dist.broadcast_object_list, "object_list src group=None device=None")
all_gather = _with_deepspeed_names(dist.all_gather, "tensor_list tensor group=None async_op=False")
all_gather_object = _with_deepspeed_names(dist.all_gather_object, "object_list obj group=None")
all_gather_into_tensor = _with_deepspeed_names(
    dist.all_gather_into_tensor, "output_tensor tensor:input_tensor group=None async_op=False"
)
reduce_scatter_tensor = _with_deepspeed_names(
    dist.reduce_scatter_tensor, "output_tensor:output tensor:input op=SUM group=None async_op=False"
)
reduce_scatter = _with_deepspeed_names(dist.reduce_scatter, "output input_list op=SUM group=None async_op=False")
reduce = _with_deepspeed_names(dist.reduce, "tensor dst op=SUM group=None async_op=False")
gather = _with_deepspeed_names(dist.gather, "tensor gather_list=None dst=0 group=None async_op=False")
scatter = _with_deepspeed_names(dist.scatter, "tensor scatter_list=None src=0 group=None async_op=False")
all_to_all_single = _with_deepspeed_names(
    dist.all_to_all_single,
    "output tensor:input output_split_sizes=None input_split_sizes=None group=None async_op=False",
)
all_to_all = _with_deepspeed_names(dist.all_to_all, "output_tensor_list input_tensor_list group=None async_op=False")
send = _with_deepspeed_names(dist.send, "tensor dst group=None tag=0")
recv = _with_deepspeed_names(dist.recv, "tensor src=None group=None tag=0")
isend = _with_deepspeed_names(dist.isend, "tensor dst group=None tag=0")
irecv = _with_deepspeed_names(dist.irecv, "tensor src=None group=None tag=0")
barrier = _with_deepspeed_names(dist.barrier, "group=None async_op=False device_ids=None")
monitored_barrier = _with_deepspeed_names(dist.monitored_barrier, "group=None timeout=None wait_all_ranks=False")
batch_isend_irecv = _with_deepspeed_names(dist.batch_isend_irecv, "p2p_op_list")
reduce_scatter_fn = _with_deepspeed_names(
    dist.reduce_scatter_tensor, "output_tensor:output tensor:input op=SUM group=None async_op=False", "prof debug"
)
allgather_fn = _with_deepspeed_names(
    dist.all_gather_into_tensor, "output_tensor input_tensor group=None async_op=False", "debug"
)


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Gathers several tensors, each into one; `async_op` returns the last handle. Raises UsageError for no tensors."""
    if not output_tensors:
        raise UsageError("all_gather_coalesced got no tensors", remedy="Call it with at least one tensor.")
    handles = [
        dist.all_gather_into_tensor(output, given, group=group, async_op=async_op)
        for output, given in zip(output_tensors, input_tensors, strict=True)
    ]
    return handles[-1]


def configure(*args: Any, **kwargs: Any) -> None:
    """Sets up DeepSpeed's logger of collectives. Raises UnsupportedError if it should log something."""
    if kwargs.get("enabled") or kwargs.get("verbose"):
        raise UnsupportedError(
            "the logger of collectives is not built", remedy="Remove that call. torch.profiler shows collectives."
        )


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """The counts of DeepSpeed's logger: empty, since the logger is not built."""
    return {} if return_dict else None


def new_group(ranks: Sequence[int] | None = None) -> Any:
    """A process group of these ranks; every rank calls it."""
    return dist.new_group(None if ranks is None else list(ranks))


def get_local_rank() -> int:
    """The number of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The number among all processes of the one that has `group_rank` in the group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The numbers among all processes of those in the group, in its order."""
    return dist.get_process_group_ranks(group)


def get_world_group() -> Any:
    """The group of all processes."""
    return dist.group.WORLD


def has_all_gather_into_tensor() -> bool:
    """True: every torch that this trainer runs with has these collectives."""
    return True


has_reduce_scatter_tensor = has_coalescing_manager = has_all_reduce_coalesced = has_all_gather_into_tensor


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
