"""Saving a run: every rank writes its own files under a temporary name, and a save appears whole or not at all.

For `Engine.save_checkpoint`.
[Note: the order of a save]
1. All ranks meet; one per file system (the *leader*) takes the save's work directory beside the tags, and finishes what killed
runs have left. Everything that can be refused is refused now.
2. Every rank writes and syncs its files there.
3. When all have, leaders seal the save and give it the tag's name, by `zckpt.output`'s protocol.
4. When all have, `latest` is replaced, by a rename; then older tags are pruned.
Killed before 3, a save has left nothing but a directory whose name begins with a dot; before 4, `latest` names the save before,
or, if that is the one that is replaced, either of the two.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zckpt.base.errors import InconsistentError, UsageError
from zckpt.base.words import count, joined, ranks, size
from zckpt.core.catalog import TensorPart
from zckpt.core.dtypes import U8
from zckpt.core.fragments import FileStore, Fragment, MemoryStore, Store
from zckpt.core.plan import OutputFile
from zckpt.engine import move
from zckpt.layouts.zero import write_unsharded
from zckpt.layouts.zero.torch_files import Laid, Pair
from zckpt.layouts.zero.write import lay_out_rank
from zckpt.output.saves import STAGED
from zckpt.runtime.checkpoints import rank_states
from zckpt.runtime.checkpoints.attempt import Attempt
from zckpt.runtime.checkpoints.background import Saving
from zckpt.runtime.checkpoints.description import (
    Described,
    describe,
    describe_training,
    signature,
    target_of,
    tensors_of,
)
from zckpt.runtime.checkpoints.exchange import Exchange
from zckpt.runtime.checkpoints.publication import Publication
from zckpt.runtime.checkpoints.rank_states import digest_of
from zckpt.runtime.checkpoints.rounds import Rounds, Streamed
from zckpt.runtime.checkpoints.state import RunState, capture
from zckpt.runtime.checkpoints.tags import check_tag
from zckpt.runtime.run import TrainingRun
from zckpt.runtime.sharded.offload import home_of
from zckpt.team.meeting import ENTRY_S, Meetings

_log = logging.getLogger("zckpt.runtime")


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What the caller of `save_checkpoint` asks for.

    Attributes:
        directory: that holds the tags.
        tag: of this save.
        latest: whether `latest` is to name it.
        only_trained: leave out parameters that are not trained.
    """

    directory: str
    tag: str
    latest: bool = True
    only_trained: bool = False


def save(run: TrainingRun, meetings: Meetings, options: SaveOptions, client_state: Mapping[str, Any]) -> Saving | None:
    """Saves a run; see [Note: the order of a save].

    Returns:
        Under `async_save`, the thread that does all but the first step, from a copy in host memory.

    Raises:
        UsageError: the tag cannot name a directory, or the client state uses names of the checkpoint's own.
        UnsupportedError: something in the client state cannot be written.
        InconsistentError: some ranks did not come, or have another tag.
        OutputError: a file cannot be written, here or elsewhere; what was there before is unchanged.
    """
    meetings.begin(f"{run.micro_steps}")
    publication = _enter(run, meetings, options)
    try:
        planned, root = _plan_together(run, meetings, publication, options, client_state)
        if run.settings.config.checkpoint.async_save:
            with Attempt() as tried:
                planned = in_memory(planned)
            meetings.agree("save_checkpoint", tried.error)
            what = f"save of {publication.tag!r} in {publication.directory}"
            return Saving(what, partial(_finish, meetings, publication, planned, root), meetings.server())
    except BaseException:
        publication.end()
        raise
    _finish(meetings, publication, planned, root)
    return None


def _plan_together(
    run: TrainingRun,
    meetings: Meetings,
    publication: Publication,
    options: SaveOptions,
    client_state: Mapping[str, Any],
) -> tuple[PlannedSave, str]:
    """The save, planned on every rank, and the directory that this rank's files are written in."""
    with Attempt() as tried:
        state = capture(run)
        digest = digest_of(state.buffers)
        publication.begin()
    word = None if tried.error is not None else [digest, publication.name]
    words = meetings.agree("save_checkpoint", tried.error, word)
    root = publication.root([name for _, name in words], run.global_rank)
    differing = frozenset(rank for rank, (theirs, _) in enumerate(words) if theirs != words[0][0])
    state = _with_all_generators(replace(state, differing=differing))
    with Attempt() as tried:
        _warn_of_gradients(state)
        planned = plan(_only_trained(state) if options.only_trained else state, client_state, STAGED)
    meetings.agree("save_checkpoint", tried.error)
    return planned, root


