"""Wraps the optimizer on the masters as `initialize` returns it: scripts step, schedule and save it; and scales losses in fp16.

For `start` and `engine`. It stands in front of the optimizer on the masters, and makes of `step()` the engine's whole update:
gradients are reduced, checked for overflow, unscaled and clipped, and the updated weights come back to the model.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py `step`, `zero_grad`, `loss_scale`, `set_lr`.

Losses in fp16 are scaled by a fixed number, or by one that follows the gradients. A step with gradients that overflow is skipped
on every rank; each overflow uses up one of `hysteresis` chances, and the last one halves the scale. `loss_scale_window` steps
without overflow double it and give the chances back.
Source: DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py. tests/runtime/test_precision.py runs both side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zckpt.base.errors import CastError, UsageError
from zckpt.runtime.config.sections import FP16


class LossScaler:
    """The scale that losses are multiplied with before backward; `dynamic`: it follows the gradients."""

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = scale
        self.dynamic = False

    def update(self, overflow: bool) -> str | None:
        """Counts a step. Returns what happened to the scale after an overflow, as part of a sentence."""
        return "the loss scale is fixed" if overflow and self.cur_scale != 1.0 else None

    def state(self) -> dict[str, float | int | bool]:
        """Everything that a resumed run needs."""
        return {"cur_scale": self.cur_scale}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned; names that are missing keep their values."""
        for name in self.state():
            setattr(self, name, state.get(name, getattr(self, name)))


class DynamicLossScaler(LossScaler):
    """A scale that follows the gradients."""

    def __init__(self, config: FP16) -> None:
        super().__init__(2.0**config.initial_scale_power)
        self.dynamic = True
        self.window = config.loss_scale_window
        self.min_scale = float(config.min_loss_scale)
        self.hysteresis = config.hysteresis
        self.consecutive_hysteresis = config.consecutive_hysteresis
        self.cur_hysteresis = config.hysteresis
        self.cur_iter = 0
        self.last_overflow_iter = -1

    def update(self, overflow: bool) -> str | None:
        """Adjusts the scale after a step; says how, after an overflow. Raises CastError for one at the least scale."""
        stable, self.cur_iter = self.cur_iter - self.last_overflow_iter - 1, self.cur_iter + 1
        if not overflow:
            grows = stable > 0 and stable % self.window == 0
            if self.consecutive_hysteresis or grows:
                self.cur_hysteresis = self.hysteresis
            self.cur_scale *= 2 if grows else 1
            return None
        self.last_overflow_iter = self.cur_iter - 1
        if self.cur_hysteresis > 1 and self.hysteresis > 1:
            self.cur_hysteresis -= 1
            return f"the loss scale stays {self.cur_scale:g}, hysteresis falls to {self.cur_hysteresis}"
        if self.cur_scale == self.min_scale:
            raise CastError(
                "the gradients overflow fp16 at the smallest loss scale",
                found=f"loss scale {self.cur_scale:g}, which is fp16.min_loss_scale",
                remedy="Check the loss and the learning rate of the last steps, or train in bf16.",
            )
        before, self.cur_scale = self.cur_scale, max(self.cur_scale / 2, self.min_scale)
        return f"the loss scale falls from {before:g} to {self.cur_scale:g}"

    def state(self) -> dict[str, float | int | bool]:
        """Everything that a resumed run needs."""
        return {
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "cur_hysteresis": self.cur_hysteresis,
        }


def loss_scaler(config: FP16) -> LossScaler:
    """The scaler for the section `fp16`; without fp16, one of scale 1."""
    if not config.enabled:
        return LossScaler()
    return LossScaler(config.loss_scale) if config.loss_scale else DynamicLossScaler(config)


_OWN = "zckpt"


def _of_inner(name: str, doc: str) -> property:
    """An attribute that is the optimizer's on the masters."""
    return property(
        lambda self: getattr(self.optimizer, name), lambda self, value: setattr(self.optimizer, name, value), doc=doc
    )


