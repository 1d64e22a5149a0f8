"""Saving a run: every rank writes its own files under a temporary name, and a save appears whole or not at all.

For `Engine.save_checkpoint`.
[Note: the order of a save]
1. All ranks meet; one per file system (the *leader*) makes a private directory beside the tags. Everything that can be
refused is refused now.
2. Every rank writes and syncs its files there.
3. When all have, leaders sync the directory and give it the tag's name, in one step even where the tag exists.
4. When all have, `latest` is replaced, by a rename; then older tags are pruned.
Killed before 3, a save has left nothing but a directory whose name begins with a dot; before 4, `latest` names the save before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import shutil
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from zckpt.errors import InconsistentError, OutputError, UsageError
from zckpt.fragments import FileStore
from zckpt.layouts import unsharded_out
from zckpt.layouts.torch_files import Pair
from zckpt.layouts.zero_out import lay_out_by_rank
from zckpt.mover import run
from zckpt.plan import OutputFile
from zckpt.publish import sync
from zckpt.runtime.description import describe_training, describe_weights, target_of
from zckpt.runtime.engine import Engine
from zckpt.runtime.exchange import Exchange, Streamed
from zckpt.runtime.meeting import ENTRY_S, Meetings
from zckpt.runtime.offload import home_of
from zckpt.runtime.state import RunState, capture

_log = logging.getLogger("zckpt.runtime")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a save is to be.

    Attributes:
        directory: that holds the tags.
        tag: of this save.
        temporary: name of the private directory in it.
        leader: whether this rank makes and renames directories.
        latest: whether `latest` is to name it.
        keep_last: tags that stay; None for all.
    """

    directory: str
    tag: str
    temporary: str
    leader: bool
    latest: bool
    keep_last: int | None


def save(
    engine: Engine, meetings: Meetings, directory: str, tag: str, client_state: Mapping[str, Any], latest: bool
) -> None:
    """Saves a run; see [Note: the order of a save].

    Raises:
        UsageError: the tag is no name of a directory, or the client state uses names that are taken.
        UnsupportedError: something in the client state cannot be written.
        InconsistentError: some ranks did not come, or want another tag.
        OutputError: a file cannot be written, here or elsewhere; what was there before is as it was.
    """
    meetings.begin(f"save {engine.micro_steps}")
    wanted = _enter(engine, meetings, directory, tag, latest)
    state = _with_all_generators(capture(engine))
    private = os.path.join(wanted.directory, wanted.temporary)
    try:
        error: BaseException | None = None
        plan: Prepared | None = None
        try:
            if wanted.leader:
                _make(wanted)
            plan = prepare(engine, state, client_state)
        except Exception as caught:
            error = caught
        meetings.agree("save_checkpoint", error)
        assert plan is not None
        try:
            write(plan, private)
        except Exception as caught:
            error = caught
        meetings.agree("save_checkpoint", error)
        publish(meetings, wanted)
    finally:
        if wanted.leader:
            shutil.rmtree(private, ignore_errors=True)


def _enter(engine: Engine, meetings: Meetings, directory: str, tag: str, latest: bool) -> Wanted:
    """Meets the others, and agrees on the tag and on a name for the private directory."""
    checkpoint = engine.settings.config.checkpoint
    token = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
    said = meetings.meet("save_checkpoint", [tag, token], within_s=ENTRY_S)
    tags = list(dict.fromkeys(one[0] for one in said))
    if len(tags) > 1:
        told = "; ".join(f"{t!r} on ranks {', '.join(str(r) for r, s in enumerate(said) if s[0] == t)}" for t in tags)
        if checkpoint.tag_validation == "FAIL":
            raise InconsistentError(
                "ranks that disagree on the tag", found=told, expected="one tag",
                remedy="Nothing was written. Leave out of the tag whatever differs from rank to rank.",
            )  # fmt: skip
        if checkpoint.tag_validation == "WARN" and engine.global_rank == 0:
            warnings.warn(f"Ranks disagree on the tag: {told}. Rank 0's is taken.", stacklevel=4)
    tag = tags[0]
    if tag != os.path.basename(tag) or tag.startswith(".") or not tag or "\0" in tag or "\n" in tag:
        raise UsageError("a tag that is no name of a directory", found=repr(tag))
    local = checkpoint.use_node_local_storage
    return Wanted(
        directory=os.path.abspath(directory),
        tag=tag,
        temporary=f".{tag}.zckpt-{said[0][1]}",
        leader=(engine.local_rank if local else engine.global_rank) == 0,
        latest=latest,
        keep_last=checkpoint.keep_last,
    )


def _with_all_generators(state: RunState) -> RunState:
    """Where some ranks write no file, rank 0 keeps the random generators of all."""
    if state.world_size == state.shard_size:
        return state
    rngs: list[dict[str, Any] | None] = [None] * state.world_size
    dist.all_gather_object(rngs, state.rng)
    return replace(state, rng={"all": rngs})


