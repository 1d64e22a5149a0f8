"""Starts the processes of a run: torchrun, a SLURM step, or `--nproc`, which starts some on this machine.

For `zckpt train` and `zckpt run`.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from zckpt.base.errors import InconsistentError, UsageError
from zckpt.base.words import count

if TYPE_CHECKING:
    from zckpt.runtime.observe.lookout import Doing

PORT = 29500
"""Where ranks of several machines meet if nobody says another one."""


def is_worker(environment: MutableMapping[str, str]) -> bool:
    """Whether this process is one of several already. In a task of a SLURM step it also sets torchrun's variables.

    `srun` starts one process per task: rank, size and node are SLURM's variables, and the first node is where ranks meet.
    Source: srun(1), "output environment variables".
    """
    if "RANK" in environment:
        return True
    size = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_PROCID" not in environment or int(size) < 2:
        return False
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or "localhost"
    environment.setdefault("MASTER_ADDR", first_host(nodes))
    environment.setdefault("MASTER_PORT", str(PORT + int(environment.get("SLURM_JOB_ID", "0")) % 1000))
    environment["RANK"], environment["WORLD_SIZE"] = environment["SLURM_PROCID"], size
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    return True


def first_host(nodes: str) -> str:
    """The first of SLURM's list of nodes: "a100-[07-09,12],b1" gives "a100-07"."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    return nodes if found is None else found[1] + (found[2] or "") + (found[3] or "")


def launch(
    arguments: Sequence[str],
    processes: int,
    *,
    named: bool = False,
    node: tuple[int, int] = (0, 1),
    meeting: tuple[str, int | None] = ("127.0.0.1", None),
    died: Callable[[InconsistentError], object] | None = None,
) -> int:
    """Starts `processes` times `python -m zckpt` with these arguments on this machine, as torchrun does, and waits.

    SIGTERM and SIGINT are sent on to all of them.

    Args:
        arguments: of zckpt; `${local_rank}` in one is the number of the process here.
        processes: how many.
        named: what ranks other than 0 print on stderr begins with their names.
        node: the number of this machine, and how many there are.
        meeting: address and port of the first machine, where all ranks meet; by default a port that is free.
        died: called with the error that says which rank a signal ended; by default it is raised.

    Returns:
        0 if all succeeded, otherwise the exit status of the first that failed, as a shell shows it: 128 + n for signal n. They
        have printed what is wrong.

    Raises:
        UsageError: there are GPUs, but fewer than processes; or the processes cannot meet.
        InconsistentError: a signal ended one of them.
    """
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from zckpt.live.device import accelerator, device_count, hidden_by
    from zckpt.runtime.observe.lookout import NOTES, last_note

    kind = accelerator()
    if kind is not None and device_count() < processes:
        hide = hidden_by(kind)
        raise UsageError(
            f"{processes} processes need as many GPUs", found=count(device_count(), "GPU"),
            remedy=f"Start fewer with --nproc, or set {hide} to train on the CPU." if hide else "Start fewer with --nproc.",
        )  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCHELASTIC_LOG_LEVEL", "CRITICAL")
    before = {number: signal.signal(number, _send_on) for number in (signal.SIGTERM, signal.SIGINT)}
    with tempfile.TemporaryDirectory(prefix="zckpt-ranks-") as directory:
        notes, logs = Path(directory, "notes"), Path(directory, "logs")
        notes.mkdir()
        os.environ[NOTES] = str(notes)
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `_death` says it
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
        address, port = meeting
        config = LaunchConfig(
            min_nodes=node[1],
            max_nodes=node[1],
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex if node[1] == 1 else "zckpt",
            rdzv_backend="c10d" if port is None else "static",
            rdzv_endpoint="localhost:0" if port is None else f"{address}:{port}",
            rdzv_configs={"rank": node[0]},
            max_restarts=0,
            signals_to_handle="SIGHUP,SIGQUIT",
            log_line_prefix_template="[rank ${rank}] ",
            logs_specs=DefaultLogsSpecs(
                str(logs), tee=dict.fromkeys(range(1, processes), Std.ERR) if named else Std.NONE
            ),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "zckpt", *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            status = int(failure.exitcode)
            death = _death(rank, status, last_note(notes, rank), _last_lines(logs, rank))
            if died is None and (status < 0 or status == 128 + signal.SIGTERM):
                raise death from None
            if died is not None and status < 0 and status != -signal.SIGTERM:  # which a user sends to all
                died(death)
            return status if status >= 0 else 128 - status
        except DistNetworkError as error:
            raise UsageError(
                f"the processes cannot meet at {address}, port {port}", found=str(error).splitlines()[0][:200],
                remedy="Pass another --master_port; on several machines also the --master_addr of the first.",
            ) from error  # fmt: skip
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 0


def _death(rank: int, status: int, note: Doing | None, said: str) -> InconsistentError:
    """The error that says which rank ended the run, where it was, and what it said last."""
    try:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else "ended while it was asked to stop"
    except ValueError:
        how = f"was killed by signal {-status}"
    where = "it had noted no step" if note is None else f"{note.process} was {note.what} of step {note.step:,}"
    memory = "SIGKILL without a command often means that memory ran out: dmesg says so. " * (status == -signal.SIGKILL)
    return InconsistentError(
        f"rank {rank} {how}, and the run ended",
        found=f"{where}; the last it printed: {said}" if said else where,
        remedy=f"{memory}Run the same command again, from the last checkpoint: zckpt train continues from it with --resume.",
    )


def _last_lines(logs: Path, rank: int) -> str:
    """The last lines of a rank's stderr."""
    for path in logs.glob(f"**/{rank}/stderr.log"):
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-3:])
    return ""


def _send_on(number: int, frame: FrameType | None) -> None:
    del frame
    for task in Path("/proc/self/task").iterdir():
        for child in task.joinpath("children").read_text().split():
            os.kill(int(child), signal.SIGTERM)
