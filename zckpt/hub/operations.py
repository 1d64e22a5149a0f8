"""What huggingface_hub is handed: operations of a commit, and open files.

For `client` and `transfer`.

[Note: operations] A `CommitOperationAdd` normally hashes its file when it is made. Ours are made of nothing and then told
hash, size and mode, as the library itself does after an upload: so a file is never read for its hash alone, and one that is
at the hub already needs no file at all.

[Note: transfers] Where the hub and this machine both speak Xet, the library's own way is taken: it is given the file's path.
Otherwise it is given an open file, which every version sends by plain HTTP.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


@dataclass(frozen=True, slots=True)
class Sent:
    """A large file that is, or will be, at the hub.

    Attributes:
        path: in the repository.
        size: in bytes.
        sha256: of its bytes.
        old: SHA-256 of the file of this path that the commit replaces; empty for none.
    """

    path: str
    size: int
    sha256: str
    old: str = ""

    def operation(self, content: Any = b"", *, uploaded: bool = True) -> CommitOperationAdd:
        """What the library commits; see [Note: operations]."""
        from huggingface_hub import CommitOperationAdd
        from huggingface_hub.lfs import UploadInfo

        operation = CommitOperationAdd(path_in_repo=self.path, path_or_fileobj=b"")
        operation.path_or_fileobj = content
        operation.upload_info = UploadInfo(sha256=bytes.fromhex(self.sha256), size=self.size, sample=b"")
        operation._upload_mode = "lfs"
        operation._should_ignore = False
        operation._remote_oid = self.old or None
        operation._is_uploaded = uploaded
        return operation


def in_memory(content: bytes | str) -> io.BytesIO:
    """A small file as an open one; see [Note: transfers]."""
    if isinstance(content, bytes):
        return io.BytesIO(content)
    with open(content, "rb") as file:
        return io.BytesIO(file.read())


_TOLD_EVERY = 1 << 20


class Watched(io.BufferedReader):
    """A file on its way out: whoever watches knows how far it is, and can end it.

    Attributes:
        was_read: whether anybody wanted any of it.
    """

    def __init__(self, path: str, watch: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path))
        self._watch = watch
        self._untold = 0
        self.was_read = False

    def read(self, nbytes: int | None = -1) -> bytes:
        """As any file's; now and then tells how far it is."""
        data = super().read(nbytes)
        self._untold += len(data)
        self.was_read = self.was_read or bool(data)
        if self._untold >= _TOLD_EVERY or not data:
            self._untold = 0
            self._watch(self.tell())
        return data
