"""Every cell of the matrix, in a process of its own: it loads what `matrix_begin.py` saved, and trains on."""

from __future__ import annotations

import sys
from pathlib import Path

import matrix
import torch
from harness import check, main, rank, world


@check(1, 2)
def cells() -> dict[str, list[str]]:
    """What differs from the run that was not stopped, by cell."""
    different = {}
    for cell in matrix.CELLS:
        if cell.world != world():
            continue
        home = matrix.place(Path(sys.argv[1]).parent / f"matrix_begin_{world()}", cell)
        engine, batches = matrix.begin(cell, seed=2)
        path, _ = engine.load_checkpoint(home)
        assert path is not None
        losses = matrix.train(engine, batches, 3 * matrix.WHEN[cell.when][0])
        wanted = torch.load(home / f"wanted_{rank()}.pt", weights_only=False)
        given = matrix.found(engine, losses)
        different[home.name] = [key for key in wanted if not matrix.same(wanted[key], given[key])]
    return different


if __name__ == "__main__":
    main()
