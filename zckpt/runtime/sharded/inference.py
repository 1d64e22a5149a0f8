"""`torch.inference_mode()` around a sharded model.

For `start`. `fully_shard` makes the buffers that a unit's parameters are gathered into in the unit's first forward, and
keeps them; made under `inference_mode`, they are tensors that it can never write to again.
Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py `init_all_gather_outputs` and `alloc_all_gather_outputs`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def allow_inference_mode(model: nn.Module) -> None:
    """Lets the first forward of a sharded model run under `inference_mode`: buffers are made as ordinary tensors before."""

    def prepare(module: nn.Module, inputs: Any) -> None:
        if not torch.is_inference_mode_enabled():
            return
        handle.remove()
        assert isinstance(module, FSDPModule)
        with torch.inference_mode(False), torch.no_grad():
            module._get_fsdp_state()._lazy_init()
            for unit in module.modules():
                if isinstance(unit, FSDPModule):
                    unit.unshard()
                    unit.reshard()

    handle = model.register_forward_pre_hook(prepare, prepend=True)
