"""Finds plain weights a second time: by the names in their files, and by the index that says which file has which tensor.

Source: huggingface_hub, serialization/_base.py (`weight_map`); torch 2.13, serialization.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from zckpt.containers import TensorRef
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import SecondLook, fields_of, hold_whole, join_path, leaves_of

_USUAL = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_FURTHER = (
    "adapter_model.safetensors", "adapter_model.bin", "optimizer_states.safetensors", "optimizer_states.safetensors.index.json",
)  # fmt: skip
_WEIGHTS = re.compile(r"[\w.-]+\.(?:pt|pth|bin|ckpt|safetensors)")
_OTHERS = re.compile(r"optim|sched|rng|random|scaler|sampler|loader|args|trainer|(?<![a-z])(?:rank|shard)[-_]?\d", re.I)
_MODELS = ("state_dict", "model_state_dict", "module", "model")


def find_again(listing: Listing) -> SecondLook:
    """The tensors of the files, whole and under their names."""
    held = weights_in(listing)
    runs = (run for name, ref in held.items() for run in hold_whole(name, "", ref))
    return SecondLook({name: ref.shape for name, ref in held.items()}, runs)


def weights_in(listing: Listing) -> dict[str, TensorRef]:
    """The tensors by their names."""
    names = list(listing.files) if len(listing.files) == 1 else [name for name in _USUAL if name in listing.files]
    names += [name for name in listing.files if name.endswith(".index.json")]
    names += [name for name in listing.files if _WEIGHTS.fullmatch(name) and not _OTHERS.search(name)] + [*_FURTHER]
    name = next(name for name in names if name in listing.files)
    if not name.endswith(".index.json"):
        return dict(_tensors(listing.open(name).root))
    found: dict[str, TensorRef] = {}
    shards: dict[str, dict[str, TensorRef]] = {}
    for tensor, file in fields_of(json.loads(listing.files[name].read())["weight_map"]).items():
        shard = shards.setdefault(str(file), {}) or dict(_tensors(listing.open(str(file)).root))
        shards[str(file)] = shard
        found[tensor] = shard[tensor]
    for shard in shards.values():  # a file may hold tensors that the index does not name
        for tensor, ref in shard.items():
            found.setdefault(tensor, ref)
    return found


def _tensors(root: object) -> Iterator[tuple[str, TensorRef]]:
    """The tensors of a state dict: on top, or under a usual key; Composer has the model in `state`."""
    state = fields_of(fields_of(root).get("state"))
    root = state["model"] if "integrations" in state and isinstance(state.get("model"), Mapping) else root
    for key in _MODELS:
        root = _without_numbers(root)
        inner = fields_of(root).get(key)
        if isinstance(inner, Mapping) and not any(isinstance(value, TensorRef) for value in fields_of(root).values()):
            root = inner
    while (below := _only_child(_without_numbers(root))) is not None:
        root = below
    root = _without_numbers(root)
    for path, value in leaves_of(root):
        if _is_generator(join_path(path), value) or any(_has_groups(root, path[:depth]) for depth in range(len(path))):
            continue  # a step of the optimizer, or a generator
        local = value if isinstance(value, TensorRef) else fields_of(value).get("_local_tensor")
        if isinstance(local, TensorRef):
            yield join_path(path), local


_RANDOM_STATE = re.compile(r"(?:\w*_)?(?:rng|random|generator|cpu|cuda|torch)(?:_\w*)?", re.I)


def _is_generator(name: str, value: object) -> bool:
    """Whether a value is the state of a random generator: a vector of bytes."""
    is_bytes = isinstance(value, TensorRef) and value.dtype.name == "U8" and len(value.shape) == 1
    return is_bytes and _RANDOM_STATE.fullmatch(name) is not None


def _without_numbers(root: object) -> object:
    """A file's contents without random generators, and without a loss or counter beside state dicts."""
    fields = fields_of(root)
    dotted = any("." in str(name) for value in fields.values() for name in fields_of(value))
    loose = [name for name, value in fields.items() if isinstance(value, TensorRef) and dotted and not value.shape]
    loose += [name for name, value in fields.items() if _is_generator(str(name), value)]
    return {name: value for name, value in fields.items() if name not in loose} if loose else root


def _has_groups(root: object, path: tuple[object, ...]) -> bool:
    """Whether the mapping at this path is an optimizer's state dict."""
    for key in path:
        root = next((below for name, below in fields_of(root).items() if str(name) == str(key)), None)
    return {"state", "param_groups"} <= fields_of(root).keys()


def _only_child(root: object) -> Mapping[str, object] | None:
    """The only state dict of dotted names in a mapping that otherwise holds optimizers alone; None for other mappings."""
    found = []
    for value in fields_of(root).values():
        paths = [path for path, leaf in leaves_of(value) if isinstance(leaf, TensorRef)]
        if paths and not all(any(_has_groups(value, path[:depth]) for depth in range(len(path))) for path in paths):
            found.append((value, paths))
    if len(found) != 1 or not isinstance(found[0][0], Mapping):
        return None
    value, paths = found[0]
    is_nested = any(isinstance(one, Mapping) for one in fields_of(value).values())
    return None if is_nested or not any("." in str(path[0]) for path in paths) else fields_of(value)