def _finish(meetings: Meetings, publication: Publication, planned: PlannedSave, root: str) -> None:
    """Writes the files, and gives them their name when all ranks have."""
    try:
        with Attempt() as tried:
            write(planned, root)
        meetings.agree("save_checkpoint", tried.error)
        publication.publish(meetings)
    finally:
        publication.end()
        meetings.part()


def _enter(run: TrainingRun, meetings: Meetings, options: SaveOptions) -> Publication:
    """Meets the others, and agrees on the tag."""
    checkpoint = run.settings.config.checkpoint
    words = meetings.meet("save_checkpoint", options.tag, within_s=ENTRY_S)
    tag, *others = dict.fromkeys(words)
    if others:
        by_tag = {one: [rank for rank, word in enumerate(words) if word == one] for one in (tag, *others)}
        found = joined([f"{one!r} on {ranks(numbers)}" for one, numbers in by_tag.items()])
        if checkpoint.tag_validation == "FAIL":
            raise InconsistentError(
                "the ranks disagree on the tag of save_checkpoint", found=found, expected="one tag",
                remedy="Nothing was written. Use a tag without anything that differs from rank to rank.",
            )  # fmt: skip
        if checkpoint.tag_validation == "WARN" and (run.global_rank == 0 or options.tag != tag):
            warnings.warn(f"The ranks disagree on the tag: {found}. Rank 0's is used.", stacklevel=4)
    check_tag(tag)
    local = checkpoint.use_node_local_storage
    return Publication(
        os.path.abspath(options.directory),
        tag,
        leader=(run.local_rank if local else run.global_rank) == 0,
        latest=options.latest,
        keep_last=checkpoint.keep_last,
    )


def _only_trained(state: RunState) -> RunState:
    parts = tuple(part for part in state.parts if part.parameter.trained)
    names = {part.name for part in parts}
    return replace(state, parts=parts, aliases={d: kept for d, kept in state.aliases.items() if kept in names})


def _warn_of_gradients(state: RunState) -> None:
    """Warns that a save between micro batches has gradients in it, and may be much larger."""
    pending = state.counters["pending_micro_steps"]
    if pending and state.run.global_rank == 0:
        grads = [grad for kind in state.gradients.values() for grad in kind.values()]
        _log.warning(
            "This save is made after %d of the %s of a step, so it holds each rank's gradients so far: %s on rank 0. Only a "
            "run with the same stage, precision, accumulation and number of ranks can use them; any other begins the step "
            "again. Save after a whole step to avoid both.",
            pending,
            count(state.run.batch.accumulation, "micro batch", "micro batches"),
            size(sum(grad.numel() * grad.element_size() for grad in grads)),
        )


def _with_all_generators(state: RunState) -> RunState:
    """If not every rank writes an optimizer file, rank 0 keeps the random generators of all."""
    run = state.run
    if run.settings.zero.stage and run.world_size == run.sharded.size:
        return state
    rngs: list[dict[str, Any] | None] = [None] * run.world_size
    dist.all_gather_object(rngs, state.rng)
    return replace(state, rng={"all": rngs})


@dataclass(frozen=True, slots=True)
class _Known:
    """What saves of a run have in common, as long as its tensors have the same names, shapes and dtypes.

    Attributes:
        signature: of these.
        described: what all ranks hold.
    """

    signature: Hashable
    described: Described


