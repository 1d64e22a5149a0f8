"""What every benchmark here does: commands in turn, round after round, watched from outside."""

from __future__ import annotations

import math
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = ROOT / "benchmarks" / "work"
ZCKPT = [sys.executable, "-m", "zckpt"]
CAT = ["sh", "-c", 'find "$@" -type f -exec cat {} + > /dev/null', "sh"]
"""Reads all files of the directories that follow."""
PYTHON = [sys.executable, "-W", "ignore"]


@dataclass
class Taken:
    """What a command took, round by round.

    Attributes:
        seconds: of wall time.
        busy: of processor time, of the command and its children.
        peak: the most resident memory of any one process of it, in KiB.
    """

    seconds: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    peak: int = 0

    @property
    def median(self) -> float:
        """Of the wall seconds."""
        return statistics.median(self.seconds)


@dataclass
class Row:
    """One comparison: a line of a table.

    Attributes:
        what: was done.
        ours: what zckpt took.
        rival: who did the same; empty for nobody.
        theirs: what that took.
        note: what makes the two less than alike.
        numel: parameters of the model, where the table is of models that grow.
        least: seconds in which this machine could move the bytes that must move (`limits`); 0 where nobody counted them.
        paired: the ratio of the two, round by round, with its interval (`paired`); empty where rounds are not compared.
    """

    what: str
    ours: Taken
    rival: str = ""
    theirs: Taken | None = None
    note: str = ""
    numel: int = 0
    least: float = 0.0
    paired: tuple[float, ...] = ()


@dataclass(frozen=True)
class Job:
    """A command to time.

    Attributes:
        command: it.
        clears: what is removed before each round of it.
        drops: what is removed after.
        tells: it prints its own seconds, as its last line: what it took to get that far is not counted.
        warms: directories or files that are read before, so that no disk slows the first reader.
        cools: a directory whose files are put out of the page cache before, so that each round reads the disk.
        touches: most of the free memory is written to before: a virtual machine's host takes back what lies idle, and a first
            touch then costs several times a second one. It is held until all that was freed earlier has been taken back: Linux
            tells the host of free memory two seconds after some was freed.
    """

    command: list[str]
    clears: tuple[Path, ...] = ()
    drops: tuple[Path, ...] = ()
    tells: bool = False
    warms: tuple[Path, ...] = ()
    cools: Path | None = None
    touches: bool = False


def in_turn(jobs: Mapping[str, Job], rounds: int, *, shuffled: bool = False) -> dict[str, Taken]:
    """Runs every job once in each round, on a disk with nothing left to write.

    Args:
        jobs: name -> job.
        rounds: how often each.
        shuffled: each round has an order of its own, the same whenever this is run; by default all have that of `jobs`.
    """
    taken = {name: Taken() for name in jobs}
    orders = random.Random(rounds)
    for _ in range(rounds):
        for name in orders.sample(list(jobs), len(jobs)) if shuffled else jobs:
            job = jobs[name]
            for path in job.clears:
                remove(path)
            if job.warms:
                subprocess.run([*CAT, *map(str, job.warms)], check=True)
            subprocess.run(["sync"], check=True)
            if job.cools:
                cool(job.cools)
            if job.touches:
                free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
                subprocess.run(
                    [*PYTHON, "-c", f"import time; held = b'1' * {free // 10 * 9}; time.sleep(3)"], check=True
                )
            seconds, usage, printed = watched(job.command)
            took = taken[name]
            took.seconds.append(float(printed.split()[-1]) if job.tells else seconds)
            took.busy.append(usage.ru_utime + usage.ru_stime)
            took.peak = max(took.peak, usage.ru_maxrss)
            for path in job.drops:
                remove(path)
    return taken


def paired(ours: Taken, theirs: Taken) -> tuple[float, ...]:
    """The ratio of our seconds to theirs in a round: its geometric mean, and the ends of the interval that holds it at 95 %.

    What slows a machine for minutes slows both of a round. The interval is Student's, of the logarithms; one round has none.
    """
    logs = [math.log(a / b) for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return ()
    wide = _STUDENT[min(len(logs), max(_STUDENT))] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - wide), math.exp(middle + wide)


_STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 11: 2.23, 12: 2.20, 13: 2.18,
            14: 2.16, 15: 2.14, 16: 2.13, 17: 2.12, 18: 2.11, 19: 2.10, 20: 2.09}  # fmt: skip
"""Number of rounds -> how many standard errors an interval of 95 % reaches to each side; of more rounds, a little less."""


def file_bytes(path: Path, pattern: str = "*") -> int:
    """Bytes of a file, or of all files of a directory whose names match."""
    return sum(file.stat().st_size for file in (path, *path.rglob(pattern)) if file.is_file())


def optimizer_bytes(checkpoint: Path) -> int:
    """Bytes of a checkpoint's masters and, where it has them, moments."""
    return file_bytes(checkpoint, "*optim_states.pt")


def cool(directory: Path) -> None:
    """Puts a file, or those of a directory, out of the page cache, as far as the system does what it is asked."""
    for path in (directory, *directory.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copying(source: Path, copy: Path, *, durable: bool = True) -> Job:
    """`cp` of what stands at `source` then, and `sync` of the copy."""
    script = "cp -r $0 $1" + (" && sync $(find $1)" if durable else "")
    return Job(["sh", "-c", script, str(source), str(copy)], clears=(copy,), drops=(copy,))


def apart(module: str, function: str, *arguments: object) -> None:
    """Calls a function of a file of this directory in a process of its own: a child's peak memory starts from its parent's."""
    script = f"import {module}; from pathlib import PosixPath; {module}.{function}(*{arguments!r})"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT / "benchmarks")


def wait_for_all(running: Iterable[subprocess.Popen[bytes]], what: str) -> float:
    """The processor seconds of processes, all of which must end well."""
    busy = 0.0
    for process in running:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        busy += usage.ru_utime + usage.ru_stime
        if status:
            raise SystemExit(f"{what}: a process ended with {status}")
    return busy


def watched(command: list[str]) -> tuple[float, resource.struct_rusage, str]:
    """Wall seconds of a command, what the system knows of it, and what it printed."""
    began = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, text=True
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command}: {printed[-800:]}")
    return time.perf_counter() - began, usage, printed


def write(dest: Path, stage: int, *arguments: str) -> Path:
    """A checkpoint, by a process of its own: a child's peak memory starts from its parent's, so this one stays small."""
    script = [sys.executable, str(ROOT / "benchmarks" / "synth.py"), str(dest), "--stage", str(stage), *arguments]
    subprocess.run(script, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    return dest


def remove(path: Path) -> None:
    """Whatever is there."""
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


def machine() -> str:
    """This one, in words."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    said = dict(map(str.strip, line.split(":", 1)) for line in _lines("/proc/cpuinfo") if ":" in line)
    model = said.get("model name", platform.machine())
    if "cpu family" in said:  # of one name there are processors of many years
        model += f" (family {said['cpu family']}, model {said['model']})"
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB of memory, Linux "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
