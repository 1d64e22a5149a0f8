"""What accelerate's launcher imports of `deepspeed.launcher`; torchrun and `zckpt run --nproc` start processes."""

from zckpt.runtime.launcher import runner

__all__ = ["runner"]
