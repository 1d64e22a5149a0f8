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

import torch
import torch.distributed as dist

from zckpt.base.errors import InconsistentError, UsageError
from zckpt.core.catalog import TensorPart
from zckpt.core.dtypes import U8
from zckpt.core.fragments import FileStore, Fragment, MemoryStore, Store
from zckpt.core.plan import OutputFile
from zckpt.engine.move import run
from zckpt.layouts.zero import write_unsharded
from zckpt.layouts.zero.torch_files import Laid, Pair
from zckpt.layouts.zero.write import lay_out_rank, sketch
from zckpt.output.saves import STAGED
from zckpt.runtime import rank_states
from zckpt.runtime.background import Saving
from zckpt.runtime.description import Described, describe, describe_training, signature, target_of, tensors_of
from zckpt.runtime.engine import Engine
from zckpt.runtime.exchange import Exchange, Rounds, Sends, Streamed
from zckpt.runtime.offload import home_of
from zckpt.runtime.publication import Publication, Wanted
from zckpt.runtime.rank_states import digest_of
from zckpt.runtime.state import RunState, capture
from zckpt.runtime.tags import check_tag
from zckpt.team.meeting import ENTRY_S, Meetings

_log = logging.getLogger("zckpt.runtime")


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What the caller asks for.

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


def save(engine: Engine, meetings: Meetings, wishes: SaveOptions, client_state: Mapping[str, Any]) -> Saving | None:
    """Saves a run; see [Note: the order of a save].

    Returns:
        Under `async_save`, the thread that does all but the first step, from a copy in host memory.

    Raises:
        UsageError: the tag is no name of a directory, or the client state uses names that are taken.
        UnsupportedError: something in the client state cannot be written.
        InconsistentError: some ranks did not come, or want another tag.
        OutputError: a file cannot be written, here or elsewhere; what was there before is as it was.
    """
    meetings.begin(f"{engine.micro_steps}")
    publication = Publication(_enter(engine, meetings, wishes))
    state, digest = None, ""
    prepared: PlannedSave | None = None
    error: Exception | None = None
    try:
        try:
            state = capture(engine)
            digest = digest_of(state.buffers)
            publication.begin()
        except Exception as caught:
            error = caught
        said = meetings.agree("save_checkpoint", error, [digest, publication.name])
        assert state is not None
        root = publication.root([one[1] for one in said], engine.global_rank)
        state = _with_all_generators(replace(state, differing=_others_than_first([one[0] for one in said])))
        try:
            _tell_of_gradients(state)
            prepared = prepare(engine, _only_trained(state) if wishes.only_trained else state, client_state, STAGED)
        except Exception as caught:
            error = caught
        meetings.agree("save_checkpoint", error)
        assert prepared is not None
        if engine.settings.config.checkpoint.async_save:
            try:
                prepared = in_memory(prepared)
            except Exception as caught:
                error = caught
            meetings.agree("save_checkpoint", error)
            what = f"save {publication.wanted.tag!r} in {publication.wanted.directory!r}"
            return Saving(what, partial(_finish, meetings, publication, prepared, root), meetings.server())
    except BaseException:
        publication.end()
        raise
    _finish(meetings, publication, prepared, root)
    return None


def _finish(meetings: Meetings, publication: Publication, prepared: PlannedSave, root: str) -> None:
    """Writes the files, and gives them their name when all ranks have."""
    error: Exception | None = None
    try:
        try:
            write(prepared, root)
        except Exception as caught:
            error = caught
        meetings.agree("save_checkpoint", error)
        publication.publish(meetings)
    finally:
        publication.end()
        meetings.part()


def _enter(engine: Engine, meetings: Meetings, wishes: SaveOptions) -> Wanted:
    """Meets the others, and agrees on the tag."""
    checkpoint = engine.settings.config.checkpoint
    said = meetings.meet("save_checkpoint", wishes.tag, within_s=ENTRY_S)
    tags = list(dict.fromkeys(said))
    if len(tags) > 1:
        told = "; ".join(
            f"{t!r} on ranks {', '.join(str(r) for r, said_tag in enumerate(said) if said_tag == t)}" for t in tags
        )
        if checkpoint.tag_validation == "FAIL":
            raise InconsistentError(
                "ranks that disagree on the tag", found=told, expected="one tag",
                remedy="Nothing was written. Leave out of the tag whatever differs from rank to rank.",
            )  # fmt: skip
        if checkpoint.tag_validation == "WARN" and (engine.global_rank == 0 or wishes.tag != tags[0]):
            warnings.warn(f"Ranks disagree on the tag: {told}. Rank 0's is taken.", stacklevel=4)
    tag = tags[0]
    check_tag(tag)
    local = checkpoint.use_node_local_storage
    return Wanted(
        directory=os.path.abspath(wishes.directory),
        tag=tag,
        leader=(engine.local_rank if local else engine.global_rank) == 0,
        latest=wishes.latest,
        keep_last=checkpoint.keep_last,
    )


def _only_trained(state: RunState) -> RunState:
    parts = tuple(part for part in state.parts if part.trained)
    names = {part.name for part in parts}
    return replace(state, parts=parts, aliases={d: kept for d, kept in state.aliases.items() if kept in names})


def _others_than_first(words: Sequence[str]) -> frozenset[int]:
    return frozenset(rank for rank, word in enumerate(words) if word != words[0])


def _tell_of_gradients(state: RunState) -> None:
    """A save between micro batches is complete, but may be much larger."""
    pending = state.counters["pending_micro_steps"]
    if pending and state.rank == 0:
        grads = [grad for kind in state.gradients.values() for grad in kind.values()]
        _log.warning(
            "A save after %d of the %d micro batches of a step: each rank's gradients so far are saved too, "
            "%s bytes of rank 0. Only a run of the same stage, precision, accumulation and number of ranks can "
            "take them up; others begin the step anew. Save after a whole step to avoid both.",
            pending,
            state.accumulation,
            f"{sum(grad.numel() * grad.element_size() for grad in grads):,}",
        )


