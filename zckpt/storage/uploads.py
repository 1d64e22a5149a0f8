"""Sends files to addresses so that each appears whole under its name, in one step.

For `output.address` and `output.address_destination`. An object store shows a file when its upload is completed. fsspec's memory
store shows it from the first byte on, so its bytes are collected first. To a store with directories and renames, the file is
sent under another name and then renamed.
"""

from __future__ import annotations

import contextlib
import io
from types import TracebackType
from typing import Any

from zckpt.base.errors import NotACheckpointError
from zckpt.storage.fsspec_io import as_zckpt_errors, filesystem, patiently
from zckpt.storage.object_store import ObjectStore

PART_BYTES = 16 << 20
"""Bytes of a part of a multi-part upload; files above about 150 GB have larger parts."""

LEAST_PART_BYTES = 5 << 20
"""The smallest part that S3 takes unless it is the last one; small parts are best where several are sent at a time."""

SENT_BYTES = 150 << 20
"""The bytes of all parts that `object_store` sends at a time."""

_MOST_PARTS = 9_000
_RENAMING = {"sftp", "ssh", "ftp", "smb", "webdav", "dav", "hdfs", "arrow_hdfs", "webhdfs", "webHDFS", "dbfs", "ofs"}
_UNFINISHED = ".zckpt-part"


class Upload:
    """One file that is sent to an address. A context manager: completes it, or discards it after an error.

    Args:
        address: of the file.
        nbytes: the file's size, from which the size of parts follows.
    """

    def __init__(self, address: str, nbytes: int) -> None:
        self.address = address
        self._fs, self._path = filesystem(address)
        kinds = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._collects = "memory" in kinds
        self._is_complete = False
        self._target = self._path + _UNFINISHED if kinds & _RENAMING else self._path
        least = ((nbytes // _MOST_PARTS >> 20) + 1) << 20
        with as_zckpt_errors(address):
            self._file: Any = io.BytesIO() if self._collects else self._opened(least)

    def _opened(self, least: int) -> Any:
        if isinstance(self._fs, ObjectStore):
            part = max(LEAST_PART_BYTES, least)
            return self._fs.open_parts(self._target, part, max(2, SENT_BYTES // part))
        part = max(PART_BYTES, least)
        try:
            return self._fs.open(self._target, "wb", block_size=part)
        except FileNotFoundError:  # a store with directories
            self._fs.makedirs(self._target.rpartition("/")[0], exist_ok=True)
            return self._fs.open(self._target, "wb", block_size=part)

    def write(self, data: bytes | memoryview) -> None:
        """Sends the next bytes."""
        with as_zckpt_errors(self.address):
            self._file.write(bytes(data))  # which obstore keeps until the store has them

    def complete(self) -> None:
        """Makes the file appear.

        Raises:
            RemoteError: the store failed. If only the answer was lost, the file may exist all the same.
        """
        with as_zckpt_errors(self.address):
            if self._collects:
                self._fs.pipe_file(self._path, self._file.getvalue())
            else:
                self._file.close()
                if self._target != self._path:
                    self._fs.mv(self._target, self._path)
        self._is_complete = True

    def discard(self) -> None:
        """Aborts the upload, unless it is complete. Raises nothing; a store may keep the parts that were sent for some time."""
        if self._collects or self._is_complete:
            return
        if isinstance(self._fs, ObjectStore):
            with contextlib.suppress(Exception):
                self._file.__exit__(KeyboardInterrupt, None, None)
            return
        try:
            with contextlib.suppress(Exception):
                self._file.discard()
        finally:
            with contextlib.suppress(Exception):
                self._file.closed = True  # otherwise its destructor would complete the upload
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


def upload_small(address: str, data: bytes) -> None:
    """Sends a small file; tries again as in `patiently`."""

    def attempt() -> None:
        with Upload(address, len(data)) as upload:
            upload.write(data)

    patiently(address, attempt)


def remove(address: str) -> None:
    """Removes a file if it exists; tries again as in `patiently`."""
    fs, path = filesystem(address)
    with contextlib.suppress(NotACheckpointError):
        patiently(address, lambda: fs.rm_file(path))
