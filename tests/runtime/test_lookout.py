"""Which rank is named when all wait, and what the lines of a run say."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from zckpt.cli.train import duration, progress_lines
from zckpt.runtime.observe.lookout import EQUAL_S, LATE_S, SILENT_S, Doing, Lookout
from zckpt.runtime.train.metrics import Step
from zckpt.runtime.world import World

WAITS = Doing(40, 12, "in forward", LATE_S + 5, 30, "process 1 on a", "engine.py, line 9, in forward")


class Watched:
    """A rank's lookout, with the notes that it finds."""

    def __init__(self, rank: int, size: int = 4) -> None:
        self.said: list[str] = []
        self.lookout = Lookout(World(rank, size, rank, torch.device("cpu")), self.said.append)

    def look(self, notes: dict[int, Doing], monkeypatch: pytest.MonkeyPatch, later_s: float = 0.0) -> list[str]:
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + later_s)
        self.lookout._look(notes)
        monkeypatch.undo()
        return self.said


def test_a_rank_whose_beat_stands_still_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(0)
    notes = dict.fromkeys(range(4), WAITS)
    assert watched.look(notes, monkeypatch) == []
    later = {rank: one if rank == 2 else replace(one, beat=40) for rank, one in notes.items()}
    [said] = watched.look(later, monkeypatch, SILENT_S + 1)
    assert said.startswith("The ranks wait for rank 2, which does not run") and "in forward of step 12" in said
    assert watched.look(later, monkeypatch, SILENT_S + 2) == [said], "said once"


def test_the_lowest_rank_that_runs_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Watched(1), Watched(2)
    notes = dict.fromkeys(range(4), WAITS)
    later = {rank: one if rank == 0 else replace(one, beat=40) for rank, one in notes.items()}
    for watched in (first, second):
        watched.look(notes, monkeypatch)
        watched.look(later, monkeypatch, SILENT_S + 1)
    assert len(first.said) == 1 and "rank 0" in first.said[0] and second.said == []


def test_a_rank_that_is_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = replace(
        WAITS, number=39, what="reading a batch", line="data.py, line 70, in fetch", process="process 7 on b"
    )
    watched = Watched(0)
    assert watched.look({0: WAITS, 1: replace(reads, since_s=LATE_S - 5), 2: WAITS}, monkeypatch) == []
    [said] = watched.look({0: WAITS, 1: reads, 2: WAITS}, monkeypatch)
    assert said == (
        "The ranks wait for rank 1: rank 1 is reading a batch of step 12 for 35 s, at data.py, line 70, in fetch (process 7 on "
        "b). The others are in forward by now."
    )


def test_ranks_that_do_the_same_for_long_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(0, 3)
    assert watched.look(dict.fromkeys(range(3), WAITS), monkeypatch) == []
    slow = replace(WAITS, since_s=EQUAL_S + 1)
    other = replace(slow, line="user.py, line 3, in wait")
    [said] = watched.look({0: slow, 1: other, 2: slow}, monkeypatch)
    assert said == (
        "All ranks are in forward of step 12 for 121 s: ranks 0, 2 at engine.py, line 9, in forward; rank 1 at user.py, line 3, "
        "in wait."
    )


def test_lines_of_a_run() -> None:
    lines: list[str] = []
    now = [0.0]
    shown = progress_lines(1000, 100, lines.append, lambda: now[0])
    for number in range(1, 1001):
        evaluated = {"eval_loss": 2.0, "perplexity": 7.389} if number == 250 else {}
        shown(Step(number, 3.0, 1e-3, 1.0, 0.5, False, 1000.0 if number % 2 else 3000.0, 10**9, 0.0, **evaluated))
        now[0] += 2.0
    assert len(lines) == 12
    assert lines[0] == "step     1/1,000  loss 3.0000  lr 0.001  norm 0.5  1,000 tokens/s  1 GB"
    assert lines[1] == "step   100/1,000  loss 3.0000  lr 0.001  norm 0.5  1,508 tokens/s  1 GB  30:00 left"
    assert lines[3].endswith("1,500 tokens/s  1 GB  eval loss 2.0000  perplexity 7.39  25:00 left")
    assert "left" not in lines[-1]
    assert [duration(s) for s in (7, 750, 3723, 183_845)] == ["0:07", "12:30", "1:02:03", "2 d 03:04:05"]
