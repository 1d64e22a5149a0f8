"""Makes an output and publishes it whole, with a manifest: the only path from an order to its destination.

For every job that writes files. A run resumes an earlier one if that was the same job, and keeps those of its files that are
unchanged. Several processes write a directory together; process 0 publishes it.
A `Destination`, which `local_destination` and `address_destination` are, brings the output there whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Protocol

from zckpt.base.errors import OutputError, UsageError
from zckpt.core.plan import WrittenFile
from zckpt.output import manifest as manifests
from zckpt.output.checks import check_path, check_space, keep_apart
from zckpt.output.files import FileOrder, FileSource, MadeFiles, PlanFiles
from zckpt.output.local_destination import LocalDestination
from zckpt.output.manifest import Manifest
from zckpt.output.order import Order, OutputReport
from zckpt.output.work_directory import is_unfinished
from zckpt.storage.location import Location
from zckpt.storage.output_places import remove_rendezvous
from zckpt.team.together import Team, here, team


class Destination(AbstractContextManager["Destination"], Protocol):
    """The place of one output: a context manager on which these calls are made once each, in this order.

     1. `begin` finishes or gives back what other runs left, finds what an interrupted run of this job left, and refuses an
        output that must not be written. If the job has been done (`published`), nothing else is called.
     2. `keep` begins the work: of what was left, only what is named stays.
     3. `take` takes the other files as it can: all at once, or one after the other.
     4. `seal` leaves a durable record that the output is complete, with its manifest, and of what it replaces.
     5. `commit` gives the output its name, and deletes what it replaces.

    The end of the context is the sixth: without a commit it takes back what was done, or keeps files for the next run of the same
    job; what had the output's name is as it was. After a seal, whoever comes next finishes the commit or gives it up.

    Attributes:
        directory: where files are made on this machine; "" if each is sent while it is made.
        published: whether an earlier run of the same job has made the output.
        files: of the output, when it is published or sealed, without the manifest.
        notes: sentences for a person.
    """

    directory: str
    published: bool
    files: Sequence[WrittenFile]
    notes: tuple[str, ...]

    def begin(self) -> Mapping[str, WrittenFile]:
        """Finds what an earlier run of this job left, whole, by name. Raises OutputError if the output must not be
        written, or another run writes it.
        """

    def keep(self, kept: Mapping[str, WrittenFile]) -> None:
        """Begins the work, and keeps these of the files that were left."""

    def take(self, source: FileSource, kept: Mapping[str, WrittenFile]) -> dict[str, WrittenFile]:
        """Takes all files that are not kept, but small ones that are known only at the end. Returns what is known of
        these and of those that are kept, by name.
        """

    def seal(self, manifest: Manifest, source: FileSource) -> None:
        """Records that the output is complete; `source` has the small files, and hashes for a signature."""

    def commit(self) -> None:
        """Gives the output its name.

        Raises:
            OutputError: a step failed. The old output, if there was one, is unchanged; or no file is lost, and the next run on
                this output finishes the commit.
        """


def check_output(
    out: Location, *, single: bool, overwrite: bool, protected: Iterable[Location], merge: bool = False
) -> None:
    """Refuses an output that must not be written, before any work is done; arguments and errors as in `check_path`."""
    if out.is_remote:
        from zckpt.output.address_destination import check_address

        if not single:
            from zckpt.output.names import check_name

            check_name(out)
        keep_apart(out, protected)
        check_address(out, single=single, overwrite=overwrite, merge=merge)
    else:
        check_path(out, single=single, overwrite=overwrite, protected=protected, merge=merge)


def publish(
    order: Order | FileOrder,
    progress: Callable[[int], None] | None = None,
    on_note: Callable[[str], None] = lambda note: None,
) -> OutputReport:
    """Makes and publishes an output, and resumes an interrupted run of the same job.

    Args:
        order: the output and how it is made.
        progress: called with the bytes written or read so far, by all processes together.
        on_note: called with sentences for a person while it runs.

    Raises:
        ZckptError: one of its kinds says what is wrong; what had the output's name before is unchanged then.
    """
    if order.signing is not None:
        _check_signing(order)
    out = order.out
    if out.is_remote:
        from zckpt.team.sameness import refuse_several

        refuse_several(out)
    elif isinstance(order, Order):
        check_space(out, order.bytes_written)
    with team(out.path) or nullcontext() as processes:
        source: FileSource = (
            PlanFiles(order, processes, progress) if isinstance(order, Order) else MadeFiles(order, processes, progress)
        )
        if processes is None:
            return _lead(order, source, None, on_note)
        from zckpt.team.sameness import agree

        agree(processes, source.shared(), out.path)
        if processes.rank:
            source.follow(processes)
            return _report_of(processes.meet()[0])
        report = _lead(order, source, processes, on_note)
        processes.meet(asdict(report))
        return report


def _lead(
    order: Order | FileOrder, source: FileSource, processes: Team | None, on_note: Callable[[str], None]
) -> OutputReport:
    """The work of the only process, or of process 0 of several."""
    with _destination_of(order, source) as destination:
        left = destination.begin()
        if not order.out.is_remote:
            remove_rendezvous(order.out.path, here().where)
        if destination.published:
            if processes is not None:
                processes.meet()
            return source.report(destination.files, {}, destination.notes, done=True)
        kept = source.choose(destination.directory, left) if left else {}
        destination.keep(kept)
        notes = source.note(kept) if kept else ()
        for note in notes:
            on_note(note)
        files = destination.take(source, kept)
        destination.seal(source.finish(destination.directory, files), source)
        destination.commit()
    return source.report(destination.files, kept, (*notes, *destination.notes), done=False)


def _destination_of(order: Order | FileOrder, source: FileSource) -> Destination:
    if order.out.is_remote:
        from zckpt.output.address_destination import AddressDestination

        return AddressDestination(order, source)
    return LocalDestination(
        order.out.path, single=order.single, names=source.names, job=source.job, overwrite=order.overwrite,
        merge=order.merge, signing=order.signing, pace=order.pace, watch=source.watch,
    )  # fmt: skip


def _check_signing(order: Order | FileOrder) -> None:
    """Refuses a signature that would not cover what is there, or has the name of another file. Raises UsageError if the
    output is put into a directory that exists, OutputError if a file that zckpt did not write has the signature's name.
    """
    if order.merge:
        raise UsageError(
            "a signature is for a directory that zckpt writes whole", file=order.out, found="a directory that exists",
            expected="a new directory as OUT", remedy="Leave out --sign, or write a directory.",
        )  # fmt: skip
    if order.single and not _has_interrupted_run(order.out):
        facts = order.out.parent / f"{order.out.name}.{manifests.NAME}"
        name = manifests.signature_for(facts.name)
        if (order.out.parent / name).is_file() and not (facts.is_file() and manifests.read(facts).signature):
            raise OutputError(
                "the name of the signature is taken", file=order.out.parent / name, found="a file that zckpt did not write",
                expected="no file of this name", remedy="Move it away, or choose another OUT. Nothing was changed.",
            )  # fmt: skip


def _has_interrupted_run(out: Location) -> bool:
    """Whether an interrupted run may have moved parts of one file; this run completes or withdraws that first."""
    if out.is_remote:
        from zckpt.output.address import OutputAddress

        return OutputAddress(out, single=True).read_record() is not None
    return is_unfinished(out.path)


def _report_of(outcome: Any) -> OutputReport:
    """What process 0 sent; its notes are its own to say."""
    overflows = {name: (int(count), float(largest)) for name, (count, largest) in outcome["overflows"].items()}
    files = tuple((path, nbytes) for path, nbytes in outcome["files"])
    return OutputReport(files, outcome["engine"], outcome["kept"], overflows, (), outcome["already_done"])
