"""Whether files have the SHA-256 that the trainer recorded of them when it saved.

For `soundness`. Such a record is beside the files, and is not a checksum of a container: each file is read from begin to end.
"""

from __future__ import annotations

import hashlib

from zckpt import layouts
from zckpt.base.errors import ZckptError
from zckpt.base.words import count
from zckpt.layouts.save.listing import Listing


def check_digests(listing: Listing, *, read: bool) -> tuple[str, list[str]] | None:
    """The result for the recorded digests: (answer, problems); None for a save without any.

    Args:
        listing: the files of the save.
        read: compare the bytes; otherwise, only whether the files are there.
    """
    try:
        family = layouts.family_of(listing)
    except ZckptError:  # whether there is a save at all, others say
        return None
    try:
        recorded = family.digests(listing)
    except ZckptError as error:
        return "", [str(error)]
    if not recorded:
        return None
    there = {name: digest for name, digest in recorded.items() if listing.where(name).is_file()}
    problems = [f"{name!r} is missing, which the save lists" for name in recorded.keys() - there.keys()]
    for name, digest in there.items() if read else ():
        sums = hashlib.sha256()
        for block in listing.where(name).blocks():
            sums.update(block)
        if sums.hexdigest() != digest.lower():
            problems.append(f"{name!r} does not have the SHA-256 that the save lists")
    files = count(len(recorded), "file")
    if read:
        return f"{files} with the SHA-256 that the save lists", sorted(problems)
    return f"{files} that the save lists with their SHA-256; --deep compares them", sorted(problems)
