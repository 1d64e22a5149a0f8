"""Gives a save its name, and updates `latest`, in steps; the process may be killed after each of them.

For `saving`. See its [Note: the order of a save]. A tag is a directory beside `latest`, which names it in a line of text; readers
tell a tag from everything else by its name (`layouts.places`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from stat import S_ISDIR

from zckpt.base.errors import OutputError, UsageError, ZckptError
from zckpt.layouts.save.listing import MODEL_NAME, SHARD_NAME, is_trainers_file, list_files, natural
from zckpt.layouts.search import is_taken
from zckpt.output.durable import make_directories
from zckpt.output.saves import SaveStaging
from zckpt.storage.location import locate
from zckpt.team.meeting import Attempt, Meetings

_log = logging.getLogger("zckpt.runtime")

README, SCRIPT, LATEST = "README.txt", "zero_to_fp32.py", "latest"
_MOST_BYTES = 255
_TEXTS = {SCRIPT: ("script.txt", 0o755), README: ("readme.txt", 0o644)}
"""Files beside the saves, for users who are given only the folder -> the text in this package, and the permissions."""


class Publication:
    """The work directory of a save, as one rank sees it; its `name` on a leader, in the directory that holds the tags."""

    def __init__(self, directory: str, tag: str, *, leader: bool, latest: bool, keep_last: int | None) -> None:
        self.directory, self.tag = directory, tag
        self.name: str | None = None
        self._latest, self._keep_last = latest, keep_last
        self._staging = SaveStaging(directory, tag, is_trainers_file) if leader else None

    def begin(self) -> None:
        """On a leader: makes the work directory, and finishes what killed runs have left. Raises OutputError if the
        directory cannot be written, or another run saves this tag.
        """
        if self._staging is None:
            return
        try:
            make_directories(self.directory)
            check_places(self.directory, self.tag)
            self._staging.begin()
            self.name = self._staging.name
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(
                "checkpoints cannot be written here", file=self.directory, found=error.strerror or str(error),
                remedy="Nothing was changed. Check the path and its permissions.",
            ) from error  # fmt: skip

    def root(self, names: Sequence[str | None], rank: int) -> str:
        """The work directory that a rank writes into: that of the last leader before it. `names`: of the leaders' work
        directories, by rank; None for other ranks.
        """
        nearest = next(name for name in reversed(names[: rank + 1]) if name is not None)
        return os.path.join(self.directory, nearest)

    def publish(self, meetings: Meetings) -> None:
        """Names a written save on every file system, then in `latest`. Raises OutputError if that fails anywhere."""
        meetings.agree("save_checkpoint", self._tried(self._commit))
        meetings.agree("save_checkpoint", self._tried(self._name_it))

    def end(self) -> None:
        """Removes what a save that failed has left; one that succeeded has left nothing."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.end()

    def _tried(self, step: Callable[[SaveStaging], None]) -> Exception | None:
        with Attempt() as tried:
            if self._staging is not None:
                step(self._staging)
        error = tried.error
        if not isinstance(error, OSError) or isinstance(error, OutputError):
            return error
        found = OutputError(
            "the save is written but could not be given its name",
            file=os.path.join(self.directory, self.tag), found=error.strerror or str(error),
            remedy="Check the directory and its permissions, and save again.",
        )  # fmt: skip
        found.__cause__ = error
        return found

    def _commit(self, staging: SaveStaging) -> None:
        staging.seal()
        staging.commit()

    def _name_it(self, staging: SaveStaging) -> None:
        for name, (text, mode) in _TEXTS.items():
            if name == SCRIPT or not os.path.lexists(os.path.join(self.directory, name)):  # one's own README stays
                staging.replace_file(name, Path(__file__).with_name(text).read_bytes(), mode)
        if self._latest:
            staging.replace_file(LATEST, self.tag.encode())
        if self._keep_last is not None:
            try:
                staging.remove(_superfluous(self.directory, self.tag, self._keep_last))
            except OSError as error:  # the new one is good all the same
                _log.warning("Older saves in %s could not be deleted: %s", self.directory, error)
        self.end()  # before the ranks agree that all is done: none then finds traces of a save that has ended


def check_tag(tag: str) -> None:
    """Refuses a name that no save can have. Looks at the name only, so that all ranks come to the same result. Raises
    UsageError if the name cannot be used; the error says why.
    """
    why = ""
    if not tag:
        why = "it is empty"
    elif "/" in tag or "\\" in tag:
        why = "it is a path, not a name"
    elif tag.startswith("."):
        why = "names that begin with a dot are those of unfinished saves"
    elif tag != tag.strip():
        why = "'latest' cannot name it: readers drop white space at its ends"
    elif not tag.isprintable():
        why = "it has characters that cannot be printed"
    elif tag.casefold() == SCRIPT or is_taken(tag):
        why = "a file or directory of this name means something else in a checkpoint"
    elif len(os.fsencode(tag)) > _MOST_BYTES:
        why = f"it has {len(os.fsencode(tag)):,} bytes, and names of files have at most {_MOST_BYTES}"
    if why:
        raise UsageError(
            "the tag cannot name a save", found=f"{tag!r:.300}: {why}", expected="a name such as global_step500",
            remedy="Nothing was written. Choose another tag.",
        )  # fmt: skip


def check_places(directory: str, tag: str) -> None:
    """Refuses a directory in which the names that a save needs are taken. Raises OutputError if one is, by something
    that a save may not replace; OSError if the directory cannot be read, or its file system has no names that long.
    """
    for name, of_directory in ((tag, True), (LATEST, False), (SCRIPT, False)):
        try:
            mode = os.lstat(os.path.join(directory, name)).st_mode
        except FileNotFoundError:
            continue
        if S_ISDIR(mode) != of_directory:
            raise OutputError(
                "exists, and a save cannot replace it", file=os.path.join(directory, name),
                found="a directory" if S_ISDIR(mode) else "not a directory",
                expected="a directory or nothing" if of_directory else "a file or nothing",
                remedy="Nothing was written. Move it away, or choose another tag or directory.",
            )  # fmt: skip


def _superfluous(directory: str, tag: str, keep: int) -> list[str]:
    """The oldest saves, by their steps, beyond `keep`; never this one, nor the one that `latest` names."""
    kept = {tag}
    with contextlib.suppress(OSError), open(os.path.join(directory, LATEST), encoding="utf-8") as file:
        kept.add(file.read().strip())
    saves = [(_steps(os.path.join(directory, name)), natural(name), name) for name in _saves(directory)]
    return [name for _, _, name in sorted(saves)[: max(0, len(saves) - keep)] if name not in kept]


def _saves(directory: str) -> list[str]:
    """Names of directories that hold nothing but files of a save."""
    found: list[str] = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if not name.startswith(".") and os.path.isdir(path) and not os.path.islink(path):
            names = os.listdir(path)
            if names and all(map(is_trainers_file, names)):
                found.append(name)
    return found


def _steps(path: str) -> int:
    """The number of steps before a save; -1 if the save does not record it."""
    listing = list_files(locate(path), os.path.basename(path))
    for name in listing.files:
        shard = SHARD_NAME.fullmatch(name)
        if MODEL_NAME.fullmatch(name) or (shard is not None and shard["kind"] == "model"):
            with contextlib.suppress(ZckptError):
                return listing.numbers(name, "global_steps").get("global_steps", -1)
    return -1
