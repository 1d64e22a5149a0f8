"""What an engine gives away and takes of its model, and how it ends: `module_state_dict`, `save_fp16_model`, `destroy`.

For `engine`. Source: DeepSpeed 0.19.8, runtime/engine.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.base.words import examples
from zckpt.live import consolidate
from zckpt.live.device import accelerator
from zckpt.runtime.engine_parts.offload import OffloadableRun
from zckpt.runtime.init_context import GatheredParameters
from zckpt.runtime.parameters import remember_optimizer
from zckpt.runtime.saves.run_state import buffers_of


class DeepSpeedRun(OffloadableRun):
    """A run with the methods that DeepSpeed's engine has, but for forward, backward and step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_compiled = False
        if self.optimizer is not None:
            remember_optimizer(self.sharded.parameters, self.optimizer)

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's `state_dict`, as it gives it at this stage.

        Args:
            destination: a dict to fill; by default a new one.
            prefix: put before every name.
            keep_vars: leave tensors attached to the graph.
            exclude_frozen_parameters: leave out parameters that are not trained.
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
        """Puts whole weights into the module, at every stage. Every rank calls it with the same ones.

        Args:
            checkpoint: the state dict is its value under "module".
            strict: the names have to be those of the model.
            custom_load_fn: puts them into the module itself, which is whole then: `custom_load_fn(src=..., dst=module)`.
            fetch_z3_params: for DeepSpeed's sake: parameters are always gathered.
            z3_params_to_fetch: likewise.
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
        own = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        kept = own | buffers_of(self).keys()
        own |= {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        if strict and (wrong := (kept ^ set(state)) - may_lack):
            raise UsageError(
                "the state dict has other names than the model", found=examples(sorted(wrong)),
                remedy="Pass the state dict of such a model, or strict=False.",
            )  # fmt: skip
        tensors: dict[str, torch.Tensor] = {}
        tensors.update(self.module.named_parameters(remove_duplicate=False))
        tensors.update(self.module.named_buffers(remove_duplicate=False))
        for name in own & set(state):
            tensors[name].data.copy_(state[name])

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole weights in the dtype of the computation, on rank 0 in host memory; None on others. Every rank calls it."""
        dtype = self.settings.config.precision
        found = consolidate(self, None if dtype == "fp32" else dtype, exclude_frozen=exclude_frozen_parameters)
        return found if self.global_rank == 0 else None

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The same, by the name that transformers and accelerate call."""
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """An old name of `save_16bit_model`."""
        done: bool = self.save_16bit_model(save_dir, save_filename)
        return done

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._is_compiled

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the module's forward with `torch.compile`; once.

        Args:
            backend: of torch.compile.
            compile_kwargs: its further arguments.
            schedule: of DeepSpeed's own compiler passes, which are not built.
            compiled_autograd_enabled: compile the backward too; not built.

        Raises:
            UnsupportedError: `schedule` or `compiled_autograd_enabled` is given.
        """
        if schedule is not None or compiled_autograd_enabled:
            what = "a schedule" if schedule is not None else "compiled_autograd_enabled"
            raise UnsupportedError(f"engine.compile with {what} is not built", remedy="Call it without that argument.")
        if not self._is_compiled:
            self.module.compile(**{**(compile_kwargs or {}), "backend": backend})
            self._is_compiled = True

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Reduces gradients in DeepSpeed, for scripts that call their own backward.

        Raises:
            UnsupportedError: always: backward reduces them.
        """
        raise UnsupportedError(
            "allreduce_gradients is not built", remedy="Remove the call: engine.backward(loss) reduces the gradients."
        )

    def empty_partition_cache(self) -> None:
        """Frees gathered parameters, and gives memory that torch keeps back to the device."""
        if self.whole is None:
            self.reshard()
        if (kind := accelerator()) is not None:
            torch.get_device_module(kind).empty_cache()

    def destroy(self) -> None:
        """Ends the run: a save in the background is completed, and gradients are dropped."""
        self.wait_for_checkpoint()
        self.zero_grad()
