"""Monitors, timers and the profiler on two ranks: what `monitor_checks` gives, and what it must be."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

Outcome = Callable[..., list[Any]]
SAMPLES = [8, 16, 24, 32, 40]
LR = [0.0, 0.01 * 0.6309297535714574, 0.01, 0.01, 0.01]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_a_run_shows_what_deepspeed_shows_of_it(outcome: Outcome) -> None:
    first, other = outcome("monitor_checks.py", 2, "beside_deepspeed")
    assert first.pop("names") == ["Train_Samples_train_loss.csv"]
    assert first.pop("samples") == SAMPLES
    assert set(first) == {"lr", "heads", "scales", "losses", "timers", "begins", "counted"}
    assert all(value is True for value in first.values()), first
    assert other == {"silent": True}


def test_each_library_reads_back_what_was_written(outcome: Outcome) -> None:
    first, other = outcome("monitor_checks.py", 2, "libraries")
    losses = first["losses"]
    board, history = first["board"], first["wandb"].pop("history")
    assert board.pop("Mine/number") == [[3, 7.0]]
    assert sorted(board) == ["Train/Samples/lr", "Train/Samples/train_loss"]
    assert [step for step, _ in board["Train/Samples/lr"]] == SAMPLES
    assert [value for _, value in board["Train/Samples/lr"]] == pytest.approx(LR, rel=1e-6)
    assert [value for _, value in board["Train/Samples/train_loss"]] == pytest.approx(losses, rel=1e-6)
    assert first["wandb"] == {"project": "numbers", "group": "these"}
    assert [step for step, _ in history] == SAMPLES  # wandb leaves out what is behind its last step
    history = [row for _, row in history]
    assert [row["Train/Samples/lr"] for row in history] == pytest.approx(LR)
    assert [row["Train/Samples/train_loss"] for row in history] == pytest.approx(losses)
    comet = {
        name: [(step, float(value)) for n, value, step in first["comet"] if n == name] for name, _, _ in first["comet"]
    }
    assert comet["Mine/number"] == [(3, 7.0)]
    assert [step for step, _ in comet["Train/Samples/lr"]] == [8, 24, 40]
    assert [value for _, value in comet["Train/Samples/train_loss"]] == pytest.approx(losses[::2], rel=1e-5)
    assert other == {"enabled": True, "tb_monitor": False, "wandb_monitor": False, "wandb_run": False}


def test_a_missing_library_is_an_error_at_the_start(outcome: Outcome) -> None:
    for given in outcome("monitor_checks.py", 2, "a_missing_library"):
        assert "switches on comet" in given["says"] and "pip install 'comet_ml>=3.41'" in given["says"]
        assert given["plain"] == "Net"
