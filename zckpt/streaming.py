"""Outputs on other machines: each file is sent while it is made, in order, by multi-part upload; no copy on this disk.

For conversions whose OUT is an address (`s3://bucket/weights`). A store has no rename, so: shards first, each there whole
or not at all; the index that names them last; and whatever happens before that, the files made until then are removed.
A `.bin` file has its checksums before its numbers, so its numbers are read twice: once for the checksums, once to send them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from zckpt import files, remote
from zckpt.errors import OutputError, redact
from zckpt.mover import MoveReport, run
from zckpt.plan import OutputFile, Plan
from zckpt.publish import index_last


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


class Outlet:
    """An output behind an address.

    Args:
        out: the address.
        single: whether it is one file.
        overwrite: whether files of an older output are removed when the new one is complete.
    """

    def __init__(self, out: str, *, single: bool, overwrite: bool) -> None:
        self.out = out.rstrip("/")
        self._single = single
        self._old = set(files.file_names(out)) if overwrite and not single and files.is_dir(out) else set()

    def write(
        self,
        plan: Plan,
        copies: Sequence[tuple[str, str]],
        judge: Callable[[MoveReport, Plan], None],
        threads: int | None,
        overflow: Literal["error", "inf", "clamp"],
        progress: Callable[[int], None] | None,
    ) -> str:
        """Sends every file of a plan, and copies of small files; returns the engine's name.

        Args:
            plan: what goes where.
            copies: (path, name) of small files.
            judge: is told of each file's run before the file is complete, and raises where it should not be.
            threads: of the mover.
            overflow: as for `mover.run`.
            progress: called with the bytes sent so far.

        Raises:
            RemoteError: the store failed. What was sent is removed again.
        """
        parts = {part.files[0][0].path: part for part in plan.by_file()}
        sent: list[str] = []
        done, engine = 0, "native"
        try:
            for path, name in copies:
                sent.append(self._address(name))
                with remote.Upload(sent[-1], files.size(path)) as upload:
                    upload.write(files.read(path))
            for name in index_last(parts):
                part = _with_checksums(parts[name], threads)
                sent.append(self._address(name))
                with remote.Upload(sent[-1], part.bytes_written) as upload:
                    told = _after(progress, done)
                    sinks = {name: upload.write}
                    moved = run(part, "", threads=threads, overflow=overflow, progress=told, sinks=sinks, streamed=True)
                    judge(moved, part)
                done, engine = done + part.bytes_written, moved.engine
        except BaseException:
            remote.remove(sent[:-1])
            raise
        remote.remove([self._address(name) for name in self._old - parts.keys() - {name for _, name in copies}])
        return engine

    def _address(self, name: str) -> str:
        return self.out if self._single else f"{self.out}/{name}"


def _after(progress: Callable[[int], None] | None, base: int) -> Callable[[int], None] | None:
    return None if progress is None else lambda now: progress(base + now)


def _with_checksums(plan: Plan, threads: int | None) -> Plan:
    """The plan of a file whose checksums are in its literals already, found by a first pass that writes nothing."""
    ((output, store),) = plan.files
    if not output.checksums:
        return plan
    found = run(plan, "", threads=threads, streamed=True).checksums
    literals = [(offset, bytearray(data)) for offset, data in output.literals]
    for checksum, crc in zip(output.checksums, found, strict=True):
        for slot in checksum.slots:
            at, data = next((at, data) for at, data in literals if at <= slot < at + len(data))
            data[slot - at : slot - at + 4] = struct.pack("<I", crc)
    known: OutputFile = replace(output, literals=tuple((at, bytes(data)) for at, data in literals), checksums=())
    return Plan(((known, store),), plan.pairs)
