"""`deepspeed.runtime.activation_checkpointing.checkpointing`: the functions of `zckpt.runtime.checkpointing`."""

from zckpt.runtime.checkpointing import *  # noqa: F403