def _make(wanted: Wanted) -> None:
    """Makes the private directory, and removes what killed runs of this machine have left."""
    try:
        os.makedirs(wanted.directory, exist_ok=True)
        for name in os.listdir(wanted.directory):
            _, mark, rest = name.partition(".zckpt-")
            host, _, pid = rest.rpartition("-")[0].rpartition("-")
            if (
                name.startswith(".")
                and mark
                and host == socket.gethostname()
                and pid.isdecimal()
                and _is_dead(int(pid))
            ):
                shutil.rmtree(os.path.join(wanted.directory, name), ignore_errors=True)
        os.mkdir(os.path.join(wanted.directory, wanted.temporary))
    except OSError as error:
        raise OutputError(
            "a checkpoint that cannot be written", file=wanted.directory, found=error.strerror or str(error),
            remedy="Nothing was changed. Check the path and its permissions.",
        ) from error  # fmt: skip


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A save that is planned but not begun.

    Attributes:
        files: of this rank.
        pairs: what fills the files of each rank of the group.
        exchange: how elements come to them; None on a rank that writes nothing.
    """

    files: tuple[tuple[OutputFile, FileStore], ...]
    pairs: tuple[Sequence[Pair], ...]
    exchange: Exchange | None


def prepare(engine: Engine, state: RunState, client_state: Mapping[str, Any]) -> Prepared:
    """Everything but the work. Writes nothing.

    Raises:
        ZckptError: as `save`.
    """
    if not state.groups and state.stage:
        raise UsageError(
            "a save of a run without an optimizer",
            remedy="There is nothing to go on from: save_pretrained writes weights.",
        )
    catalog = describe_weights(engine, state)
    training = describe_training(state, client_state, engine.settings.config.gradient_clipping)
    if state.world_size > state.shard_size and engine.global_rank >= state.shard_size:
        return Prepared((), (), None)  # the first group of ranks writes
    if state.stage == 0:
        parts = [unsharded_out.lay_out(catalog, training, ".", state.world_size)]
    else:
        parts = list(lay_out_by_rank(catalog, training, target_of(state)))
    mine = parts[state.shard_rank]
    return Prepared(mine.files, tuple(part.pairs for part in parts), _exchange(engine, state))


def _exchange(engine: Engine, state: RunState) -> Exchange:
    home = home_of(engine.settings.zero, engine.device)
    group = engine.sharded.shard_group if state.shard_size > 1 else None
    return Exchange(state.shard_rank, state.shard_size, group, engine.device, home.type == "cpu")


def write(prepared: Prepared, directory: str) -> None:
    """Writes and syncs this rank's files, and sends the others what theirs need.

    Raises:
        OutputError: a file cannot be written. The exchange was carried to its end.
    """
    if prepared.exchange is None:
        return
    stream = prepared.exchange.stream(prepared.pairs)
    try:
        if prepared.files:
            run(Streamed(prepared.files, prepared.pairs[prepared.exchange.rank], stream), directory, overflow="inf")
    finally:
        with torch.no_grad():
            prepared.exchange.drain(stream)


def publish(meetings: Meetings, wanted: Wanted) -> None:
    """Gives a written save its name, on every file system, and then lets `latest` name it.

    Raises:
        OutputError: it cannot be done, here or elsewhere.
    """
    error: Exception | None = None
    if wanted.leader:
        try:
            _rename(wanted)
        except OSError as caught:
            error = _named(wanted, caught)
    meetings.agree("save_checkpoint", error)
    if wanted.leader:
        try:
            if wanted.latest:
                replace_file(os.path.join(wanted.directory, "latest"), wanted.tag.encode())
        except OSError as caught:
            error = _named(wanted, caught)
    meetings.agree("save_checkpoint", error)


def _named(wanted: Wanted, error: OSError) -> OutputError:
    found = OutputError(
        "a checkpoint that could not be given its name", file=os.path.join(wanted.directory, wanted.tag),
        found=error.strerror or str(error),
    )  # fmt: skip
    found.__cause__ = error
    return found


def _rename(wanted: Wanted) -> None:
    """The private directory becomes the tag; a tag of that name is replaced in the same instant."""
    private, final = (os.path.join(wanted.directory, name) for name in (wanted.temporary, wanted.tag))
    sync(private)
    try:
        os.rename(private, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange_names(private, final):
            old = f"{private}.old"
            os.rename(final, old)
            os.rename(private, final)
            os.rename(old, private)
        sync(wanted.directory)
        shutil.rmtree(private, ignore_errors=True)
    sync(wanted.directory)


def _exchange_names(a: str, b: str) -> bool:
    """Swaps two names in one step, where system and file system can.

    Source: renameat2(2), RENAME_EXCHANGE (2), Linux 3.15 and glibc 2.28.
    """
    here = -100  # AT_FDCWD
    with contextlib.suppress(OSError, AttributeError):
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
        return bool(renameat2(here, os.fsencode(a), here, os.fsencode(b), 2) == 0)
    return False


def replace_file(path: str, data: bytes, mode: int | None = None) -> None:
    """Puts a small file in the place of another, whole or not at all."""
    temporary = f"{path}.zckpt-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync(os.path.dirname(path) or ".")
