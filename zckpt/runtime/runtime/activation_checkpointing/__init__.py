"""`deepspeed.runtime.activation_checkpointing`."""

from zckpt.runtime import checkpointing

__all__ = ["checkpointing"]
