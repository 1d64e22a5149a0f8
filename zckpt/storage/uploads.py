"""Sends files to addresses so that each appears whole under its name, in one step.

For `output.address` and `output.address_destination`. An object store shows a file when its upload is completed. fsspec's memory
store shows it from the first byte on, so its bytes are collected first. To a store with directories and renames, the file is
sent under another name and then renamed.
"""

from __future__ import annotations

import contextlib
import io
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from zckpt.base.errors import NotACheckpointError
from zckpt.storage.fsspec_io import as_zckpt_errors, filesystem, patiently, refresh
from zckpt.storage.object_store import ObjectStore

if TYPE_CHECKING:
    from concurrent.futures import Future

PART_BYTES = 16 << 20
"""Bytes of a part of a multi-part upload; files above about 150 GB have larger parts."""

LEAST_PART_BYTES = 5 << 20
"""The smallest part that S3 takes unless it is the last one; small parts are best where several are sent at a time."""

SENT_BYTES = 165 << 20
"""The bytes of all parts of a file that are sent to S3 at a time."""

_SENT_BY_S3FS = 150 << 20
"""The same by s3fs, which takes 50 MiB by itself."""

_MOST_PARTS = 9_000
_RENAMING = {"sftp", "ssh", "ftp", "smb", "webdav", "dav", "hdfs", "arrow_hdfs", "webhdfs", "webHDFS", "dbfs", "ofs"}
_UNFINISHED = ".zckpt-part"


class Upload(contextlib.AbstractContextManager["Upload"]):
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
        part = max(LEAST_PART_BYTES, least)
        if isinstance(self._fs, ObjectStore):
            return self._fs.open_parts(self._target, part, max(2, SENT_BYTES // part))
        if hasattr(self._fs, "call_s3"):
            return _PartsByS3fs(self._fs, self._target, part, max(2, _SENT_BY_S3FS // part))
        if self._fs.protocol == "hf":
            from huggingface_hub.utils import disable_progress_bars

            disable_progress_bars()
        part = max(PART_BYTES, least)
        try:
            return self._fs.open(self._target, "wb", block_size=part)
        except FileNotFoundError:  # a store with directories
            self._fs.makedirs(self._target.rpartition("/")[0], exist_ok=True)
            return self._fs.open(self._target, "wb", block_size=part)

    def write(self, data: bytes | memoryview) -> None:
        """Sends the next bytes."""
        with as_zckpt_errors(self.address):
            is_kept = not isinstance(self._file, _PartsByS3fs)  # obstore keeps what it gets until that is sent
            self._file.write(bytes(data) if is_kept else data)

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
        refresh(self.address)
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
            with contextlib.suppress(Exception):
                os.remove(self._file.temp_file.name)  # of the hub's client, which sends a file once it is whole
        if self._target != self._path:
            with contextlib.suppress(Exception):
                self._file.close()
            with contextlib.suppress(Exception):
                self._fs.rm_file(self._target)

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


class _PartsByS3fs:
    """A file that s3fs sends in parts, several at a time; s3fs's own file sends them one after the other.

    Args:
        fs: s3fs.
        path: of the file.
        part_bytes: of each part but the last. A file that is no longer is sent in one request.
        parts: how many are sent at a time.
    """

    def __init__(self, fs: Any, path: str, part_bytes: int, parts: int) -> None:
        self._fs, self._path = fs, path
        bucket, key, _ = fs.split_path(path)
        self._names = {"Bucket": bucket, "Key": key}
        self._part_bytes, self._most = part_bytes, parts
        self._part = io.BytesIO()
        self._begun: dict[str, str] = {}
        self._sent: list[Future[Any]] = []
        self._under_way: set[Future[Any]] = set()

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes; waits while as many parts are under way as may be. Raises what a part raised."""
        rest = memoryview(data)
        while rest:
            if self._part.tell() == self._part_bytes:
                self._send()
            room = self._part_bytes - self._part.tell()
            self._part.write(rest[:room])
            rest = rest[room:]

    def _send(self) -> None:
        import asyncio
        from concurrent.futures import FIRST_COMPLETED, wait

        body, self._part = self._part, io.BytesIO()  # what is no file, the client copies before it sends it
        body.seek(0)
        if not self._begun:
            begun = self._fs.call_s3("create_multipart_upload", **self._names)
            self._begun = {**self._names, "UploadId": begun["UploadId"]}
        asked = self._fs._call_s3("upload_part", **self._begun, PartNumber=len(self._sent) + 1, Body=body)
        self._sent.append(asyncio.run_coroutine_threadsafe(asked, self._fs.loop))
        self._sent[-1].add_done_callback(lambda _: body.close())  # the client may keep it for a while
        self._under_way.add(self._sent[-1])
        if len(self._under_way) >= self._most:
            done, self._under_way = wait(self._under_way, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()

    def close(self) -> None:
        """Makes the file appear, once the store has all parts."""
        if not self._begun:
            self._fs.call_s3("put_object", **self._names, Body=self._part.getvalue())
        else:
            self._send()
            parts = [{"PartNumber": number, "ETag": one.result()["ETag"]} for number, one in enumerate(self._sent, 1)]
            self._fs.call_s3("complete_multipart_upload", **self._begun, MultipartUpload={"Parts": parts})
        self._fs.invalidate_cache(self._path)

    def discard(self) -> None:
        """Gives the upload up; the store forgets its parts."""
        for one in self._under_way:
            one.cancel()
        if self._begun:
            self._fs.call_s3("abort_multipart_upload", **self._begun)


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
    refresh(address)
