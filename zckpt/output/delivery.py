"""Carries out a plan and publishes its output whole, with a manifest; resumes an interrupted run.

For every job that writes files. A run resumes an earlier one if that was the same job, and keeps those of its files that are
unchanged.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from zckpt.base.errors import CorruptError, InconsistentError, UnsupportedError, UsageError
from zckpt.base.pace import Pace
from zckpt.engine.batches import progress_after
from zckpt.engine.checksums import join
from zckpt.engine.move import Written, run
from zckpt.engine.scan import scan
from zckpt.engine.scan_requests import CrcRange, request_of_bytes
from zckpt.output.checks import check_path, check_space, keep_apart
from zckpt.output.journal import Finished
from zckpt.output.order import Delivered, Order, as_finished, fingerprint, manifest_of, overflows_of, resumed, seen
from zckpt.output.staging import Staging, is_there
from zckpt.storage.location import LocalPath, Location
from zckpt.team.together import Team, team

if TYPE_CHECKING:
    from hashlib import _Hash


def check_output(
    out: Location, *, single: bool, overwrite: bool, protected: Iterable[Location], merge: bool = False
) -> None:
    """Refuses an output that must not be written, before any work is done; arguments and errors as in `check_path`."""
    if out.is_remote:
        from zckpt.output import delivery_to_address

        keep_apart(out, protected)
        delivery_to_address.check_address(out, single=single, overwrite=overwrite, merge=merge)
    else:
        check_path(out, single=single, overwrite=overwrite, protected=protected, merge=merge)


def deliver(
    order: Order, progress: Callable[[int], None] | None = None, on_note: Callable[[str], None] = lambda note: None
) -> Delivered:
    """Writes and publishes an output, and resumes an interrupted run of the same job.

    Args:
        order: the output and how it is made.
        progress: called with the bytes written so far.
        on_note: called with sentences for a person while it runs.

    Raises:
        ZckptError: one of its kinds says what is wrong; what had the output's name before is unchanged then.
    """
    _check_signing(order)
    if order.out.is_remote:
        from zckpt.output import delivery_to_address

        return delivery_to_address.send(order, progress, on_note)
    check_space(order.out, order.bytes_written)
    with team(order.out.path) as processes:
        if processes.size > 1:
            _agree(processes, order)
        if processes.rank == 0:
            return _lead(processes, order, progress, on_note)
        from zckpt.team.partition import follow

        follow(processes, order.plan, order.how)
        return _delivered_elsewhere(processes.meet()[0])


def _lead(
    processes: Team, order: Order, progress: Callable[[int], None] | None, on_note: Callable[[str], None]
) -> Delivered:
    """The work of the only process, or of process 0 of several."""
    names = [entry.name for _, entry in order.plan.pairs]
    key = (order.signing.signer.hint,) if order.signing else ()
    job = fingerprint(order.plan, order.copies, order.overflow, order.single, *key)
    hashes = _hashes(order, processes)
    watch = progress if processes.size == 1 else processes.watched(None)
    with Staging(
        order.out.path, single=order.single, names=order.names, job=job, overwrite=order.overwrite, merge=order.merge
    ) as staging:
        processes.sweep(order.out.path)
        if staging.published:
            kept = still_sound(staging.home, staging.left, order.pace, watch)
            if damaged := staging.left.keys() - kept.keys():
                staging.make_again(sorted(damaged))
        if not staging.published:
            kept = still_sound(staging.directory, staging.left, order.pace, watch)
        made, engine = dict(kept), "native"
        notes = resumed(len(kept), order) if not staging.published else ()
        for note in notes:
            on_note(note)
        if not staging.published:
            staging.keep(kept)

            def finished(written: Written) -> None:
                made[written.path] = as_finished(written, names)
                staging.finished(made[written.path])

            if processes.size > 1:
                from zckpt.team.partition import lead

                engine = lead(
                    processes, order.plan, staging.directory, order.how, done=kept, finished=finished, progress=progress
                )
            else:
                engine = run(
                    order.plan, staging.directory, progress=progress, done=kept, finished=finished,
                    consumers={path: digest.update for path, digest in hashes.items() if path not in kept}, **order.how,
                ).engine  # fmt: skip
        else:
            processes.meet()
        overflows = overflows_of((file.overflows for file in made.values()), order.plan, order.overflow)
        if not staging.published:
            made.update((name, staging.copy(file, name)) for file, name in order.copies)
            known = {path: digest.hexdigest() for path, digest in hashes.items() if path not in kept}
            signing = order.signing
            sign = None if signing is None else signing.of(order.out.path, staging.directory, made, known)
            staging.commit(manifest_of(order, made.values()), sign)
    sizes = [(file.path, file.size) for file, _ in order.plan.files]
    sizes += [(name, file.size()) for file, name in order.copies]
    delivered = Delivered(
        files=tuple(sizes),
        engine=engine,
        kept=len(sizes) if staging.published else len(kept),
        overflows=overflows,
        notes=(*notes, *staging.notes),
        already_done=staging.published,
    )
    processes.meet(asdict(delivered))
    return delivered


def _hashes(order: Order, processes: Team) -> dict[str, _Hash]:
    """Path -> SHA-256 in the making, of the files of a signed output that can be hashed while they are written.

    A file with checksums in it, and one that several processes write, is read again.
    """
    if order.signing is None or processes.size > 1:
        return {}
    return {output.path: sha256() for output, _ in order.plan.files if not output.checksums}


def _check_signing(order: Order) -> None:
    """Refuses a signature that could not be made, or would not cover what is there.

    Raises:
        UnsupportedError, UsageError: the output is at an address, one file, or put into a directory that exists.
    """
    if order.signing is None:
        return
    if order.out.is_remote:
        raise UnsupportedError(
            "an output at an address cannot be signed", file=order.out,
            remedy="Write it to a directory on this machine with --sign, and copy that to the address.",
        )  # fmt: skip
    if order.single or order.merge:
        raise UsageError(
            "a signature is for a directory that zckpt writes whole", file=order.out,
            found="a single file" if order.single else "a directory that exists", expected="a new directory as OUT",
            remedy="Leave out --sign, or write a directory.",
        )  # fmt: skip


def _delivered_elsewhere(outcome: Any) -> Delivered:
    """The `Delivered` of process 0, from what it sent."""
    overflows = {name: (int(count), float(largest)) for name, (count, largest) in outcome["overflows"].items()}
    files = tuple((path, nbytes) for path, nbytes in outcome["files"])
    return Delivered(files, outcome["engine"], outcome["kept"], overflows, (), outcome["already_done"])


def _agree(processes: Team, order: Order) -> None:
    """Checks that all processes have the same job.

    Raises:
        UsageError: they have different arguments.
        InconsistentError: they see different files.
    """
    asked = (order.overflow, order.single, order.overwrite, order.merge, order.dtype and order.dtype.name)
    job = fingerprint(order.plan, order.copies, *asked, sorted(map(repr, order.options.items())), state=seen)
    here = {"job": job, "out": os.path.realpath(order.out), "asked": sys.argv[1:], "host": os.uname().nodename}
    said = processes.meet(here)
    for rank, other in enumerate(said):
        if (other["job"], other["out"]) == (said[0]["job"], said[0]["out"]):
            continue
        if other["asked"] != said[0]["asked"]:
            raise UsageError(
                "the processes have different arguments",
                found=f"process {rank}: {shlex.join(other['asked'])}; process 0: {shlex.join(said[0]['asked'])}",
                remedy="Start all of them with the same arguments. Nothing was changed.",
            )
        raise InconsistentError(
            "the processes see different files",
            found=f"process {rank} on {other['host']} does not see what process 0 on {said[0]['host']} sees",
            expected="the same paths, sizes and modification times, and one output",
            remedy="Put the checkpoint and OUT on a file system that all machines share. Nothing was changed.",
        )


def still_sound(
    directory: str, left: Mapping[str, Finished], pace: Pace, progress: Callable[[int], None] | None = None
) -> dict[str, Finished]:
    """The files of `left` that still have their sizes and checksums, by path; reads every byte of them."""
    sound: dict[str, Finished] = {}
    read = 0
    for path, file in left.items():
        if not is_there(directory, file):
            continue
        store = (LocalPath(directory) / path).store()
        try:
            report = scan(
                [request_of_bytes(store, 0, store.size)] if store.size else [],
                [CrcRange(store, 0, store.size)],
                progress=progress_after(progress, read),
                **pace,
            )
        except CorruptError:
            continue
        if join(report.crcs.get(0, ()), 0, store.size) == file.crc32:
            sound[path] = file
            read += store.size
    return sound
