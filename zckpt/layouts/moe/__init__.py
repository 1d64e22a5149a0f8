"""Mixtures of experts: DeepSpeed's MoE layers and AutoEP."""

from dataclasses import replace

from zckpt.layouts import zero
from zckpt.layouts.moe.files import match
from zckpt.layouts.save.family import later
from zckpt.layouts.save.second import UnprovedFamily

FAMILY = replace(
    zero.FAMILY,
    name="mixture of experts",
    match=match,
    read=later("moe.read", "read"),
    second=UnprovedFamily("zckpt has no second reader of this family"),
    read_training=later("moe.read", "read_training"),
)
