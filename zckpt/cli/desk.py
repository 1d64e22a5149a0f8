"""The error desk: the only place where errors become lines.

Whatever is wrong is printed in the form of `ZckptError.lines`, and as JSON on stdout where `--json` was asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator

import typer

from zckpt.base.errors import UsageError, ZckptError, causes_of, redact
from zckpt.base.words import escape_controls, wrap_text
from zckpt.cli.streams import UnprintedError

_ClickError = next(kind for kind in reversed(typer.BadParameter.__mro__) if hasattr(kind, "format_message"))
"""The base of the errors that typer raises for a wrong command line."""

python_format = warnings.formatwarning
"""Python's own format of warnings, kept before `main` sets the command line's."""


class Interrupted(BaseException):
    """Ctrl-C, or a request to end. It is not a KeyboardInterrupt, because typer would handle that itself. `is_ctrl_c`:
    whether it was Ctrl-C, after which shells expect the exit status 130.
    """

    def __init__(self, *, is_ctrl_c: bool = False) -> None:
        super().__init__()
        self.is_ctrl_c = is_ctrl_c


def report(error: BaseException) -> int:
    """Prints an error; returns the exit status."""
    import json

    from zckpt.cli.output import stderr_width
    from zckpt.team import together

    if os.environ.get("ZCKPT_DEBUG") == "1":
        sys.stderr.write(mask_secrets("".join(traceback.format_exception(error))))
    code, known = _as_zckpt_error(error)
    notes = list(getattr(error, "__notes__", ()))
    facts = {**known.as_json(), "error": code, **({"notes": notes} if notes else {})}
    width = stderr_width()
    known.file = _as_typed(known.file)
    lines = [*known.lines(width), *(line for note in notes for line in wrap_text(f"note: {note}", width, " " * 6))]
    if not (isinstance(error, UnprintedError) and error.is_pipe and not error.done):  # `| head` has what it wanted
        sys.stderr.writelines(_paint(escape_controls(mask_secrets(line))) + "\n" for line in lines)
    if "--json" in sys.argv[1:] and together.speaks():
        with contextlib.suppress(UnprintedError):
            sys.stdout.write(mask_secrets(json.dumps(facts) + "\n"))
            sys.stdout.flush()
    return 130 if _is_of_ctrl_c(error) else 2


def _as_typed(file: str | None) -> str | None:
    """A path below the current directory in its short form, unless the command line has the long one."""
    with contextlib.suppress(OSError):  # the current directory is gone
        here = os.path.join(os.getcwd(), "")
        if file and file.startswith(here) and not any(here in word for word in sys.argv[1:]):
            return file[len(here) :]
    return file


def _is_of_ctrl_c(error: BaseException) -> bool:
    """Whether Ctrl-C is the error, or what it came from."""
    return any(isinstance(cause, Interrupted) and cause.is_ctrl_c for cause in causes_of(error))


def _as_zckpt_error(error: BaseException) -> tuple[str, ZckptError]:
    """A code for programs, and the error with zckpt's fields."""
    if isinstance(error, ZckptError):
        return error.code, error
    if isinstance(error, _ClickError):
        return UsageError.code, _wrong_usage(error)
    if isinstance(error, Interrupted):
        return "interrupted", ZckptError("interrupted; no output is half written")
    if isinstance(error, MemoryError):
        remedy = "Use fewer --threads, or a smaller --buffer. No output is half written."
        return "memory", ZckptError("out of memory", remedy=remedy)
    if isinstance(error, OSError):
        file = None if error.filename is None else os.fsdecode(error.filename)
        remedy = "Solve this, then run the same command again. No output is half written."
        what = str(error.strerror or error)
        return "os", ZckptError(what[:1].lower() + what[1:], file=file, remedy=remedy)
    detail = " ".join(str(error).split())
    remedy = "Run the same command with ZCKPT_DEBUG=1 in the environment, and report what it prints."
    return "internal", ZckptError(f"internal error: {type(error).__name__}: {detail}", remedy=remedy)


def _wrong_usage(error: BaseException) -> UsageError:
    """The error for a wrong command line: an unknown option, a missing argument, a wrong value."""
    first, *others = error.format_message().split(". ")  # type: ignore[attr-defined]
    what = re.sub(r"^Got unexpected", "unexpected", first.rstrip("."))
    context = getattr(error, "ctx", None)
    command = "zckpt" if context is None else context.command_path
    remedy = [f"{other.rstrip('.?')}?" if other.startswith("Did you") else f"{other.rstrip('.')}." for other in others]
    unknown = getattr(error, "option_name", "")
    if context is not None and unknown and "no such option" in first.lower():
        from zckpt.cli.hints import option_meant

        known = [name for param in context.command.get_params(context) for name in param.opts]
        what, remedy = f"no such option: {unknown}", [option_meant(unknown, command, known)]
    if context is not None and "--type" in what:
        from zckpt.cli.hints import value_meant

        remedy.append(value_meant(what))
    return UsageError(
        what[:1].lower() + what[1:],
        remedy=" ".join([*filter(None, remedy), f"Run '{command} --help' for its arguments and options."]),
    )


def _paint(line: str) -> str:
    from zckpt.cli.output import label

    for word, colour in (("error:", "red"), ("note:", "yellow")):
        if line.startswith(word):
            return label(word, colour, sys.stderr) + line.removeprefix(word)
    return line


def mask_secrets(text: str) -> str:
    """A text without secrets: those that were given, and texts that look like one."""
    return redact(text, *_secrets_given())


def _secrets_given() -> Iterator[str]:
    """Secrets on the command line and in the environment."""
    for before, after in itertools.pairwise(sys.argv):
        if before == "--token":
            yield after
    yield from (argument.partition("=")[2] for argument in sys.argv if argument.startswith("--token="))
    yield from (os.environ.get(name, "") for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY"))
