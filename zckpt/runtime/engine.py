"""The engine that a training script drives: forward, backward, step.

For `initialize`, which makes it. One optimizer step is: backward of every micro batch, scaled and reduced; the norm of all
gradients, which also shows overflow; one multiplication that takes back the scale and clips; the optimizer on the masters;
the schedule. The order and the numbers are DeepSpeed's (0.19.8, runtime/engine.py), but for one: after a step in which the
loss scale doubles, gradients are divided by the scale that they were made with.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.base.words import examples
from zckpt.live.device import accelerator
from zckpt.runtime.engine_parts.answers import add_answers
from zckpt.runtime.engine_parts.batches import Batches
from zckpt.runtime.engine_parts.weights import Weights
from zckpt.runtime.observe.observer import Observer
from zckpt.runtime.optimizers.lion_lamb import Lamb
from zckpt.runtime.parameters import remember_optimizer
from zckpt.runtime.saves.engine_part import Saves
from zckpt.runtime.sharding import gradients
from zckpt.runtime.sharding.gradients import DirectBackwards, forget_scaled, mark_scaled, of_engine
from zckpt.runtime.sharding.on_access import explain_failure

_log = logging.getLogger("zckpt.runtime")


class Engine(Saves, Weights, Batches):
    """A sharded model with its optimizer, made by `initialize`: call it, then `backward`, then `step`.

        loss = engine(batch)
        engine.backward(loss)
        engine.step()

    Attributes that the engine does not have are those of the model. `TrainingRun` lists the engine's own; `answers` has
    DeepSpeed's names of what the config says.

    Attributes:
        config: the JSON, with every "auto" filled in.
        client_optimizer: what the script passed as optimizer; None if the config's is used.
        client_lr_scheduler: what it passed as schedule.
        training_data: the dataset that it passed.
        collate_fn: makes a batch of its samples.
        is_compiled: whether `compile` was called.
        observer: shows what the config wants to see of the run.
        monitor: writes events to the monitors that the config switches on: `monitor.write_events([(name, value, samples)])`.
        timers: by name, in milliseconds: `timers("fwd").elapsed()`.
        tput_timer: samples per second.
        flops_profiler: counts operations; None if the config does not ask for it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = self.settings.raw
        self.client_optimizer: Any = None
        self.client_lr_scheduler: Any = None
        self.training_data: Any = None
        self.collate_fn: Any = None
        self.is_compiled = False
        self._backwards = 0
        self._replicated = [one for one in self.sharded.parameters if one.replicated]
        self._masters = [one.master for one in self.sharded.parameters if one.master is not None]
        self._unreduced = self._counted = False
        self._direct: DirectBackwards | None = None
        if self.optimizer is not None:
            self.optimizer.engine = self
            remember_optimizer(self.sharded.parameters, self.optimizer)
            self._direct = DirectBackwards(self.module, self.sharded.parameters, self._begin_direct)
            self.module.register_forward_hook(self.forward_ended)
        if isinstance(self.basic_optimizer, Lamb):
            self.basic_optimizer.sum_over_shards = self._sum_over_shards
        self.observer = Observer(self)
        self.monitor, self.timers = self.observer.monitor, self.observer.timers
        self.tput_timer, self.flops_profiler = self.observer.tput_timer, self.observer.flops_profiler
        self.observer.describe(vars(self))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward, with its arguments and its result. Every rank calls it. Raises UsageError if a parameter
        is used outside of the module that it is gathered with; the error names both.
        """
        if self.settings.config.fp16.enabled and self.settings.config.fp16.auto_cast:
            inputs, kwargs = tree_map_only(torch.Tensor, _to_half, (inputs, kwargs))
        try:
            with self.observer.forward():
                result = self.module(*inputs, **kwargs)
        except RuntimeError as error:
            raise explain_failure(error, self.module) or error from error.__cause__
        if not torch.is_grad_enabled() and self.settings.zero.stage == 3:
            self.reshard()
        self.forward_ended()  # a compiled module has left its hooks out
        return result

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss multiplied by the loss scale of fp16, for `engine.scale(loss).backward()`; without fp16 as it is.
        `loss`: one number; it is not divided by the micro batches of a step: its backward does that. Raises UsageError
        if there is no optimizer, or the loss has more than one element.
        """
        self._need_optimizer("scale")
        _check_loss(loss, "scale")
        return mark_scaled(loss.float() * self.cur_scale) if self.settings.config.fp16.enabled else loss

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Computes the gradients of a loss, and adds them to those of the micro batches before. Every rank calls it.

        Args:
            loss: one number, the mean over this rank's micro batch.
            retain_graph: as in `torch.Tensor.backward`.
            scale_wrt_gas: divide the loss by the number of micro batches in a step.

        Returns:
            The loss, divided by that number if `scale_wrt_gas` is set.

        Raises:
            UsageError: there is no optimizer, or the loss has more than one element.
        """
        self._need_optimizer("backward")
        _check_loss(loss, "backward")
        if scale_wrt_gas:
            loss = loss / self.batch.accumulation
        self.observer.begin_backward(loss)
        self._reduce_next()
        with of_engine():
            (loss.float() * self.cur_scale).backward(retain_graph=retain_graph)
        self.observer.begin_reductions()
        for parameter in self._replicated:
            parameter.take_gradient()
        self.observer.end_backward()
        self._backwards += 1
        self._counted = True
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Updates the weights after the last micro batch of a step; after any other, counts the micro batch. Every rank
        calls it. `lr_kwargs`: arguments for the schedule's `step`. Raises UsageError if there is no optimizer,
        CastError if fp16 gradients overflow at the smallest loss scale.
        """
        self._need_optimizer("step")
        assert self.optimizer is not None
        self._applied, self._stepping, before = False, True, self.global_steps
        self.observer.begin_step()
        try:
            last = self.is_gradient_accumulation_boundary()
            if last:
                if not self._backwards and not self.pending_micro_steps:
                    _log.warning("engine.step() without a backward since the last step: all gradients are zero.")
                self.optimizer.step()
                if self._applied and self.lr_scheduler is not None:
                    self.lr_scheduler.step(**(lr_kwargs or {}))
                self._count_step()
        finally:
            self._stepping = False
        self.observer.end_step(last, before)
        self.micro_steps += 1
        self.pending_micro_steps = 0 if last else self.pending_micro_steps + 1

    def apply_gradients(self) -> None:
        """Updates the weights from the gradients that there are, and drops these: what the optimizer's `step` does.
        Raises CastError if fp16 gradients overflow at the smallest loss scale.
        """
        if self._stepping:
            self._update()
        else:  # the script decides when a step is complete
            before = self.global_steps
            self.observer.begin_step()
            self._update()
            managed = self.settings.config.managed_gradient_accumulation
            self.micro_steps += self.batch.accumulation - self.pending_micro_steps if managed else self._backwards
            self.pending_micro_steps = 0
            self._count_step()
            self.observer.end_step(True, before)

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last step's parts by name; empty without `wall_clock_breakdown`."""
        return self.observer.wall_clock

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the module's forward with `torch.compile`, once. `backend`, `compile_kwargs`: its arguments. Raises
        UnsupportedError for `schedule`, of DeepSpeed's own compiler passes, and `compiled_autograd_enabled`: they are not built.
        """
        if schedule is not None or compiled_autograd_enabled:
            what = "a schedule" if schedule is not None else "compiled_autograd_enabled"
            raise UnsupportedError(f"engine.compile with {what} is not built", remedy="Call it without that argument.")
        if not self.is_compiled:
            self.module.compile(**{**(compile_kwargs or {}), "backend": backend})
            self.is_compiled = True

    def empty_partition_cache(self) -> None:
        """Frees gathered parameters, and gives memory that torch keeps back to the device."""
        if self.whole is None:
            self.reshard()
        kind = accelerator()
        if kind is not None:
            torch.get_device_module(kind).empty_cache()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError("an engine cannot be copied", remedy="Copy its model: copy.deepcopy(engine.module).")

    def destroy(self) -> None:
        """Ends the run: a save in the background is completed, and gradients are dropped."""
        self.wait_for_checkpoint()
        self.zero_grad()

    def _update(self) -> None:
        assert self.optimizer is not None
        if self._unreduced:
            gradients.reduce_pending(self.module)
            self._unreduced = False
        self.reshard()
        grads = self._gradients()
        scale = self.cur_scale
        norm = self._global_norm(grads)
        overflow = norm is not None and not math.isfinite(norm) and self._checks_overflow()
        self._norm = float("inf") if overflow else None if norm is None else norm / scale
        change = self.scaler.update(overflow)
        self._applied, self.optimizer.overflow = not overflow, overflow
        if overflow:
            self.skipped_steps += 1
            if self.global_rank == 0:
                why = f"; {change}" if change else ""
                _log.warning("Step %d is skipped: its gradients are not finite%s.", self.global_steps + 1, why)
        else:
            self._multiply(grads, scale)
            self.optimizer.update_masters()
            for parameter in self._replicated:
                parameter.give_back()
        self.zero_grad()
        self.gather()

    def _count_step(self) -> None:
        self.global_steps += 1
        managed = self.settings.config.managed_gradient_accumulation
        micros = self.batch.accumulation if managed else self._backwards
        self.global_samples += self.batch.micro * micros * self.world_size
        self._backwards = 0
        every = self.settings.config.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            facts = self.global_steps, self.skipped_steps, self.get_lr(), self.get_mom()
            _log.info("step=%d, skipped=%d, lr=%s, mom=%s", *facts)

    def _gradients(self) -> list[torch.Tensor]:
        """The gradients of all masters, reduced; zeros for a parameter that had no part in any loss."""
        for parameter in self.sharded.parameters:
            parameter.bind()
            parameter.take_gradient()
        absent = [one.name for one in self.sharded.parameters if one.master is not None and one.master.grad is None]
        if absent and not self.settings.zero.ignore_unused_parameters:
            raise UsageError(
                "parameters without a gradient", found=examples(absent),
                remedy="Use them in the loss, or set zero_optimization.ignore_unused_parameters to true, which takes zeros.",
            )  # fmt: skip
        for master in self._masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        whole = {id(one.master) for one in self._replicated}
        mine = [master.grad for master in self._masters if id(master) in whole and master.grad is not None]
        if mine and self.world_size > 1:
            flat = torch.cat([grad.reshape(-1) for grad in mine]).to(self.device)
            dist.all_reduce(flat, op=dist.ReduceOp.SUM)
            flat /= self.world_size
            for grad, part in zip(mine, flat.split([grad.numel() for grad in mine]), strict=True):
                grad.copy_(part.view_as(grad))
        return [master.grad for master in self._masters if master.grad is not None]

    def _global_norm(self, grads: Sequence[torch.Tensor]) -> float | None:
        if not self.settings.zero.compute_grad_norm and not self._checks_overflow():
            return None
        squares = torch.stack(torch._foreach_norm(list(grads))).square() if grads else torch.zeros(1)
        return float(self._sum_over_shards(squares[None], self._masters).sum().sqrt())

    def _sum_over_shards(self, sums: torch.Tensor, masters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sums over the ranks that hold rows of the same parameters; a replicated one counts once."""
        if self.sharded.size == 1:
            return sums
        if self._replicated and self.sharded.rank:
            replicated = {id(parameter.master) for parameter in self._replicated}
            once = torch.tensor([id(master) in replicated for master in masters], device=sums.device)
            sums = sums.masked_fill(once, 0.0)
        total = sums.to(self.device)
        dist.all_reduce(total, group=self.sharded.group)
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

    def forward_ended(self, *_: Any) -> None:
        """A forward of the module, or of a part of it, has ended."""
        if self._direct is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._direct.attach()
            self._counted = False
            forget_scaled()

    def _begin_direct(self, scaled: bool) -> int:
        """A backward that the script has begun reaches the first parameter. Returns what its gradients are divided by."""
        if self.settings.config.fp16.enabled and not scaled and (self.scaler.dynamic or self.cur_scale != 1.0):
            raise UsageError(
                "loss.backward() without the loss scale that fp16 needs",
                expected=f"a loss multiplied by {self.cur_scale:g}",
                remedy="Call engine.backward(loss) or engine.scale(loss).backward() instead.",
            )
        self.observer.begin_backward(None)
        self._reduce_next()
        if not self._counted:
            self._backwards += 1
            self._counted = True
        return self.batch.accumulation

    def _reduce_next(self) -> None:
        """Sets what the next backward does with its gradients; see [Note: stages] in `shard`."""
        last = self.is_gradient_accumulation_boundary() or not self.settings.config.managed_gradient_accumulation
        root = self.module
        assert isinstance(root, FSDPModule)
        if self.settings.zero.stage < 2:
            root.set_requires_gradient_sync(last)
            self._unreduced = not last
        elif self.sharded.mesh.ndim == 2:
            root.set_requires_all_reduce(last)
            self._unreduced = not last

    def _need_optimizer(self, what: str) -> None:
        if self.optimizer is None:
            raise UsageError(
                f"{what} needs an optimizer, and this engine has none",
                remedy="Pass an optimizer to initialize, or add a section 'optimizer' to the config.",
            )


add_answers(Engine)


def _check_loss(loss: object, what: str) -> None:
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"{what} needs a loss that is a tensor", found=f"a {type(loss).__name__}",
            remedy="Pass what the forward returned, not its .item().",
        )  # fmt: skip
    if loss.numel() != 1:
        raise UsageError(
            f"{what} needs a loss of one element", found=f"a loss of shape {list(loss.shape)}",
            remedy="Reduce the loss first, for example with loss.mean().",
        )  # fmt: skip


def _to_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor
