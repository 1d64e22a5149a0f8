"""What scripts find under `deepspeed.checkpoint`: names of files and keys, and `utils`. zckpt's commands convert checkpoints."""

from zckpt.runtime.checkpoint import constants, utils

__all__ = ["constants", "utils"]
