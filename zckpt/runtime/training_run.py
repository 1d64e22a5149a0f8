"""A run: the sharded model with its optimizer, schedule and counters, and the answers that scripts ask of it.

For `engine`, which trains a run, and `saves`, which save and load one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from zckpt.runtime.config.read import BatchSizes, Settings
from zckpt.runtime.loader import Loader
from zckpt.runtime.optimizers.handle import EngineOptimizer, loss_scaler
from zckpt.runtime.sharding import gradients
from zckpt.runtime.sharding.shard import Sharded
from zckpt.runtime.sharding.whole import Copies, WholeParameters, refuse_parts
from zckpt.runtime.world import World


class MissingAttribute(AttributeError):
    """An attribute that neither the engine nor its model has."""

    def __init__(self, engine: TrainingRun, name: str) -> None:
        super().__init__(name=name, obj=engine)
        self._own = [own for own in dir(type(engine)) if not own.startswith("_")]
        model = type(engine.module)
        self._instead = engine.instead
        self._model = (model.__bases__[-1] if issubclass(model, FSDPModule) else model).__name__

    def __str__(self) -> str:
        text = f"'Engine' object has no attribute {self.name!r}, and neither has its model, a {self._model}"
        if self.name is not None and self.name in self._instead:
            return f"'Engine' has no {self.name!r}, an inner part of DeepSpeed's engine. {self._instead[self.name]}"
        near = difflib.get_close_matches(str(self.name), self._own, 1)
        return f"{text}. The engine has {near[0]!r}." if near else text


class TrainingRun(nn.Module):
    """A model that trains sharded, between two micro batches.

    Attributes:
        module: the model, sharded in place.
        settings: the config that was read.
        batch: the batch sizes.
        sharded: what this rank holds.
        optimizer: what scripts hold of the one on the masters of `sharding`; None for inference.
        lr_scheduler: stepped after each step that was not skipped; None without one.
        training_dataloader: of `training_data`; None without it.
        scaler: the loss scale.
        copies: what the modules hold after `.half()` and the like.
        whole: keeps parameters whole between steps, at stages 0 to 2.
        device: of the computation.
        global_rank: the number of this process among all.
        local_rank: its number on its node.
        world_size: the number of processes.
        global_steps: optimizer steps, the skipped ones too.
        global_samples: samples of these steps.
        micro_steps: calls of `step`.
        pending_micro_steps: those since the last optimizer step.
        skipped_steps: steps with gradients that overflowed.
        loaded_checkpoint_dp_world_size: data-parallel ranks that wrote the last checkpoint which was loaded, if it says so.
        loaded_checkpoint_mp_world_size: its model-parallel ranks.
        inside_no_sync_ctxt: this is inside `no_sync`.
        instead: DeepSpeed's attributes that are not here, and what to do instead.
    """

    instead: Mapping[str, str] = {}

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        batch: BatchSizes,
        world: World,
        sharded: Sharded,
        optimizer: EngineOptimizer | None,
        lr_scheduler: Any,
        loader: Loader | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.settings, self.batch, self.world, self.sharded = settings, batch, world, sharded
        self.optimizer, self.lr_scheduler, self.training_dataloader = optimizer, lr_scheduler, loader
        self.scaler = loss_scaler(settings.config.fp16)
        self.device = world.device
        self.global_rank, self.local_rank, self.world_size = world.rank, world.local_rank, world.size
        self.copies = Copies(module, sharded.parameters)
        self.whole: WholeParameters | None = None
        if settings.zero.stage < 3:
            self.whole = WholeParameters(module, sharded.parameters, self.copies)
        else:
            refuse_parts(module)
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self.micro_steps = self.pending_micro_steps = 0
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None
        self._norm: float | None = None
        self._applied = False
        self._boundary: bool | None = None
        self._stepping = self.inside_no_sync_ctxt = False

    @property
    def basic_optimizer(self) -> Optimizer | None:
        """The optimizer on the masters itself; None for inference."""
        return None if self.optimizer is None else self.optimizer.optimizer

    @property
    def cur_scale(self) -> float:
        """The loss scale; 1 without fp16."""
        return self.scaler.cur_scale

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the optimizer; empty without one."""
        return [] if self.optimizer is None else self.optimizer.param_groups

    def get_lr(self) -> list[float]:
        """The learning rates, one per parameter group."""
        return [float(group["lr"]) for group in self.groups]

    def get_mom(self) -> list[Any]:
        """The momenta, or betas, one per parameter group."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping; infinite if the step was skipped, None if not computed."""
        return self._norm

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.settings.zero.stage

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` changed the weights."""
        return self._applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro batch is the last of its optimizer step."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings.config.managed_gradient_accumulation:
            return self._stepping
        return (self.micro_steps + 1) % self.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Sets whether the next forward, and those after it until the next call, belong to the last micro batch of a step."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets backwards inside the context reduce no gradients between ranks; the next one outside reduces all."""
        before = self._boundary, self.inside_no_sync_ctxt
        self._boundary, self.inside_no_sync_ctxt = False, True
        try:
            yield
        finally:
            self._boundary, self.inside_no_sync_ctxt = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, those of the micro batches since the last step too."""
        gradients.forget(self.module, self.sharded.parameters)

    def gather(self) -> None:
        """Gathers the parameters that are whole between steps: all of them at stages 0 to 2. Every rank calls it."""
        if self.whole is not None:
            self.whole.gather()

    def reshard(self, *, keep: bool = True) -> None:
        """Frees the gathered parameters; `keep`: once the parts have what scripts have written to them."""
        self.copies.give_back()
        if keep and self.whole is not None:
            self.whole.take_up()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            if hasattr(module, name) or hasattr(type(module), name):
                return getattr(module, name)
            raise MissingAttribute(self, name) from None
