"""Where parts of parameters live between steps: on the device, or in host memory.

For `sharding`. The engine keeps one part per parameter, its fp32 master, so `offload_optimizer` and `offload_param` ask for
the same: the part, its gradient and the optimizer's states in host memory, and the optimizer's arithmetic there. What stays
on the device is what the stage gathers. NVMe is refused when the config is read.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from zckpt.runtime.config_zero import Zero


def offloads(zero: Zero) -> bool:
    """Whether parts live in host memory."""
    return zero.offloads_optimizer or zero.offloads_param


def offload_policy(zero: Zero) -> OffloadPolicy:
    """The policy for `fully_shard`; memory is page-locked where there is an accelerator to copy to."""
    if not offloads(zero):
        return OffloadPolicy()
    wishes = [section.pin_memory for section in (zero.offload_optimizer, zero.offload_param) if section is not None]
    pin = all(wishes) if zero.cpu_offload_use_pin_memory is None else zero.cpu_offload_use_pin_memory
    return CPUOffloadPolicy(pin_memory=pin and torch.cuda.is_available())


def home_of(zero: Zero, device: torch.device) -> torch.device:
    """The device that parts live on."""
    return torch.device("cpu") if offloads(zero) else device
