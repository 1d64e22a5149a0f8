"""What the trainer saves it loads, all of it: runs of many kinds go on in a fresh process as if they had not been stopped."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matrix
import pytest
import torch
import torch.distributed as dist

Outcome = Callable[..., list[Any]]


def test_the_cells_meet_in_pairs() -> None:
    """As [Note: cells] says; and there are few of them."""
    rows = [((cell.stage, cell.world), *cell[2:5]) for cell in matrix.CELLS]
    for i, j in itertools.combinations(range(len(matrix.AXES)), 2):
        for pair in itertools.product(matrix.AXES[i], matrix.AXES[j]):
            assert any((row[i], row[j]) == pair for row in rows), pair
    assert len(rows) <= 64


@pytest.mark.xdist_group("matrix")
@pytest.mark.parametrize("world", [1, 2])
def test_a_fresh_process_goes_on_to_the_last_bit(outcome: Outcome, world: int) -> None:
    """In losses, masters, states, buffers, generators, loss scale, schedule, counters and the position of the data."""
    made = outcome("matrix_begin.py", world, "cells")[0]
    assert len(made) == sum(cell.world == world for cell in matrix.CELLS)
    for rank, given in enumerate(outcome("matrix_go_on.py", world, "cells")):
        assert len(given) == len(made)
        assert {cell: keys for cell, keys in given.items() if keys} == {}, rank


@pytest.mark.xdist_group("matrix")
def test_buffers_of_ranks_in_another_world(outcome: Outcome, caplog: pytest.LogCaptureFixture) -> None:
    """Alone, a run takes those of rank 0, and says so."""
    outcome("matrix_begin.py", 2, "cells")
    home = Path(outcome("matrix_begin.py", 2, "cells")[0][0]).parent
    cells = [cell for cell in matrix.CELLS if cell.world == 2 and cell.model == "buffers"]
    assert len(cells) > 1
    try:
        for cell in cells:
            caplog.clear()
            place = matrix.place(home, cell)
            [tag] = (path for path in place.iterdir() if path.name.startswith("global_step"))
            own = tag / "zckpt_rank_1_states.pt"
            assert own.exists() == (cell.stage < 3 or cell.zero == "mics" or "between" in cell.when), cell
            if cell.zero:
                continue
            engine, _ = matrix.begin(cell, seed=3)
            with caplog.at_level(logging.WARNING, "zckpt.runtime"):
                engine.load_checkpoint(place)
            model = torch.load(min(tag.glob("*mp_rank_00_model_states.pt")), weights_only=True)
            assert torch.equal(engine.module.middle.mean.float(), model["module"]["middle.mean"].float())
            assert "these ranks take rank 0's" in caplog.text, cell
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
