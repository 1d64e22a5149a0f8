"""Where a push goes, what the hub holds there before and after it, and the values that huggingface_hub takes.

For every other module of this package.

[Note: operations] A `CommitOperationAdd` normally hashes its file when it is made. Ours are made from empty bytes, and get hash,
size and mode afterwards, as the library itself sets them after an upload. So a file is never read for its hash alone, and one
that is at the hub already is not needed here.

[Note: transfers] If the hub and this machine both speak Xet, the library gets the file's path and chooses the transfer itself.
Otherwise it gets an open file, which every version sends by plain HTTP.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.jobs.own_groups import MESSAGE, PageOptions

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


@dataclass(frozen=True)
class PageTarget(PageOptions):
    """Where to push, and how. `repo_id`: as given; `checks.check` adds the owner where it is missing."""

    repo_id: str

    def __post_init__(self) -> None:
        if not self.message:
            object.__setattr__(self, "message", MESSAGE)

    @property
    def label(self) -> str:
        """The repository and revision, for messages."""
        return f"{self.repo_id}@{self.revision}"

    def place(self, name: str) -> str:
        """A file's path in the repository."""
        return f"{self.path_in_repo.strip('/')}/{name}".lstrip("/")


Files = Mapping[str, tuple[int, str]]
"""Path -> bytes and hash of a repository's file: SHA-256 of a large file, git's SHA-1 of others."""


@dataclass(frozen=True, slots=True)
class Page:
    """What a repository holds at one revision.

    Attributes:
        exists: whether the repository exists.
        head: the revision's commit; empty if the repository or the revision does not exist.
        private: whether only its owners see it; None if that is not known.
        files: all that it holds.
    """

    exists: bool
    head: str = ""
    private: bool | None = None
    files: Files = field(default_factory=dict[str, tuple[int, str]])


Committed = tuple[str, str]
"""The hash of a commit at the hub, and the address of the pull request that it is in; empty for none."""


@dataclass(frozen=True, slots=True)
class SentFile:
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


def small_operations(contents: Mapping[str, bytes | str], *, in_memory: bool) -> list[CommitOperationAdd]:
    """New operations that add small files; a commit uses them up. `contents`: path in the repository -> the file's bytes, or a
    local path; `in_memory`: pass open files instead, see [Note: transfers].
    """
    from huggingface_hub import CommitOperationAdd

    def given(content: bytes | str) -> bytes | str | io.BytesIO:
        if not in_memory:
            return content
        return io.BytesIO(content if isinstance(content, bytes) else Path(content).read_bytes())

    return [CommitOperationAdd(path_in_repo=path, path_or_fileobj=given(content)) for path, content in contents.items()]


_WATCH_BYTES = 1 << 20


class Watched(io.BufferedReader):
    """A file with a reader that is watched, and can be stopped. `watch`: called about once a MiB, and at the end, with the bytes
    read so far; what it raises reaches the reader. `was_read`: whether any of it was read.
    """

    def __init__(self, path: str, watch: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path))
        self._watch = watch
        self._unwatched = 0
        self.was_read = False

    def read(self, nbytes: int | None = -1) -> bytes:
        """Reads as any file does, and calls `watch`."""
        data = super().read(nbytes)
        self._unwatched += len(data)
        self.was_read = self.was_read or bool(data)
        if self._unwatched >= _WATCH_BYTES or not data:
            self._unwatched = 0
            self._watch(self.tell())
        return data
