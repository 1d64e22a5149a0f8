"""Where tests write: in memory, where a machine has room there, for nobody waits there for a disk to sync.

Those of tests/engine write to the disk, since the engine asks what a file system can. `ZCKPT_TEST_DISK=/tmp` leaves all there.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
_ROOM = 2 << 30
_DISK, _ROOT = "ZCKPT_TEST_DISK", "PYTEST_DEBUG_TEMPROOT"


def use_memory() -> None:
    """Temporary files of pytest, and of all that tests start, are in memory from now on, and gone when the tests are done."""
    if _DISK in os.environ:
        return
    os.environ[_DISK] = tempfile.gettempdir()
    if _ROOT in os.environ or not os.access(MEMORY, os.W_OK):
        return
    room = os.statvfs(MEMORY)
    if room.f_bavail * room.f_frsize < _ROOM or room.f_flag & os.ST_NOEXEC:
        return
    own, process = tempfile.mkdtemp(prefix="zckpt-tests-", dir=MEMORY), os.getpid()
    atexit.register(lambda: process == os.getpid() and shutil.rmtree(own, ignore_errors=True))
    os.environ.update({_ROOT: str(MEMORY), "TMPDIR": own})
    tempfile.tempdir = None


def on_disk() -> Path:
    """A new directory on the disk; whoever asks removes it."""
    return Path(tempfile.mkdtemp(prefix="zckpt-test-", dir=os.environ[_DISK]))
