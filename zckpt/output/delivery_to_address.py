"""Writes outputs to addresses: sends each file while it is made, by multi-part upload, without a copy on this disk.

For conversions whose OUT is an address (`s3://bucket/weights`). `output.address` replaces the old output by the new one.
A `.bin` file has its checksums before its numbers, so its numbers are read twice: for the checksums, and to send them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from zckpt.base.pace import Pace
from zckpt.core.plan import OutputFile, Plan
from zckpt.engine.batches import progress_after
from zckpt.engine.move import Mode, run
from zckpt.output.address import OutputAddress, SentToAddress, recover
from zckpt.output.journal import Finished
from zckpt.output.order import Delivered, Order, as_finished, fingerprint, manifest_of, overflows_of, resumed
from zckpt.output.sending import INDEX, Sending, Write


def send(
    order: Order, progress: Callable[[int], None] | None = None, on_note: Callable[[str], None] = lambda note: None
) -> Delivered:
    """As `delivery.deliver`, to an address.

    Args:
        order: the output and how it is made.
        progress: called with the bytes sent so far.
        on_note: called with sentences for a person while it runs.

    Raises:
        OutputError: the output exists, or files are in the way.
        RemoteError: the store failed.
    """
    place = OutputAddress(order.out.refreshed(), single=order.single)
    key = (order.signing.signer.hint,) if order.signing else ()
    job = fingerprint(
        order.plan, order.copies, order.overflow, order.single, sorted(map(repr, order.options.items())), *key
    )
    kept = recover(place, job)
    done = place.made_by(job)
    if done is not None:
        listed = [sent.file for sent in done.sent if sent.file.path != place.manifest]
        sizes = tuple((file.path, file.nbytes) for file in listed)
        overflows = overflows_of((file.overflows for file in listed), order.plan, order.overflow)
        return Delivered(sizes, "native", len(sizes), overflows, (), already_done=True)
    sending = _SendingPlan(order, place, job, kept)
    notes = resumed(len(kept), order)
    for note in notes:
        on_note(note)
    return replace(sending.carry_out(progress), notes=notes)


class _SendingPlan:
    """One run that sends what a plan makes.

    Args:
        order: the output and how it is made.
        place: the output's address.
        job: fingerprint of the order.
        kept: files that an interrupted run of the same job had sent.
    """

    def __init__(self, order: Order, place: OutputAddress, job: str, kept: tuple[SentToAddress, ...]) -> None:
        self._order = order
        self._parts = {part.files[0][0].path: part for part in order.plan.by_file()}
        self._small = {name: text for name, part in self._parts.items() if (text := _literal(name, part)) is not None}
        self._small |= {name: file.read() for file, name in order.copies}
        large = [name for name in self._parts if name not in self._small]
        is_indexed = any(name.endswith(INDEX) for name in self._small)
        self._sending = Sending(
            place, job, kept, large=large, small=self._small, head=large[0] if len(large) == 1 and not is_indexed else "",
            overwrite=order.overwrite, merge=order.merge, signing=order.signing,
        )  # fmt: skip
        self._engine = "native"

    def carry_out(self, progress: Callable[[int], None] | None) -> Delivered:
        """Sends everything; `progress` is called with the bytes sent so far."""
        sending, order = self._sending, self._order
        try:
            sending.begin()
            done = 0
            for name in sorted(sending.names):
                watch = progress_after(progress, done)
                done += (sending.left(name) or self._made(name, watch)).nbytes
            overflows = overflows_of((file.overflows for file in sending.sent), order.plan, order.overflow)
            sending.seal(self._small, partial(manifest_of, order))
        except BaseException:
            sending.withdraw()
            raise
        sending.commit()
        listed = tuple((file.path, file.nbytes) for file in sending.files())
        return Delivered(listed, self._engine, sending.kept, overflows, ())

    def _made(self, name: str, progress: Callable[[int], None] | None) -> Finished:
        """Makes and sends one large file; a shard appears unless a cast is an error."""
        plan = _with_checksums(self._parts[name], self._order.pace)
        names = [entry.name for _, entry in plan.pairs]

        def work(write: Write) -> Finished:
            consumers = {plan.files[0][0].path: write}
            moved = run(plan, "", mode=Mode.STREAMED, progress=progress, consumers=consumers, **self._order.how)
            file = as_finished(moved.files[0], names)
            overflows_of([file.overflows], plan, self._order.overflow)
            self._engine = moved.engine
            return file

        return self._sending.send(name, plan.bytes_written, work)


def _literal(name: str, part: Plan) -> bytes | None:
    """The bytes of a JSON file that are all in the plan; None for a file of tensors."""
    output = part.files[0][0]
    known = b"".join(data for _, data in sorted(output.literals))
    return known if name.endswith(".json") and len(known) == output.size else None


def _with_checksums(plan: Plan, pace: Pace) -> Plan:
    """The plan of one file with its checksums filled in; computes them by a first pass that writes nothing."""
    ((output, store),) = plan.files
    if not output.checksums:
        return plan
    literals = [(offset, bytearray(data)) for offset, data in output.literals]
    for slot, crc in run(plan, "", mode=Mode.STREAMED, **pace).files[0].slots.items():
        at, data = next((at, data) for at, data in literals if at <= slot < at + len(data))
        data[slot - at : slot - at + len(crc)] = crc
    known: OutputFile = replace(output, literals=tuple((at, bytes(data)) for at, data in literals), checksums=())
    return Plan(((known, store),), plan.pairs)
