"""`deepspeed.runtime.zero.partition_parameters`."""

from zckpt.runtime.sharded.external import register_external_parameter, unregister_external_parameter
from zckpt.runtime.sharded.labels import ZeroParamStatus, ZeroParamType
from zckpt.runtime.zero import GatheredParameters, Init

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
]
