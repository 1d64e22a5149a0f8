"""Mixtures of experts: DeepSpeed's MoE layers and AutoEP."""

from dataclasses import replace

from zckpt.layouts import zero
from zckpt.layouts.moe import read as _read

FAMILY = replace(
    zero.FAMILY, name="mixture of experts", match=_read.match, read=_read.read, read_training=_read.read_training
)
