"""Saving a run: every rank writes its own files under a temporary name, and a save appears whole or not at all.

For `Engine.save_checkpoint`.
[Note: the order of a save]
1. All ranks meet, and say the tag and what their buffers are. One per file system (the *leader*) takes the save's work directory
beside the tags, and finishes what killed runs have left. Everything that can be refused is refused now.
2. Every rank writes and syncs its files there.
Saves in the background copy what the rank holds between 1 and 2 (`snapshot`), and do the rest beside the training.
3. When all have, leaders seal the save and give it the tag's name, by `zckpt.output`'s protocol.
4. When all have, `latest` is replaced, by a rename; then older tags are pruned.
Killed before 3, a save has left nothing but a directory with a name that begins with a dot; before 4, `latest` names the save
before, or, if that is the one that is replaced, either of the two.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError
from zckpt.base.words import count, size
from zckpt.output.saves import STAGED
from zckpt.runtime.saves.background import Saving
from zckpt.runtime.saves.description import tensors_of
from zckpt.runtime.saves.exchange import Exchange, make_group
from zckpt.runtime.saves.planned_save import Outlined, exchange_of, outline, plan
from zckpt.runtime.saves.publication import Publication, check_tag
from zckpt.runtime.saves.rank_states import digest_of
from zckpt.runtime.saves.rounds import Rounds
from zckpt.runtime.saves.run_state import RunState, capture
from zckpt.runtime.saves.snapshot import Pool, Snapshot
from zckpt.runtime.training_run import TrainingRun
from zckpt.team.meeting import ENTRY_S, Attempt, Meetings
from zckpt.team.sameness import place_of_directory, ranks_by_value

_log = logging.getLogger("zckpt.runtime")

Begun = TypeVar("Begun")


def save(
    run: TrainingRun,
    meetings: Meetings,
    directory: str,
    tag: str,
    client_state: Mapping[str, Any],
    *,
    latest: bool,
    only_trained: bool,
) -> Saving | None:
    """Saves a run, with the arguments of `save_checkpoint`; see [Note: the order of a save]. Under `async_save` it returns the
    thread that does all but the first step, from a copy in host memory.

    Raises:
        UsageError: the tag cannot name a directory, or the client state uses names of the checkpoint's own.
        UnsupportedError: something in the client state cannot be written.
        InconsistentError: some ranks did not come, or have another tag.
        OutputError: a file cannot be written, here or elsewhere; what was there before is unchanged.
    """
    meetings.begin(f"{run.micro_steps}")
    state, publication = _enter(run, meetings, directory, tag, latest=latest)
    begin = partial(_begin_together, state, meetings, publication, only_trained=only_trained)
    try:
        if run.settings.config.checkpoint.async_save:
            means = _means.setdefault(run, _Means())
            means.number += 1  # before anything that may fail on this rank alone
            (outlined, snapshot), root = begin(partial(_copy_state, client_state, means))
            server = meetings.server()
            what = f"save of {publication.tag!r} in {publication.directory}"
            finish = partial(_finish_copied, meetings, publication, outlined, snapshot, means, root, server)
            return Saving(what, finish, server)
        planned, root = begin(lambda state: plan(outline(state, client_state, STAGED), exchange_of(state)))
    except BaseException:
        publication.end()
        raise
    _finish(meetings, publication, planned, root)
    return None


@dataclass(slots=True)
class _Means:
    """Resources that saves in the background of one run share: the memory of their copies; the group in which they exchange
    elements, and its store (None before the first one, and after one that failed); how many there were, as on every rank.
    """

    pool: Pool = field(default_factory=dict[bool, torch.Tensor])
    group: tuple[Any, object] | None = None
    number: int = 0


_means: WeakKeyDictionary[TrainingRun, _Means] = WeakKeyDictionary()


def _begin_together(
    state: RunState,
    meetings: Meetings,
    publication: Publication,
    begin: Callable[[RunState], Begun],
    *,
    only_trained: bool,
) -> tuple[Begun, str]:
    """What `begin` makes of the state, once every rank has it, and the directory for this rank's files."""
    state = _with_all_generators(state)
    with Attempt() as tried:
        publication.begin()
        _warn_of_gradients(state)
        if only_trained:
            state = _only_trained(state)
        begun = begin(state)
    names = meetings.agree("save_checkpoint", tried.error, publication.name)
    return begun, publication.root(names, state.run.global_rank)


