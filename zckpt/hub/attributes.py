"""`.gitattributes`: which files of a repository are large ones.

For `transfer`. `git clone` fetches the large files of a page only if a line of this file matches them.
Source: git's gitattributes(5): a pattern without a slash matches a file's name in any directory.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

_LARGE = "filter=lfs diff=lfs merge=lfs -text"


def with_large(text: bytes, paths: Iterable[str]) -> bytes | None:
    """The file with a line added for each large file that lacks one; None if no line is missing.

    Args:
        text: the file as it is; empty if it does not exist.
        paths: of the large files.
    """
    missing = [path for path in paths if not _is_large(text.decode(errors="replace"), path)]
    if not missing:
        return None
    kept = text if not text or text.endswith(b"\n") else text + b"\n"
    return kept + "".join(f"{pattern} {_LARGE}\n" for pattern in sorted({*map(_pattern, missing)})).encode()


def _pattern(path: str) -> str:
    """The pattern for a file: one for all weights, its own path for any other file."""
    if path.endswith(".safetensors"):
        return "*.safetensors"
    return "".join(f"[{c}]" if c in "*?[" else "?" if c.isspace() else c for c in path)


def _is_large(text: str, path: str) -> bool:
    large = False
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or words[0].startswith("#"):
            continue
        pattern = words[0].lstrip("/")
        whole = "/" in words[0]
        if fnmatch.fnmatchcase(path if whole else path.rpartition("/")[2], pattern):
            if "filter=lfs" in words[1:]:
                large = True
            elif any(word in ("-filter", "!filter") or word.startswith("filter=") for word in words[1:]):
                large = False
    return large
