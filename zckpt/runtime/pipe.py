"""`deepspeed.pipe`: pipeline parallelism is not built."""

from __future__ import annotations

from zckpt.runtime.unbuilt import unbuilt

__all__ = ["DualPipeVModule", "LayerSpec", "PipelineModule", "TiedLayerSpec"]

DualPipeVModule = unbuilt("DualPipeVModule")
LayerSpec = unbuilt("LayerSpec")
PipelineModule = unbuilt("PipelineModule")
TiedLayerSpec = unbuilt("TiedLayerSpec")
