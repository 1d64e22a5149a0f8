"""A checkpoint on several nodes' disks, where each has the files of its own ranks: read as if all were on one.

For `loading`, under `use_node_local_storage`. Every rank gets the indexes of the files that it cannot see, and puts them into
sparse files of the same names and sizes in a directory of its own: all that reads a checkpoint reads these. Elements are not
in them. They come from a rank that sees the file, by the exchange that saving uses.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, InconsistentError, OutputError
from zckpt.core.catalog import TensorEntry, TensorPart
from zckpt.core.fragments import Fragment
from zckpt.core.plan import Pair, Plan
from zckpt.core.stores import FileStore
from zckpt.layouts.save.listing import is_deepspeed_file
from zckpt.layouts.save.module_states import index_of
from zckpt.layouts.save.pointers import latest_of
from zckpt.layouts.zero.same_layout import Held
from zckpt.live.plain_values import dtype_of
from zckpt.runtime.saves.exchange import Exchange, RankStore
from zckpt.runtime.saves.rounds import Rounds
from zckpt.runtime.sharding.parameter import ShardedParameter
from zckpt.runtime.training_run import TrainingRun
from zckpt.runtime.world import elements_of
from zckpt.storage.location import locate
from zckpt.team.meeting import Attempt, attempt, first_error

Value = TypeVar("Value")

Want = tuple[Held, ShardedParameter | None, torch.Tensor]
"""An entry, the parameter with the part of it that is wanted (None: all of it), and where that goes: a dense vector."""


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """A save with files on several nodes; `close` it.

    Attributes:
        run: that loads it.
        directory: that holds the tag, with all files in it.
        tag: the save.
        owners: file name -> the first rank that sees it.
        visible: by rank, the names of the files that it sees.
    """

    run: TrainingRun
    directory: str
    tag: str
    owners: Mapping[str, int]
    visible: Sequence[frozenset[str]]

    def close(self) -> None:
        """Removes the sparse files."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def fill(self, wanted: Sequence[Want]) -> None:
        """Fills tensors; every rank calls it, with the same entries in the same order. Raises this rank's own error
        before any element has moved; OutputError if another rank's.
        """
        run = self.run
        with Attempt() as tried:
            host = [
                tensor
                if tensor.device.type == "cpu" and tensor.is_contiguous()
                else torch.empty(tensor.shape, dtype=tensor.dtype)
                for *_, tensor in wanted
            ]
            pairs = list(self._pairs(wanted, host))
            places: dict[Hashable, torch.Tensor] = dict(enumerate(host))
            files = [self._key(name) for name in sorted(self.owners)]
            exchange = Exchange(run.global_rank, run.world_size, None, run.device, True, places.__getitem__, files)
            rounds = Rounds(exchange, Plan((), pairs))
        errors = _on_every_rank(run, lambda: None if tried.error is None else f"rank {run.global_rank}: {tried.error}")
        if tried.error is not None:
            raise tried.error
        for error in filter(None, errors):
            raise OutputError(
                "the load failed on another rank", file=self.directory, found=error,
                remedy="Mend what that rank reports, then start all ranks again.",
            )  # fmt: skip
        rounds.carry_out("")
        for (*_, tensor), copy in zip(wanted, host, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)

    def _key(self, name: str) -> Path:
        return Path(self.directory, self.tag, name)

    def _pairs(self, wanted: Sequence[Want], host: Sequence[torch.Tensor]) -> Iterator[Pair]:
        """What this rank wants, of files that it sees and of other ranks."""
        rank, size = self.run.global_rank, self.run.sharded.size
        for number, ((entry, parameter, _), tensor) in enumerate(zip(wanted, host, strict=True)):
            start, count = 0, entry.numel
            if parameter is not None and not parameter.replicated and size > 1:
                start, count = elements_of(parameter.shape, size, rank % size)
            if count:
                fragments = tuple(self._as_seen(fragment) for fragment in entry.fragments)
                dtype = dtype_of(tensor.dtype)
                assert isinstance(entry, TensorEntry)
                store = RankStore(entry.name, count * dtype.itemsize, rank=rank, key=number)
                target = TensorPart(entry.name, entry.shape, dtype, (Fragment(store, 0, start, count),))
                yield replace(entry, fragments=fragments, replicas=()), target

    def _as_seen(self, fragment: Fragment) -> Fragment:
        store = fragment.store
        assert isinstance(store, FileStore)
        name = os.path.basename(store.path)
        if name in self.visible[self.run.global_rank]:
            return fragment
        remote = RankStore(
            store.path, store.size, store.identity, store.byteorder, rank=self.owners[name], key=self._key(name)
        )
        return replace(fragment, store=remote)


def gather_indexes(run: TrainingRun, directory: str, tag: str | None) -> NodeFiles | None:
    """The save, if no rank sees all of it; None if every rank sees the same files. Every rank calls it. Raises
    ZckptError if some rank cannot read its files; every rank raises it, InconsistentError if `latest` differs from node
    to node, IncompleteError if no rank sees a `latest`.
    """
    if run.world_size == 1:
        return None
    tags = _on_every_rank(run, lambda: latest_of(locate(directory)) if tag is None else tag)
    known = sorted({one for one in tags if one is not None})
    if len(known) > 1:
        raise InconsistentError(
            "'latest' differs from node to node", file=directory, found=", ".join(map(repr, known)),
            remedy="Pass the tag of a save that every node has its files of: load_checkpoint(dir, tag=...).",
        )  # fmt: skip
    if not known:
        raise IncompleteError(
            "no node has a file 'latest' here", file=directory, remedy="Pass a tag: load_checkpoint(dir, tag=...)."
        )
    [tag] = known
    place = os.path.join(directory, tag)
    visible = [frozenset(names) for names in _on_every_rank(run, lambda: _names(place))]
    if len(set(visible)) == 1:
        return None
    owners = {
        name: next(rank for rank, one in enumerate(visible) if name in one) for name in frozenset().union(*visible)
    }
    mine = [name for name, owner in owners.items() if owner == run.global_rank]
    indexes = _on_every_rank(run, lambda: {name: index_of(os.path.join(place, name)) for name in mine})
    home = tempfile.mkdtemp(prefix="zckpt-nodes-")
    os.mkdir(os.path.join(home, tag))
    for name, (size, parts) in ((name, index) for one in indexes for name, index in one.items()):
        path = os.path.join(home, tag, name)
        if name in visible[run.global_rank]:
            os.symlink(os.path.abspath(os.path.join(place, name)), path)
            continue
        with open(path, "xb") as file:
            file.truncate(size)
            for offset, data in parts:
                os.pwrite(file.fileno(), data, offset)
    return NodeFiles(run, home, tag, owners, visible)


def _on_every_rank(run: TrainingRun, make: Callable[[], Value]) -> list[Value]:
    """Calls `make` on every rank and returns all results, by rank; an error of one rank is raised on all."""
    results: list[Any] = [None] * run.world_size
    dist.all_gather_object(results, attempt(make))
    return first_error(results)


def _names(place: str) -> list[str]:
    """The files of a save that this rank sees."""
    return [name for name in os.listdir(place) if is_deepspeed_file(name)] if os.path.isdir(place) else []