class EngineOptimizer(Optimizer):
    """An optimizer on master weights, as a script holds it.

    `step` does what the engine's step does at the end of its micro batches, except that it neither steps the engine's schedule
    nor waits for `gradient_accumulation_steps`: who calls it decides when. It uses the gradients up. All that it does not have
    is the optimizer's on the masters.

    Attributes:
        optimizer: the optimizer on the masters.
        engine: with the weights that it updates, once `initialize` has made it.
        overflow: whether the last step was skipped, because its gradients were not finite.
        before_change: called before its step and before anybody gets its states, who may change them; None where that is
            nobody's concern.
    """

    engine: Any

    def __init__(self, optimizer: Optimizer) -> None:  # Optimizer's own constructor would make groups of its own
        self.optimizer = optimizer
        self.overflow = False
        self.custom_loss_scaler = False
        self.before_change: Callable[[], None] | None = None
        self._updating = False
        optimizer.register_step_pre_hook(self._refuse_alone)

    param_groups: Any = _of_inner("param_groups", "The parameter groups, of masters.")
    defaults: Any = _of_inner("defaults", "The settings of groups that name none.")

    @property
    def state(self) -> Any:
        """The states, by master."""
        self._wait()
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the weights from the gradients that there are, and drops these. Every rank calls it. Raises
        UsageError if there is a closure, CastError if fp16 gradients overflow at the smallest loss scale.
        """
        if closure is not None:
            raise UsageError(
                "optimizer.step takes no closure",
                remedy="Compute the loss and call engine.backward(loss) before optimizer.step().",
            )
        self.engine.apply_gradients()

    def update_masters(self) -> None:
        """One step of the optimizer on the masters, for the engine."""
        self._wait()
        self._updating = True
        try:
            self.optimizer.step()
        finally:
            self._updating = False

    def _wait(self) -> None:
        if self.before_change is not None:
            self.before_change()

    def _refuse_alone(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._updating:
            raise UsageError(
                "the step of an optimizer that was given to initialize does not train the model",
                remedy="Call engine.step(), or step() of the optimizer that initialize returned.",
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, those of the micro batches since the last step too."""
        self.engine.zero_grad(set_to_none)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Calls the engine's `backward`."""
        self.engine.backward(loss, retain_graph=retain_graph)

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward; 1 without fp16."""
        return self.loss_scaler.cur_scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self.loss_scaler.cur_scale = float(scale)

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the gradients."""
        return self.loss_scaler.dynamic

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scaler."""
        scaler: LossScaler = self.engine.scaler
        return scaler

    @property
    def _global_grad_norm(self) -> float | None:
        norm: float | None = self.engine.get_global_grad_norm()
        return norm

    def get_lr(self) -> float:
        """The learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as torch has it, with this rank's masters and the loss scale under a key of their own."""
        masters = [[master.data for master in group["params"]] for group in self.param_groups]
        own = {"masters": masters, "scaler": self.engine.scaler.state()}
        return {**self.optimizer.state_dict(), _OWN: own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave, on the same rank of as many; the weights follow the masters. Every rank
        calls it. Raises UsageError if it is of another rank, or of another model.
        """
        own = state_dict.get(_OWN)
        if own is not None:
            masters = [list(group["params"]) for group in self.param_groups]
            found = [[tuple(master.shape) for master in group] for group in own["masters"]]
            expected = [[tuple(master.shape) for master in group] for group in masters]
            if found != expected:
                raise UsageError(
                    "the optimizer's state does not fit this rank", found=f"masters of shapes {found[:1]}",
                    expected=f"masters of shapes {expected[:1]}",
                    remedy="Use engine.save_checkpoint and engine.load_checkpoint, which fit a run to any number of ranks.",
                )  # fmt: skip
        self.optimizer.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        if own is None:
            return
        self.engine.reshard()
        for group, saved in zip(self.param_groups, own["masters"], strict=True):
            for master, before in zip(group["params"], saved, strict=True):
                master.copy_(before)
        self.engine.scaler.load_state(own["scaler"])
        self.engine.gather()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: what is trained is decided when the model is sharded. Raises UsageError always."""
        raise UsageError(
            "a parameter group cannot be added after initialize",
            found=f"a group of {len(list(param_group.get('params', ())))} parameters",
            remedy="Pass all groups to initialize(model_parameters=...); give those that train later a learning rate of 0.",
        )

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        if name == "engine":
            remedy = "Use the optimizer after initialize has returned."
            raise UsageError("the optimizer has no engine yet", remedy=remedy)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)
