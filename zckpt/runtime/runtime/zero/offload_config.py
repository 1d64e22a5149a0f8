"""`deepspeed.runtime.zero.offload_config`."""

from zckpt.runtime.config.zero import OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig
from zckpt.runtime.config.zero import OffloadParam as DeepSpeedZeroOffloadParamConfig
from zckpt.runtime.engine_parts.offload import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]
