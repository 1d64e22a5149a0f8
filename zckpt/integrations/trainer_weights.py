"""Consolidated weights beside the checkpoints of transformers' Trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from zckpt.integrations.weights import OnError, WeightsWriter, When
from zckpt.output.order import Overflow


class TrainerWeights(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """At each save of the Trainer, or at the end, writes consolidated weights that `from_pretrained` loads. Nothing is gathered.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[TrainerWeights(dtype="bf16")])

    Works under DeepSpeed's stages 1 to 3, under zckpt's trainer, FSDP2, DDP and on one device. The weights are the
    optimizer's fp32 weights, rounded to `dtype`. They lie in `weights` inside the checkpoint's directory, which the Trainer
    deletes together; at the end in `weights` inside the output directory. The tokenizer, or what else is the Trainer's
    `processing_class`, is saved with them.

    Args:
        dtype: of floating-point parameters: "bf16", "fp16", "fp32"; None keeps each as it is trained.
        when: "save" for each save, "end" for the end of the training only.
        directory: the name inside the checkpoint, or the output directory.
        max_shard_size: of a weights file.
        exclude_frozen: leave out parameters that are not trained.
        overflow: what to do with numbers too large for `dtype`: "error", "inf" or "clamp".
        push_to: "owner/name", to which the weights are pushed as soon as they are written; rank 0 does it while others wait.
        push_options: further arguments of `zckpt.push_to_hub`: `private`, `token`, ...
        on_error: "log" logs errors of writing and pushing, and training continues; "raise" raises them.

    Attributes:
        failures: directory -> error, for those that could not be written or pushed.

    Raises:
        UsageError: `when` or `on_error` has a value that is not known.
    """

    def __init__(
        self,
        dtype: str | None = "bf16",
        *,
        when: When = "save",
        directory: str = "weights",
        max_shard_size: int | str = "5GB",
        exclude_frozen: bool = False,
        overflow: Overflow = "error",
        push_to: str | None = None,
        push_options: Mapping[str, Any] | None = None,
        on_error: OnError = "log",
    ) -> None:
        self._writer = WeightsWriter(
            dtype, max_shard_size, exclude_frozen, overflow, push_to, push_options, on_error, when
        )
        self._directory = directory

    @property
    def failures(self) -> dict[str, Exception]:
        """Directory -> error, for those that could not be written or pushed."""
        return self._writer.failures

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called by the Trainer on every rank when a checkpoint is written."""
        if self._writer.when == "save":
            checkpoint = os.path.join(str(args.output_dir), f"checkpoint-{state.global_step}")
            self._write(checkpoint, checkpoint, kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called by the Trainer on every rank when the training is over."""
        if self._writer.when == "end":
            self._write(str(args.output_dir), None, kwargs)
        self._writer.tell_of_failures()

    def _write(self, home: str, checkpoint: str | None, given: Mapping[str, Any]) -> None:
        self._writer.write(
            given["model"],
            os.path.join(home, self._directory),
            checkpoint=checkpoint,
            companion=given.get("processing_class"),
        )
