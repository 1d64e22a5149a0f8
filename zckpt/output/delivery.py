"""Carries out a plan and publishes its output whole, with a manifest; resumes an interrupted run.

For every job that writes files. A run resumes an earlier one if that was the same job, and keeps those of its files that are
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from zckpt.base.errors import CorruptError, OutputError, UsageError
from zckpt.base.pace import Pace
from zckpt.engine.batches import progress_after
from zckpt.engine.checksums import join
from zckpt.engine.move import Written, run
from zckpt.engine.scan import scan
from zckpt.engine.scan_requests import CrcRange, request_of_bytes
from zckpt.output import manifest as manifests
from zckpt.output.checks import check_path, check_space, keep_apart
from zckpt.output.journal import Finished
from zckpt.output.order import Delivered, Order, as_finished, fingerprint, manifest_of, overflows_of, resumed, seen
from zckpt.output.staging import Staging, is_there
from zckpt.output.work_directory import is_unfinished
from zckpt.storage.location import LocalPath, Location
from zckpt.team.agreement import agree, refuse_several
from zckpt.team.together import Team, team

if TYPE_CHECKING:
    from hashlib import _Hash


def check_output(
    out: Location, *, single: bool, overwrite: bool, protected: Iterable[Location], merge: bool = False
) -> None:
    """Refuses an output that must not be written, before any work is done; arguments and errors as in `check_path`."""
    if out.is_remote:
        from zckpt.output import sending

        keep_apart(out, protected)
        sending.check_address(out, single=single, overwrite=overwrite, merge=merge)
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

        refuse_several(order.out)
        return delivery_to_address.send(order, progress, on_note)
    check_space(order.out, order.bytes_written)
    with team(order.out.path) as processes:
        if processes.size > 1:
            asked = (order.overflow, order.single, order.overwrite, order.merge, order.dtype and order.dtype.name)
            job = fingerprint(order.plan, order.copies, *asked, sorted(map(repr, order.options.items())), state=seen)
            agree(processes, job, order.out.path)
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
            out = order.out.path
            sign = None if signing is None else signing.of(out, staging.directory, made, known, single=order.single)
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
    """Refuses a signature that would not cover what is there, or has the name of another file.

    Raises:
        UsageError: the output is put into a directory that exists.
        OutputError: a file that zckpt did not write has the signature's name.
    """
    if order.signing is None:
        return
    if order.merge:
        raise UsageError(
            "a signature is for a directory that zckpt writes whole", file=order.out, found="a directory that exists",
            expected="a new directory as OUT", remedy="Leave out --sign, or write a directory.",
        )  # fmt: skip
    if order.single and not _interrupted(order.out):
        facts = order.out.parent / f"{order.out.name}.{manifests.NAME}"
        name = manifests.signature_for(facts.name)
        if (order.out.parent / name).is_file() and not (facts.is_file() and manifests.read(facts).signature):
            raise OutputError(
                "the name of the signature is taken", file=order.out.parent / name, found="a file that zckpt did not write",
                expected="no file of this name", remedy="Move it away, or choose another OUT. Nothing was changed.",
            )  # fmt: skip


def _interrupted(out: Location) -> bool:
    """Whether a run was interrupted that may have moved the parts of one file; this run completes or withdraws that first."""
    if out.is_remote:
        from zckpt.output.address import OutputAddress

        return OutputAddress(out, single=True).read_record() is not None
    return is_unfinished(out.path)


def _delivered_elsewhere(outcome: Any) -> Delivered:
    """The `Delivered` of process 0, from what it sent."""
    overflows = {name: (int(count), float(largest)) for name, (count, largest) in outcome["overflows"].items()}
    files = tuple((path, nbytes) for path, nbytes in outcome["files"])
    return Delivered(files, outcome["engine"], outcome["kept"], overflows, (), outcome["already_done"])


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
