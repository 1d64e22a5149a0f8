"""`zckpt run`: a training script that imports `deepspeed`, with this trainer under that name."""

from __future__ import annotations

import os
import runpy
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Annotated, NoReturn

import typer

from zckpt.base import collector
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.cli import desk
from zckpt.cli.declare import command
from zckpt.cli.desk import python_format
from zckpt.jobs.groups import option

_HERE = "Processes"
_THERE = "Several machines"

_LAUNCHERS = (
    "accelerate.commands.launch",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate",
    "torchrun",
)
"""Modules and programs that start the processes themselves, and so run once."""


@dataclass(frozen=True, repr=False, eq=False)
class Launch:
    """The processes that are started, and where: options of `deepspeed` and of `torchrun`, by their names there."""

    nproc: int | None = option(
        None, "--nproc --num_gpus --num_accelerators", "positive",
        "Processes on each machine; by default one for each accelerator.", _HERE, metavar="N",
    )  # fmt: skip
    nproc_per_node: str | None = option(
        None, "--nproc_per_node --nproc-per-node", "text", "As --nproc, and without --local_rank, as torchrun.", _HERE,
        metavar="N",
    )  # fmt: skip
    include: str = option(
        "", "-i --include", "text", "Only these: host1@host2:0,2.", _HERE, metavar="NAME:SLOTS", show_default=False
    )
    exclude: str = option("", "-e --exclude", "text", "All but these.", _HERE, metavar="NAME:SLOTS", show_default=False)
    no_local_rank: bool = option(
        False, "--no_local_rank", "flag", "Do not pass --local_rank=N to SCRIPT, as deepspeed does.", _HERE
    )
    hostfile: str | None = option(
        None, "-H --hostfile", "text", "Lines 'NAME slots=N'; ssh starts the others.", _THERE, metavar="FILE"
    )
    num_nodes: str | None = option(
        None, "--num_nodes --nnodes", "text", "Machines; of a hostfile the first N.", _THERE, metavar="N"
    )
    node_rank: int | None = option(
        None, "--node_rank --node-rank", "number", "Start this machine alone, which has this number from 0.", _THERE,
        metavar="N",
    )  # fmt: skip
    master_addr: str | None = option(
        None, "--master_addr --master-addr", "text", "The first machine, where all meet.", _THERE, metavar="HOST"
    )
    master_port: int | None = option(
        None, "--master_port --master-port", "number", "Of it there; on one machine a free one.", _THERE, metavar="PORT"
    )
    ssh_port: int | None = option(None, "--ssh_port", "number", "Of ssh on the other machines.", _THERE, metavar="PORT")
    venv_script: str | None = option(
        None, "--venv_script", "text", "A script to source first on the other machines.", _THERE, metavar="FILE"
    )
    dry_run: bool = option(False, "-n --dry-run", "flag", "Print the command for each machine.", _THERE)
    no_ssh: bool = option(False, "--no_ssh", "flag", "", _THERE, hidden=True)
    no_ssh_check: bool = option(
        False, "--no_ssh_check", "flag", "As without it: ssh is not tried before it starts a machine.", _THERE
    )
    force_multi: bool = option(False, "--force_multi", "flag", "Start a machine by ssh if it is this one, too.", _THERE)
    standalone: bool = option(
        False, "--standalone", "flag", "This machine alone; a hostfile that lies in its usual place is not read.", _HERE
    )
    quiet: bool = option(False, "-q --quiet", "flag", "As --log_level error.", _HERE)
    log_level: str = option(
        "warning", "--log_level", "text", "info and debug print the commands that are started.", _HERE, metavar="LEVEL"
    )
    local_rank: int | None = option(None, "--local_rank --local-rank", "number", "", _HERE, hidden=True)