def _copy_state(client_state: Mapping[str, Any], means: _Means, state: RunState) -> tuple[Outlined, Snapshot]:
    """Copies what this rank holds so far that training may go on; the optimizer waits for the part that is copied later."""
    run, outlined = state.run, outline(state, client_state, STAGED, copied=True)
    tensors = tensors_of(state) if outlined.takes_part else {}
    states = {(part.name, name) for part in state.parts for name in part.states}
    snapshot = Snapshot(tensors, lambda key: key not in states, means.pool)
    if run.optimizer is not None:
        run.optimizer.before_change = snapshot.finish
    return outlined, snapshot


def _finish_copied(
    meetings: Meetings,
    publication: Publication,
    outlined: Outlined,
    snapshot: Snapshot,
    means: _Means,
    root: str,
    store: object,
) -> None:
    """Plans a save with elements that are copied, and finishes it."""
    group, means.group = means.group, None
    try:
        with Attempt() as tried:
            rank, size = outlined.rank, outlined.target.world_size
            if group is None and outlined.takes_part and size > 1:  # first of all: the others wait for it
                group = make_group(f"{meetings.name} {means.number}", rank, size, store), store
            snapshot.check()
            tensors, host = snapshot.tensors, torch.device("cpu")
            own = None if group is None else group[0]
            planned = plan(outlined, Exchange(rank, size, own, host, True, tensors.__getitem__, list(tensors)))
        meetings.agree("save_checkpoint", tried.error)
    except BaseException:
        publication.end()
        meetings.part()
        raise
    _finish(meetings, publication, planned, root)
    means.group = group  # after a failure ranks may be at different places in it


def _finish(meetings: Meetings, publication: Publication, planned: Rounds | None, root: str) -> None:
    """Writes the files, and gives them their name when all ranks have."""
    try:
        with Attempt() as tried:
            if planned is not None:
                planned.carry_out(root)
        meetings.agree("save_checkpoint", tried.error)
        publication.publish(meetings)
    finally:
        publication.end()
        meetings.part()


def _enter(
    run: TrainingRun, meetings: Meetings, directory: str, tag: str, *, latest: bool
) -> tuple[RunState, Publication]:
    """Meets the other ranks and agrees on the tag; returns the state and the save's publication."""
    checkpoint = run.settings.config.checkpoint
    digest: str | None = None
    with Attempt() as tried:
        state = capture(run)
        digest = digest_of(state.buffers)
    word = [tag, digest, *place_of_directory(directory)]
    words = meetings.agree("save_checkpoint", tried.error, word, within_s=ENTRY_S)
    local, first = checkpoint.use_node_local_storage, words[0]
    if not local and any(one[2] != first[2] and (one[3] is None or one[3] != first[3]) for one in words):
        raise InconsistentError(
            "the ranks disagree on the directory of save_checkpoint", found=ranks_by_value([one[2] for one in words]),
            expected="one directory, which all ranks see",
            remedy="Nothing was written. Pass the same directory on every rank. Where each node has a disk of its own, set "
            "checkpoint.use_node_local_storage to true.",
        )  # fmt: skip
    differing = frozenset(rank for rank, one in enumerate(words) if one[1] != first[1])
    common, *others = dict.fromkeys(one[0] for one in words)
    if others:
        found = ranks_by_value([repr(one[0]) for one in words])
        if checkpoint.tag_validation == "FAIL":
            raise InconsistentError(
                "the ranks disagree on the tag of save_checkpoint", found=found, expected="one tag",
                remedy="Nothing was written. Use a tag without anything that differs from rank to rank.",
            )  # fmt: skip
        if checkpoint.tag_validation == "WARN" and (run.global_rank == 0 or tag != common):
            warnings.warn(f"The ranks disagree on the tag: {found}. Rank 0's is used.", stacklevel=4)
    check_tag(common)
    return replace(state, differing=differing), Publication(
        os.path.abspath(directory),
        common,
        leader=(run.local_rank if local else run.global_rank) == 0,
        latest=latest,
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
    """The state, with all ranks' generators on those that write the model, where some ranks write no optimizer file."""
    run = state.run
    if run.settings.zero.stage and run.world_size == run.sharded.size:
        return state
    rngs: list[dict[str, Any] | None] = []
    for writer in range(run.sharded.size):  # the others get nothing, however many ranks there are
        mine: list[Any] | None = [None] * run.world_size if run.global_rank == writer else None
        dist.gather_object(state.rng, mine, dst=writer)
        rngs = mine or rngs
    return replace(state, rng={"all": rngs})
