"""`deepspeed.runtime.zero.config`."""

from enum import IntEnum

from zckpt.runtime.config.zero import Zero as DeepSpeedZeroConfig

__all__ = ["DeepSpeedZeroConfig", "ZeroStageEnum"]


class ZeroStageEnum(IntEnum):
    """The stages by name."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
