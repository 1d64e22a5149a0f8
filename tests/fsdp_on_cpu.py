"""Lets accelerate shard on CPUs: it knows FSDP, but asks for it only where it finds a GPU or the like.

What `AcceleratorState` does for several GPUs is done for several CPUs; all else is accelerate's and torch's own code.
Source: accelerate 1.15, state.py `AcceleratorState.__init__`.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def initialize() -> None:
    """From now on, an `Accelerator` with an FSDP plugin shards on CPUs too."""
    original = AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None and self.distributed_type in (DistributedType.MULTI_CPU, DistributedType.FSDP):
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.device = torch.device("cpu")  # FSDP1 takes no "cpu:0"
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_fsdp
