"""Files that name a save, such as `latest`, and the tags that they or a user name."""

from __future__ import annotations

import codecs

from zckpt.base.errors import IncompleteError, NotACheckpointError, UnsafeError, ZckptError
from zckpt.storage.identity import stays_inside
from zckpt.storage.location import Location


def read_pointer(path: Location) -> str:
    """The text of a file such as `latest`, without a byte-order mark, line ends and blanks.

    Raises:
        NotACheckpointError: it cannot be read. IncompleteError: it is empty.
    """
    try:
        data = path.read(4096)
        is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = (data.decode("utf-16") if is_wide else data.removeprefix(codecs.BOM_UTF8).decode()).strip()
    except ZckptError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise NotACheckpointError(
            "cannot be read", file=path, found=str(error), remedy="Choose a tag with --tag."
        ) from error
    if not text:
        raise IncompleteError("is empty", file=path, expected="the name of a tag", remedy="Choose a tag with --tag.")
    return text


def check_tag(tag: str, path: Location, origin: str) -> None:
    """Raises UnsafeError for a tag that is not a name of a directory beside `latest`; `origin`: where it is from."""
    if "\n" in tag or not stays_inside(tag.replace("\\", "/")):
        raise UnsafeError(
            f"has a tag that points outside it, in {origin}",
            file=path,
            found=f"{tag!r:.200}",
            expected="the name of a directory beside 'latest'",
            remedy="Correct it, or choose a tag with --tag. Nothing was read from there.",
        )


def latest_of(path: Location) -> str | None:
    """The text of `latest` in a directory; None if there is no such file."""
    return read_pointer(pointer) if (pointer := path / "latest").is_file() else None
