"""Files sent to addresses: each appears under its name whole, in one step, or not at all.

For `output.address` and `streaming`. An object store shows a file when its upload is completed. fsspec's memory shows it from the
first byte on, so what goes there is collected first. A kind of store that has directories and renames is given the file under
another name, which is then changed.
"""

from __future__ import annotations

import contextlib
import io
from types import TracebackType
from typing import Any

from zckpt.base.errors import NotACheckpointError
from zckpt.storage.fsspec_io import filesystem, patiently, told

PART_BYTES = 16 << 20
"""Of a multi-part upload, for files up to a terabyte or so."""

_MOST_PARTS = 9_000
_RENAMING = {"sftp", "ssh", "ftp", "smb", "webdav", "dav", "hdfs", "arrow_hdfs", "webhdfs", "webHDFS", "dbfs", "ofs"}
_UNFINISHED = ".zckpt-part"


class Upload:
    """One file on its way to an address. As a context manager it is completed, or given up when there was an error.

    Args:
        address: where it goes.
        nbytes: how large it will be; decides the size of parts.
    """

    def __init__(self, address: str, nbytes: int) -> None:
        self.address = address
        self._fs, self._path = filesystem(address)
        kinds = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._collects = "memory" in kinds
        self._is_complete = False
        self._target = self._path + _UNFINISHED if kinds & _RENAMING else self._path
        part = max(PART_BYTES, ((nbytes // _MOST_PARTS >> 20) + 1) << 20)
        with told(address):
            self._file: Any = io.BytesIO() if self._collects else self._opened(part)

    def _opened(self, part: int) -> Any:
        try:
            return self._fs.open(self._target, "wb", block_size=part)
        except FileNotFoundError:  # a kind that has directories
            self._fs.makedirs(self._target.rpartition("/")[0], exist_ok=True)
            return self._fs.open(self._target, "wb", block_size=part)

    def write(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        with told(self.address):
            self._file.write(data)

    def complete(self) -> None:
        """Makes the file appear.

        Raises:
            RemoteError: the store failed. Where an answer was lost, the file may be there all the same.
        """
        with told(self.address):
            if self._collects:
                self._fs.pipe_file(self._path, self._file.getvalue())
            else:
                self._file.close()
                if self._target != self._path:
                    self._fs.mv(self._target, self._path)
        self._is_complete = True

    def discard(self) -> None:
        """Gives the upload up, unless it is complete. Never fails; what was sent may take room until the store forgets it."""
        if self._collects or self._is_complete:
            return
        try:
            with contextlib.suppress(Exception):
                self._file.discard()
        finally:
            with contextlib.suppress(Exception):
                self._file.closed = True  # or its destructor would complete the upload
        if self._target != self._path:
            with contextlib.suppress(Exception):
                self._file.close()
            with contextlib.suppress(Exception):
                self._fs.rm_file(self._target)

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()
            return
        try:
            self.complete()
        except BaseException:
            self.discard()
            raise


def put(address: str, data: bytes) -> None:
    """Sends a small file; tries again after failures that may pass."""

    def attempt() -> None:
        with Upload(address, len(data)) as upload:
            upload.write(data)

    patiently(address, attempt)


def remove(address: str) -> None:
    """Removes a file; one that is not there is no failure. Tries again after failures that may pass."""
    fs, path = filesystem(address)
    with contextlib.suppress(NotACheckpointError):
        patiently(address, lambda: fs.rm_file(path))
