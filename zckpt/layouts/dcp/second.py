"""Finds the chunks of a torch.distributed.checkpoint save a second time.

`.metadata` says of each chunk which indexes of the tensor it holds (`MetadataIndex.offset`, `ChunkStorageMetadata.sizes`) and
which bytes of a data file (`_StorageInfo`); there lies a torch file of the chunk. The shards of `HuggingFaceStorageWriter` say in
their headers where in the whole they begin. `planner_data` has the path of each tensor in the state dict. accelerate saves the
optimizer in a directory of its own, beside the model's.
Source: torch 2.13, distributed/checkpoint/{metadata,filesystem,hf_storage,_consolidate_hf_safetensors,state_dict}.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from zckpt.base import limits
from zckpt.base.errors import UnsupportedError
from zckpt.containers import Placeholder, TensorRef, load_pickle
from zckpt.containers.alike_items import AlikeItems
from zckpt.containers.container import open_input
from zckpt.layouts.save.listing import Listing, list_files
from zckpt.layouts.save.second import (
    NO_PROOF,
    Path,
    SecondLook,
    Shape,
    as_number,
    as_sequence,
    fields_of,
    hold_box,
    join_path,
)

_MODELS = ("model", "state_dict", "model_state_dict", "module")
_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.|^module\.|(?<=\.)module\.")
_FLAT = re.compile(r"(?:^|\.)_?flat_param(?:$|_)")
_NOWHERE = "holds flat parameters, and the files do not say what is in them"


class SavedTensor(NamedTuple):
    """A tensor of a state dict: its path, its shape, its parts (first indexes, and elements), and what its planner adds."""

    path: Path
    shape: Shape
    parts: Iterable[tuple[Sequence[int], TensorRef]]
    beside: Mapping[str, object] = {}


def find_again(listing: Listing) -> SecondLook:
    """The model's tensors and the optimizer's states."""
    if not any(name.endswith(".metadata") for name in listing.files):
        return look_at(listing, _of_shards(listing))
    tensors, others = described_in(listing)
    beside = listing.directory.absolute()
    if match := re.fullmatch(r"pytorch_model_fsdp_(\d+)", beside.name):
        optimizer = beside.parent / f"optimizer_{match[1]}"
        if (optimizer / ".metadata").is_file() and not any("param_groups" in join_path(path) for path in others):
            apart, more = described_in(list_files(optimizer, ""))
            tensors, others = [*tensors, *apart], others | more
    return look_at(listing, tensors, others)


def look_at(listing: Listing, tensors: Sequence[SavedTensor], others: Iterable[Path] = ()) -> SecondLook:
    """Which tensors of a state dict are the model's, and which are states of its parameters; `others`: paths of other values."""
    of_model = _of_model(tensors, others, listing.options.key)
    if any(_FLAT.search(name) for name in of_model):
        raise UnsupportedError(_NOWHERE, file=listing.directory, remedy=NO_PROOF)
    plain = {_WRAPPERS.sub("", name): name for name in of_model}
    taken = {id(tensor) for tensor in of_model.values()}
    held = [(name, "", tensor) for name, tensor in of_model.items()]
    for tensor in tensors:
        if id(tensor) not in taken and (said := _state_of(join_path(tensor.path), plain)) is not None:
            held.append((*said, tensor))
    runs = (
        run
        for name, state, tensor in held
        for offsets, ref in tensor.parts
        for run in hold_box(name, state, ref, offsets, tensor.shape)
    )
    return SecondLook({name: tensor.shape for name, tensor in of_model.items()}, runs)


def _of_model(tensors: Sequence[SavedTensor], others: Iterable[Path], key: str) -> dict[str, SavedTensor]:
    """The model's tensors: those under `key`, those under a key that names a model, or those outside the optimizer."""
    everywhere = [join_path(path) for path in (*(tensor.path for tensor in tensors), *others)]
    homes = {name[: name.index("param_groups")] for name in everywhere if "param_groups" in name.split(".")}
    free = {
        tensor.path: tensor
        for tensor in tensors
        if not any(join_path(tensor.path).startswith((f"{home}state.", f"{home}param_groups.")) for home in homes)
    }
    if key:
        return _below(free, f"{key}.")
    named: set[tuple[str | int, ...]] = set()
    for path in free:
        named |= {path[: at + 1] for at, head in enumerate(path[:2]) if head in _MODELS and at + 1 < len(path)}
    if named:
        ordered = sorted(named, key=lambda home: (len(home), _MODELS.index(str(home[-1]))))
        return _below(free, f"{join_path(ordered[0])}.")
    heads = {path[0] for path in free}
    if len(heads) == 1 and all(len(path) > 1 for path in free):
        return _below(free, f"{heads.pop()}.")
    joined = [head for head in _MODELS if all(join_path(path).startswith(f"{head}.") for path in free)]
    if homes - {""} and joined:
        return _below(free, f"{joined[0]}.")
    top = {path: tensor for path, tensor in free.items() if len(path) == 1}
    most = sum(math.prod(tensor.shape) for tensor in free.values())
    is_top = 2 * sum(math.prod(tensor.shape) for tensor in top.values()) > most
    return {join_path(path): tensor for path, tensor in (top if is_top else free).items()}


