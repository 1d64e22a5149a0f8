"""`deepspeed.runtime.zero.offload_config`."""

from zckpt.runtime.ds_config.zero import OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig
from zckpt.runtime.ds_config.zero import OffloadParam as DeepSpeedZeroOffloadParamConfig
from zckpt.runtime.methods.offload import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]
