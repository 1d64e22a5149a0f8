"""`deepspeed.runtime.base_optimizer`: what an engine's optimizer is an instance of."""

from torch.optim import Optimizer as DeepSpeedOptimizer

ZeROOptimizer = DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer", "ZeROOptimizer"]
