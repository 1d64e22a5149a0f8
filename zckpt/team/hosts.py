"""On which machines and accelerators the processes of a run start: hostfiles, choices of slots, and a command for each machine.

For `zckpt run`. Source: DeepSpeed 0.19.8, launcher/runner.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zckpt.base.errors import NotACheckpointError, RemoteError, UsageError
from zckpt.base.words import join_words

Hosts = dict[str, list[int]]
"""Machine -> its slots: the numbers of its accelerators, one process each."""

USUAL_HOSTFILE = "/job/hostfile"
"""Where `deepspeed` looks for a hostfile if none is named."""

_EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
_POLL_S = 0.1


def read_hostfile(path: str) -> Hosts:
    """The machines of a hostfile, with the lines `NAME slots=N`. Raises NotACheckpointError if there is no such file;
    UsageError if a line has another form, a machine stands there twice, or there is none.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise NotACheckpointError(
            "there is no such hostfile", file=path, remedy="Correct --hostfile, or leave it out for this machine alone."
        ) from None
    hosts: Hosts = {}
    for line in map(str.strip, lines):
        found = re.match(r"(\S+)\s+slots=(\d+)", line)
        if not line or line.startswith("#"):
            continue
        if found is None or found[1] in hosts:
            raise UsageError(
                "a line of the hostfile cannot be used" if found is None else "the hostfile names a machine twice",
                file=path, found=line, expected="a line 'NAME slots=N' for each machine",
                remedy="Correct this line.",
            )  # fmt: skip
        hosts[found[1]] = list(range(int(found[2])))
    if not hosts:
        raise UsageError(
            "the hostfile names no machine", file=path, expected="lines 'NAME slots=N'", remedy="Add a line."
        )
    return hosts


def read_choice(text: str) -> Hosts:
    """What --include or --exclude names: `NAME[:SLOT,...]@...`; no slots stand for all of a machine. Raises UsageError
    if it has another form.
    """
    chosen: Hosts = {}
    for part in filter(None, text.split("@")):
        found = re.fullmatch(r"([^:\s]+)(?::(\d+(?:,\d+)*))?", part)
        if found is None:
            what = f"{part!r} names no machine and slots"
            raise UsageError(what, expected="NAME or NAME:0,1, with @ between machines", remedy="Correct it.")
        slots = [int(slot) for slot in (found[2] or "").split(",") if slot]
        chosen[found[1]] = sorted({*chosen.get(found[1], []), *slots})
    return chosen


def choose(hosts: Hosts, include: str, exclude: str) -> Hosts:
    """The machines and slots that are used, in the order of the hostfile. Raises UsageError if a choice names a machine
    or a slot that is not there, or none is left.
    """
    chosen = read_choice(include or exclude)
    option = "--include" if include else "--exclude"
    for name, slots in chosen.items():
        missing = [slot for slot in slots if slot not in hosts.get(name, ())]
        if name not in hosts or missing:
            raise UsageError(
                f"{option} names machine {name!r}, which cannot be started from here" if name not in hosts
                else f"{option} names a slot that {name} does not have",
                found=f"{name}:{','.join(map(str, missing))}" if missing else name,
                expected="; ".join(f"{host}:0-{slots[-1]}" for host, slots in hosts.items() if slots),
                remedy="Correct it, or name the machine in --hostfile.",
            )  # fmt: skip
    if include:
        hosts = {name: chosen[name] or slots for name, slots in hosts.items() if name in chosen}
    elif exclude:
        left = {name: chosen[name] or slots if name in chosen else [] for name, slots in hosts.items()}
        hosts = {name: [slot for slot in slots if slot not in left[name]] for name, slots in hosts.items()}
    hosts = {name: slots for name, slots in hosts.items() if slots}
    if not hosts:
        raise UsageError(f"{option} leaves no slot", remedy="Leave one for each process.")
    return hosts


def is_here(host: str) -> bool:
    """Whether a name stands for this machine."""
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn())


def shell_line(
    host: str, words: Sequence[str], *, ssh_port: int | None, before: str | None, always_ssh: bool = False
) -> list[str]:
    """The command that starts `words` on a machine, in this directory and with the variables that `deepspeed` sends too.

    Args:
        host: the machine; this one needs no ssh.
        words: the command there.
        ssh_port: of the machine's ssh, if not its usual one.
        before: a script that is sourced first, such as that of a virtual environment.
        always_ssh: this machine is reached by ssh too.
    """
    if is_here(host) and not always_ssh:
        return list(words)
    line = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*_exports(), *words])}"
    port = ["-p", str(ssh_port)] if ssh_port is not None else []
    # -tt: when the connection ends, the processes there get a hang-up signal and end too
    return ["ssh", "-tt", *port, host, f". {shlex.quote(before)} && {line}" if before else line]


def _exports() -> Iterator[str]:
    """Variables for other machines: of the environment, and of files `.deepspeed_env` at home and here."""
    yield from (f"{name}={value}" for name, value in os.environ.items() if name.startswith(_EXPORTED))
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    for path in (Path.home() / name, Path(name)):
        if path.is_file():
            yield from (line.strip() for line in path.read_text(encoding="utf-8").splitlines() if "=" in line)


def start_all(commands: Mapping[str, Sequence[str]]) -> int:
    """Starts one command for each machine and waits; if one fails, the others are ended. Returns 0, or the exit status
    of the first that failed. Raises UsageError if there is no ssh, RemoteError if ssh could not reach a machine.
    """
    distant = [host for host, command in commands.items() if command[0] == "ssh"]
    if distant and shutil.which("ssh") is None:
        raise UsageError(
            f"{join_words(distant)} cannot be started from here: there is no ssh", expected="the program ssh on PATH",
            remedy="Install it. Or run the lines that --dry-run prints on each machine.",
        )  # fmt: skip
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for host, command in commands.items():
            running[host] = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while None in (statuses := [process.poll() for process in running.values()]) and not any(statuses):
            time.sleep(_POLL_S)
        failed = {host: process.returncode for host, process in running.items() if process.returncode}
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    for host in failed:
        if host in distant and failed[host] == 255:
            raise RemoteError(
                f"{host} could not be started, or the connection to it ended", file=host, found="exit status 255 of ssh",
                expected="ssh that needs no password", remedy=f"Try 'ssh {host} hostname'. The other machines were stopped.",
            )  # fmt: skip
    return next(iter(failed.values()), 0)
