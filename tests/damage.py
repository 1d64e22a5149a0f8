"""Files of a checkpoint, changed; and what `verify` then finds."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zckpt.checks.verdict import Verification


def edit(path: Path, change: Callable[[Any], object]) -> None:
    root = torch.load(path, weights_only=False)
    change(root)
    torch.save(root, path)


def wrong(found: Verification) -> dict[str, tuple[str, ...]]:
    return {check.name: check.problems for check in found.checks if not check.ok}


def forget_name(path: Path) -> None:
    """Names the records of a torch file as `torch.save` does when it gets an open file: by no name of a file."""
    if path.suffix != ".pt":
        return
    with zipfile.ZipFile(path) as old:
        records = [(name.partition("/")[2], old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(path, "w") as new:
        for name, data in records:
            new.writestr(f"archive/{name}", data)


def damage_pickle(data: bytearray, at: int, changes: random.Random) -> None:
    """Changes a byte of a pickle there to an opcode or to any other, or removes or doubles some bytes."""
    kind = changes.randrange(4)
    if kind == 0:
        data[at] = changes.choice(b"KMJ\x8a(t\x85\x86\x87hjubR\x94}N.)\x81qp\0\xff")
    elif kind == 1:
        data[at] = changes.randrange(256)
    elif kind == 2:
        del data[at : at + changes.randrange(1, 40)]
    else:
        data[at:at] = data[at : at + changes.randrange(1, 60)]
