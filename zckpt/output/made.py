"""Publishes outputs whose files the caller makes one after the other, with sizes that are not known before.

For deltas, and for what is made of them; everything that `delivery` writes has a plan. The protocol is the one of
`zckpt.output`; to an address, `made_to_address` sends the files. An interrupted run is resumed: its finished files are kept if
their bytes are as they were. Several processes make the files in turn, and process 0 publishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from zckpt.output import made_to_address
from zckpt.output.delivery import still_sound
from zckpt.output.journal import Finished
from zckpt.output.making import Made, Making, RunningSum
from zckpt.output.staging import Staging
from zckpt.team.agreement import agree
from zckpt.team.together import Team, team


def carry_out(
    making: Making, progress: Callable[[int], None] | None = None, on_note: Callable[[str], None] = lambda note: None
) -> Made:
    """Makes all files and publishes the output.

    Args:
        making: how they are made.
        progress: called with the bytes of which all processes have told.
        on_note: called with sentences for a person while it runs.

    Raises:
        OutputError: the output cannot be written.
        ZckptError: a file cannot be made; nothing is published.
    """
    if making.out.is_remote:
        return made_to_address.send(making, progress, on_note)
    with team(making.out.path) as processes:
        if processes.size > 1:
            agree(processes, making.shared(), making.out.path)
        if processes.rank == 0:
            return _Lead(making, processes, progress, on_note).carry_out()
        return _follow(making, processes)


class _Lead:
    """The work of the only process, or of process 0 of several."""

    def __init__(
        self, making: Making, processes: Team, progress: Callable[[int], None] | None, on_note: Callable[[str], None]
    ) -> None:
        self._it, self._processes, self._on_note = making, processes, on_note
        self._moved = RunningSum(processes.watched(progress) if processes.size > 1 else progress)
        self._files: dict[str, Finished] = {}

    def carry_out(self) -> Made:
        it = self._it
        with Staging(it.out.path, single=False, names=(), job=it.job, overwrite=it.overwrite) as staging:
            self._processes.sweep(it.out.path)
            if staging.published:
                kept = still_sound(staging.home, staging.left, it.pace)
                if not (damaged := staging.left.keys() - kept.keys()):
                    self._processes.meet()
                    sizes = tuple((file.path, file.nbytes) for file in kept.values())
                    return self._told(Made(sizes, len(sizes), staging.notes, already_done=True))
                staging.make_again(sorted(damaged))
            kept = still_sound(staging.directory, staging.left, it.pace)
            needs = {name: it.needs(staging.directory, name) for name in it.names if name in kept}
            done = {name for name, others in needs.items() if all(other in kept for other in others)}
            staging.keep({*done, *(other for name in done for other in needs[name])})
            self._files = {path: kept[path] for name in done for path in (name, *needs[name])}
            notes = it.note(len(done))
            for note in notes:
                self._on_note(note)
            try:
                self._make_all(staging, [name for name in it.names if name not in done])
                manifest = it.end(staging.directory, self._files)
            except OSError as error:
                raise it.unwritten(error) from error
            paths = [file.path for file in manifest.files]
            signing = it.signing
            staging.commit(manifest, None if signing is None else signing.of(it.out.path, staging.directory, paths, {}))
            sizes = tuple((file.path, file.nbytes) for file in manifest.files)
        return self._told(Made(sizes, len(done), (*notes, *staging.notes)))

    def _make_all(self, staging: Staging, names: Sequence[str]) -> None:
        """Makes this process's files, and waits for those of the others."""
        it, processes = self._it, self._processes
        processes.meet({"directory": staging.directory, "names": list(names)})
        for name in names[:: processes.size]:
            for file in it.make(staging.directory, name, self._moved):
                self._files[file.path] = file
                staging.finished(file)
            self._listen(staging)
        while any(name not in self._files for name in names):
            self._listen(staging)
            self._moved(0)
            time.sleep(0.02)

    def _listen(self, staging: Staging) -> None:
        if self._processes.size > 1:
            for _, word in self._processes.news():
                file = Finished(**word)
                self._files[file.path] = file
                staging.finished(file)

    def _told(self, made: Made) -> Made:
        self._processes.meet(asdict(made))
        return made


def _follow(making: Making, processes: Team) -> Made:
    """The work of the other processes."""
    begun = processes.meet()[0]
    if begun is not None:
        moved = RunningSum(processes.watched(None))
        try:
            for name in begun["names"][processes.rank :: processes.size]:
                for file in making.make(begun["directory"], name, moved):
                    processes.post(asdict(file))
        except OSError as error:
            raise making.unwritten(error) from error
    said = processes.meet()[0]
    files = tuple((path, nbytes) for path, nbytes in said["files"])
    return Made(files, said["kept"], (), said["already_done"])
