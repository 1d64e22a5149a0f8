"""Whether several processes have the same job before any of them begins."""

from __future__ import annotations

import os
import shlex
import sys

from zckpt.base.errors import InconsistentError, UsageError
from zckpt.base.pace import Pace
from zckpt.team.together import Team, here


def agree(team: Team, job: str, out: str) -> None:
    """Checks that all processes have the same job.

    Args:
        team: the processes.
        job: fingerprint of all that the output's bytes depend on, of facts that are the same on all machines.
        out: the output's path.

    Raises:
        UsageError: they have different arguments.
        InconsistentError: they see different files.
    """
    mine = {"job": job, "out": os.path.realpath(out), "asked": sys.argv[1:], "host": os.uname().nodename}
    said = team.meet(mine)
    for rank, other in enumerate(said):
        if (other["job"], other["out"]) == (said[0]["job"], said[0]["out"]):
            continue
        if other["asked"] != said[0]["asked"]:
            raise UsageError(
                "the processes have different arguments",
                found=f"process {rank}: {shlex.join(other['asked'])}; process 0: {shlex.join(said[0]['asked'])}",
                remedy="Start all of them with the same arguments. Nothing was changed.",
            )
        raise InconsistentError(
            "the processes see different files",
            found=f"process {rank} on {other['host']} does not see what process 0 on {said[0]['host']} sees",
            expected="the same paths, sizes and modification times, and one output",
            remedy="Put the checkpoint and OUT on a file system that all machines share. Nothing was changed.",
        )


def refuse_several(out: object) -> None:
    """Refuses an output at an address to several processes, which would each write all of it. Raises UsageError if
    there are several.
    """
    mine = here()
    if mine.size > 1:
        raise UsageError(
            "several processes cannot write to an address together", file=str(out), found=f"{mine.size:,} processes",
            expected="one process, which sends with several threads",
            remedy="Start one process; or let several write to a directory that all machines share, and copy that. "
            "To work alone, take RANK, or SLURM_STEP_ID, out of the environment.",
        )  # fmt: skip


def share_of(pace: Pace) -> Pace:
    """A process's share of a pace: a limit on bytes per second is shared by all processes."""
    rate = pace["bytes_per_s"]
    return pace if rate is None else {**pace, "bytes_per_s": max(1, rate // here().size)}
