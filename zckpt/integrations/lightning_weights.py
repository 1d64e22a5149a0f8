"""Consolidated weights beside the checkpoints of lightning's Trainer."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from zckpt.integrations.weights import OnError, WeightsWriter, When, beside
from zckpt.output.order import Overflow


class LightningWeights(Callback):  # type: ignore[misc,unused-ignore]
    """At each save of lightning's Trainer, or at the end, writes consolidated weights. Nothing is gathered.

        trainer = Trainer(strategy="deepspeed_stage_3", callbacks=[ModelCheckpoint(...), LightningWeights(part="model")])

    The weights of `epoch=0-step=500.ckpt`, a file or a directory, lie beside it in `epoch=0-step=500.weights`, and are
    deleted with it; at the end they lie in `weights` under `default_root_dir`. Works with DeepSpeedStrategy (stages 1 to 3),
    ModelParallelStrategy, DDP and on one device. With FSDPStrategy, rank 0 converts the checkpoint instead, if `part` is not
    given.

    Args:
        dtype: of floating-point parameters: "bf16", "fp16", "fp32"; None keeps each as it is trained.
        part: the attribute of the LightningModule that is the model, such as "model"; its names have no prefix then, and if it
            is a transformers model, `from_pretrained` loads the directory. By default the whole LightningModule.
        when: "save" for each save, "end" for the end of the training only.
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
        part: str | None = None,
        when: When = "save",
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
        self._part = part

    @property
    def failures(self) -> dict[str, Exception]:
        """Directory -> error, for those that could not be written or pushed."""
        return self._writer.failures

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called on every rank before the training: from now on, what saves and deletes checkpoints does so with weights."""
        if stage != "fit" or self._writer.when != "save" or hasattr(trainer.save_checkpoint, "__wrapped__"):
            return
        save, remove = trainer.save_checkpoint, trainer.strategy.remove_checkpoint

        @functools.wraps(save)
        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
            save(filepath, *args, **kwargs)
            self._write(pl_module, beside(os.fspath(filepath)), os.fspath(filepath))

        @functools.wraps(remove)
        def remove_checkpoint(filepath: Any) -> None:
            remove(filepath)
            weights = beside(os.fspath(filepath))
            if trainer.is_global_zero and os.path.exists(os.path.join(weights, "zckpt.json")):
                shutil.rmtree(weights, ignore_errors=True)

        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
        trainer.strategy.remove_checkpoint = remove_checkpoint  # type: ignore[method-assign]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called on every rank when the training is over."""
        if self._writer.when == "end":
            self._write(pl_module, os.path.join(trainer.default_root_dir, "weights"), None)
        self._writer.tell_of_failures()

    def _write(self, module: LightningModule, directory: str, checkpoint: str | None) -> None:
        model = module if self._part is None else getattr(module, self._part)
        self._writer.write(model, directory, checkpoint=checkpoint if self._part is None else None)
