"""A loader for `training_data` that knows its position; and the random generators of a process.

For `initialize(..., training_data=...)`. Every rank gets its own samples, shuffled again each epoch; epoch and batch are all
the state, so a resumed run continues with the next batch. torch's loader draws a seed whenever it is iterated: it gets a
generator of its own for that, so that the global one is at the same place in a run that was resumed inside an epoch.

The generators are Python's, torch's, the accelerator's by its kind, numpy's where it is in use; `run_state` saves and restores
them.
"""

from __future__ import annotations

import random
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zckpt.live.device import generator_state, set_generator_state
from zckpt.runtime.world import World


def rng_state() -> dict[str, Any]:
    """The states of this process's random generators, copied, without any class of numpy."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": (version, _text_of(words), gauss), "torch": torch.get_rng_state()}
    on_device = generator_state()
    if on_device is not None:
        state[on_device[0]] = on_device[1]
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
        if "key" in (inner := state["numpy"]["state"]):
            inner["key"] = _text_of(inner["key"])
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores what `rng_state` returned; generators that it does not have, or that are missing here, stay as they are."""
    if "python" in state:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(_words_of(words)), gauss))
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    set_generator_state(state)
    if "numpy" in state:
        import numpy

        inner = dict(state["numpy"]["state"])
        if "key" in inner:
            inner["key"] = numpy.asarray(_words_of(inner["key"]), dtype=numpy.uint32)
        numpy.random.set_state({**state["numpy"], "state": inner})


def _text_of(words: Sequence[int]) -> str:
    """Hundreds of words of 32 bits as one text: a pickle that is read without running it takes a step for each number."""
    return struct.pack(f"<{len(words)}I", *words).hex()


def _words_of(words: str | Sequence[int]) -> Sequence[int]:
    """The words of a text; saves of older versions have the words themselves."""
    return struct.unpack(f"<{len(words) // 8}I", bytes.fromhex(words)) if isinstance(words, str) else words


class Loader:
    """Micro batches of this rank; one `for` loop over it is one epoch, or what is left of it.

    Args:
        dataset: with length and items, or iterable; an iterable one has to give each rank its own samples.
        batch_size: samples per micro batch.
        world: all ranks.
        collate_fn: makes a batch of samples; by default torch's own.
        drop_last: leave out the last samples if they do not fill a batch.
        seed: of the order of samples.

    Attributes:
        epoch: the epoch that the next batch belongs to.
        batch: its number in the epoch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        world: World,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        seed: int = 0,
    ) -> None:
        self.epoch = self.batch = 0
        self._batch_size, self._seed = batch_size, seed
        self._generator = torch.Generator()
        sampler: DistributedSampler[Any] | None = None
        if not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(
                dataset, num_replicas=world.size, rank=world.rank, seed=seed, drop_last=drop_last
            )
        self._sampler, self._dataset, self._drop_last = sampler, dataset, drop_last
        self._load: Callable[..., DataLoader[Any]] = partial(
            DataLoader,
            dataset,
            batch_size=batch_size,
            collate_fn=collate_fn,
            drop_last=drop_last,
            pin_memory=world.device.type != "cpu",
            generator=self._generator,
        )

    def __len__(self) -> int:
        samples = len(self._sampler) if self._sampler is not None else len(self._dataset)  # type: ignore[arg-type]
        return samples // self._batch_size if self._drop_last else -(-samples // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        skip, rest = self.batch, None
        self._generator.manual_seed(self._seed + self.epoch)
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
            rest = list(self._sampler)[skip * self._batch_size :]
            skip = 0
        before = rng_state() if skip else None
        batches = iter(self._load(sampler=rest))
        if before is not None:  # samples that were used before: what they draw from the generators was drawn then
            for _ in islice(batches, skip):
                pass
            set_rng_state(before)
        for batch in batches:
            self.batch += 1
            yield batch
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The position: `epoch`, and `batch` in it."""
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Sets the position; the batch after it is the next one."""
        self.epoch, self.batch = state_dict["epoch"], state_dict["batch"]


def repeat(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of all epochs, one after another."""
    while True:
        yield from loader


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same lists, tuples and dicts with what a function makes of their tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {name: map_tensors(change, one) for name, one in value.items()}
        return changed if isinstance(value, defaultdict) else type(value)(changed)
    return type(value)([map_tensors(change, one) for one in value]) if isinstance(value, tuple | list) else value
