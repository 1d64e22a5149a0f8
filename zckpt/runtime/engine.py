"""The engine that a training script drives: forward, backward, step.

For `initialize`, which makes it. One optimizer step is: backward of every micro batch, scaled and reduced; the norm of all
gradients, which also shows overflow; one multiplication that takes back the scale and clips; the optimizer on the masters;
the schedule. The order and the numbers are DeepSpeed's (0.19.8, runtime/engine.py), but for one: after a step in which the
loss scale doubles, gradients are divided by the scale that they were made with.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.live import save_pretrained
from zckpt.runtime.checkpoint import Checkpoints
from zckpt.runtime.config import BatchSizes, Settings
from zckpt.runtime.data import Loader
from zckpt.runtime.gradients import forget
from zckpt.runtime.optim import Lamb
from zckpt.runtime.precision import loss_scaler
from zckpt.runtime.sharding import Sharded
from zckpt.runtime.ungathered import explained
from zckpt.runtime.world import World

_log = logging.getLogger("zckpt.runtime")


class Engine(Checkpoints, nn.Module):
    """A model that trains sharded.

    Attributes:
        module: the model, sharded in place.
        settings: the config that was read.
        batch: the batch sizes.
        sharded: what this rank holds.
        optimizer: on the masters of `sharded`; None for inference.
        lr_scheduler: stepped after each step that was not skipped.
        loader: of `training_data`.
        scaler: the loss scale.
        device: of the computation.
        global_steps: optimizer steps, the skipped ones too.
        global_samples: samples of these steps.
        micro_steps: calls of `step`.
        pending_micro_steps: those since the last optimizer step.
        skipped_steps: steps whose gradients overflowed.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        batch: BatchSizes,
        world: World,
        sharded: Sharded,
        optimizer: Optimizer | None,
        loader: Loader | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.settings, self.batch, self.world, self.sharded = settings, batch, world, sharded
        self.optimizer, self.loader = optimizer, loader
        self.lr_scheduler: Any = None
        self.scaler = loss_scaler(settings.config.fp16)
        self.device = world.device
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self.micro_steps = self.pending_micro_steps = 0
        self._norm: float | None = None
        self._applied = False
        self._boundary: bool | None = None
        self._stepping = False
        self._backwards = 0
        self._replicated = [held for held in sharded.held if held.replicated]
        self._masters = [held for held in sharded.held if held.master is not None]
        if isinstance(optimizer, Lamb):
            optimizer.sum_over_shards = self._sum_over_shards

    # What scripts ask for.

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """This process on its node."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.world.size

    @property
    def cur_scale(self) -> float:
        """The loss scale; 1 without fp16."""
        return self.scaler.cur_scale

    def get_lr(self) -> list[float]:
        """Learning rates, one per parameter group."""
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momenta or betas, one per parameter group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping; infinite where it was skipped."""
        return self._norm

    def train_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.batch.total

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and forward."""
        return self.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Forwards per optimizer step."""
        return self.batch.accumulation

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.settings.zero.stage

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights."""
        return self._applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro batch of now is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings.config.managed_gradient_accumulation:
            return self._stepping
        return (self.micro_steps + 1) % self.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says it by hand, until it is said again: before the forward that it is about."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside reduce nothing; the last one, outside, reduces all."""
        before, self._boundary = self._boundary, False
        try:
            yield
        finally:
            self._boundary = before

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    # The loop.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if self.settings.config.fp16.enabled and self.settings.config.fp16.auto_cast:
            inputs, kwargs = _to_half(inputs), _to_half(kwargs)
        try:
            result = self.module(*inputs, **kwargs)
        except RuntimeError as error:
            raise explained(error, self.module) or error from error.__cause__
        if not torch.is_grad_enabled():
            self.reshard()
        return result

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Gradients of a loss, added to those of the micro batches before.

        Args:
            loss: one number, the mean over this rank's micro batch.
            retain_graph: as in torch.
            scale_wrt_gas: divide by the number of micro batches in a step.

        Returns:
            The loss, so divided.
        """
        self._need_optimizer("backward")
        if loss.numel() != 1:
            raise UsageError("a backward from more than one number", found=f"a loss of shape {list(loss.shape)}")
        if scale_wrt_gas:
            loss = loss / self.batch.accumulation
        last = self.is_gradient_accumulation_boundary() or not self.settings.config.managed_gradient_accumulation
        self._reduce_next(last)
        (loss.float() * self.cur_scale).backward(retain_graph=retain_graph)
        for held in self._replicated:
            held.take_gradient()
        self._backwards += 1
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the end of a step's micro batches: the update. Elsewhere it only counts.

        Args:
            lr_kwargs: for the schedule's `step`.

        Raises:
            CastError: fp16 gradients overflow at the smallest loss scale.
        """
        self._need_optimizer("step")
        self._applied, self._stepping = False, True
        try:
            last = self.is_gradient_accumulation_boundary()
            if last:
                self._update(lr_kwargs or {})
        finally:
            self._stepping = False
        self.micro_steps += 1
        self.pending_micro_steps = 0 if last else self.pending_micro_steps + 1

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the whole weights in the dtype of the computation, between two steps; every rank calls it.

        Args:
            save_dir: a directory that `from_pretrained` loads then; see `zckpt.live.save_pretrained`.
            save_filename: the only weights file, as in `pytorch_model.bin`; safetensors in shards where not given.
            exclude_frozen_parameters: leave out parameters that are not trained.

        Returns:
            True: all ranks wrote, whatever the stage.
        """
        dtype = self.settings.config.precision
        save_pretrained(self, save_dir, dtype, exclude_frozen=exclude_frozen_parameters, file=save_filename)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, those of the micro batches since the last step too."""
        forget(self.module, self.sharded.held)

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        assert self.optimizer is not None
        self.reshard()
        grads = self._gradients()
        scale = self.cur_scale
        norm = self._global_norm(grads)
        overflow = norm is not None and not math.isfinite(norm) and self._checks_overflow()
        self._norm = float("inf") if overflow else None if norm is None else norm / scale
        told = self.scaler.update(overflow)
        if overflow:
            self.skipped_steps += 1
            if self.global_rank == 0:
                _log.warning(
                    "Step %d skipped on every rank: its gradients are not finite%s.",
                    self.global_steps + 1,
                    f"; {told}" if told else "",
                )
        else:
            self._multiply(grads, scale)
            self.optimizer.step()
            for held in self._replicated:
                held.give_back()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
            self._applied = True
        self.zero_grad()
        self.global_steps += 1
        managed = self.settings.config.managed_gradient_accumulation
        micros = self.batch.accumulation if managed else self._backwards
        self.global_samples += self.batch.micro * micros * self.world_size
        self._backwards = 0
        every = self.settings.config.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            _log.info(
                "step=%d, skipped=%d, lr=%s, mom=%s",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self.get_mom(),
            )

    # Gradients.

    def _gradients(self) -> list[torch.Tensor]:
        """The gradients of all masters, reduced; zeros for a parameter that had no part in any loss."""
        for held in self.sharded.held:
            held.bind()
            held.take_gradient()
        absent = [held for held in self._masters if held.master is not None and held.master.grad is None]
        if absent and not self.settings.zero.ignore_unused_parameters:
            raise UsageError(
                "parameters without gradient",
                found=examples(held.name for held in absent),
                remedy="Leave them out of the loss on purpose: zero_optimization.ignore_unused_parameters: true.",
            )
        for held in absent:
            if held.master is not None:
                held.master.grad = torch.zeros_like(held.master)
        mine = [
            held.master.grad for held in self._replicated if held.master is not None and held.master.grad is not None
        ]
        if mine and self.world_size > 1:
            flat = torch.cat([grad.reshape(-1) for grad in mine]).to(self.device)
            dist.all_reduce(flat, op=dist.ReduceOp.SUM)
            flat /= self.world_size
            for grad, part in zip(mine, flat.split([grad.numel() for grad in mine]), strict=True):
                grad.copy_(part.view_as(grad))
        return [held.master.grad for held in self._masters if held.master is not None and held.master.grad is not None]

    def _global_norm(self, grads: Sequence[torch.Tensor]) -> float | None:
        if not self.settings.zero.compute_grad_norm and not self._checks_overflow():
            return None
        held = [held.master for held in self._masters if held.master is not None]
        squares = torch.stack(torch._foreach_norm(list(grads))).square() if grads else torch.zeros(1)
        return float(self._sum_over_shards(squares[None], held).sum().sqrt())

    def _sum_over_shards(self, sums: torch.Tensor, masters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sums over the ranks that hold rows of the same parameters; a replicated one counts once.

        Args:
            sums: shape (rows, parameters).
            masters: the parameters.
        """
        if self.sharded.mesh["shard"].size() == 1:
            return sums
        if self._replicated and self.sharded.mesh.get_local_rank("shard"):
            replicated = {id(held.master) for held in self._replicated}
            once = torch.tensor([id(master) in replicated for master in masters], device=sums.device)
            sums = sums.masked_fill(once, 0.0)
        total = sums.to(self.device)
        dist.all_reduce(total, group=self.sharded.shard_group)
        return total.to(sums.device)

    def _checks_overflow(self) -> bool:
        return not self.settings.bf16.enabled or self.settings.bf16.check_grad_overflow

    def _multiply(self, grads: list[torch.Tensor], scale: float) -> None:
        """Takes back the loss scale and clips, in one multiplication; `sum` makes of the mean the sum."""
        factor = 1.0 / scale
        limit = self.settings.config.gradient_clipping
        if limit > 0 and self._norm is not None:
            factor /= max(1.0, (self._norm + 1e-6) / limit)
        if self.settings.config.gradient_allreduce_op == "sum":
            factor *= self.world_size
        if factor != 1.0 and grads:
            torch._foreach_mul_(grads, factor)

    def _reduce_next(self, last: bool) -> None:
        """What the next backward does with its gradients; see [Note: stages] in `sharding`."""
        root = self.module
        assert isinstance(root, FSDPModule)
        if self.settings.zero.stage < 2:
            root.set_requires_gradient_sync(last)
        elif self.sharded.mesh.ndim == 2:
            root.set_requires_all_reduce(last)
        if self.settings.zero.stage < 3:
            root.set_reshard_after_backward(last)

    def reshard(self) -> None:
        """Frees what was gathered of the parameters; between steps nothing is."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _need_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise UsageError(
                f"{what} without an optimizer",
                remedy="Give initialize an optimizer, or the config a section 'optimizer'.",
            )


def _to_half(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _to_half(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_half(inner) for inner in value)
    return value
