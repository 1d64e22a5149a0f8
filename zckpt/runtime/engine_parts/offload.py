"""Moves a run's states to host memory for a while: `offload_states` and `reload_states`.

For `engine`, and for scripts that need the device's memory between two phases of training.
Source: DeepSpeed 0.19.8, runtime/engine.py and runtime/zero/offload_config.py.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zckpt.base.errors import UsageError
from zckpt.runtime.sharding.gradients import units_of
from zckpt.runtime.training_run import TrainingRun


class OffloadDeviceEnum(str, Enum):
    """Places for states, by DeepSpeed's names."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of states, by DeepSpeed's names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_WEIGHTS = (OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.lp_params)
_HOST = torch.device("cpu")


class Offload(TrainingRun):
    """Moves a run's states from the device and back."""

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Moves states from the device to host memory, between two steps; `reload_states` brings them back.

        `include`: which; by default all. Master weights and the module's weights are one memory here, so either name moves
        both. There is no contiguous buffer of gradients. `device`: `cpu`; `none` does nothing. `pin_memory`: for DeepSpeed's
        sake: the host memory is not page-locked. `non_blocking`: return before the copies are done. Raises UsageError if
        `device` is `nvme`, or `offload_param` keeps the weights in host memory anyway.
        """
        if device == OffloadDeviceEnum.none:
            return
        if device == OffloadDeviceEnum.nvme:
            raise UsageError(
                "offload_states moves to host memory only", found="device nvme", remedy="Pass OffloadDeviceEnum.cpu."
            )
        if self.settings.zero.offloads_param:
            raise UsageError(
                "offload_states does not go with offload_param, which keeps the states in host memory anyway",
                remedy="Remove the call, or offload_param from the config.",
            )
        wanted = [kind for kind in OffloadStateTypeEnum if include is None or kind in include]
        self._move(_HOST, wanted, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what `offload_states` has moved. `non_blocking`: return before the copies are done."""
        self._move(self.device, list(OffloadStateTypeEnum), non_blocking)
        self.gather()

    @torch.no_grad()
    def _move(self, device: torch.device, wanted: list[OffloadStateTypeEnum], non_blocking: bool) -> None:
        self.reshard()
        in_host_memory = self.settings.zero.offloads_optimizer
        if any(kind in wanted for kind in _WEIGHTS) and not in_host_memory:
            self._move_weights(device, non_blocking)
        if OffloadStateTypeEnum.lp_grads in wanted:
            for one in self.sharded.parameters:
                grad: Any = one.weight.grad
                if isinstance(grad, DTensor) and not in_host_memory:
                    grad._local_tensor = grad._local_tensor.to(device, non_blocking=non_blocking)
        if OffloadStateTypeEnum.optim_states in wanted and self.optimizer is not None and not in_host_memory:
            for states in self.optimizer.state.values():
                for name, value in states.items():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        states[name] = value.to(device, non_blocking=non_blocking)

    def _move_weights(self, device: torch.device, non_blocking: bool) -> None:
        for one in self.sharded.parameters:
            weight: Any = one.weight
            if not isinstance(weight, DTensor):
                weight.data = weight.data.to(device, non_blocking=non_blocking)
                if one.master is not None and one.master.device != device:
                    one.master.data = one.master.data.to(device, non_blocking=non_blocking)
            elif weight._local_tensor.device != device:
                weight._local_tensor = weight._local_tensor.to(device, non_blocking=non_blocking)
        for unit in units_of(self.module):  # what `fully_shard` keeps of each weight
            for parameter in unit.fsdp_params:
                parameter.reset_sharded_param()
        for one in self.sharded.parameters:
            one.bind()
