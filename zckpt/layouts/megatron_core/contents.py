"""What the items of a Megatron-Core save are: weights, an optimizer's states, and everything else.

For `megatron_core`. Pure functions on names. A tensor's item has the name of the model's parameter without a number where
layers or experts are stacked. Objects (`ShardedObject`) are items `name/shard_1_4`: random states, `_extra_state` of modules, and
what an optimizer has beside its tensors.

[Note: names of optimizer states] `optimizer.state.exp_avg.NAME` is the state of the weight NAME; with several optimizers (dense
and experts) `chained_0.` may be before it. The fp32 weights are such a state: `fp32_param` (the plain optimizer, and the
distributed one before 0.15) or `param`. Sharded by `fsdp_dtensor`, the name comes first: `optimizer.state.NAME.exp_avg`, where
other wrappers are before the names than in the model. Buckets (`optimizer.distributed.dp_group_idx_0.gbuf_idx_0...`) have no
names.
Source: megatron-core 0.9 - 0.16.1, dist_checkpointing/{mapping,optimizer}.py, optimizer/{optimizer,distrib_optimizer}.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.containers import value_at
from zckpt.layouts.dcp.metadata import BytesItem, Metadata, Path, TensorItem
from zckpt.storage.location import Location

MASTERS = ("param", "fp32_param", "master_param")
"""The names that versions give the state that holds the fp32 weights."""

_OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>\w+?)\.(?P<name>.+)")
_BUCKET = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_NO_WEIGHT = re.compile(
    r"(?:^|\.)_extra_state(?:$|[./])|^(?:rng_state|rerun_state_machine_state|common_state)(?:$|[./])"
)
_WRAPPERS = re.compile(r"^(?:model\d*\.)?(?:module\.)*")


@dataclass(frozen=True, slots=True)
class MegatronItems:
    """The items of a save, by what they are.

    Attributes:
        weights: name of a parameter or buffer -> tensor.
        states: name of a parameter -> state -> tensor; the fp32 weights are `param`.
        steps: name of a parameter -> the number of its steps, where each parameter has its own.
        buckets: names of items of an optimizer that do not name parameters.
        others: names of tensors that are neither.
    """

    weights: dict[str, TensorItem] = field(default_factory=dict[str, TensorItem])
    states: dict[str, dict[str, TensorItem]] = field(default_factory=dict[str, "dict[str, TensorItem]"])
    steps: dict[str, TensorItem] = field(default_factory=dict[str, TensorItem])
    buckets: list[str] = field(default_factory=list[str])
    others: list[str] = field(default_factory=list[str])


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers before it: Megatron's own modules, NeMo's, and Megatron-FSDP's."""
    return _WRAPPERS.sub("", name)


def sorted_items(metadata: Metadata) -> MegatronItems:
    """The items of a save."""
    found = MegatronItems()
    for name, item in metadata.items.items():
        if _BUCKET.match(name):
            found.buckets.append(name)
        elif isinstance(item, BytesItem) or _NO_WEIGHT.search(name):
            continue
        elif not _OF_OPTIMIZER.match(name):
            found.weights[plain_name(name)] = item
        elif (named := _state(name, item.path)) is not None:
            owner, state = named
            if state == "step":
                found.steps[owner] = item
            else:
                found.states.setdefault(owner, {})["param" if state in MASTERS else state] = item
        else:
            found.others.append(name)
    return found


def moments_of(metadata: Metadata) -> frozenset[str]:
    """The names of an optimizer's items that are not its fp32 weights: moments, steps, and objects it has beside them."""
    return frozenset(
        name
        for name, item in metadata.items.items()
        if _is_of_optimizer(name, item.path) and not _is_master(name, item.path)
    )


def _is_of_optimizer(name: str, path: Path) -> bool:
    return _OF_OPTIMIZER.match(name) is not None or path[:1] == ("optimizer",)


def _is_master(name: str, path: Path) -> bool:
    """Whether an item holds fp32 weights: those of a parameter, or of a bucket; its items end with the name of the state."""
    found = _state(name, path)
    return (name.rpartition(".")[2] if found is None else found[1]) in MASTERS


def _state(name: str, path: Path) -> tuple[str, str] | None:
    """(parameter, state) of an item; None for one that is not a parameter's state. See [Note: names of optimizer states]."""
    if len(path) > 3 and path[:2] == ("optimizer", "state"):
        return plain_name(str(path[2])), str(path[3])
    match = _STATE.match(name)
    return None if match is None else (plain_name(match["name"]), match["state"])


def has_names(metadata: Location) -> bool:
    """Whether the pickle of a save's metadata has names that Megatron-Core gives items, or wraps its own models' names in.

    It is looked through in windows: that of a million chunks has 150 MB.
    """
    found: set[bytes] = set()
    offset, length = 0, _WINDOW
    while length == _WINDOW:
        window = metadata.read(_WINDOW, offset)
        found.update(sign for sign in (*_SIGNS, _MODEL, *_OF_MODELS) if sign in window)
        if not found.isdisjoint(_SIGNS) or (_MODEL in found and not found.isdisjoint(_OF_MODELS)):
            return True
        length = len(window)
        offset += _WINDOW - max(map(len, _SIGNS))  # a name may lie across two windows
    return False


_WINDOW = 4 << 20

_SIGNS = (
    b"_extra_state/shard_",
    b"rng_state/shard_",
    b"common_state/shard_",
    b"param_to_group_meta",
    b"optimizer.state.exp_avg.",
    b"optimizer.distributed.dp_group_idx_",
)
_MODEL = b"model.module."
_OF_MODELS = (b"self_attention.linear_", b"mlp.linear_fc1", b"mixer.in_proj.")


def shape_before(beside: Mapping[object, object], item: TensorItem) -> tuple[int, ...] | None:
    """The shape that a tensor had before its parts were flattened; None for one that was not."""
    shape = value_at(beside, item.name, "nd_reformulated_orig_global_shape")
    return tuple(shape) if isinstance(shape, tuple | list) and all(type(n) is int for n in shape) else None
