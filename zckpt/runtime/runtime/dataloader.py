"""`deepspeed.runtime.dataloader`."""

from zckpt.runtime.loader import Loader as DeepSpeedDataLoader
from zckpt.runtime.utils.small import RepeatingLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]
