"""Writes a model's consolidated weights in the middle of somebody else's training loop, and never stops that loop by itself.

For `trainer_weights` and `lightning_weights`, on every rank. The weights come from memory, each rank's part from that rank
(`live.save_pretrained`). Where zckpt cannot take them from memory (FSDP1, states on NVMe), rank 0 converts the checkpoint that
the loop has just written; the attempt has shown that all ranks have come so far, so all of its files are there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError, UsageError, ZckptError
from zckpt.base.sizes import file_bytes
from zckpt.base.words import count
from zckpt.hub import push_to_hub
from zckpt.jobs.convert import convert
from zckpt.jobs.options import Options
from zckpt.live.export import save_pretrained
from zckpt.output.order import Overflow

_log = logging.getLogger("zckpt.integrations")

When = Literal["save", "end"]
OnError = Literal["log", "raise"]


@dataclass(frozen=True, slots=True)
class WeightsWriter:
    """Writes weights, and remembers what went wrong; see `TrainerWeights` for how. `failures`: directory -> error, for those that
    could not be written or pushed.
    """

    dtype: str | None = "bf16"
    max_shard_size: int | str = "5GB"
    exclude_frozen: bool = False
    overflow: Overflow = "error"
    push_to: str | None = None
    push_options: Mapping[str, Any] | None = None
    on_error: OnError = "log"
    when: When = "save"
    failures: dict[str, Exception] = field(default_factory=dict[str, Exception])

    def __post_init__(self) -> None:
        file_bytes(self.max_shard_size, "max_shard_size")
        for name, known in {"on_error": ("log", "raise"), "when": ("save", "end")}.items():
            if getattr(self, name) not in known:
                raise UsageError(
                    f"{name} has a value that the callback does not know", found=repr(getattr(self, name)),
                    expected=" or ".join(map(repr, known)), remedy=f"Pass {name}={known[0]!r} or {name}={known[1]!r}.",
                )  # fmt: skip

    def write(self, model: nn.Module, directory: str, *, checkpoint: str | None = None, companion: Any = None) -> bool:
        """Writes a model's weights, as `live.save_pretrained` takes it, to a directory that `from_pretrained` loads; it is made
        if it is missing. Every rank calls it, between two steps. `checkpoint`: what the loop has just saved, with the same names;
        read if the memory cannot be. `companion`: has a method `save_pretrained(directory)`, such as a tokenizer; saved beside
        the weights. Returns whether this rank did its part. Raises Exception, whatever went wrong, with `on_error="raise"`;
        otherwise it is logged, and training continues.
        """
        try:
            self._write(model, directory, checkpoint, companion)
        except Exception as error:
            if self.on_error == "raise":
                raise
            self.failures[directory] = error
            if _is_first():
                told = str(error) if isinstance(error, ZckptError) else f"{type(error).__name__}: {error}"
                _log.error("The weights were not written to %s; training continues. %s", directory, told)
            return False
        return True

    def tell_of_failures(self) -> None:
        """Reports again, at the end of a run, where weights are missing."""
        if self.failures and _is_first():
            number, places = count(len(self.failures), "directory", "directories"), ", ".join(self.failures)
            _log.error("Weights are missing or were not pushed in %s: %s", number, places)

    def _write(self, model: nn.Module, directory: str, checkpoint: str | None, companion: Any) -> None:
        frozen, overflow = self.exclude_frozen, self.overflow
        try:
            save_pretrained(model, directory, self.dtype, self.max_shard_size, exclude_frozen=frozen, overflow=overflow)
        except UnsupportedError:
            if checkpoint is None or frozen:
                raise
            if _is_first():
                made = Options(max_shard_size=self.max_shard_size, overflow=overflow)
                convert(checkpoint, directory, dtype=self.dtype or "fp32", options=made, progress=False)
        if not _is_first():
            return
        if hasattr(companion, "save_pretrained"):
            companion.save_pretrained(directory)
        if self.push_to is not None:
            push_to_hub(directory, self.push_to, **(self.push_options or {}))


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def beside(checkpoint: str) -> str:
    """The directory for the weights of a checkpoint that is one file, or another library's directory: beside it."""
    return f"{os.path.splitext(checkpoint)[0]}.weights"
