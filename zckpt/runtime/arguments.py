"""Command-line arguments of training scripts: `deepspeed.add_config_arguments(parser)`.

Source: DeepSpeed 0.19.8, __init__.py.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from zckpt.base.errors import UnsupportedError, UsageError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config` to a parser, and returns it. `initialize(args=...)` reads the second."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name in ("deepspeed", "deepscale"):
        old = "old name of --deepspeed" if name == "deepscale" else "the script trains with an engine"
        group.add_argument(f"--{name}", default=False, action="store_true", help=old)
        old = "old name of --deepspeed_config" if name == "deepscale" else "path of the JSON config"
        group.add_argument(f"--{name}_config", default=None, type=str, help=old)
    return parser


def config_of(args: Any, config: Any, config_params: Any) -> Any:
    """The config from any of the three places where a script may give it; None for none. Raises UsageError if it is
    given both in the arguments and to `initialize`.
    """
    names = ("deepspeed_config", "deepscale_config")
    given_by_args = [value for name in names if (value := getattr(args, name, None)) is not None]
    given = [value for value in (config, config_params) if value is not None]
    if len(given_by_args) + bool(given) > 1:
        raise UsageError(
            "initialize got two configs", found=" and ".join(_config_text(one) for one in (*given_by_args, *given)),
            remedy="Pass one: in args.deepspeed_config, or as initialize(config=...).",
        )  # fmt: skip
    return (*given_by_args, *given, None)[0]


def refuse_parallel(mpu: Any, mesh_param: Any) -> None:
    """Raises UnsupportedError for model or sequence parallelism; an `mpu` (an object with DeepSpeed's methods) of data
    parallelism alone is fine. `mesh_param`: the sizes of data and sequence parallelism.
    """
    kinds = ("model_parallel", "tensor_model_parallel", "slice_parallel", "pipe_parallel", "pipeline_model_parallel")
    found = []
    for kind in kinds:
        ask = getattr(mpu, f"get_{kind}_world_size", None)
        if ask is not None and ask() > 1:
            found.append(f"{kind.replace('_', ' ')} world size {ask()}")
    if mesh_param is not None and len(mesh_param) > 1 and mesh_param[1] > 1:
        found.append(f"sequence parallel size {mesh_param[1]}")
    if found:
        raise UnsupportedError(
            "initialize trains data parallel only", found=", ".join(found),
            remedy="Leave mpu and mesh_param out: stage 3 shares the parameters of the plain model out over all ranks.",
        )  # fmt: skip


def refuse_partial(groups: Iterable[Any], quantized: bool) -> None:
    """Raises UnsupportedError for what `zero.Init` does not do: parameters that some ranks share, or that are quantized.
    A missing group, and one of all ranks, is fine.
    """
    for group in groups:
        if group is not None and dist.get_world_size(group) != dist.get_world_size():
            raise UnsupportedError(
                "zero.Init got a group of some of the ranks",
                found=f"{dist.get_world_size(group)} of {dist.get_world_size()} ranks",
                remedy="Leave the group out. For groups that share parameters set zero_optimization.mics_shard_size.",
            )
    if quantized:
        remedy = "Leave zero_quantized_weights out."
        raise UnsupportedError("zero.Init with quantized weights is not built", remedy=remedy)


def _config_text(config: Any) -> str:
    return os.fspath(config) if isinstance(config, str | os.PathLike) else f"a {type(config).__name__}"
