"""Deltas from live models on several ranks; `test_live_deltas` says what must come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checks import BF16, config, start, train
from harness import CHECKS, check, main, rank
from live_checks import Shared, equal, load, many_kinds, sharded
from torch import nn

import zckpt
from zckpt import live
from zckpt.base.errors import InconsistentError, OutputError, ZckptError
from zckpt.deltas.encode import Encoder
from zckpt.live import assignment

CHECKS.clear()  # those of the others


def changed(model: nn.Module, seed: int) -> None:
    """Changes some elements of some parameters in place, on every rank its own."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if number % 3 != seed % 3 and local.numel():
                local.view(-1)[:: 2 + seed] *= 1.5


def applied(old: Path, deltas: list[Path], out: Path, wanted: Path) -> bool:
    """On rank 0, whether deltas give the weights that `save_pretrained` wrote."""
    right = True
    if rank() == 0:
        zckpt.apply_delta(old, deltas, out, progress=False)
        right = equal(load(out), load(wanted))
    dist.barrier()
    return right


def refused(kind: type[ZckptError], *arguments: Any) -> str:
    try:
        live.export_delta(*arguments)
    except kind as error:
        return str(error)
    return ""


@check(2)
def deltas() -> dict[str, bool]:
    """What a rank offers, in any cut, and in pieces of any size; from a directory, and from host memory."""
    out: dict[str, bool] = {}
    for kind, piece in (("plain", 64), ("rows", assignment.PIECE_BYTES), ("columns", 12)):
        model = many_kinds() if kind == "plain" else sharded(many_kinds(), kind)
        before, assignment.PIECE_BYTES = assignment.PIECE_BYTES, piece
        with Shared() as home:
            live.save_pretrained(model, home / "old", "bf16")
            changed(model, 1)
            live.save_pretrained(model, home / "new", "bf16")
            report = live.export_delta(model, home / "old", home / "weight_v000001", max_shard_size=100)
            out[f"{kind} counted"] = 0 < report.counts.changed_tensors < report.counts.tensors
            out[kind] = applied(home / "old", [home / "weight_v000001"], home / "applied", home / "new")
            held = live.HeldWeights(home / "old")
            first = live.export_delta(model, held, home / "held" / "weight_v000001", encoding="overwrite")
            out[f"{kind} the same from memory"] = first.counts == report.counts
            changed(model, 2)
            live.save_pretrained(model, home / "newer", "bf16")
            live.export_delta(model, held, home / "held" / "weight_v000002")
            both = [home / "held" / f"weight_v00000{number}" for number in (1, 2)]
            out[f"{kind} twice"] = applied(home / "old", both, home / "twice", home / "newer")
        assignment.PIECE_BYTES = before
    return out


@check(2)
def a_trainer() -> dict[str, bool]:
    """Of the trainer's masters, after a step; as good as the delta of its checkpoint."""
    out: dict[str, bool] = {}
    for stage in (1, 3):
        engine = start(config(stage, **BF16))
        with Shared() as home:
            live.save_pretrained(engine, home / "old", "bf16")
            train(engine, 1)
            live.save_pretrained(engine, home / "new", "bf16")
            engine.save_checkpoint(home / "run")
            report = live.export_delta(engine, home / "old", home / "delta")
            out[f"{stage}"] = applied(home / "old", [home / "delta"], home / "applied", home / "new")
            if rank() == 0:
                offline = zckpt.delta(home / "old", home / "run", home / "offline", progress=False)
                out[f"{stage} counts"] = offline.counts == report.counts
            dist.barrier()
        train(engine, 1, start=1)  # which frees and takes the memory that the delta was made of
    return out


@check(2)
def refusals() -> dict[str, bool]:
    """Every rank raises the same, nothing is published, and the next call works."""
    out: dict[str, bool] = {}
    model = sharded(many_kinds(), "rows")
    with Shared() as home:
        live.save_pretrained(model, home / "old", "bf16")
        live.save_pretrained(nn.Linear(3, 3), home / "other", "bf16")
        changed(model, 1)
        out["other model"] = "only the new version has" in refused(InconsistentError, model, home / "other", home / "a")
        out["exists"] = "already exists" in refused(OutputError, model, home / "old", home / "other")
        finish = Encoder.finish
        if rank() == 1:

            def failing(encoder: Encoder) -> None:
                raise OutputError("the disk is full", remedy="Make room.")

            Encoder.finish = failing  # type: ignore[assignment, method-assign]
        out["a rank that fails"] = "disk is full" in refused(OutputError, model, home / "old", home / "a")
        Encoder.finish = finish  # type: ignore[method-assign]
        dist.barrier()
        out["nothing there"] = {path.name for path in home.iterdir()} == {"old", "other"}
        out["after that"] = live.export_delta(model, home / "old", home / "a").counts.changed > 0
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
