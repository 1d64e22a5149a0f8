"""Outputs on other machines: each file is sent while it is made, in order, by multi-part upload; no copy on this disk.

For conversions whose OUT is an address (`s3://bucket/weights`). A store has no rename, so: shards first, each there whole
or not at all; the index that names them after these, the manifest last; and whatever happens before that, the files made
until then are removed. A `.bin` file has its checksums before its numbers, so its numbers are read twice: once for the
checksums, once to send them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

from zckpt import files, remote
from zckpt.batches import progress_after
from zckpt.delivery import Delivered, Order, as_finished, manifest_of, overflows_of
from zckpt.errors import OutputError, redact
from zckpt.mover import run
from zckpt.output import manifest
from zckpt.output.commit import in_order
from zckpt.output.journal import Finished
from zckpt.plan import OutputFile, Plan
from zckpt.tuning import Pace


def check_output(out: str, *, single: bool, overwrite: bool) -> None:
    """Refuses an output that is there already.

    Raises:
        OutputError: it is.
    """
    remote.refresh(out)
    there = files.is_file(out) if single else bool(files.is_dir(out) and files.names(out))
    if there and not overwrite:
        raise OutputError(
            "an output that exists", file=redact(out), found="is there already" + ("" if single else " and is not empty"),
            remedy="Nothing was changed. Choose another OUT, or pass --overwrite to replace it when the new one is complete.",
        )  # fmt: skip


def send(order: Order, progress: Callable[[int], None] | None = None) -> Delivered:
    """As `delivery.deliver`, to an address.

    Args:
        order: what is to be delivered.
        progress: called with the bytes sent so far.

    Raises:
        RemoteError: the store failed. What was sent is removed again.
    """
    out, parts = order.out.rstrip("/"), {part.files[0][0].path: part for part in order.plan.by_file()}
    facts = manifest.path_for(out, single=order.single)
    addresses = {name: out if order.single else f"{out}/{name}" for name in (*(n for _, n in order.copies), *parts)}
    old: set[str] = set()
    if order.overwrite and not order.single and files.is_dir(out):
        old = {f"{out}/{name}" for name in files.file_names(out)} - {*addresses.values(), facts}
    made: list[Finished] = []
    engine = "native"
    try:
        for path, name in order.copies:
            made.append(_copied(path, name, addresses[name]))
        done = 0
        for name in in_order(parts):
            file, engine = _made(order, parts[name], addresses[name], progress_after(progress, done))
            made.append(file)
            done += file.nbytes
        overflows = overflows_of((file.overflows for file in made), order.plan, order.overflow)
        text = manifest_of(order, made).as_bytes()
        with remote.Upload(facts, len(text)) as upload:
            upload.write(text)
    except BaseException:
        remote.remove([addresses[file.path] for file in made])
        raise
    remote.remove(sorted(old))
    sizes = {file.path: file.nbytes for file in made}
    listed = tuple((name, sizes[name]) for name in (*parts, *(name for _, name in order.copies)))
    return Delivered(listed, engine, 0, overflows, ())


def _copied(path: str, name: str, address: str) -> Finished:
    data = files.read(path)
    with remote.Upload(address, len(data)) as upload:
        upload.write(data)
    return Finished(name, len(data), zlib.crc32(data))


def _made(order: Order, plan: Plan, address: str, progress: Callable[[int], None] | None) -> tuple[Finished, str]:
    """One file; complete there only if no cast of it is an error."""
    plan = _with_checksums(plan, order.pace)
    names = [entry.name for _, entry in plan.pairs]
    with remote.Upload(address, plan.bytes_written) as upload:
        moved = run(
            plan, "", overflow=order.overflow, progress=progress, window=order.buffer, streamed=True,
            sinks={plan.files[0][0].path: upload.write}, **order.pace,
        )  # fmt: skip
        file = as_finished(moved.files[0], names)
        overflows_of([file.overflows], plan, order.overflow)
    return file, moved.engine


def _with_checksums(plan: Plan, pace: Pace) -> Plan:
    """The plan of a file whose checksums are in its literals already, found by a first pass that writes nothing."""
    ((output, store),) = plan.files
    if not output.checksums:
        return plan
    literals = [(offset, bytearray(data)) for offset, data in output.literals]
    for slot, crc in run(plan, "", streamed=True, **pace).files[0].slots.items():
        at, data = next((at, data) for at, data in literals if at <= slot < at + len(data))
        data[slot - at : slot - at + len(crc)] = crc
    known: OutputFile = replace(output, literals=tuple((at, bytes(data)) for at, data in literals), checksums=())
    return Plan(((known, store),), plan.pairs)
