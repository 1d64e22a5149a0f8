"""`zckpt run`: a training script that imports `deepspeed`, with this trainer under that name."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import warnings
from types import TracebackType
from typing import Annotated, NoReturn

import typer

from zckpt.base import collector
from zckpt.base.errors import UsageError
from zckpt.cli.declare import command
from zckpt.cli.desk import python_format
from zckpt.cli.texts import positive


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(
        app,
        "run",
        about="Run a training script, in which 'import deepspeed' gives zckpt's trainer, also to transformers and accelerate. "
        "Options of run come before SCRIPT; everything after it goes to SCRIPT.",
        example="zckpt run --nproc 2 train.py --deepspeed ds_config.json --output_dir out",
        status="0 done, 2 error, or what SCRIPT returns",
        passes_on=True,
    )(run)


def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file, or with -m a module.", show_default=False)
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of SCRIPT.", show_default=False)
    ] = None,
    *,
    module: Annotated[
        bool, typer.Option("-m", "--module", rich_help_panel="Run", help="SCRIPT is a module's name, as for python -m.")
    ] = False,
    nproc: Annotated[
        int,
        typer.Option(
            "--nproc", metavar="N", rich_help_panel="Run", callback=positive, help="Processes on this machine."
        ),
    ] = 1,
) -> None:
    """Starts the processes of a script, or is one of them."""
    words = list(arguments or ())
    if not module and not os.path.exists(script):
        raise UsageError(
            "there is no such script", file=script, remedy="Pass the path of a Python file, or -m and a module's name."
        )
    if nproc > 1 or "SLURM_PROCID" in os.environ:
        from zckpt.runtime.train.launch import is_worker, launch

        if not is_worker(os.environ) and nproc > 1:
            raise typer.Exit(launch(["run", *(["-m"] if module else []), script, *words], nproc))
    from zckpt.runtime.names.finder import as_deepspeed

    as_deepspeed()
    _as_python_does()
    sys.argv[:] = [script, *words]
    try:
        if module:
            _look_for_modules_in(os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            _look_for_modules_in(os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt as error:
        _end(error, 128 + signal.SIGINT)
    except Exception as error:
        _end(error, 1)


def _as_python_does() -> None:
    """Takes back what the command line has set for itself: signals, warnings, and no garbage collector."""
    collector.switch_on()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.formatwarning = python_format


def _look_for_modules_in(directory: str) -> None:
    """Puts a directory where Python puts that of a script: at the front of `sys.path`."""
    if not sys.flags.safe_path:
        sys.path[0] = directory


def _end(error: BaseException, status: int) -> NoReturn:
    """Prints an error of the script, without the frames of what started it, and ends the process."""
    trace = _of_script(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.exit(status)


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    starters = (__file__, runpy.__file__, "<frozen runpy>")
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in starters:
        inner = inner.tb_next
    return trace if inner is None else inner
