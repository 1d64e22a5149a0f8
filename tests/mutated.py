"""Weights of a model with one thing wrong, and what `verify` and transformers say of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

import zckpt

WORDS = 34
"""Rows of the embedding of every model that is mutated."""


def mutants(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor], str]]:
    """What is done, the weights after it, and a tensor that must be named."""
    names = sorted(state)
    second = [n for n in names if re.search(r"(layers?|blocks)\.1\.", n)]
    flat = next(n for n in reversed(second) if state[n].dim() == 2 and state[n].shape[0] != state[n].shape[1])
    norm = next(n for n in names if "norm" in n and n.endswith("weight"))
    yield "drop", {n: t for n, t in state.items() if n != norm}, norm
    yield "rename", {n + ("s" if n == flat else ""): t for n, t in state.items()}, flat
    yield "transpose", {**state, flat: state[flat].t().contiguous()}, flat
    yield "double", {**state, "copy.of.it": state[norm].clone()}, "copy.of.it"
    yield "cut", {**state, flat: state[flat][:-1].clone()}, flat
    part = re.search(r".*(layers?|blocks)\.1\.", second[0])
    assert part
    lost = next(n for n in second if n.startswith(part[0]) and "norm" in n)
    yield "layer", {n: t for n, t in state.items() if not n.startswith(part[0])}, lost
    if experts := [n for n in names if ".experts.2." in n]:
        yield "expert", {n: t for n, t in state.items() if ".experts.2." not in n}, experts[0]
        yield "part of an expert", {n: t for n, t in state.items() if n != experts[1]}, experts[1]
    table = next((n for n in names if state[n].shape[:1] == (WORDS,)), None)
    if table:
        yield "vocabulary", {**state, table: torch.cat([state[table], state[table][:3]])}, table
    if "lm_head.weight" in state:
        head = {n: t for n, t in state.items() if n != "lm_head.weight"}
        yield "head", {**head, "score.weight": state["lm_head.weight"][:2].clone()}, "score.weight"


def write(path: Path, state: dict[str, torch.Tensor], model: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(model / "config.json", path)
    return path


def problems_of(found: zckpt.Verification) -> str:
    """What is wrong in words, of which each names a few tensors, and all names."""
    names = [name for key in ("missing", "ignored", "shapes", "in_memory") for name in (found.like or {}).get(key, ())]
    return "\n".join([*(problem for check in found.checks for problem in check.problems), *names])


def loads(kind: str, path: Path) -> bool:
    """What transformers says of real weights."""
    import transformers

    try:
        _, info = getattr(transformers, kind).from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except RuntimeError:  # a stack that lacks an expert
        return False
    return not any(info.values())
