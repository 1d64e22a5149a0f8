"""Decides where parts of parameters are between steps: on the device, or in host memory.

For `shard`. The engine keeps one part per parameter, its fp32 master, so `offload_optimizer` and `offload_param` ask for
the same: the part, its gradient and the optimizer's states in host memory, and the optimizer's arithmetic there. What stays
on the device is what the stage gathers. For device nvme that is
host memory too, mapped from a file: see `swapping`.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from zckpt.live.device import pins
from zckpt.runtime.config.zero import Zero


def offloads(zero: Zero) -> bool:
    """Whether parts are in host memory."""
    return zero.offloads_optimizer or zero.offloads_param


def offload_policy(zero: Zero) -> OffloadPolicy:
    """The policy for `fully_shard`; memory is page-locked if there is an accelerator to copy to."""
    if not offloads(zero):
        return OffloadPolicy()
    sections = [section for section in (zero.offload_optimizer, zero.offload_param) if section is not None]
    pin = zero.cpu_offload_use_pin_memory
    if pin is None:
        pin = all(section.pin_memory for section in sections)
    return CPUOffloadPolicy(pin_memory=pin and not zero.nvme and pins())


def home_of(zero: Zero, device: torch.device) -> torch.device:
    """The device of the parts."""
    return torch.device("cpu") if offloads(zero) else device
