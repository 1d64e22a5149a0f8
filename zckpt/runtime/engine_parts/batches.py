"""The engine's methods on whole batches: `train_batch`, `eval_batch`, loaders, batch sizes and learning rates.

For `engine`. Source: DeepSpeed 0.19.8, runtime/engine.py, and runtime/pipe/engine.py for `train_batch` and `eval_batch`, which
here take any model with a forward that returns the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zckpt.base.errors import UsageError
from zckpt.base.words import count
from zckpt.runtime.config.read import BatchSizes
from zckpt.runtime.loader import Loader, map_tensors, repeat
from zckpt.runtime.training_run import TrainingRun


class Batches(TrainingRun):
    """What an engine does with whole batches."""

    _batches: Iterator[Any] | None = None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Sets the iterator that `train_batch` uses when it is called without one."""
        self._batches = iterator

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Trains one optimizer step: forward, backward and step of each micro batch. Every rank calls it.

        `data_iter` gives the micro batches; by default `training_data`, again and again. A dict goes to the model as keyword
        arguments, a tuple or list as positional ones, anything else as the only one. Returns the mean of the losses over
        micro batches and ranks. Raises UsageError if there is nothing to take batches from, gradients are disabled, or the
        model returns no loss.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                "train_batch is called with gradients disabled", remedy="Call eval_batch there, or leave torch.no_grad().",
            )  # fmt: skip
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        if self._batches is None:
            if self.training_dataloader is None:
                raise UsageError(
                    "train_batch has no data", remedy="Pass an iterator: train_batch(data_iter=iter(loader)). Or pass "
                    "training_data to initialize.",
                )  # fmt: skip
            self._batches = repeat(self.training_dataloader)
        self.train()
        losses = []
        for _ in range(self.batch.accumulation - self.pending_micro_steps):
            loss = _loss_of(self._called(next(self._batches)))
            self.backward(loss)
            self.step()
            losses.append(loss.detach())
        return self._mean(losses)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluates micro batches without gradients. Every rank calls it. The module is in evaluation mode afterwards.

        Args:
            data_iter: gives the micro batches, as for `train_batch`.
            return_logits: return the model's results too.
            compute_loss: the model's result is, or begins with, a loss; False returns the results as they are.
            reduce_output: "avg" for the mean over micro batches; None for a list of this rank's.
            bcast_loss: for DeepSpeed's sake; every rank gets the mean over ranks.
            num_micro_batches: how many; by default those of an optimizer step.

        Returns:
            The mean of the losses, or what `reduce_output` and `compute_loss` say; with `return_logits` a tuple of that and
            the results.

        Raises:
            UsageError: the model returns no loss, or `reduce_output` is neither "avg" nor None.
        """
        if reduce_output not in ("avg", None):
            raise UsageError(
                f"eval_batch has no reduce_output {reduce_output!r}", expected="'avg', or None",
                remedy="Pass one of these.",
            )  # fmt: skip
        self.eval()
        with torch.no_grad():
            rounds = self.batch.accumulation if num_micro_batches is None else num_micro_batches
            results = [self._called(next(data_iter)) for _ in range(rounds)]
            found: Any = results
            if compute_loss:
                found = [_loss_of(result) for result in results]
                if reduce_output == "avg":
                    found = self._mean(found)
        return (found, results) if return_logits else found

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader of this rank's micro batches.

        Args:
            dataset: with length and items, or iterable.
            batch_size: samples per micro batch; by default those of a forward.
            route: "train" shuffles again each epoch; "eval" and "predict" keep the dataset's order.
            pin_memory: page-locked host memory, if there is an accelerator.
            data_sampler: chooses the samples; by default each rank gets its share.
            collate_fn: makes a batch of samples; by default the one that `initialize` got, or torch's own.
            num_local_io_workers: processes that load; by default none.

        Returns:
            A `Loader`, which knows its position; with a sampler, workers or another route than "train" torch's `DataLoader`.

        Raises:
            UsageError: there is no such route.
        """
        if route not in ("train", "eval", "predict"):
            raise UsageError(
                f"deepspeed_io has no route {route!r}", expected="'train', 'eval' or 'predict'",
                remedy="Pass one of these.",
            )  # fmt: skip
        size, drop_last = batch_size or self.batch.micro, self.settings.config.dataloader_drop_last
        collate_fn = collate_fn or self.collate_fn
        if route == "train" and data_sampler is None and not num_local_io_workers:
            return Loader(dataset, size, self.world, collate_fn=collate_fn, drop_last=drop_last)
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            ranks, rank = self.world_size, self.global_rank
            data_sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=route == "train")
        return DataLoader(
            dataset, batch_size=size, sampler=data_sampler, collate_fn=collate_fn, drop_last=drop_last,
            num_workers=num_local_io_workers or 0, pin_memory=pin_memory and self.device.type != "cpu",
        )  # fmt: skip

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Sets the samples per optimizer step over all ranks: other micro batches per step, of the same size. Raises
        UsageError if they are not a multiple of the micro batches of all ranks, or a step has begun.
        """
        per_forward = self.batch.micro * self.world_size
        if train_batch_size <= 0 or train_batch_size % per_forward:
            raise UsageError(
                "the new batch size is not a multiple of one forward of all ranks", found=f"{train_batch_size:,} samples",
                expected=f"a multiple of {self.batch.micro:,} x {count(self.world_size, 'rank')} = {per_forward:,}",
                remedy="Choose such a number, or call set_train_micro_batch_size first.",
            )  # fmt: skip
        if self.pending_micro_steps:
            raise UsageError(
                "the batch size is set in the middle of a step",
                found=f"{count(self.pending_micro_steps, 'micro batch', 'micro batches')} since the last one",
                remedy="Call it right after a step: engine.is_gradient_accumulation_boundary() says which is the last.",
            )
        self.batch = BatchSizes(train_batch_size, self.batch.micro, train_batch_size // per_forward)
        # so that the next step has all its micro batches
        self.micro_steps = self.global_steps * self.batch.accumulation

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Sets the samples per rank and forward; the forwards per step stay, and so does the loader's batch size."""
        accumulation = self.batch.accumulation
        self.batch = BatchSizes(micro_batch_size * accumulation * self.world_size, micro_batch_size, accumulation)

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Sets the learning rate of all parameter groups: one number, or one per group. A schedule sets it again.
        Raises UsageError if there are not as many numbers as groups.
        """
        rates = [lr] * len(self.groups) if isinstance(lr, int | float) else list(lr)
        if len(rates) != len(self.groups):
            raise UsageError(
                "set_lr got another number of rates than there are groups", found=f"{len(rates):,}",
                expected=count(len(self.groups), "rate"), remedy="Pass one number, or one per parameter group.",
            )  # fmt: skip
        for group, rate in zip(self.groups, rates, strict=True):
            group["lr"] = float(rate)

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Wraps several backwards of a step. DeepSpeed reduces once; here each is reduced, to the same sum."""
        yield

    def _called(self, batch: Any) -> Any:
        batch = map_tensors(lambda tensor: tensor.to(self.device), batch)
        if isinstance(batch, dict):
            return self(**batch)
        return self(*batch) if isinstance(batch, tuple | list) else self(batch)

    def _mean(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.stack([loss.detach().float() for loss in losses]).mean()
        if self.world_size > 1:
            dist.all_reduce(total)
        return total / self.world_size


def _loss_of(result: Any) -> torch.Tensor:
    """The loss in a model's result. Raises UsageError if there is none."""
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", result)
    if isinstance(loss, tuple | list) and loss:
        loss = loss[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError(
            "the model returns no loss", found=f"a {type(loss).__name__}",
            expected="a tensor of one element, first in a tuple, or named loss",
            remedy="Let the model's forward return the loss, or call engine(batch), engine.backward(loss) and engine.step().",
        )  # fmt: skip
    return loss.reshape(())