def _with_all_generators(state: RunState) -> RunState:
    """Where not every rank writes an optimizer file, rank 0 keeps the random generators of all."""
    if state.stage and state.world_size == state.shard_size:
        return state
    rngs: list[dict[str, Any] | None] = [None] * state.world_size
    dist.all_gather_object(rngs, state.rng)
    return replace(state, rng={"all": rngs})


@dataclass(frozen=True, slots=True)
class Known:
    """What saves of a run have in common, as long as its tensors have the same names, shapes and dtypes.

    Attributes:
        signature: of these.
        described: what all ranks hold.
        sends: what this rank sends to others; None on a rank that takes no part.
    """

    signature: Hashable
    described: Described
    sends: Sends | None


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


def prepare(engine: Engine, state: RunState, client_state: Mapping[str, Any], place: str) -> PlannedSave:
    """Everything but the work, for files in a directory of the name `place`. Writes nothing.

    Raises:
        ZckptError: as `save`.
    """
    if not state.groups and state.stage:
        raise UsageError(
            "a save of a run without an optimizer",
            remedy="There is nothing to go on from. engine.save_16bit_model(dir) writes the weights, sharded as they are.",
        )
    takes_part = state.world_size == state.shard_size or engine.global_rank < state.shard_size
    known, now = engine.known_to_saves, signature(state)
    described = known.described if isinstance(known, Known) and known.signature == now else describe(engine, state)
    training = describe_training(state, described, client_state, engine.settings.config.gradient_clipping)
    exchange = _exchange(engine, state)
    if not isinstance(known, Known) or known.signature != now:
        sends = None
        if takes_part and state.stage == 0:
            sends = exchange.sends(
                [write_unsharded.lay_out(described.weights, training, place, state.world_size).pairs]
            )
        elif takes_part:
            sends = exchange.sends(sketch(described.weights, training, target_of(state, place)))
        engine.known_to_saves = known = Known(now, described, sends)
    own = rank_states.lay_out(state, place)
    if not takes_part:  # the first group of ranks writes
        return PlannedSave((), (), None) if own is None else _prepared([own], _alone(), Sends())
    if state.stage == 0:
        laid = write_unsharded.lay_out(described.weights, training, place, state.world_size)
    else:
        laid = lay_out_rank(described.weights, training, target_of(state, place), state.shard_rank)
    assert known.sends is not None
    return _prepared([laid] if own is None else [laid, own], exchange, known.sends)


def _prepared(several: Sequence[Laid], exchange: Exchange, sends: Sends) -> PlannedSave:
    """All files of a rank, one after the other."""
    files = tuple(file for laid in several for file in laid.files)
    pairs = tuple(pair for laid in several for pair in laid.pairs)
    return PlannedSave(files, pairs, exchange.rounds(pairs, sends))


def _alone() -> Exchange:
    """An exchange of which this rank is the only one, and holds nothing that is not in its pairs."""
    held: dict[Hashable, torch.Tensor] = {}
    return Exchange(0, 1, None, torch.device("cpu"), True, held.__getitem__)


def _exchange(engine: Engine, state: RunState) -> Exchange:
    home = home_of(engine.settings.zero, engine.device)
    group = engine.sharded.shard_group if state.shard_size > 1 else None
    tensors = tensors_of(state)
    direct = home.type == "cpu"
    return Exchange(state.shard_rank, state.shard_size, group, engine.device, direct, lambda key: tensors[key])


def in_memory(prepared: PlannedSave) -> PlannedSave:
    """The same save from a copy of all its elements in host memory: nobody else is needed to write it."""
    if prepared.rounds is None:
        return prepared
    with prepared.rounds as rounds:
        buffers = {id(store): torch.empty(store.size, dtype=torch.uint8) for _, store in prepared.files}
        stores = {key: MemoryStore(buffer.data_ptr(), buffer.numel(), buffer) for key, buffer in buffers.items()}
        into = (move if move is None else move._replace(dst=stores[id(move.dst)]) for move in rounds)
        run(Streamed((), prepared.pairs, into), "", overflow="inf")
    pairs = [
        (
            TensorPart("", (size,), U8, (Fragment(stores[id(store)], offset, 0, size),)),
            TensorPart("", (size,), U8, (Fragment(store, offset, 0, size),)),
        )
        for store, offset, size in _ranges(prepared.pairs)
    ]
    return PlannedSave(prepared.files, pairs, _alone().rounds(pairs, Sends()))


def _ranges(pairs: Sequence[Pair]) -> Iterator[tuple[Store, int, int]]:
    """The bytes of files that pairs fill: store, offset, length; what follows each other is one."""
    last: tuple[Store, int, int] | None = None
    for _, part in pairs:
        for fragment in part.fragments:
            size = fragment.count * part.dtype.itemsize
            if last is not None and last[0] is fragment.store and last[1] + last[2] == fragment.byte_offset:
                last = (last[0], last[1], last[2] + size)
                continue
            if last is not None:
                yield last
            last = (fragment.store, fragment.byte_offset, size)
    if last is not None:
        yield last


def write(prepared: PlannedSave, directory: str) -> None:
    """Writes and syncs this rank's files, and sends the others what theirs need.

    Raises:
        OutputError: a file cannot be written. The exchange was carried to its end.
    """
    if prepared.rounds is None:
        return
    with prepared.rounds as rounds:
        run(Streamed(prepared.files, prepared.pairs, rounds), directory, overflow="inf")
