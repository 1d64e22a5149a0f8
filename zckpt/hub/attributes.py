"""`.gitattributes`: which files of a repository are large ones.

For `transfer`. A page that is cloned with git gets its large files only where a line of this file says that they are some.
Source: git's gitattributes(5): a pattern without a slash matches a file's name in any directory.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

_LARGE = "filter=lfs diff=lfs merge=lfs -text"


def with_large(text: bytes, paths: Iterable[str]) -> bytes | None:
    """The file with a line for each large file that has none; None when nothing is missing.

    Args:
        text: the file as it is; empty where there is none.
        paths: of the large files.
    """
    missing = [path for path in paths if not _is_large(text.decode(errors="replace"), path)]
    if not missing:
        return None
    kept = text if not text or text.endswith(b"\n") else text + b"\n"
    return (
        kept
        + "".join(
            f"{_pattern(path)} {_LARGE}\n" for path in sorted({_pattern(p): p for p in missing}.values())
        ).encode()
    )


def _pattern(path: str) -> str:
    """All weights at once; any other file by its own path."""
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
