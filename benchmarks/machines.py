"""Several machines at one conversion, where each machine's link is the limit: `benchmarks/results_machines.md`.

    python benchmarks/machines.py [--rate 1] [--layers 16] [--rounds 1] [--counts 1 2 4 8]

Machines are network namespaces of this one (tests/networks.py), each with a link of that many MB/s. They read an S3 server
(moto's) and write a directory that is not behind the links; or they read and write one directory over the links
(tests/shared_directory.py). Each runs `zckpt to-bf16`, one process, started as srun starts it, and finds the others by notes
beside the output. The processors are those of this machine, for all of them: a few seconds of starting that many programs at
once are in the times. It takes root.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from measure import PYTHON, ROOT, ZCKPT, file_bytes, machine, remove, wait_for_all, write

sys.path.insert(0, str(ROOT / "tests"))

from networks import SERVER, Network, refusal
from s3_server import KEYS

PAGE = ROOT / "benchmarks" / "results_machines.md"
SHARE = ROOT / "tests" / "shared_directory.py"
S3 = ROOT / "tests" / "s3_server.py"
HOW = {
    "s3": "from S3 to a directory beside the links",
    "shared": "from a shared directory to it",
}


@dataclass(frozen=True)
class Trial:
    """One conversion by several machines.

    Attributes:
        seconds: until the last process had ended.
        busy: processor seconds of the processes of all machines.
        got, sent: the most bytes that any machine got over its link, and that any sent.
        output: the bytes of the output's files of weights.
    """

    seconds: float
    busy: float
    got: int
    sent: int
    output: tuple[bytes, ...]


def trial(how: str, count: int, place: Path, rate: int) -> Trial:
    """A conversion of `place / "ckpt"`, by so many machines."""
    out = place / "out"
    remove(out)
    with Network(count, rate) as network:
        serve = [S3, SERVER, place / "ckpt"] if how == "s3" else [SHARE, "serve", SERVER, place]
        server = subprocess.Popen(
            network.at_switch([*PYTHON, *map(str, serve)]), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        running: list[subprocess.Popen[bytes]] = []
        try:
            assert server.stdout is not None
            told = server.stdout.readline().strip()
            if how == "s3":
                command = [*ZCKPT, "to-bf16", "s3://bkt", str(out), "--quiet"]
            else:
                seen = place / "seen"
                seen.mkdir(exist_ok=True)
                command = [*PYTHON, str(SHARE), "mount", SERVER, told, str(seen)]
                command += [*ZCKPT, "to-bf16", str(seen / "ckpt"), str(seen / "out"), "--quiet"]
            slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(count)}
            environment = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": told, **slurm}
            before, began = [network.carried(number) for number in range(count)], time.perf_counter()
            running = [
                subprocess.Popen(
                    network.on(number, command), env={**environment, "SLURM_PROCID": str(number)}, cwd=ROOT
                )
                for number in range(count)
            ]
            busy = wait_for_all(running, f"{how}, {count} machines")
            seconds = time.perf_counter() - began
            after = [network.carried(number) for number in range(count)]
        finally:
            for process in (*running, server):
                process.kill()
                process.wait()
    carried = [[now - then for now, then in zip(*pair, strict=True)] for pair in zip(after, before, strict=True)]
    whole = tuple(path.read_bytes() for path in sorted(out.glob("*.safetensors")))
    return Trial(seconds, busy, max(got for got, _ in carried), max(sent for _, sent in carried), whole)


def main() -> None:
    """Every way and number of machines, in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1.0, help="MB/s of each link, in each direction")
    parser.add_argument("--layers", type=int, default=16, help="of a GPT-2 of width 512")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--how", action="append", choices=HOW, help="only this; may be repeated")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    if why := refusal():
        raise SystemExit(f"cannot be measured here: {why}")
    os.environ["DS_ACCELERATOR"] = "cpu"
    rate = int(options.rate * 1e6)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        place = Path(memory)
        checkpoint = write(place / "ckpt", 3, "--layers", str(options.layers), "--width", "512")
        nbytes, load = file_bytes(checkpoint, "*optim_states.pt"), os.getloadavg()[0]
        lines = []
        for how in options.how or HOW:
            taken: dict[int, list[Trial]] = {count: [] for count in options.counts}
            for _ in range(options.rounds):
                for count in options.counts:
                    taken[count].append(trial(how, count, place, rate))
                    assert taken[count][0].output == taken[options.counts[0]][0].output, "the outputs differ"
                    print(how, count, f"{taken[count][-1].seconds:.1f} s", file=sys.stderr, flush=True)
            lines += _lines(how, taken, rate)
    when = f"median of {options.rounds} round{'s' * (options.rounds > 1)}; load before {load:.1f}; {time.strftime('%Y-%m')}"
    head = (
        "# Several machines at one conversion\n\nBy `benchmarks/machines.py`: each machine is a network namespace with a link of "
        f"{options.rate:g} MB/s in each direction, and runs one `zckpt to-bf16` of a ZeRO-3 checkpoint of 8 ranks with "
        f'{nbytes / 1e6:,.0f} MB of fp32 masters. The processors are this machine\'s, for all of them. "Of the link" is the time '
        "in which the busiest link could carry what it carried, one direction beside the other, divided by the time taken. All "
        f"outputs are the same bytes. {machine()}; {when}.\n\n"
    )
    columns = ["how", "machines", "seconds", "part of one's time", "of the link"]
    columns += ["got over a link, MB", "sent, MB", "processor s, all"]
    rule = ["---"] * len(columns)
    table = "\n".join(f"| {' | '.join(line)} |" for line in [columns, rule, *lines])
    options.page.write_text(f"{head}{table}\n")
    print(table)


def _lines(how: str, taken: dict[int, list[Trial]], rate: int) -> list[list[str]]:
    first = statistics.median(one.seconds for one in next(iter(taken.values())))
    lines = []
    for count, trials in taken.items():
        seconds = statistics.median(one.seconds for one in trials)
        got, sent = max(one.got for one in trials), max(one.sent for one in trials)
        busy, link = statistics.median(one.busy for one in trials), max(got, sent) / rate / seconds
        figures = [f"{seconds:.1f}", f"{seconds / first:.3f}", f"{link:.0%}", f"{got / 1e6:.1f}", f"{sent / 1e6:.1f}"]
        lines.append([HOW[how], str(count), *figures, f"{busy:.1f}"])
    return lines


if __name__ == "__main__":
    main()
