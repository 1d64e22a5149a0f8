"""Mixtures of experts: DeepSpeed's MoE layers and AutoEP."""

from dataclasses import replace

from zckpt.layouts import zero
from zckpt.layouts.moe.files import match
from zckpt.layouts.save.family import later

FAMILY = replace(
    zero.FAMILY,
    name="mixture of experts",
    match=match,
    read=later("moe.read", "read"),
    second=later("moe.second", "find_again"),
    read_training=later("moe.read", "read_training"),
)
