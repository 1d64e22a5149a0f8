"""`deepspeed.runtime.fp16`."""

from zckpt.runtime.runtime.fp16 import loss_scaler, onebit

__all__ = ["loss_scaler", "onebit"]
