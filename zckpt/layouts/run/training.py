"""What a run needs beside its weights to continue: optimizer states, settings, counters, schedules.

Families read it (`read_training`), and writers and the trainer use it. Masters are not in it: they are the catalog's
trainable parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Literal

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import OTHER_SAVE, InconsistentError
from zckpt.containers import Placeholder
from zckpt.core.catalog import Padding, TensorEntry, held_by
from zckpt.core.claims import Claim, Claims
from zckpt.core.dtypes import F16, DType
from zckpt.layouts.joining.slices import Joint
from zckpt.layouts.run.values import is_plain

Form = Literal["zero", "bf16"]
"""The writer of the optimizer files: a ZeRO optimizer, or DeepSpeed's `BF16_Optimizer` (fp32 gradient accumulation)."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group of the optimizer.

    Attributes:
        names: its parameters, in the order in which the model's optimizer was given them.
        settings: learning rate, betas and so on; inert values.
        scalars: states that are one value for the whole group, such as the step: numbers, or tensors of one element.
        states: names of the states that each element of a parameter has, such as `exp_avg`.
    """

    names: tuple[str, ...]
    settings: Mapping[str, object]
    scalars: Mapping[str, object]
    states: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Training:
    """The state of a training run, beside its weights.

    Attributes:
        groups: of the optimizer.
        states: parameter -> state -> its elements, in the parameter's shape.
        scaler: the loss scaler and what DeepSpeed keeps beside it: `loss_scaler`, `dynamic_loss_scale`, `overflow`,
            `clip_grad`; inert values, absent where they were not saved.
        model: everything of the model file but weights and what is derived from them: counters, `lr_scheduler`,
            `ds_config`, client state; inert values.
        precision: dtype of the module's own weights.
        form: who wrote the optimizer files.
        raw: everything in the first rank's optimizer file, inert: a universal checkpoint keeps some of it.
        joined: parameter -> how its slices make up the whole, where the checkpoint has rules for that; a parameter that
            is not there is whole on every rank, or laid end to end in dimension 0.
        beside: what a rank's optimizer file holds beside DeepSpeed's own entries; for writing.
        padding: what of the states belongs to no parameter, or is what others hold too.
        other_shapes: parameter -> state -> tensor, of states that do not have a number for each element of the parameter, such
            as the scales and tables of quantised ones.
        state_names: parameter or buffer -> its name in the model's state dict, where that is another one.
        also_frozen: names of trained parameters that were frozen when the save was written (layers that take turns).
        claims: what all states and the padding read; made again when these are others.
    """

    groups: tuple[ParameterGroup, ...]
    states: Mapping[str, Mapping[str, TensorEntry]]
    scaler: Mapping[str, object]
    model: Mapping[str, object]
    precision: DType
    form: Form = "zero"
    raw: Mapping[str, object] = field(default_factory=dict[str, object])
    joined: Mapping[str, Joint] = field(default_factory=dict[str, Joint])
    beside: Mapping[str, object] = field(default_factory=dict[str, object])
    padding: tuple[Padding, ...] = ()
    other_shapes: Mapping[str, Mapping[str, TensorEntry]] = field(
        default_factory=dict[str, "Mapping[str, TensorEntry]"]
    )
    state_names: Mapping[str, str] = field(default_factory=dict[str, str])
    also_frozen: tuple[str, ...] = ()
    claims: Claims = field(default_factory=Claims, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks that no two states are the same bytes. Raises InconsistentError if two are."""
        if not self.claims.include(self._held()):
            object.__setattr__(self, "claims", Claims(self._held()))

    def _held(self) -> Iterator[Claim]:
        named = ((f"{state} of {name}", entry) for name, own in self.states.items() for state, entry in own.items())
        return held_by(named, self.padding)

    def state(self, name: str, state: str) -> TensorEntry:
        """One state of a parameter. Raises InconsistentError if it has no state of that name, though other parameters
        have.
        """
        found = self.states.get(name, {}).get(state)
        if found is None:
            raise InconsistentError(f"there is no optimizer state {state!r} of parameter {name!r}", remedy=OTHER_SAVE)
        return found

    def states_of(self, name: str, group: ParameterGroup) -> Mapping[str, TensorEntry]:
        """All states of a parameter of a group. Raises InconsistentError if it has none, though the group has some."""
        if name not in self.states and group.states:
            self.state(name, group.states[0])
        return self.states.get(name, {})


def new_scaler(precision: DType) -> Placeholder:
    """DeepSpeed's loss scaler at the start of a run: a dynamic one from 2^16 for fp16, otherwise one that does nothing.

    Source: runtime/fp16/loss_scaler.py (0.19.8).
    """
    module = "deepspeed.runtime.fp16.loss_scaler"
    if precision != F16:
        state: dict[str, object] = {"cur_scale": 1.0, "dynamic": False}
        return Placeholder(module, "LossScaler", (), state, called=True, new=True)
    state = {
        "cur_scale": 65536.0, "dynamic": True, "cur_iter": 0, "last_overflow_iter": -1, "scale_factor": 2.0,
        "scale_window": 1000, "min_scale": 1, "delayed_shift": 2, "cur_hysteresis": 2, "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True, "dtype": F16,
    }  # fmt: skip
    return Placeholder(module, "DynamicLossScaler", (), state, called=True, new=True)


def client_state(root: Mapping[str, object], steps: int | None) -> dict[str, object]:
    """The counters that DeepSpeed needs in every save, and the numbers, texts and lists of these in a trainer's own
    file.

    Args:
        root: what the file holds.
        steps: optimizer steps, or None where it does not say.
    """
    rest = {key: value for key, value in root.items() if value is not None and is_plain(value)}
    return {**rest, "global_steps": steps or 0, "skipped_steps": 0, "ds_version": "0.19.8"}


_MEGATRONS_OWN = re.compile(r"params|.*_mult|is_.*|default_config|(?:max|min)_lr|(?:pre|param|start|end)_.*|step")
"""Settings of a group that only Megatron's schedules read."""


def kept_settings(group: Mapping[str, object]) -> dict[str, object]:
    """The settings of a group of Megatron's that any optimizer has."""
    kept = {str(key): value for key, value in group.items() if not _MEGATRONS_OWN.fullmatch(str(key))}
    return {**kept, "weight_decay": 0.0} if group.get("wd_mult") == 0 else kept
