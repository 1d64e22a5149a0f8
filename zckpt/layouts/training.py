"""What a run needs beside its weights to go on: optimizer states, settings, counters, schedules.

For the readers of ZeRO saves, which make it, and for the writers and the trainer. Masters are not in it: they are the
catalog's trainable parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from zckpt.catalog import TensorEntry
from zckpt.dtypes import DType
from zckpt.layouts.slices import Joint

Form = Literal["zero", "bf16"]
"""Who wrote the optimizer files: the ZeRO optimizers, or DeepSpeed's `BF16_Optimizer` (fp32 gradient accumulation)."""


@dataclass(frozen=True, slots=True)
class Group:
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
        raw: all that the first rank's optimizer file says, inert: what a universal checkpoint keeps of it.
        joined: parameter -> how its slices make up the whole, where the checkpoint has rules for that; a parameter that
            is not there is whole on every rank, or laid end to end in dimension 0.
    """

    groups: tuple[Group, ...]
    states: Mapping[str, Mapping[str, TensorEntry]]
    scaler: Mapping[str, object]
    model: Mapping[str, object]
    precision: DType
    form: Form = "zero"
    raw: Mapping[str, object] = field(default_factory=dict[str, object])
    joined: Mapping[str, Joint] = field(default_factory=dict[str, Joint])
