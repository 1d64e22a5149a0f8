"""`deepspeed.moe.layer`: not built."""

from __future__ import annotations

from zckpt.runtime.unbuilt import unbuilt

__all__ = ["MoE"]

MoE = unbuilt("MoE")
