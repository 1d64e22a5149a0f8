"""An output whose files the caller makes one after the other, with sizes that are not known before: published whole.

For deltas, and for what is made of them; everything that `delivery` writes has a plan. The protocol is the one of
`zckpt.output`. An interrupted run is resumed: its finished files are kept if their bytes are as they were.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from zckpt.base.errors import OutputError, ZckptError
from zckpt.base.pace import Pace
from zckpt.base.words import count
from zckpt.engine.checksums import crc_of_file
from zckpt.output.delivery import still_sound
from zckpt.output.journal import Finished
from zckpt.output.manifest import Manifest
from zckpt.output.signature import Signing
from zckpt.output.staging import Staging
from zckpt.storage.fsync_queue import make_durable


@dataclass(frozen=True, slots=True)
class Made:
    """An output that was made.

    Attributes:
        files: (path relative to the output, bytes), without the manifest.
        kept: files that an earlier run had finished.
        notes: sentences for a person.
        already_done: whether an earlier run of the same job had made the output, so that nothing was written.
    """

    files: tuple[tuple[str, int], ...]
    kept: int
    notes: tuple[str, ...]
    already_done: bool = False


@dataclass(frozen=True, slots=True)
class Making:
    """How an output is made.

    Attributes:
        out: its path.
        job: fingerprint of everything that its bytes depend on.
        names: of the files that are made one by one, in order.
        make: is given the staged directory and one of these names; makes that file, and before it any that belong to it, each
            durable (`finished`).
        needs: is given the same for a file that an earlier run had made; names those that belong to it.
        end: is given the staged directory and all those files; makes the others, may rename some, and returns the manifest.
        overwrite: replace an existing output.
        pace: threads and I/O settings, for what an earlier run left.
        signing: with which key the output is signed; None for none.
    """

    out: str
    job: str
    names: Sequence[str]
    make: Callable[[str, str], Sequence[Finished]]
    end: Callable[[str], Manifest]
    overwrite: bool
    pace: Pace
    needs: Callable[[str, str], Collection[str]] = lambda directory, name: ()
    signing: Signing | None = None

    def carry_out(self, on_note: Callable[[str], None] = lambda note: None) -> Made:
        """Makes all files and publishes the output.

        Raises:
            OutputError: the output cannot be written.
            ZckptError: a file cannot be made; nothing is published.
        """
        with Staging(self.out, single=False, names=(), job=self.job, overwrite=self.overwrite) as staging:
            if staging.published:
                kept = still_sound(staging.home, staging.left, self.pace)
                if damaged := staging.left.keys() - kept.keys():
                    staging.make_again(sorted(damaged))
                else:
                    sizes = tuple((file.path, file.nbytes) for file in kept.values())
                    return Made(sizes, len(sizes), staging.notes, already_done=True)
            kept = still_sound(staging.directory, staging.left, self.pace)
            needs = {name: self.needs(staging.directory, name) for name in self.names if name in kept}
            done = {name for name, others in needs.items() if all(other in kept for other in others)}
            staging.keep({*done, *(other for name in done for other in needs[name])})
            notes: tuple[str, ...] = ()
            if done:
                verb = "is" if len(done) == 1 else "are"
                notes = (
                    f"resuming an interrupted run: {len(done):,} of {count(len(self.names), 'file')} {verb} already complete",
                )
                on_note(notes[0])
            try:
                for name in self.names:
                    if name not in done:
                        for file in self.make(staging.directory, name):
                            staging.finished(file)
                manifest = self.end(staging.directory)
            except OSError as error:
                if isinstance(error, ZckptError):
                    raise
                raise OutputError(
                    "cannot be written", file=self.out, found=error.strerror or str(error),
                    remedy="Make room or get the right to write there, and run the same command again. Nothing was published.",
                ) from error  # fmt: skip
            paths = [file.path for file in manifest.files]
            signing = self.signing
            staging.commit(manifest, None if signing is None else signing.of(self.out, staging.directory, paths, {}))
            sizes = tuple((file.path, file.nbytes) for file in manifest.files)
            return Made(sizes, len(done), (*notes, *staging.notes))


def finished(directory: str, name: str) -> Finished:
    """Makes a file that was written durable, and reads its checksum; errors as OSError."""
    with open(os.path.join(directory, name), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        crc = crc_of_file(file.fileno(), 0, nbytes)
        make_durable(file.fileno())
    return Finished(name, nbytes, crc)


def write_small(directory: str, name: str, data: bytes) -> Finished:
    """Writes a small file, durably."""
    with open(os.path.join(directory, name), "wb") as file:
        file.write(data)
    return finished(directory, name)
