"""Optimizers by the names of `deepspeed.ops`: torch's kernels, or this package's where torch has none."""

from zckpt.runtime.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
