"""Files of a checkpoint, changed; and what `verify` then finds."""

from __future__ import annotations

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
