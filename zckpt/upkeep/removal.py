"""Deletes saves so that a process may be killed at any moment and every directory with a save's name is still a whole save.

For `prune`. [Note: how a save goes] The save's directory is renamed into a work directory in the run's directory, which no loader
takes for a save; when its own name is gone for good, what is in it is deleted. A kill, or a power failure, leaves
whole saves and the work directory, which the next `prune --yes` of the run empties. Accelerate sorts all directories beside its
saves by the first number in their names, so the work directory's name has a 0: it sorts before every save and is never loaded.
Source: accelerate 1.15, accelerator.py `load_state`.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable

from zckpt.base.errors import OutputError
from zckpt.layouts.run_saves import RunSave
from zckpt.output.durable import sync
from zckpt.output.work_directory import WorkDirectory

WORK = ".pruned.0.zckpt"
"""The work directory's name."""


def is_left(run: str) -> bool:
    """Whether a prune was killed and left its work directory."""
    return os.path.isdir(os.path.join(run, WORK)) and not os.path.islink(os.path.join(run, WORK))


def left_bytes(run: str) -> int:
    """Bytes of saves that a killed prune left."""
    return bytes_below(os.path.join(run, WORK, "files"))


def bytes_below(path: str) -> int:
    """The bytes that deleting a directory frees: files with names elsewhere do not count, and links are not followed."""
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                found = os.lstat(os.path.join(root, name))
            except OSError:  # it is gone meanwhile
                continue
            total += found.st_size if found.st_nlink == 1 and stat.S_ISREG(found.st_mode) else 0
    return total


def remove(
    run: str,
    saves: Iterable[RunSave],
    needed: Callable[[Collection[str]], Collection[str]],
    done: Callable[[str], None],
) -> list[str]:
    """Deletes saves of a run's directory, one after the other, and what a killed run left. `needed`: names of saves that
    something needs now, but for those in its argument, which are to go; asked before each goes. `done`: called with the name of
    each save that is gone. Returns the saves that are needed meanwhile, and stayed. Raises OutputError if another prune is at
    work, or a save cannot be deleted.
    """
    work = WorkDirectory(run, os.path.join(run, WORK))
    stayed: list[str] = []
    work.take()
    try:
        for left in (work.files, *(os.path.join(path, "files") for path in work.dead)):
            _delete(left)
        os.mkdir(work.files, 0o700)
        going = {save.name: save for save in saves}
        for save in [*going.values()]:
            if save.name in needed(going):
                del going[save.name]
                stayed.append(save.name)
                continue
            aside = os.path.join(work.files, save.name)
            if _move_away(os.path.join(run, save.name), aside):
                sync(run)
                _delete(aside)
            done(save.name)
        os.rmdir(work.files)
    finally:
        work.release(remove=True)
        for path in work.dead:
            shutil.rmtree(path, ignore_errors=True)
    return stayed


def _move_away(path: str, aside: str) -> bool:
    """Renames a save away; False if it is gone, as the run itself deletes saves too. Raises OutputError if it cannot be
    renamed, or is a link now.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise OutputError(
                "is not a directory any more", file=path, expected="the directory that was a save",
                remedy="Run the same command again.",
            )  # fmt: skip
        os.rename(path, aside)
    except FileNotFoundError:
        return False
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            "cannot be renamed, so it was not deleted", file=path, found=error.strerror or str(error),
            remedy="Give yourself permission to write here, then run the same command again.",
        ) from error  # fmt: skip
    return True


def _delete(path: str) -> None:
    """Deletes a directory of the work directory; links in it are removed, not followed. Raises OutputError if something
    in it cannot be deleted.
    """
    if not os.path.lexists(path):
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise OutputError(
            "cannot be deleted", file=error.filename or path, found=error.strerror or str(error),
            remedy="Solve this, then run the same command again: it deletes what is left.",
        ) from error  # fmt: skip
