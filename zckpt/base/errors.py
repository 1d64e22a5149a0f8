"""Everything that can go wrong, as one tree of exceptions.

For every module: facts are raised here as fields (what, file, found, expected, remedy); `lines` lays them out for a person,
`as_json` for a program, and `str` puts them in one line.

    ZckptError                                     x = raised, the base itself is not
      x NotACheckpointError (FileNotFoundError)    nothing here that any layout knows
      x IncompleteError                            files or elements are missing
      x CorruptError                               bytes contradict themselves; has byte_offset
      x UnsafeError                                a pickle, path or link asked for something zckpt does not do
      x UnsupportedError                           understood, but not supported
      x InconsistentError                          files are sound but do not belong together
      x OutputError (OSError)                      cannot write, exists, full, inside the input
      x AccessError (PermissionError)              no token or key, or one that may not do this
      x RemoteError (ConnectionError)              a server failed, or answered what it should not
      x CastError                                  a cast would lose numbers
      x ResourceError                              the machine has too little memory, or no more threads
      x UsageError (ValueError)                    a wrong argument; NoTensorError (KeyError): a name that is not there
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import ClassVar

from zckpt.base.dataclass import public
from zckpt.base.patterns import compile_late
from zckpt.base.words import wrap_text

COPY_AGAIN = "Copy that file again. If that does not help, use another save."
"""The fix for a damaged file."""

OTHER_SAVE = "Copy the files of one save again, or use another save. Nothing was written."
"""The fix for files that do not belong together."""


class ZckptError(Exception):
    """Base of all errors zckpt raises on purpose.

    Args:
        what: what is wrong, as a clause in lower case that reads on after `file` and a colon: "2 of 8 rank files are missing".
        file: the file, directory or tensor that is wrong.
        found: what is there: a noun phrase in lower case, without a full stop.
        expected: what should be there, in the same form.
        remedy: what a person can do now, as whole sentences in the imperative.
    """

    code: ClassVar[str] = "error"

    def __init__(
        self,
        what: str,
        *,
        file: str | os.PathLike[str] | None = None,
        found: str = "",
        expected: str = "",
        remedy: str = "",
    ) -> None:
        self.what = what
        self.file = None if file is None else _path_text(os.fspath(file))
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(what)

    def __str__(self) -> str:
        text = self.what if self.file is None else f"{self.file}: {self.what}"
        for name, value in (("found", self.found), ("expected", self.expected)):
            text += f"; {name} {value.rstrip('.')}" if value else ""
        text = text.rstrip(".") + "."
        return f"{text} {self.remedy}" if self.remedy else text

    def lines(self, width: int | None = None) -> list[str]:
        """Returns the fields, one below the other, as a person reads them: the file and what is wrong, then found,
        expected, fix.

        Args:
            width: the most characters in a line, longer words aside; None for one line a field.
        """
        place = "error: " if self.file is None else f"error: {self.file}: "
        lines = wrap_text(place + self.what, width, " " * 7)
        for name, text in (("found", self.found), ("expected", self.expected), ("fix", self.remedy)):
            if text:
                lines += wrap_text(f"  {name:8}  {text}", width, " " * 12)
        return lines

    def as_json(self) -> dict[str, object]:
        """Returns the error's fields, for `--json`."""
        return {
            "error": self.code,
            "what": self.what,
            "file": self.file,
            "found": self.found,
            "expected": self.expected,
            "remedy": self.remedy,
        }


class NotACheckpointError(ZckptError, FileNotFoundError):
    """No layout knows what is here."""

    code = "not_a_checkpoint"


class IncompleteError(ZckptError):
    """Files or elements are missing."""

    code = "incomplete"


class CorruptError(ZckptError):
    """A file contradicts itself.

    Args:
        byte_offset: where in `file`, in bytes, when it is known.
    """

    code = "corrupt"

    def __init__(
        self,
        what: str,
        *,
        file: str | os.PathLike[str] | None = None,
        found: str = "",
        expected: str = "",
        remedy: str = "",
        byte_offset: int | None = None,
    ) -> None:
        super().__init__(what, file=file, found=found, expected=expected, remedy=remedy)
        self.byte_offset = byte_offset

    def as_json(self) -> dict[str, object]:
        """Returns the error's fields for `--json`, with `byte_offset`."""
        return {**super().as_json(), "byte_offset": self.byte_offset}


class UnsafeError(ZckptError):
    """A pickle, path or link asked for something zckpt does not do. Nothing was executed."""

    code = "unsafe"


class UnsupportedError(ZckptError):
    """zckpt understands what it found, but does not support it."""

    code = "unsupported"


class InconsistentError(ZckptError):
    """The files are sound, but do not belong together."""

    code = "inconsistent"


class OutputError(ZckptError, OSError):
    """The output cannot be written."""

    code = "output"


class AccessError(ZckptError, PermissionError):
    """There is no token or key for a hub or store, or the one given may not do this."""

    code = "access"


class RemoteError(ZckptError, ConnectionError):
    """A server failed for good, or answered what it should not."""

    code = "remote"


class CastError(ZckptError):
    """A cast would lose numbers."""

    code = "cast"


class ResourceError(ZckptError):
    """The machine has too little memory for a job, or cannot start more threads."""

    code = "resources"


class UsageError(ZckptError, ValueError):
    """An argument is wrong."""

    code = "usage"


for _kind in (ZckptError, *ZckptError.__subclasses__()):
    public(_kind)


class NoTensorError(UsageError, KeyError):
    """A checkpoint's mapping has no tensor of this name."""


def read_error(path: str, number: int, offset: int) -> CorruptError:
    """The error for a file that cannot be read at byte `offset`; a negative `number` (no errno) means that it ends there."""
    if number < 0:
        return CorruptError(
            "ends too early", file=path, found=f"no data at byte {offset:,} or soon after",
            expected="more data, by its own index", byte_offset=offset,
            remedy="Copy the file again: it was cut short, or shrank while it was read.",
        )  # fmt: skip
    return CorruptError(
        "cannot be read", file=path, found=f"{os.strerror(number)} at byte {offset:,}", byte_offset=offset,
        remedy="Check the disk, and copy the file again.",
    )  # fmt: skip


def add_note(error: BaseException, text: str) -> None:
    """Adds a sentence for a person to an error, as `BaseException.add_note` does from Python 3.11 on."""
    error.__notes__ = [*getattr(error, "__notes__", ()), text]


_SECRETS = (
    (compile_late(r"\b(?:hf|api_org)_\w{6,}"), "hf_..."),
    (compile_late(r"(?i)\b(bearer\s+)\S+"), r"\1..."),
    (compile_late(r"(\w://)[^/\s@]+@"), r"\1"),
    (compile_late(r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>]+"), r"\1?..."),
    (compile_late(r"(?i)([?&](?:X-Amz-[\w-]+|Signature|token|sig)=)[^&\s]+"), r"\1..."),
)


def _path_text(path: str) -> str:
    return redact(path) if "://" in path else path


def redact(text: str, *secrets: str) -> str:
    """A text without the given secrets, and without what looks like one: tokens, passwords, signed addresses.

    A given secret of fewer than four characters is replaced only where it is a word, not inside other words.
    """
    for secret in filter(None, secrets):
        if len(secret) < 4:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "...", text)
        else:
            text = text.replace(secret, "...")
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """An error and all errors that it was raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
