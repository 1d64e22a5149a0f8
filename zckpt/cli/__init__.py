"""The command line: its commands, and the error desk, the only place where errors become lines.

Exit status: 0 done or yes, 1 the answer is no, 2 an error. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from types import FrameType
from typing import NoReturn

import typer

from zckpt.base.errors import ZckptError, redact
from zckpt.cli import convert, demo, look, options, peft, push, reshape, train
from zckpt.team import together

app = typer.Typer(
    name="zckpt",
    help="Turn sharded training checkpoints into whole weights, at the speed of the disk, without running a pickle.",
    epilog="Example: zckpt to-bf16 out/checkpoint-500 weights/",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
look.register(app)
convert.register(app)
reshape.register(app)
peft.register(app)
push.register(app)
train.register(app)
demo.register(app)


class Interrupted(BaseException):
    """Ctrl-C, or a request to end. Not a KeyboardInterrupt: the command line library would answer that itself."""


@app.callback()
def _top(context: typer.Context, version: options.Version = False) -> None:
    command = context.invoked_subcommand or ""
    if command.startswith("to-") or command == "reshard":  # what torchrun or srun starts many times is one job
        together.allow()


def main() -> None:
    """Runs a command; whatever goes wrong leaves as one line and exit status 2."""
    gc.disable()  # a plan is millions of objects in no cycle: looking for one takes a tenth of the time
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        try:
            app(prog_name="zckpt")
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the last flush must not fail again
        sys.exit(2)
    except (Interrupted, Exception) as error:
        sys.exit(_report(error))


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted


def _report(error: BaseException) -> int:
    """Tells of an error; returns the exit status."""
    if os.environ.get("ZCKPT_DEBUG") == "1":
        sys.stderr.write(_masked("".join(traceback.format_exception(error))))
    if isinstance(error, ZckptError):
        lines, facts = error.lines(_width()), error.as_json()
    else:
        code, text = _foreign(error)
        lines = [f"error: {text}"]
        facts = {"error": code, "what": text, "file": None, "found": "", "expected": "", "remedy": ""}
    notes = list(getattr(error, "__notes__", ()))
    if notes:
        facts["notes"] = notes
    try:
        sys.stderr.writelines(_masked(f"{line}\n") for line in lines)
        sys.stderr.writelines(_masked(f"note: {note}\n") for note in notes)
        if "--json" in sys.argv[1:] and together.speaks():
            sys.stdout.write(_masked(json.dumps(facts) + "\n"))
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 2


def _width() -> int | None:
    """Columns of the terminal; None where there is none, so that logs have one line a field."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else None


def _masked(text: str) -> str:
    """A text without secrets: those that were given, and those that look like one."""
    given = [after for before, after in itertools.pairwise(sys.argv) if before == "--token"]
    given += [argument.partition("=")[2] for argument in sys.argv if argument.startswith("--token=")]
    given += [os.environ.get(name, "") for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY")]
    return redact(text, *given)


def _foreign(error: BaseException) -> tuple[str, str]:
    """A code and one line for what is not a ZckptError."""
    if isinstance(error, Interrupted):
        return "interrupted", "interrupted: nothing was published"
    if isinstance(error, MemoryError):
        return "memory", "out of memory: nothing was published. Try fewer --threads."
    if isinstance(error, OSError):
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return "os", f"{place}{error.strerror or error}; nothing was published"
    detail = " ".join(str(error).split())
    return "internal", (
        f"a mistake in zckpt itself: {type(error).__name__}: {detail}. "
        "Run it again with ZCKPT_DEBUG=1 and report what it says."
    )
