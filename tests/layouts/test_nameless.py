"""Megatron-Core's fp32 weights without names: what places them, what cannot be placed, and what is wrong with buckets."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bits import same_bits
from torch.distributed.checkpoint import DefaultSavePlanner

import zckpt
from zckpt import layouts
from zckpt.base.errors import InconsistentError, UnsupportedError
from zckpt.jobs.open import open_catalog, read_tensor

HEAD = "optimizer.distributed.dp_group_idx_"
LAYER = ("self_attention.linear_proj.weight", "input_layernorm.weight", "self_attention.linear_qkv.weight",
         "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight")  # fmt: skip
SIZES = {"linear_proj": (8, 8), "linear_qkv": (24, 8), "linear_fc1": (20, 8), "layernorm": (8,)}
States = dict[str, dict[str, torch.Tensor]]


def states_of(ones: Callable[[str], bool] = lambda name: False, layers: int = 3) -> States:
    """Parameter, in the order of the model -> its fp32 weights and moments; those named by `ones` are one when rounded."""
    torch.manual_seed(3)
    names = [f"decoder.layers.{n}.{local}" for n in range(layers) for local in LAYER]
    made: States = {}
    for name in ["embedding.word_embeddings.weight", *names, "decoder.final_layernorm.weight"]:
        shape = next((size for key, size in SIZES.items() if key in name), (32, 8))
        own = {state: torch.randn(shape) for state in ("param", "exp_avg", "exp_avg_sq")}
        made[name] = own | ({"param": 1 + 1e-4 * torch.rand(shape)} if ones(name) else {})
    return made


def buckets_of(states: States) -> dict[str, torch.Tensor]:
    """The vectors of a bucket: parameters in reverse, each at a multiple of 64 elements."""
    held: dict[str, list[torch.Tensor]] = {}
    for own in reversed(states.values()):
        for state, value in own.items():
            held.setdefault(state, []).append(
                torch.nn.functional.pad(value.flatten(), (0, -value.numel() % 64), value=9)
            )
    key = f"{HEAD}0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0."
    return {key + state: torch.cat(rows) for state, rows in held.items()}


def save(path: Path, states: States, more: Mapping[str, object]) -> Path:
    """A save of one process, with groups beside the buckets as Megatron-Core has them."""
    step: dict[str, object] = {"weight_decay": 0.1, "lr": 0.5, "step": 7}
    groups = [{"params": [], "wd_mult": wd, **step} for wd in (1.0, 0.0)]
    state = {name: own["param"].bfloat16() for name, own in states.items()} | {
        f"{HEAD}0.optimizer/shard_0_1": [{"param_groups": groups}],
        "common_state/shard_0_1": [{"args": argparse.Namespace(num_layers=3), "iteration": 7}], **more,
    }  # fmt: skip
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=path, no_dist=True, planner=DefaultSavePlanner(flatten_state_dict=False))
    return path


def read_states(path: Path) -> States:
    opened = open_catalog(str(path))
    training = layouts.read_training(opened.place.listing)
    found = {name: {"param": entry, **training.states[name]} for name, entry in opened.catalog.tensors.items()}
    return {n: {s: read_tensor(e, "pt") for s, e in own.items()} for n, own in found.items()}  # type: ignore[misc]


@pytest.mark.parametrize(
    "ones",
    [
        lambda name: False,
        lambda name: "input_layernorm" in name,
        lambda name: "layernorm" in name and ".1." not in name,
        lambda name: "final" in name or (".2." in name and "input_layernorm" in name),
    ],
)
def test_the_order_tells_equal_weights_apart(tmp_path: Path, ones: Callable[[str], bool]) -> None:
    states = states_of(ones)
    path = save(tmp_path / "save", states, buckets_of(states))
    found = read_states(path)
    assert {(n, s): same_bits(found[n][s], t) for n, own in states.items() for s, t in own.items()} == {
        (n, s): True for n, own in states.items() for s in own
    }
    assert zckpt.verify(path, deep=True).ok


def test_equal_weights_with_equal_states_are_anywhere(tmp_path: Path) -> None:
    states = states_of(lambda name: "layernorm" in name)
    for name, own in states.items():
        if "layernorm" in name:
            own.update(param=torch.ones(8), exp_avg=torch.zeros(8), exp_avg_sq=torch.zeros(8))
    found = read_states(save(tmp_path / "save", states, buckets_of(states)))
    assert all(same_bits(found[n][s], t) for n, own in states.items() for s, t in own.items())


def damaged(kind: str) -> tuple[States, dict[str, object]]:
    """(States, items of buckets) with a fault."""
    states = states_of(lambda name: kind == "ties" and "layernorm" in name)
    items: dict[str, object] = dict(buckets_of(states))
    master = next(name for name in items if name.endswith(".param"))
    vector = items[master]
    assert isinstance(vector, torch.Tensor)
    if kind == "permuted":
        items[master] = vector.roll(1)
    elif kind == "one":
        vector[64] += 1
    elif kind == "cut":
        items |= {name: value[:-64] for name, value in items.items() if isinstance(value, torch.Tensor)}
    elif kind == "short":
        items[master.removesuffix("param") + "exp_avg"] = torch.zeros(3)
    elif kind == "masters":
        del items[master]
    elif kind == "bucket":
        items[f"{HEAD}0.per_bucket_numel_unpadded/shard_0_1"] = [[{"x": [vector.numel(), 512]}]]
    elif kind == "group":
        items |= {name.replace("_idx_0.", "_idx_2.", 1): value for name, value in items.items()}
    elif kind == "foreign":
        items |= {name.replace("bucket_idx_0", "bucket_idx_1"): torch.randn(640) for name in list(items)}
    elif kind == "twice":
        items |= {name.replace("bucket_idx_0", "bucket_idx_1"): value for name, value in items.items()}
    return states, items


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("ties", r"hold the same numbers, and the order does not tell which is at element"),
        ("permuted", r"elements 0-[\d,]+ of bucket 0 of buffer 0 of 'optimizer.* are no weight's"),
        ("one", r"elements 8-.* of bucket 0 of buffer 0 of 'optimizer.* are no weight's"),
        ("cut", r"elements .* are no weight's|have no fp32 weights in part"),
        ("short", r"has 'exp_avg' of another size or dtype"),
        ("masters", r"has no fp32 weights"),
        ("bucket", r"bucket 1 of buffer 0 of 'optimizer.*' has 512 elements, held are none"),
        ("group", r"optimizer\.distributed\.dp_group_idx_1 is missing"),
        ("foreign", r"of bucket 1 of buffer 0 of 'optimizer.* are no weight's"),
        ("twice", r"is of no weight that is not elsewhere too"),
    ],
)
def test_what_cannot_be_placed_is_named(tmp_path: Path, kind: str, said: str) -> None:
    path = save(tmp_path / "save", *damaged(kind))
    opened = open_catalog(str(path))
    with pytest.raises(UnsupportedError, match=said):
        layouts.read_training(opened.place.listing)
    assert all(entry.dtype.torch_name == "bfloat16" for entry in opened.catalog.tensors.values())
    assert any("are the model's own" in note for note in opened.catalog.source.notes)


def test_every_number_is_compared_before_anything_is_written(tmp_path: Path) -> None:
    states = states_of(layers=1)
    states["embedding.word_embeddings.weight"] = {
        n: torch.randn(1 << 14, 8) for n in ("param", "exp_avg", "exp_avg_sq")
    }
    items = buckets_of(states)
    vector = items[next(name for name in items if name.endswith(".param"))]
    vector[-1000] += 1  # far from both ends of a parameter, which is placed by these
    path = save(tmp_path / "save", states, items)
    with pytest.raises(InconsistentError, match=r"are not the model's in 1 tensor: 'embedding.*"):
        zckpt.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    vector[-1000] -= 1
    assert not zckpt.verify(path, deep=True).ok
