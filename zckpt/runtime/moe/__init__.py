"""What scripts of dense models call of `deepspeed.moe`; layers of experts are not built."""

from zckpt.runtime.moe import layer, utils

__all__ = ["layer", "utils"]
