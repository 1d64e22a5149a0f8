"""DeepSpeed's longer import paths: `from zckpt.runtime.runtime.zero.config import ...`. Each module names parts elsewhere."""

from zckpt.runtime.runtime import (
    activation_checkpointing,
    base_optimizer,
    config,
    constants,
    dataloader,
    engine,
    fp16,
    lr_schedules,
    pipe,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "base_optimizer",
    "config",
    "constants",
    "dataloader",
    "engine",
    "fp16",
    "lr_schedules",
    "pipe",
    "utils",
    "zero",
]
