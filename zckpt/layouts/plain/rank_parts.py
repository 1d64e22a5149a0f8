"""Finds files of plain weights that hold one rank's part of a model, by their names and contents.

For `read`: a part could be converted, verified and uploaded like a model, without being one. The evidence is a name
(`model_world_size_8_rank_3.pt`, `checkpoint-shard0.pt`), torch's DTensors and ShardedTensors, flat parameters of FSDP and
FairScale, FairScale's `shard_metadata`, and parameters under FSDP's own names that are all vectors.
Source: torch 2.13, distributed/fsdp/_state_dict_utils.py (`_local_post_state_dict_hook`), _flat_param.py (`FLAT_PARAM`);
fairscale 0.4.13, nn/data_parallel/fully_sharded_data_parallel.py (`local_state_dict`, `local_metadata_dict`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from zckpt.base.patterns import compile_late
from zckpt.base.words import examples
from zckpt.containers import TensorRef
from zckpt.layouts.save.cut_tensors import class_of, cut_tensor

_NAME = compile_late(r"(?<![a-z])(rank|shard)[-_.]?\d+(?!\d)(?!_of_1(?!\d))", re.IGNORECASE)
_ALONE = compile_late(r"world_size_1_", re.IGNORECASE)
_OF_ADAPTERS = compile_late(r"lora|loha|lokr|hada", re.IGNORECASE)
"""In names of tensors: of an adapter's file, `rank8` is the adapter's rank."""

_SHARDED = ("DTensor", "ShardedTensor", "FlatParameter")
_FLAT = compile_late(r"(?:.*\.)?_?flat_param(?:_\d+)?")
_FSDP = "_fsdp_wrapped_module."
_METADATA = "shard_metadata"
_DEEPEST = 8
"""The depth to which nested mappings are searched."""


def by_contents(root: Mapping[object, object]) -> str:
    """The evidence in a file that it holds one rank's part, in words; empty if there is none."""
    if _METADATA in root:
        return f"an entry {_METADATA!r}"
    values = dict(_values(root))
    sharded = [name for name, value in values.items() if _is_part(name, value)]
    if sharded:
        return f"{class_of(values[sharded[0]])}s: {examples(sharded)}"
    tensors = {name: value for name, value in values.items() if isinstance(value, TensorRef)}
    if flat := [name for name in tensors if _FLAT.fullmatch(name)]:
        return f"flat parameters: {examples(flat)}"
    wrapped = {name: ref for name, ref in tensors.items() if _FSDP in name}
    if wrapped and all(len(ref.shape) < 2 for ref in wrapped.values()):
        return f"parameters of FSDP that are all vectors: {examples(wrapped)}"
    return ""


def by_name(file: str, root: Mapping[object, object]) -> str:
    """The evidence in a file's name that it holds one rank's part, in words; empty if there is none."""
    found = _NAME.search(file)
    if not found or _ALONE.search(file):
        return ""
    if found[1].lower() == "rank" and any(_OF_ADAPTERS.search(name) for name, _ in _values(root)):
        return ""
    return f"{found[0]!r} in its name"


def _values(state: Mapping[object, object], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """All values under dotted names."""
    for key, value in state.items():
        if isinstance(value, Mapping) and depth < _DEEPEST:
            yield from _values(value, f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _is_part(name: str, value: object) -> bool:
    """Whether a value is some rows of a tensor: a DTensor that only one rank holds is whole."""
    if class_of(value) not in _SHARDED:
        return False
    cut = cut_tensor(value, name, "")
    return cut is None or cut.whole is None