def _below(tensors: Mapping[Path, SavedTensor], head: str) -> dict[str, SavedTensor]:
    named = ((join_path(path), tensor) for path, tensor in tensors.items())
    return {name.removeprefix(head): tensor for name, tensor in named if name.startswith(head)}


def _state_of(name: str, parameters: Mapping[str, str]) -> tuple[str, str] | None:
    """(Parameter, state): after `state`, the state's name follows the parameter's; in Megatron-Core's saves, it is before it."""
    parts = name.split(".")
    for at in (at for at, part in enumerate(parts) if part == "state"):
        rest = parts[at + 1 :]
        for end in range(len(rest) - 1, 0, -1):
            if found := parameters.get(_WRAPPERS.sub("", ".".join(rest[:end]))):
                return found, ".".join(rest[end:])
        if found := parameters.get(_WRAPPERS.sub("", ".".join(rest[1:]))):
            return found, rest[0]
    return None


def described_in(listing: Listing) -> tuple[list[SavedTensor], dict[Path, Callable[[], object]]]:
    """The tensors that `.metadata` describes, and the paths of other items, with what reads them; ranks that saved alone
    have metadata of their own.
    """
    value_at = partial(_value_at, listing, AlikeItems())
    found: dict[Path, tuple[Shape, list[tuple[Sequence[int], tuple[str, int, int]]]]] = {}
    beside: dict[Path, Mapping[str, object]] = {}
    others: dict[Path, Callable[[], object]] = {}
    names = [name for name in listing.files if name.endswith(".metadata")]
    for name in [".metadata"] if ".metadata" in names else names:
        data = listing.files[name].read()
        root = load_pickle(
            data, file=listing.files[name].path, most=max(limits.PICKLE_COST, limits.METADATA_COST_PER_BYTE * len(data))
        )
        state = fields_of(root)
        described, paths = fields_of(state["state_dict_metadata"]), fields_of(state.get("planner_data"))
        chunks: dict[str, list[tuple[Sequence[int], tuple[str, int, int]]]] = {}
        for index, info in fields_of(state["storage_data"]).items():
            key, at = fields_of(index), fields_of(info)
            place = (str(at["relative_path"]), as_number(at["offset"]), as_number(at["length"]))
            chunks.setdefault(str(key["fqn"]), []).append((_numbers(key.get("offset")), place))
        for item, value in described.items():
            own, sizes = paths.get(item), fields_of(value)
            path: Path = tuple(own) if isinstance(own, tuple | list) else (item,)
            if "size" not in sizes:
                others[path] = partial(value_at, *(place for _, place in chunks.get(item, [])))
                continue
            beside[path] = fields_of(fields_of(state.get("mcore_data")).get(item))
            boxes = map(fields_of, as_sequence(sizes["chunks"]))
            empty = {_numbers(box["offsets"]) for box in boxes if 0 in _numbers(box["sizes"])}
            here = [chunk for chunk in chunks.get(item, []) if tuple(chunk[0]) not in empty]
            found.setdefault(path, (_numbers(sizes["size"]), []))[1].extend(here)
    return [
        SavedTensor(at, shape, _parts(value_at, places), beside[at]) for at, (shape, places) in found.items()
    ], others


def _value_at(listing: Listing, alike: AlikeItems, place: tuple[str, int, int]) -> object:
    """What the torch file at a place in a data file holds."""
    file, offset, length = place
    with open_input(listing.where(file).path) as source:
        return alike.root(source.part(offset, length, "an item"))


def _parts(
    value_at: Callable[[tuple[str, int, int]], object], places: Iterable[tuple[Sequence[int], tuple[str, int, int]]]
) -> Iterator[tuple[Sequence[int], TensorRef]]:
    """The parts of a tensor: their first indexes, and their elements."""
    for offsets, place in places:
        ref = unwrap(value_at(place))
        if not isinstance(ref, TensorRef):
            raise TypeError(f"no tensor in {place[0]!r} at {place[1]:,}")
        yield offsets, ref


def unwrap(value: object) -> object:
    """The one large tensor in a wrapper that casts it (`WeightWithDynamicFloat8CastTensor._tensor`); else the value itself."""
    held = fields_of(value).values() if isinstance(value, Placeholder) else ()
    large = [one for one in held if isinstance(one, TensorRef) and one.numel > 1]
    return large[0] if len(large) == 1 else value


def _of_shards(listing: Listing) -> list[SavedTensor]:
    """The tensors in the shards of `HuggingFaceStorageWriter`."""
    found: dict[str, list[tuple[Sequence[int], TensorRef]]] = {}
    for file in listing.files:
        if not file.endswith(".safetensors"):
            continue
        container = listing.open(file)
        said = json.loads(container.metadata.get("DCP_SHARDING_INFO", "{}"))
        for name, ref in fields_of(container.root).items():
            if isinstance(ref, TensorRef):
                offsets = said[name]["saved_offsets"] if name in said else (0,) * len(ref.shape)
                found.setdefault(str(name), []).append((_numbers(offsets), ref))
    shapes = {
        name: tuple(max(ends) for ends in zip(*([a + n for a, n in zip(at, ref.shape)] for at, ref in parts)))
        for name, parts in found.items()
    }  # fmt: skip
    return [SavedTensor((name,), shapes[name], parts) for name, parts in found.items()]


def _numbers(value: object) -> Shape:
    return tuple(as_number(number) for number in as_sequence(value))
