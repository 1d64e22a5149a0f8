"""Checks the names of saves.

For `saving`. A tag is a directory beside `latest`, which names it in a line of text; readers tell a tag from everything else by
its name (`layouts.places`).
"""

from __future__ import annotations

import os
from stat import S_ISDIR

from zckpt.base.errors import OutputError, UsageError
from zckpt.layouts.search import is_taken

SCRIPT = "zero_to_fp32.py"
LATEST = "latest"

_MOST_BYTES = 255


def check_tag(tag: str) -> None:
    """Refuses a name that no save can have. Looks at the name only, so that all ranks come to the same result. Raises
    UsageError if the name cannot be used; the error says why.
    """
    why = ""
    if not tag:
        why = "it is empty"
    elif "/" in tag or "\\" in tag:
        why = "it is a path, not a name"
    elif tag.startswith("."):
        why = "names that begin with a dot are those of unfinished saves"
    elif tag != tag.strip():
        why = "'latest' cannot name it: readers drop white space at its ends"
    elif not tag.isprintable():
        why = "it has characters that cannot be printed"
    elif tag.casefold() == SCRIPT or is_taken(tag):
        why = "a file or directory of this name means something else in a checkpoint"
    elif len(os.fsencode(tag)) > _MOST_BYTES:
        why = f"it has {len(os.fsencode(tag)):,} bytes, and names of files have at most {_MOST_BYTES}"
    if why:
        raise UsageError(
            "the tag cannot name a save", found=f"{tag!r:.300}: {why}", expected="a name such as global_step500",
            remedy="Nothing was written. Choose another tag.",
        )  # fmt: skip


def check_places(directory: str, tag: str) -> None:
    """Refuses a directory in which the names that a save needs are taken. Raises OutputError if one is, by something
    that a save may not replace; OSError if the directory cannot be read, or its file system has no names that long.
    """
    for name, of_directory in ((tag, True), (LATEST, False), (SCRIPT, False)):
        try:
            mode = os.lstat(os.path.join(directory, name)).st_mode
        except FileNotFoundError:
            continue
        if S_ISDIR(mode) != of_directory:
            raise OutputError(
                "exists, and a save cannot replace it", file=os.path.join(directory, name),
                found="a directory" if S_ISDIR(mode) else "not a directory",
                expected="a directory or nothing" if of_directory else "a file or nothing",
                remedy="Nothing was written. Move it away, or choose another tag or directory.",
            )  # fmt: skip