@command(
    "run",
    about="Run a training script, in which 'import deepspeed' gives zckpt's trainer, also to transformers and accelerate. "
    "Options of run come before SCRIPT; everything after it goes to SCRIPT.",
    example="zckpt run --num_gpus 2 train.py --deepspeed ds_config.json --output_dir out",
    status="0 done, 2 error, or what SCRIPT returns",
    passes_on=True,
)
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
    options: Launch,
) -> None:
    """Starts the processes of a script, or is one of them."""
    words = list(arguments or ())
    if not module and not os.path.exists(script):
        raise UsageError(
            "there is no such script", file=script, remedy="Pass the path of a Python file, or -m and a module's name."
        )
    if options.local_rank is not None:  # of deepspeed's own launcher, which puts it before the word `run`
        words.insert(0, f"--local_rank={options.local_rank}")
    status = _launch(options, [*(["-m"] if module else []), script], words)
    if status is not None:
        raise typer.Exit(status)
    from zckpt.live.device import end_group_with_process
    from zckpt.runtime.names.finder import as_deepspeed

    as_deepspeed()
    end_group_with_process()  # also of a script that makes its own
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


def _launch(asked: Launch, script: Sequence[str], words: Sequence[str]) -> int | None:
    """The exit status of the processes that were started; None if the script runs in this process."""
    from zckpt.live.device import accelerator, device_count
    from zckpt.runtime.train.launch import PORT, is_worker, launch
    from zckpt.team import hosts

    if is_worker(os.environ):
        return None
    log = _log_of(asked)
    number, nodes, local = _processes(asked), _number("--num_nodes", asked.num_nodes), "127.0.0.1"
    picked, alone = asked.include or asked.exclude, asked.node_rank is not None
    if (asked.include and asked.exclude) or (picked and (number or (nodes and not alone))):
        raise UsageError(
            "--include and --exclude say which accelerators are used, and nothing beside them can",
            remedy="Pass one of --include and --exclude alone, or --nproc and --num_nodes.",
        )
    usual_file = hosts.USUAL_HOSTFILE if os.path.isfile(hosts.USUAL_HOSTFILE) and not asked.standalone else None
    listed = asked.hostfile or usual_file
    if listed is not None:
        chosen = hosts.read_hostfile(listed)
    else:
        usual = number or (1 if os.path.basename(script[-1]) in _LAUNCHERS else device_count()) or 1
        if usual == 1 and not (
            number or nodes or picked or alone or asked.master_port or asked.dry_run or asked.force_multi
        ):
            return None
        slots = [slot for part in hosts.read_choice(picked).values() for slot in part]
        chosen = {
            "localhost": list(range(device_count() if picked and accelerator() else max([usual - 1, *slots]) + 1))
        }
    if picked:
        chosen = hosts.choose(chosen, asked.include, asked.exclude)
    elif listed is not None:
        chosen = {host: own if number is None else list(range(number)) for host, own in [*chosen.items()][:nodes]}
    count = nodes if nodes and listed is None else len(chosen)
    if count > 1 and ((listed is None and not alone) or (nodes or 0) > count):
        raise UsageError(
            f"{nodes} machines are asked for, and {len(chosen)} can be started from here",
            remedy="Name all in --hostfile. Or run this on each machine, with --node_rank and --master_addr.",
        )
    first = asked.master_addr or (local if count == 1 else next(iter(chosen)))
    if count > 1 and first in (local, "localhost"):
        raise UsageError(
            "the other machines cannot reach the first one by this name", found=first,
            remedy="Pass --master_addr, with a name or an address that all machines know.",
        )  # fmt: skip
    rank_here = asked.node_rank if alone or asked.no_ssh else 0
    if rank_here is None or not 0 <= rank_here < count:
        raise UsageError(
            "--node_rank does not name one of the machines", found=str(rank_here), expected=f"0 to {count - 1}",
            remedy="Pass --node_rank, and with no hostfile --num_nodes.",
        )  # fmt: skip
    port = asked.master_port or (PORT if count > 1 else None)
    plain = asked.no_local_rank or asked.nproc_per_node is not None
    everywhere = not alone and (count > 1 or asked.force_multi or not hosts.is_here(next(iter(chosen))))
    if everywhere or asked.dry_run:
        commands = {}
        for rank, (host, own) in enumerate(chosen.items()):
            there = [
                "--include",
                f"localhost:{','.join(map(str, own))}",
                "--num_nodes",
                str(count),
                "--node_rank",
                str(rank),
            ]
            there += [
                "--master_addr",
                first,
                "--master_port",
                str(port or PORT),
                *(["--no_local_rank"] if plain else []),
            ]
            line = [sys.executable, "-m", "zckpt", "run", *there, *script, *words]
            commands[host] = hosts.shell_line(
                host, line, ssh_port=asked.ssh_port, before=asked.venv_script, always_ssh=asked.force_multi
            )
        if asked.dry_run:
            typer.echo("\n".join(map(shlex.join, commands.values())))
            return 0
        log(commands.values())
        return hosts.start_all(commands)
    own = [*chosen.values()][rank_here if listed is not None else 0]
    _show(own)
    passed = [*script, *([] if plain else ["--local_rank=${local_rank}"]), *(word.replace("$", "$$") for word in words)]
    log([[sys.executable, "-m", "zckpt", "run", *passed]] * len(own))
    return launch(["run", *passed], len(own), node=(rank_here, count), meeting=(first, port), died=desk.report)


