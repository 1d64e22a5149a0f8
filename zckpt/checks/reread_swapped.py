"""The optimizer files of a ZeRO save, with the vectors that are in swap files in their places; found without layouts.

For `reread`. DeepSpeed names a vector whose sub-group was on NVMe by its attribute `ds_id`, and the swap file by that name.
Source: DeepSpeed 0.19.8, runtime/swap_tensor/optimizer_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zckpt.containers import TensorRef
from zckpt.layouts.save.listing import Listing

FILE = re.compile(r"(?:bf16_)?(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_(?P<kind>model|optim)_states\.pt")
_SWAPPED = re.compile(r"offloaded_tensors/rank(?P<rank>\d+)/(?P<label>.+)\.tensor\.swp")

Line = Sequence[tuple[TensorRef, Mapping[str, TensorRef]]]
"""Vectors with the states that go with them."""


def mapping(value: object) -> Mapping[str, object]:
    """The value, if it is a mapping; otherwise an empty one."""
    return value if isinstance(value, Mapping) else {}


def optimizer_of(listing: Listing, name: str) -> Mapping[str, object]:
    """What a file has of an optimizer; tensors without elements are those of the swap files that they name, up to their ends."""
    root = mapping(listing.open(name).root)
    held = mapping(root.get("optimizer_state_dict", root.get("optimizer")))
    match = FILE.fullmatch(name)
    swapped = {file: at for file in listing.files if (at := _SWAPPED.fullmatch(file))}
    if not swapped or match is None or match["dp"] is None:
        return held
    parts = {other["mp"] for other in map(FILE.fullmatch, listing.files) if other}
    rank = int(match["dp"]) * len(parts) + int(match["mp"])
    stores = {at["label"]: listing.files[file].store() for file, at in swapped.items() if int(at["rank"]) == rank}

    def stored(value: object) -> object:
        store = stores.get(_label(value))
        if store is None or not isinstance(value, TensorRef):
            return value
        return TensorRef(
            store, 0, value.dtype, (store.size // value.dtype.itemsize,), (1,), store.path, 0, store.size, 0
        )

    flat, base = held.get("fp32_flat_groups"), mapping(held.get("optimizer_state_dict"))
    vectors = list(flat) if isinstance(flat, list | tuple) else []
    states: dict[object, object] = dict(mapping(base.get("state")).items())
    for number, vector in enumerate(vectors):
        own = mapping(states.get(number))
        is_empty = isinstance(vector, TensorRef) and vector.shape == (0,)
        if is_empty or any("-" in _label(value) for value in own.values()) or _is_large(vector, mapping(root)):
            vectors[number] = stored(vector)
            states[number] = {key: stored(value) if "-" in _label(value) else value for key, value in own.items()}
    return {**held, "fp32_flat_groups": vectors, "optimizer_state_dict": {**base, "state": states}}


def _label(value: object) -> str:
    """The name that DeepSpeed gives a tensor that it swaps: `0_65`, or `exp_avg-0_65`."""
    return str((value.attributes or {}).get("ds_id", "")) if isinstance(value, TensorRef) else ""


def _is_large(vector: object, root: Mapping[str, object]) -> bool:
    """Whether a run whose optimizer is on NVMe, by the config in its file, swapped a vector even if the file has elements."""
    config = mapping(root.get("ds_config"))
    offload = mapping(mapping(config.get("zero_optimization")).get("offload_optimizer"))
    block = mapping(config.get("aio")).get("block_size")
    least = max(1 << 20, block if isinstance(block, int) else 0)
    return offload.get("device") == "nvme" and isinstance(vector, TensorRef) and vector.nbytes >= least


def without_ends(line: Line, groups: Sequence[Mapping[str, int]], world: int) -> Line:
    """A rank's vectors; those in swap files without what is behind their group's pieces."""
    if len(line) != len(groups):
        return line
    pieces = [sum(-(-numel // world) for numel in group.values()) for group in groups]
    return [
        (replace(ref, shape=(min(own, ref.numel),)) if _SWAPPED.search(ref.store.path) else ref, state)
        for (ref, state), own in zip(line, pieces, strict=True)
    ]
