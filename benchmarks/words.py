"""What ranks say to each other to agree: bytes that one rank sends and gets, for a save, a load and a live save.

    python benchmarks/words.py

Real processes, 2 to 16 of them, on one machine, zckpt's trainer at stages 0 and 3. Counted are notes in torch.distributed's store
with their keys, and pickled objects in collectives; the elements that ranks exchange are not. How often a rank looks for a note
that is not there yet depends on how long it waits, and is not counted.

Then the meetings of these runs are held once more by 16 to 4,096 ranks in one process, with the notes in memory: a rank that was
not there says what one of those that were said. (Live saves agree by collectives, which `load_scale.py` simulates.) Writes
results_words.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from exchange_scale import exponent

WORLDS = (2, 4, 8, 16)
SIMULATED = (16, 64, 256, 1024, 4096)
PAGE = Path(__file__).with_name("results_words.md")
WHAT = ("save", "load", "live save")


def main() -> None:
    """Launches the ranks and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Path(options.worker))
        return
    lines = [
        "# What ranks say to agree", "",
        "By `benchmarks/words.py`, in real processes: bytes of notes in the store and of objects in collectives, sent and got by "
        "one rank, and how many notes. Looks for notes that are not there yet are not in it. Rank 0 hears of every rank in each "
        "meeting, a hundred bytes or less; at stage 0 its file keeps the random generators of all ranks, 12 KB of each. What "
        "another rank says and hears hardly grows.", "",
        "| stage | what | ranks | rank 0, bytes | notes | the most of the others, bytes | notes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    runs = {size: launched(size) for size in WORLDS}
    found = {size: run["counted"] for size, run in runs.items()}
    for stage in ("0", "3"):
        for what in WHAT:
            rows: list[list[float]] = []
            for size in WORLDS:
                first, *others = found[size][stage][what]
                rows.append([*first, *(max(one[number] for one in others) for number in range(2))])
                lines.append(f"| {stage} | {what} | {size} | " + " | ".join(f"{one:,.0f}" for one in rows[-1]) + " |")
            lines.append(fitted(f"| {stage} | {what}", WORLDS, rows))
    lines += [
        "", "The meetings of these runs, held by more ranks in one process, which say what the 16 said.", "",
        "| stage | what | ranks | rank 0, bytes | notes | the most of the others, bytes | notes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for stage in ("0", "3"):
        for what in WHAT[:2]:
            rows = [simulated(runs[max(WORLDS)]["said"][stage][what], size) for size in SIMULATED]
            for size, row in zip(SIMULATED, rows, strict=True):
                lines.append(f"| {stage} | {what} | {size:,} | " + " | ".join(f"{one:,.0f}" for one in row) + " |")
            lines.append(fitted(f"| {stage} | {what}", SIMULATED, rows))
    PAGE.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def launched(size: int) -> dict[str, Any]:
    """What ranks counted and said: stage -> what -> for each rank [bytes, notes], and by meeting and rank."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as home:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [*launcher, __file__, "--worker", home], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        found: dict[str, Any] = json.loads(Path(home, "found.json").read_text())
        return found


def fitted(begin: str, sizes: tuple[int, ...], rows: list[list[float]]) -> str:
    """The row of exponents of the columns."""
    return (
        f"{begin} | exponent | " + " | ".join(f"{exponent(sizes, one):.2f}" for one in zip(*rows, strict=True)) + " |"
    )


class Later(Exception):
    """A rank of a simulation would wait now."""


class Notes:
    """What one rank finds of the notes of all, which are in memory; counts them as `Counted` does."""

    def __init__(self, notes: dict[str, bytes]) -> None:
        self.notes, self.nbytes, self.count = notes, 0, 0

    def put(self, key: str, note: bytes) -> bool:
        """Leaves a note; one that was there before is not a new one."""
        if key not in self.notes:
            self.add(len(key) + len(note))
        self.notes[key] = note
        return True

    def get(self, key: str) -> bytes | None:
        """The note; None where there is none."""
        note = self.notes.get(key)
        if note is not None:
            self.add(len(key) + len(note))
        return note

    def drop(self, key: str) -> None:
        """Keeps the note, so that the second call of a meeting leaves no new one; nobody looks for it again."""

    def add(self, nbytes: int) -> None:
        """A note."""
        self.nbytes, self.count = self.nbytes + nbytes, self.count + 1

    def wait(self) -> NoReturn:
        """For the others."""
        raise Later


def simulated(said: list[list[Any]], size: int) -> list[float]:
    """Bytes and notes of rank 0, and the most of another rank's, where so many ranks hold these meetings: words by rank.

    In each meeting all others come, and would wait; then rank 0 comes, finds their words and posts the minutes; then the others
    find these.
    """
    from zckpt.team.meeting import Meetings

    notes: dict[str, bytes] = {}
    ranks = [Notes(notes) for _ in range(size)]
    meetings = [Meetings("simulated", rank, size, one, one.wait) for rank, one in enumerate(ranks)]  # type: ignore[arg-type]
    for words in said:

        def meet(rank: int, words: list[Any] = words) -> list[Any]:
            word = words[rank if rank < len(words) else 1 + (rank - 1) % (len(words) - 1)]
            return meetings[rank].meet("a meeting", word)

        for rank in range(1, size):
            with contextlib.suppress(Later):
                meet(rank)
        if any(len(meet(rank)) != size for rank in range(size)):
            raise AssertionError("a word was lost")
    first, *others = ranks
    return [first.nbytes, first.count, max(one.nbytes for one in others), max(one.count for one in others)]


class Counted:
    """Bytes and notes of this process since the last look."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from zckpt.live.ranks import Ranks
        from zckpt.team.meeting import Meetings
        from zckpt.team.rendezvous import StoreRendezvous

        self.nbytes = self.notes = 0
        self.said: list[list[Any]] = []
        meet = Meetings.meet

        def heard(this: Any, what: str, word: Any = None, **options: Any) -> list[Any]:
            words = meet(this, what, word, **options)
            self.said.append(words)
            return words

        Meetings.meet = heard  # type: ignore[method-assign,assignment]
        put, get = StoreRendezvous.put, StoreRendezvous.get

        def counted_put(this: Any, key: str, note: bytes) -> bool:
            self.add(len(key) + len(note))
            return put(this, key, note)

        def counted_get(this: Any, key: str) -> bytes | None:
            note = get(this, key)
            if note is not None:
                self.add(len(key) + len(note))
            return note

        StoreRendezvous.put, StoreRendezvous.get = counted_put, counted_get  # type: ignore[method-assign,assignment]
        for kind, name in ((Ranks, "swap"), (Ranks, "send_value"), (Ranks, "receive_value"), (Ranks, "tell")):
            setattr(kind, name, self.objects(getattr(kind, name)))
        gather = dist.gather_object

        def counted_gather(value: Any, into: list[Any] | None = None, **options: Any) -> None:
            gather(value, into, **options)
            self.nbytes += sum(len(pickle.dumps(one)) for one in (value, *(into or ())))

        dist.gather_object = counted_gather  # type: ignore[assignment]

    def add(self, nbytes: int) -> None:
        """A note."""
        self.nbytes, self.notes = self.nbytes + nbytes, self.notes + 1

    def objects(self, job: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, its objects counted."""

        def call(this: Any, value: Any, *more: Any) -> Any:
            found = job(this, value, *more)
            for several in (value, found):
                pickled = several if isinstance(several, list) else [several]
                self.nbytes += sum(len(pickle.dumps(one)) for one in pickled if one is not None)
            return found

        return call

    def taken(self) -> list[int]:
        """The figures, which begin anew."""
        found = [self.nbytes, self.notes]
        self.nbytes = self.notes = 0
        self.said = []
        return found


def work(home: Path) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from zckpt import live, runtime

    dist.init_process_group("gloo")
    counted = Counted()
    found: dict[str, dict[str, list[Any]]] = {}
    said: dict[str, dict[str, list[list[Any]]]] = {}
    for stage in (0, 3):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        }
        torch.manual_seed(0)
        engine = runtime.initialize(model=nn.Sequential(*(nn.Linear(64, 64) for _ in range(24))), config=config)[0]
        engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().mean())
        engine.step()
        place = str(home / f"run{stage}")
        jobs: dict[str, Callable[[], object]] = {
            "save": lambda engine=engine, place=place: engine.save_checkpoint(place, tag="t"),  # type: ignore[misc]
            "load": lambda engine=engine, place=place: engine.load_checkpoint(place, tag="t"),  # type: ignore[misc]
            "live save": lambda engine=engine, stage=stage: live.save_pretrained(engine, home / f"w{stage}", "bf16"),  # type: ignore[misc]
        }
        for what, job in jobs.items():
            counted.taken()
            job()
            said.setdefault(str(stage), {})[what] = counted.said
            mine = torch.tensor(counted.taken())
            everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mine)
            found.setdefault(str(stage), {})[what] = [one.tolist() for one in everyone]
    if dist.get_rank() == 0:
        (home / "found.json").write_text(json.dumps({"counted": found, "said": said}))
    dist.barrier()
    torch.set_num_threads(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
