"""Runs the checks of a script on every rank and writes down what each gives or how it fails."""

from __future__ import annotations

import datetime
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import gloo

CHECKS: dict[str, Callable[[], Any]] = {}


def check(*worlds: int) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a check for these world sizes; what it gives is JSON."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        function.worlds = worlds  # type: ignore[attr-defined]
        CHECKS[function.__name__] = function
        return function

    return register


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().clone().float()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main() -> None:
    """Each check by itself; after a failure the others are left out, since ranks may be out of step."""
    warnings.simplefilter("ignore")
    out = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    results: dict[str, Any] = {}
    wanted = set(sys.argv[2:])
    for name, function in CHECKS.items():
        if function.__module__ != "__main__":  # another script's, imported for its helpers
            continue
        if dist.get_world_size() not in function.worlds or (wanted and name not in wanted):  # type: ignore[attr-defined]
            continue
        try:
            results[name] = {"value": function()}
        except BaseException:
            results[name] = {"error": traceback.format_exc()}
        fine = torch.tensor(float("value" in results[name]))
        try:
            dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        except RuntimeError:
            break
        if not fine.item():
            break
    (out / f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))
    gloo.end()
