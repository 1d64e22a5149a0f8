"""The engine's methods on weights: `module_state_dict`, `save_16bit_model`; and on states, to host memory for a while and back.

For `engine`, and for scripts that need the device's memory between two phases of training (`offload_states`, `reload_states`).
Source: DeepSpeed 0.19.8, runtime/engine.py and runtime/zero/offload_config.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.live import consolidate, save_pretrained
from zckpt.runtime.init_context import GatheredParameters
from zckpt.runtime.saves.run_state import buffers_of
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


class Weights(TrainingRun):
    """Gives a run's weights away, takes new ones, and moves its states from the device and back."""

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's `state_dict`, as it gives it at this stage. `destination`: a dict to fill, by default a new one; `prefix`:
        put before every name; `keep_vars`: leave tensors attached to the graph; `exclude_frozen_parameters`: leave those out.
        """
        given = {} if destination is None else {"destination": destination}
        state: dict[str, Any] = self.module.state_dict(prefix=prefix, keep_vars=keep_vars, **given)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(f"{prefix}{name}", None)
        return state

    @torch.no_grad()
    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Puts consolidated weights into the module, at every stage. Every rank calls it with the same ones.

        Args:
            checkpoint: the state dict is its value under "module".
            strict: the names have to be those of the model.
            custom_load_fn: puts them into the module itself, which is whole then: `custom_load_fn(src=..., dst=module)`.
            fetch_z3_params: for DeepSpeed's sake: parameters are always gathered.
            z3_params_to_fetch: for DeepSpeed's sake, too.
            allowed_missing_keys: names that may be missing although `strict` is set.

        Raises:
            UsageError: names differ, and `strict` is set.
        """
        state = checkpoint["module"]
        self.reshard()
        with GatheredParameters([one.weight for one in self.sharded.parameters], modifier_rank=0):
            if custom_load_fn is not None:
                custom_load_fn(src=state, dst=self.module)
            else:
                self._put_whole(state, strict, set(allowed_missing_keys or ()))
        self.gather()

    def _put_whole(self, state: Mapping[str, Any], strict: bool, may_lack: set[str]) -> None:
        tensors: dict[str, torch.Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        kept = tensors.keys() | buffers_of(self).keys()
        tensors.update(self.module.named_buffers(remove_duplicate=False))
        if strict and (wrong := (kept ^ set(state)) - may_lack):
            raise UsageError(
                "the state dict has other names than the model", found=examples(sorted(wrong)),
                remedy="Pass the state dict of such a model, or strict=False.",
            )  # fmt: skip
        for name in tensors.keys() & set(state):
            tensors[name].data.copy_(state[name])

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Consolidated weights in the dtype of the computation, on rank 0 in host memory; elsewhere None. All call it."""
        dtype = self.settings.config.precision
        found = consolidate(self, None if dtype == "fp32" else dtype, exclude_frozen=exclude_frozen_parameters)
        return found if self.global_rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes consolidated weights in the dtype of the computation, between two steps. All ranks call it; returns True.

        Args:
            save_dir: the directory to write; transformers' `from_pretrained` loads it.
            save_filename: the name of the only weights file, such as `pytorch_model.bin`; without it, safetensors in shards.
            exclude_frozen_parameters: leave out parameters that are not trained.
        """
        dtype = self.settings.config.precision
        save_pretrained(self, save_dir, dtype, exclude_frozen=exclude_frozen_parameters, file=save_filename)
        return True

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """As `save_16bit_model`, under its old name."""
        return self.save_16bit_model(save_dir, save_filename)

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
