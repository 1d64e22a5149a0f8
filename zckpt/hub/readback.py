"""After the commit: sizes, hashes and the headers of the weights at the hub are compared with what was sent."""

from __future__ import annotations

from collections.abc import Mapping

from zckpt.base.errors import CorruptError
from zckpt.hub.client import Hub
from zckpt.hub.target import PageFile

Wanted = Mapping[str, tuple[int, frozenset[str]]]
"""Path -> size, and the hashes that its bytes may have at the hub (SHA-256 as a large file, git's SHA-1 as a small one)."""


def differences(found: Mapping[str, PageFile], wanted: Wanted) -> list[str]:
    """A line for each expected file that is missing at the hub, or has other bytes there."""
    wrong: list[str] = []
    for path, (size, oids) in wanted.items():
        file = found.get(path)
        if file is None:
            wrong.append(f"{path!r} is missing")
        elif file.size != size:
            wrong.append(f"{path!r} has {file.size:,} bytes instead of {size:,}")
        elif file.oid not in oids:
            wrong.append(f"{path!r} has the hash {file.oid}")
    return wrong


def read_back(
    hub: Hub, repo_id: str, revision: str, wanted: Wanted, headers: Mapping[str, bytes]
) -> tuple[tuple[str, int, str], ...]:
    """Compares a commit with what was sent.

    Args:
        hub: the hub.
        repo_id: the repository.
        revision: the commit.
        wanted: what was sent.
        headers: path of a shard -> the bytes it begins with, which are fetched by a range request.

    Returns:
        (path, bytes, hash) of each file, as the hub lists them.

    Raises:
        CorruptError: a file is missing or has other bytes.
    """
    found = hub.tree(repo_id, revision)
    wrong = differences(found, wanted)
    for path, header in headers.items():
        if not wrong and hub.read(repo_id, path, revision, len(header)) != header:
            wrong.append(f"{path!r} begins with another header")
    if wrong:
        raise CorruptError(
            "the page differs from what was sent", file=f"{repo_id}@{revision[:12]}", found="; ".join(wrong[:5]),
            expected="the sizes, hashes and headers that were sent",
            remedy="Do not use this commit. Run the same command again with --yes.",
        )  # fmt: skip
    return tuple((path, found[path].size, found[path].oid) for path in wanted)