_known: WeakKeyDictionary[TrainingRun, _Known] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save that is planned but not begun.

    Attributes:
        files: of this rank.
        pairs: what fills them.
        rounds: how elements come to them, and to others from here; None on a rank that takes no part.
    """

    files: tuple[tuple[OutputFile, FileStore], ...]
    pairs: Sequence[Pair]
    rounds: Rounds | None


def plan(state: RunState, client_state: Mapping[str, Any], place: str) -> PlannedSave:
    """Everything but the work, for files in a directory of the name `place`. Writes nothing.

    Raises:
        ZckptError: as `save`.
    """
    run = state.run
    if not state.groups and run.settings.zero.stage:
        raise UsageError(
            "save_checkpoint needs an optimizer, and this engine has none",
            remedy="Call engine.save_16bit_model(dir) to write the weights.",
        )
    takes_part = run.world_size == run.sharded.size or run.global_rank < run.sharded.size  # the first group writes
    known, now = _known.get(run), signature(state)
    if known is None or known.signature != now:
        known = _known[run] = _Known(now, describe(state))
    described = known.described
    training = describe_training(state, described, client_state)
    exchange = _exchange(state)
    target = target_of(state, place)
    unsharded = None
    if run.settings.zero.stage == 0 and takes_part:
        unsharded = write_unsharded.lay_out(described.weights, training, place, run.world_size)
    own = rank_states.lay_out(state, place)
    if not takes_part:
        return PlannedSave((), (), None) if own is None else _planned([own], _alone())
    laid = unsharded or lay_out_rank(described.weights, training, target, run.sharded.rank)
    return _planned([laid] if own is None else [laid, own], exchange)


def _planned(several: Sequence[Laid], exchange: Exchange) -> PlannedSave:
    """All files of a rank, one after the other."""
    files = tuple(file for laid in several for file in laid.files)
    pairs = tuple(pair for laid in several for pair in laid.pairs)
    return PlannedSave(files, pairs, Rounds(exchange, pairs))


def _alone() -> Exchange:
    """An exchange of which this rank is the only one, and holds nothing that is not in its pairs."""
    nothing: dict[Hashable, torch.Tensor] = {}
    return Exchange(0, 1, None, torch.device("cpu"), True, nothing.__getitem__, ())


def _exchange(state: RunState) -> Exchange:
    run, sharded, tensors = state.run, state.run.sharded, tensors_of(state)
    direct = home_of(run.settings.zero, run.device).type == "cpu"
    group = sharded.group if sharded.size > 1 else None
    return Exchange(sharded.rank, sharded.size, group, run.device, direct, tensors.__getitem__, list(tensors))


def in_memory(planned: PlannedSave) -> PlannedSave:
    """The same save from a copy of all its elements in host memory, which this rank can write without the others."""
    if planned.rounds is None:
        return planned
    with planned.rounds as rounds:
        buffers = {id(store): torch.empty(store.size, dtype=torch.uint8) for _, store in planned.files}
        stores = {key: MemoryStore(buffer.data_ptr(), buffer.numel(), buffer) for key, buffer in buffers.items()}
        into = (one if one is None else one._replace(dst=stores[id(one.dst)]) for one in rounds)
        move.run(Streamed((), planned.pairs, into), "", overflow="inf")
    pairs = [
        (
            TensorPart("", (nbytes,), U8, (Fragment(stores[id(store)], offset, 0, nbytes),)),
            TensorPart("", (nbytes,), U8, (Fragment(store, offset, 0, nbytes),)),
        )
        for store, offset, nbytes in _ranges(planned.pairs)
    ]
    return PlannedSave(planned.files, pairs, Rounds(_alone(), pairs))


def _ranges(pairs: Sequence[Pair]) -> Iterator[tuple[Store, int, int]]:
    """The bytes of files that pairs fill: store, offset, length; what follows each other is one."""
    last: tuple[Store, int, int] | None = None
    for _, part in pairs:
        for fragment in part.fragments:
            nbytes = fragment.count * part.dtype.itemsize
            if last is not None and last[0] is fragment.store and last[1] + last[2] == fragment.byte_offset:
                last = (last[0], last[1], last[2] + nbytes)
                continue
            if last is not None:
                yield last
            last = (fragment.store, fragment.byte_offset, nbytes)
    if last is not None:
        yield last


def write(planned: PlannedSave, directory: str) -> None:
    """Writes and syncs this rank's files, and sends the others what theirs need.

    Raises:
        OutputError: a file cannot be written. The exchange was carried to its end.
    """
    if planned.rounds is None:
        return
    with planned.rounds as rounds:
        move.run(Streamed(planned.files, planned.pairs, rounds), directory, overflow="inf")
