"""The command line. Each module declares its commands, which `commands` lists; `desk` reports errors.

Exit status: 0 done or yes, 1 the answer is no, 2 an error, 130 Ctrl-C. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import signal
import sys
import warnings
from types import FrameType
from typing import Annotated, NoReturn

import typer

from zckpt.base.version import DOCUMENTATION
from zckpt.cli import desk, streams
from zckpt.cli.commands import Commands

app = typer.Typer(
    name="zckpt",
    cls=Commands,
    help="Merge the shards of a DeepSpeed ZeRO, FSDP or Megatron checkpoint into consolidated weights, at the speed of the disk, "
    "without executing a pickle.",
    epilog="\n\n".join(
        [
            "Exit status: 0 done, 1 the answer is no, 2 error",
            "Example: zckpt inspect out/checkpoint-500",
            "Example: zckpt to-bf16 out/checkpoint-500 weights/",
            "Example: zckpt push out/checkpoint-500 OWNER/NAME",
            f"Documentation: {DOCUMENTATION}",
        ]
    ),
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback()
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --version: also print what a bug report needs.")
    ] = False,
) -> None:
    if version:
        from zckpt.cli import about

        typer.echo("\n".join(about.lines(verbose)))
        raise typer.Exit
    if verbose:
        raise typer.BadParameter("--verbose is of use only with --version")
    command = context.invoked_subcommand
    if command is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)
    if command.startswith("to-") or command in ("convert", "reshard", "average", "slim", "delta", "apply"):
        from zckpt.team import together

        together.allow()  # what torchrun or srun starts many times is one job


def main() -> None:
    """Runs a command; an error is printed by `desk`, with exit status 2."""
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    streams.guard()
    if sys.argv[1:2] and sys.argv[1].startswith("--local_rank=") and sys.argv[2:3] == ["run"]:
        sys.argv[1:3] = [sys.argv[2], sys.argv[1]]  # `deepspeed --module zckpt run`
    try:
        try:
            status = app(prog_name="zckpt", standalone_mode=False)
        finally:
            sys.stdout.flush()
    except (desk.Interrupted, Exception) as error:
        sys.exit(desk.report(error))
    sys.exit(status)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise desk.Interrupted(is_ctrl_c=number == signal.SIGINT)
