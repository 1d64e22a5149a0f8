"""`deepspeed.runtime.engine`."""

from zckpt.runtime.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
