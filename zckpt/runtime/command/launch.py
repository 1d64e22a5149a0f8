"""Where the processes of a run come from: torchrun, a SLURM step, or `--nproc`, which starts some on this machine.

For `zckpt train` and `zckpt run`.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import uuid
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import FrameType

from zckpt.base.errors import UsageError
from zckpt.base.words import count

_PORT = 29500


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
    environment.setdefault("MASTER_PORT", str(_PORT + int(environment.get("SLURM_JOB_ID", "0")) % 1000))
    environment["RANK"], environment["WORLD_SIZE"] = environment["SLURM_PROCID"], size
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    return True


def first_host(nodes: str) -> str:
    """The first of SLURM's list of nodes: "a100-[07-09,12],b1" gives "a100-07"."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    return nodes if found is None else found[1] + (found[2] or "") + (found[3] or "")


def launch(arguments: Sequence[str], processes: int) -> int:
    """Starts `processes` times `python -m zckpt` with these arguments on this machine, as torchrun does, and waits.

    SIGTERM and SIGINT are sent on to all of them.

    Returns:
        0 if all succeeded, otherwise the exit status of the first that failed, as a shell shows it: 128 + n for signal n. They
        have printed what is wrong.

    Raises:
        UsageError: there are GPUs, but fewer than processes.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from zckpt.live.device import accelerator, device_count, hidden_by

    kind = accelerator()
    if kind is not None and device_count() < processes:
        hide = hidden_by(kind)
        raise UsageError(
            f"--nproc {processes} needs as many GPUs", found=count(device_count(), "GPU"),
            remedy=f"Pass a smaller --nproc, or set {hide} to train on the CPU." if hide else "Pass a smaller --nproc.",
        )  # fmt: skip
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCHELASTIC_LOG_LEVEL", "CRITICAL")
    before = {number: signal.signal(number, _send_on) for number in (signal.SIGTERM, signal.SIGINT)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",
    )
    try:
        elastic_launch(config, sys.executable)("-m", "zckpt", *arguments)
    except ChildFailedError as error:
        status = int(error.get_first_failure()[1].exitcode)
        return status if status >= 0 else 128 - status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _send_on(number: int, frame: FrameType | None) -> None:
    del frame
    for task in Path("/proc/self/task").iterdir():
        for child in task.joinpath("children").read_text().split():
            os.kill(int(child), signal.SIGTERM)
