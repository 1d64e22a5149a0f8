"""Checks that all ranks of a run hold the same facts, and several processes the same job, before they begin something together.

A digest is compared first; only where digests differ do the facts themselves travel, once for each kind of rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Hashable, Mapping, Sequence

from zckpt.base.errors import InconsistentError, UsageError
from zckpt.base.pace import Pace
from zckpt.base.words import join_words, ranks
from zckpt.team.meeting import Meetings
from zckpt.team.together import Team, here

_MOST_KINDS = 4
"""The most kinds of ranks with facts that are compared."""

_SHOWN = 6
"""The most facts that an error lists."""


def ranks_by_value(said: Sequence[Hashable]) -> str:
    """The values with the ranks that have them: `1.0 on rank 0, 0.5 on ranks 1, 2`."""
    numbers: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(said):
        numbers.setdefault(value, []).append(rank)
    return join_words([f"{value} on {ranks(who)}" for value, who in numbers.items()])


def place_of_directory(path: str) -> tuple[str, int | None]:
    """A key by which two ranks know whether they mean one directory: its real path, and its inode if it exists.

    Machines may have one file system at different paths; the number is the same.
    """
    try:
        return os.path.realpath(path), os.stat(path).st_ino
    except OSError:
        return os.path.realpath(path), None


def check_same(meetings: Meetings, what: str, facts: Mapping[str, str], *, within_s: float) -> None:
    """Checks that all ranks hold the same facts.

    Args:
        meetings: of the ranks.
        what: the call that brings everybody here.
        facts: by name; a fact that only some ranks hold differs.
        within_s: as for `Meetings.meet`.

    Raises:
        InconsistentError: on every rank: what differs, and between which ranks; or some ranks did not come.
    """
    digests = meetings.meet(
        what, hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(), within_s=within_s
    )
    kinds = [*dict.fromkeys(digests)][:_MOST_KINDS]
    if len(kinds) == 1:
        return
    speaks = meetings.rank in map(digests.index, kinds)
    words = meetings.meet(what, dict(facts) if speaks else None, within_s=within_s)
    held = {kind: words[digests.index(kind)] for kind in kinds}
    names = [*dict.fromkeys(name for one in held.values() for name in one)]
    differing = [name for name in names if len({one.get(name) for one in held.values()}) > 1]
    found = [
        f"{name}: {ranks_by_value([held[d].get(name, 'none') if d in held else 'not compared' for d in digests])}"
        for name in differing[:_SHOWN]
    ]
    more = f"; and {len(differing) - _SHOWN:,} more" if len(differing) > _SHOWN else ""
    raise InconsistentError(
        f"the ranks call {what} with different arguments", found="; ".join(found) + more, expected="the same on every rank",
        remedy="Start every rank with the same script, config, model and versions. Nothing was changed.",
    )  # fmt: skip


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
