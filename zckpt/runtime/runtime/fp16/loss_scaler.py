"""`deepspeed.runtime.fp16.loss_scaler`."""

from zckpt.runtime.optimizers.loss_scale import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]
