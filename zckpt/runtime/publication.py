"""How a save gets its name, and `latest` the save: in steps that may each be the last one.

For `saving`. See its [Note: the order of a save].
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import shutil
import socket
from dataclasses import dataclass

from zckpt.errors import OutputError, ZckptError
from zckpt.layouts.listing import MODEL_NAME, SHARD_NAME, is_deepspeed_file, is_rank_file, list_files, natural
from zckpt.live.meeting import Meetings
from zckpt.output.durable import sync
from zckpt.runtime.tags import LATEST, SCRIPT, check_places

_log = logging.getLogger("zckpt.runtime")

_STUB = """#!/usr/bin/env python
\"\"\"Whole fp32 weights out of this checkpoint, with the arguments of DeepSpeed's script of this name.

    python zero_to_fp32.py . pytorch_model.bin
    python zero_to_fp32.py . output_dir/ --safe_serialization
\"\"\"

import sys

try:
    from zckpt.drop_in import main
except ImportError as error:
    sys.exit(f"{error}: pip install 'zckpt[torch]' where this runs.")

if __name__ == "__main__":
    sys.exit(main())
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a save is to be.

    Attributes:
        directory: that holds the tags.
        tag: of this save.
        temporary: name of the private directory in it.
        leader: whether this rank makes and renames directories.
        latest: whether `latest` is to name it.
        keep_last: tags that stay; None for all.
    """

    directory: str
    tag: str
    temporary: str
    leader: bool
    latest: bool
    keep_last: int | None


def make_private(wanted: Wanted) -> None:
    """Makes the private directory, and removes what killed runs of this machine have left."""
    try:
        os.makedirs(wanted.directory, exist_ok=True)
        check_places(wanted.directory, wanted.tag)
        for name in os.listdir(wanted.directory):
            _, mark, rest = name.partition(".zckpt-")
            host, _, pid = rest.rpartition("-")[0].rpartition("-")
            if (
                name.startswith(".")
                and mark
                and host == socket.gethostname()
                and pid.isdecimal()
                and _is_dead(int(pid))
            ):
                shutil.rmtree(os.path.join(wanted.directory, name), ignore_errors=True)
        os.mkdir(os.path.join(wanted.directory, wanted.temporary))
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            "a checkpoint that cannot be written", file=wanted.directory, found=error.strerror or str(error),
            remedy="Nothing was changed. Check the path and its permissions.",
        ) from error  # fmt: skip


def remove_private(wanted: Wanted) -> None:
    """Removes what a save that failed has left; one that succeeded has left nothing."""
    if wanted.leader:
        shutil.rmtree(os.path.join(wanted.directory, wanted.temporary), ignore_errors=True)


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def publish(meetings: Meetings, wanted: Wanted) -> None:
    """Gives a written save its name, on every file system, and then lets `latest` name it.

    Raises:
        OutputError: it cannot be done, here or elsewhere.
    """
    error: Exception | None = None
    if wanted.leader:
        try:
            _rename(wanted)
        except OSError as caught:
            error = _named(wanted, caught)
    meetings.agree("save_checkpoint", error)
    if wanted.leader:
        try:
            replace_file(os.path.join(wanted.directory, SCRIPT), _STUB.encode(), 0o755)
            if wanted.latest:
                replace_file(os.path.join(wanted.directory, LATEST), wanted.tag.encode())
            _prune(wanted)
        except OSError as caught:
            error = _named(wanted, caught)
    meetings.agree("save_checkpoint", error)


def _named(wanted: Wanted, error: OSError) -> OutputError:
    found = OutputError(
        "a checkpoint that could not be given its name", file=os.path.join(wanted.directory, wanted.tag),
        found=error.strerror or str(error),
    )  # fmt: skip
    found.__cause__ = error
    return found


def _rename(wanted: Wanted) -> None:
    """The private directory becomes the tag; a tag of that name is replaced in the same instant."""
    private, final = (os.path.join(wanted.directory, name) for name in (wanted.temporary, wanted.tag))
    sync(private)
    try:
        os.rename(private, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange_names(private, final):
            old = f"{private}.old"
            os.rename(final, old)
            os.rename(private, final)
            os.rename(old, private)
        sync(wanted.directory)
        shutil.rmtree(private, ignore_errors=True)
    sync(wanted.directory)


def _exchange_names(a: str, b: str) -> bool:
    """Swaps two names in one step, where system and file system can.

    Source: renameat2(2), RENAME_EXCHANGE (2), Linux 3.15 and glibc 2.28.
    """
    here = -100  # AT_FDCWD
    with contextlib.suppress(OSError, AttributeError):
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
        return bool(renameat2(here, os.fsencode(a), here, os.fsencode(b), 2) == 0)
    return False


def replace_file(path: str, data: bytes, mode: int | None = None) -> None:
    """Puts a small file in the place of another, whole or not at all; one that is the same stays."""
    with contextlib.suppress(OSError), open(path, "rb") as old:
        if old.read() == data:
            return
    temporary = f"{path}.zckpt-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync(os.path.dirname(path) or ".")


def _prune(wanted: Wanted) -> None:
    """Deletes older saves. The new one is good whatever becomes of them."""
    if wanted.keep_last is not None:
        try:
            _keep(wanted.directory, wanted.tag, wanted.keep_last)
        except OSError as error:
            _log.warning("Older saves in %r could not be deleted: %s", wanted.directory, error)


def _keep(directory: str, tag: str, keep: int) -> None:
    """Deletes the oldest saves, by their steps, until `keep` are left; never this one, nor that which `latest` names."""
    kept = {tag}
    with contextlib.suppress(OSError), open(os.path.join(directory, LATEST), encoding="utf-8") as file:
        kept.add(file.read().strip())
    saves = [(_steps(os.path.join(directory, name)), natural(name), name) for name in _saves(directory)]
    for _, _, name in sorted(saves)[: max(0, len(saves) - keep)]:
        if name not in kept:
            doomed = os.path.join(directory, f".zckpt-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}")
            os.rename(os.path.join(directory, name), doomed)  # half a save never stands under its tag
            shutil.rmtree(doomed, ignore_errors=True)


def _saves(directory: str) -> list[str]:
    """Names of directories that hold nothing but files of a save."""
    found: list[str] = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if not name.startswith(".") and os.path.isdir(path) and not os.path.islink(path):
            names = os.listdir(path)
            if names and all(is_deepspeed_file(inner) or is_rank_file(inner) for inner in names):
                found.append(name)
    return found


def _steps(path: str) -> int:
    """The steps that a save was made after; -1 where it does not say."""
    listing = list_files(path, os.path.basename(path))
    for name in listing.files:
        shard = SHARD_NAME.fullmatch(name)
        if MODEL_NAME.fullmatch(name) or (shard is not None and shard["kind"] == "model"):
            with contextlib.suppress(ZckptError):
                return listing.numbers(name, "global_steps").get("global_steps", -1)
    return -1