def _log_of(asked: Launch) -> Callable[[Iterable[Sequence[str]]], None]:
    """A function that reports the commands that are started. Raises UsageError if there is no such level, or
    --standalone is contradicted.
    """
    level = "error" if asked.quiet else asked.log_level
    if level not in ("debug", "info", "warning", "error", "critical"):
        raise UsageError(f"--log_level has no level {level!r}", remedy="Pass debug, info, warning, error or critical.")
    others = ("hostfile", "node_rank", "master_addr", "force_multi")
    if asked.standalone and (
        any(getattr(asked, name) not in (None, False) for name in others) or asked.num_nodes not in (None, "1")
    ):
        raise UsageError(
            "--standalone means this machine alone, and other machines are asked for",
            remedy="Leave --standalone out, or " + ", ".join(f"--{name}" for name in (*others, "num_nodes")) + ".",
        )
    shows = level in ("debug", "info")
    return lambda commands: typer.echo("\n".join(map(shlex.join, commands)), err=True) if shows else None


def _processes(asked: Launch) -> int | None:
    """How many processes each machine gets; None for one on each accelerator."""
    if asked.nproc_per_node is None or asked.nproc_per_node in ("auto", "gpu"):
        return asked.nproc
    if asked.nproc is not None:
        raise UsageError("--nproc_per_node and --nproc say the same", remedy="Pass one of them.")
    return (os.cpu_count() or 1) if asked.nproc_per_node == "cpu" else _number("--nproc_per_node", asked.nproc_per_node)


def _number(option: str, text: str | None) -> int | None:
    if text is None or (text.isdecimal() and int(text) > 0):
        return int(text) if text else None
    raise UsageError(
        f"{option} {text!r} is not a whole number above 0",
        remedy="Pass a number. A range, for machines that come and go, is torchrun's: torchrun ... -m zckpt run SCRIPT.",
    )


def _show(slots: Sequence[int]) -> None:
    """Shows the processes these accelerators alone, among those that are visible here."""
    from zckpt.live.device import accelerator, hidden_by

    kind = accelerator()
    if kind is None or [*slots] == [*range(len(slots))]:
        return
    hide = hidden_by(kind)
    if hide is None:
        raise UsageError(
            f"which accelerators of kind {kind.type} are used cannot be chosen here",
            remedy="Set the variable of its own library, and leave --include and --exclude out.",
        )
    name = hide.rstrip("=")
    seen = os.environ[name].split(",") if name in os.environ else [*map(str, range(max(slots) + 1))]
    os.environ[name] = ",".join(seen[slot] for slot in slots)


def _as_python_does() -> None:
    """Undoes what the command line has set for itself: signals, warnings, and no garbage collector."""
    collector.switch_on()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.formatwarning = python_format


def _look_for_modules_in(directory: str) -> None:
    """Puts a directory in the place of a script's: at the front of `sys.path`."""
    if not sys.flags.safe_path:
        sys.path[0] = directory


def _end(error: BaseException, status: int) -> NoReturn:
    """Prints an error of the script, without the frames of what started it, and ends the process."""
    trace = _of_script(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    sys.last_value = error
    sys.exit(status)


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    starters = (__file__, runpy.__file__, "<frozen runpy>")
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in starters:
        inner = inner.tb_next
    return trace if inner is None else inner
