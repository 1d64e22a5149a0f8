"""Whether a checkpoint is complete and intact, and an output equal to it, so that the shards may be deleted.

For `zckpt verify`. `soundness` finds out whether each of the two is intact, `compared` whether they are equal; a look at one
alone imports nothing of what outputs are. Most is imported when the reading of every byte has begun: it takes as long as half a
gigabyte.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zckpt.base.errors import redact
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.base.progress import Progress, watch_progress
from zckpt.checks.verdict import Verification
from zckpt.engine.early import begun, likely_files

if TYPE_CHECKING:
    from zckpt.core.catalog import Catalog
    from zckpt.jobs.groups import LoraMerge
    from zckpt.layouts.save.listing import ReadOptions
    from zckpt.storage.location import Location


def verify(
    checkpoint: str | os.PathLike[str],
    converted: str | os.PathLike[str] | None = None,
    *,
    deep: bool = False,
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    read_options: ReadOptions | None = None,
    lora: LoraMerge | None = None,
    as_part: bool = False,
    trust_reader: bool = False,
    like: str | os.PathLike[str] | None = None,
    pace: Pace | None = None,
    progress: Progress = None,
) -> Verification:
    """Checks whether a checkpoint, or an output with its `zckpt.json`, is complete and intact.

    Args:
        checkpoint: a checkpoint, plain weights, or a delta; here or behind an address.
        converted: an output (or a delta) made from it: every tensor is derived from the shards once more and compared; if it is a
            checkpoint, so is the optimizer's state.
        deep: read every byte of the checkpoint: checksums, copies of weights, NaN and infinity.
            Without it, and with `converted`, the bytes are read that the output was made from. What has a `zckpt.json` is
            always read whole, and so is `converted`.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        read_options: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.
        lora: the base and the adapters that were merged into `converted`, where they are not in the checkpoint.
        as_part: the checkpoint is one part of a save (a shard, one rank's file or directory), and looked at alone.
        trust_reader: call shards safe to delete although no second reader has found their tensors in the same places.
        like: a Hugging Face model: its directory, its config.json, or `hf://OWNER/NAME`. Whether a loader of it finds every
            tensor in `converted`, or in `checkpoint` where that is weights, and nothing else; by headers alone. Where nothing
            else is asked for, only headers are read.
        pace: threads, bytes per second, and whether the page cache keeps what is read; None for each default.
        progress: a function that is called with the bytes read so far, and with the total if it takes a second argument (it
            grows when it is found that there is more to read); None shows a bar in a terminal or notebook, False shows none.

    Returns:
        The answers. Its `ok` says whether nothing is wrong, `deletable` whether the shards may be deleted; `lines()` and
        `as_json()` say why.

    Raises:
        NotACheckpointError: there is nothing to look at. UnsupportedError: zckpt cannot read it.
        UsageError: `checkpoint` is an output that was made from `converted`.

    Example:
        >>> _ = zckpt.convert("run", "weights/", progress=False)
        >>> zckpt.verify("run", "weights/", progress=False).deletable[0]
        True
    """
    pace = pace or DEFAULT_PACE
    if like is not None and converted is None and not deep:
        return _verify_likeness(checkpoint, like, tag, also, read_options, as_part=as_part)
    likely = likely_files(os.fspath(checkpoint), tag) if deep else []
    with watch_progress(progress, None, "verify") as watch, begun(likely, pace) as early:
        from zckpt.checks.soundness import examine_checkpoint
        from zckpt.deltas.form import is_delta_directory
        from zckpt.jobs.groups import Reading
        from zckpt.storage.location import locate

        options = Reading(tag=tag, also=also, read_options=read_options, as_part=as_part)
        path, delta = locate(checkpoint), locate(checkpoint if converted is None else converted)
        if is_delta_directory(delta):
            from zckpt.checks.deltas import verify_delta

            more = (lambda nbytes: None) if watch is None else watch.expect
            return verify_delta(delta, None if converted is None else path, options, pace, watch, more)
        # with as many bytes of the checkpoint
        later = 0 if watch is None or converted is None else 2 * _file_bytes(locate(converted))

        def expect(nbytes: int) -> None:
            if watch is not None:
                watch.expect(nbytes + later)

        state = examine_checkpoint(path, options, deep=deep, pace=pace, progress=watch, expect=expect, early=early)
        deletable = None
        if converted is not None:
            read = sum(file.store.size for file in state.files) if state.whole else 0
            expect(read)
            from zckpt.checks.compared import check_order, compare

            check_order(path, locate(converted), state)
            deletable = compare(state, locate(converted), lora, pace, watch, read, trust_reader=trust_reader)
        loads_as, like_facts = None, None
        if like is not None:
            from zckpt.checks.like import examine_likeness

            out = path if converted is None else locate(converted)
            _, found = examine_likeness(out, locate(like), options if converted is None else Reading())
            state.checks.extend(found.checks)
            state.notes.extend(found.notes)
            loads_as, like_facts = found.loads_as, found.facts
    return Verification(
        path=redact(state.place.listing.directory.path),
        about=_about(state.catalog),
        deep=deep,
        checks=tuple(state.checks),
        numbers=state.numbers,
        deletable=deletable,
        notes=tuple(state.notes),
        unread_bytes=state.unread_bytes,
        complete=False if state.catalog is None else state.catalog.evidence.complete,
        proved_by=state.proofs(),
        not_proved=tuple(filter(None, [*state.unproved(trust_reader=trust_reader), state.doubt])),
        loads_as=loads_as,
        like=like_facts,
    )


def _verify_likeness(
    checkpoint: str | os.PathLike[str],
    like: str | os.PathLike[str],
    tag: str | None,
    also: Sequence[str | os.PathLike[str]],
    read_options: ReadOptions | None,
    *,
    as_part: bool,
) -> Verification:
    """Checks whether a loader finds every tensor; reads headers, and no element."""
    from zckpt.checks.like import examine_likeness
    from zckpt.jobs.groups import Reading
    from zckpt.storage.location import locate

    options = Reading(tag=tag, also=also, read_options=read_options, as_part=as_part)
    catalog, found = examine_likeness(locate(checkpoint), locate(like), options)
    return Verification(
        path=redact(os.fspath(checkpoint)),
        about=_about(catalog),
        deep=False,
        checks=found.checks,
        notes=(*(() if catalog is None else catalog.source.notes), *found.notes),
        unread_bytes=0 if catalog is None else sum(entry.nbytes for entry in catalog.tensors.values()),
        complete=bool(found.loads_as),
        loads_as=found.loads_as,
        like=found.facts,
        headers_only=True,
    )


def _about(catalog: Catalog | None) -> str:
    if catalog is None:
        return "cannot be read whole"
    source, topology = catalog.source, catalog.topology
    words = [source.layout]
    if source.framework[0]:
        words.append(f"written by {' '.join(source.framework).strip()}")
    if source.global_steps is not None:
        words.append(f"step {source.global_steps:,}")
    if source.zero_stage is not None:
        words.append(f"world size {topology.dp}")
    return ", ".join(words)


def _file_bytes(path: Location) -> int:
    """Bytes of a file, or of those in a directory; 0 if they cannot be listed, which is reported later."""
    try:
        return path.size() if path.is_file() else sum((path / name).size() for name in path.file_names(path.names()))
    except OSError:
        return 0
