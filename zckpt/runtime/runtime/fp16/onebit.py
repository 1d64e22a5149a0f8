"""`deepspeed.runtime.fp16.onebit`: optimizers that compress what ranks send; not built."""

from __future__ import annotations

from zckpt.runtime.unbuilt import unbuilt

__all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam"]

OnebitAdam = unbuilt("OnebitAdam")
OnebitLamb = unbuilt("OnebitLamb")
ZeroOneAdam = unbuilt("ZeroOneAdam")
