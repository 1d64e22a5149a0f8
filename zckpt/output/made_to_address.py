"""Sends an output to an address whose files are made one after the other, with sizes that are not known before.

For `made`. Each file is made in a directory of this machine, sent, and deleted there; small files are sent at the commit.
Files that only a later run needs lie at the address until then.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from zckpt.output.address import OutputAddress, SentToAddress, recover
from zckpt.output.journal import Finished
from zckpt.output.making import Made, Making, RunningSum
from zckpt.output.manifest import Manifest
from zckpt.output.sending import Sending, Write
from zckpt.team.agreement import refuse_several

_BLOCK = 4 << 20


def send(
    making: Making, progress: Callable[[int], None] | None = None, on_note: Callable[[str], None] = lambda note: None
) -> Made:
    """As `made.carry_out`, to an address.

    Raises:
        UsageError: several processes would send.
        OutputError: the output exists, files are in the way, or the directory for files that are made is full.
        RemoteError: the store failed.
        ZckptError: a file cannot be made; nothing is published.
    """
    refuse_several(making.out)
    place = OutputAddress(making.out.refreshed(), single=False)
    kept = recover(place, making.job)
    done = place.made_by(making.job)
    if done is not None:
        sizes = tuple((s.file.path, s.file.nbytes) for s in done.sent if s.file.path != place.manifest)
        return Made(sizes, len(sizes), (), already_done=True)
    with tempfile.TemporaryDirectory(prefix="zckpt-") as directory:
        return _SendingFiles(making, place, kept, directory).carry_out(progress, on_note)


class _SendingFiles:
    """One run that sends files.

    Args:
        making: how they are made.
        place: the output's address.
        kept: files that an interrupted run of the same job had sent.
        directory: where files are made.
    """

    def __init__(self, making: Making, place: OutputAddress, kept: tuple[SentToAddress, ...], directory: str) -> None:
        self._it, self._place, self._directory = making, place, directory
        small = {*making.names} - {*making.helpers, *making.large}
        indexed = bool(making.helpers) or len(making.large) != 1
        self._sending = Sending(
            place, making.job, kept, large=making.large, small=small, head="" if indexed else next(iter(making.large)),
            helpers=making.helpers, overwrite=making.overwrite, signing=making.signing,
        )  # fmt: skip

    def carry_out(self, progress: Callable[[int], None] | None, on_note: Callable[[str], None]) -> Made:
        """Makes and sends everything; arguments as of `made.carry_out`."""
        sending, making = self._sending, self._it
        try:
            sending.begin()
            made = self._left()
            notes = making.note(kept := len([name for name in making.names if name in made]))
            for note in notes:
                on_note(note)
            moved = RunningSum(progress)
            for name in making.names:
                if name not in made:
                    for file in making.make(self._directory, name, moved):
                        made[file.path] = file
                        if file.path in sending.names:
                            self._send(file)
            manifest = making.end(self._directory, made)
            self._seal(manifest)
        except OSError as error:
            sending.withdraw()
            raise making.unwritten(error) from error
        except BaseException:
            sending.withdraw()
            raise
        sending.commit()
        return Made(tuple((file.path, file.nbytes) for file in sending.files()), kept, notes)

    def _left(self) -> dict[str, Finished]:
        """What an interrupted run had made and sent, whole; brings back what `end` needs of it."""
        making, sending = self._it, self._sending
        there = {name: file for name in sending.names if (file := sending.left(name)) is not None}
        for name in making.helpers:
            if name in there:
                Path(self._directory, name).write_bytes(self._place.read(sending.names[name]))
        found: dict[str, Finished] = {}
        for name in making.names:
            needed = making.needs(self._directory, name) if name in there else ()
            if name in there and all(other in there for other in needed):
                found |= {path: replace(there[path], path=path) for path in (name, *needed)}
        return found

    def _send(self, file: Finished) -> None:
        """Sends a file; helpers stay here too."""
        path = Path(self._directory, file.path)

        def work(write: Write) -> Finished:
            with path.open("rb") as source:
                while block := source.read(_BLOCK):
                    write(block)
            return file

        self._sending.send(file.path, file.nbytes, work)
        if file.path not in self._it.helpers:
            path.unlink()

    def _seal(self, manifest: Manifest) -> None:
        large = {file.path for file in manifest.files if file.path in self._sending.names}
        small = {
            file.path: Path(self._directory, file.path).read_bytes()
            for file in manifest.files
            if file.path not in large
        }

        def with_files(files: Iterable[Finished]) -> Manifest:
            return replace(manifest, files=tuple(files))

        self._sending.seal(small, with_files)
