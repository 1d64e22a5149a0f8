"""`deepspeed.runtime.pipe`: pipeline parallelism is not built."""

from __future__ import annotations

from zckpt.runtime.pipe import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec
from zckpt.runtime.unbuilt import unbuilt

__all__ = ["DualPipeVModule", "LayerSpec", "PipelineEngine", "PipelineModule", "TiedLayerSpec"]

PipelineEngine = unbuilt("PipelineEngine")
