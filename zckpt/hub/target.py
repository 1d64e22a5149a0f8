"""Where a push goes, and what the hub holds there before and after it: plain values.

For every other module of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.jobs.own_groups import MESSAGE, PageOptions


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


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of a repository.

    Attributes:
        size: in bytes.
        oid: SHA-256 for large files, git's SHA-1 for others.
    """

    size: int
    oid: str


@dataclass(frozen=True, slots=True)
class Page:
    """What a repository holds at one revision.

    Attributes:
        exists: whether the repository exists.
        head: the revision's commit; empty if the repository or the revision does not exist.
        private: whether only its owners see it; None if that is not known.
        files: path -> file.
    """

    exists: bool
    head: str = ""
    private: bool | None = None
    files: Mapping[str, PageFile] = field(default_factory=dict[str, PageFile])


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit at the hub.

    Attributes:
        oid: its hash.
        pull_request: address of the pull request that it is in; empty for none.
    """

    oid: str
    pull_request: str = ""
