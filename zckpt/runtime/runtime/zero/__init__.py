"""`deepspeed.runtime.zero`: the names of `zckpt.runtime.zero`."""

from zckpt.runtime.runtime.zero import config, offload_config, partition_parameters, stage3, stage_1_and_2, utils
from zckpt.runtime.runtime.zero.partition_parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
)
from zckpt.runtime.unbuilt import unbuilt

TiledLinear = unbuilt("TiledLinear")
TiledLinearReturnBias = unbuilt("TiledLinearReturnBias")

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "config",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "utils",
]
