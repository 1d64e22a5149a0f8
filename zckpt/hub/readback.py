"""After the commit: what does the hub hold? Sizes, hashes, and the headers of the weights, compared with what was sent.

For `transfer`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from zckpt.base.errors import CorruptError
from zckpt.hub.client import Hub, RemoteFile


def git_hash(data: bytes) -> str:
    """SHA-1 of a blob, as git names it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def differences(found: Mapping[str, RemoteFile], wanted: Mapping[str, tuple[int, frozenset[str]]]) -> list[str]:
    """What is wrong with the hub's files, a line each.

    Args:
        found: path -> file at the hub.
        wanted: path -> size, and the names its bytes may have there (SHA-256 as a large file, git's hash as a small one).
    """
    wrong: list[str] = []
    for path, (size, oids) in wanted.items():
        file = found.get(path)
        if file is None:
            wrong.append(f"{path!r} is not there")
        elif file.size != size:
            wrong.append(f"{path!r} has {file.size:,} bytes, not {size:,}")
        elif file.oid not in oids:
            wrong.append(f"{path!r} has the hash {file.oid}")
    return wrong


def read_back(
    hub: Hub,
    repo_id: str,
    revision: str,
    wanted: Mapping[str, tuple[int, frozenset[str]]],
    headers: Mapping[str, bytes],
) -> tuple[tuple[str, int, str], ...]:
    """Compares a commit with what was sent.

    Args:
        hub: the hub.
        repo_id: the repository.
        revision: the commit.
        wanted: as for `differences`.
        headers: path of a shard -> the bytes it begins with, which are fetched by a range request.

    Returns:
        (path, bytes, hash) of each file, as the hub tells them.

    Raises:
        CorruptError: something is not as it was sent.
    """
    found = hub.tree(repo_id, revision)
    wrong = differences(found, wanted)
    for path, header in headers.items():
        if not wrong and hub.read(repo_id, path, revision, len(header)) != header:
            wrong.append(f"{path!r} begins with another header")
    if wrong:
        raise CorruptError(
            "a page that is not what was sent", file=f"{repo_id}@{revision[:12]}", found="; ".join(wrong[:5]),
            expected="sizes, hashes and headers should be those that were sent",
            remedy="The commit is there, but must not be used. Push again with --yes.",
        )  # fmt: skip
    return tuple((path, found[path].size, found[path].oid) for path in wanted)
