"""Finds a second time what is in saves of which zckpt reads the weights alone, as each format's own code joins its files.

Source: pytorch/xla, torch_xla/distributed/fsdp/state_dict_utils.py `consolidate_sharded_state_dicts`; nanotron 2411b02,
serialize/utils.py `merge_and_shard_tp_tensors`, serialize/weights.py `load_sharded_param_latest`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from zckpt.containers import TensorRef
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import (
    HeldRun,
    SecondLook,
    Shape,
    hold_box,
    hold_elements,
    hold_whole,
    mapping,
    rows_of,
    shape_of,
)


def find_xla(listing: Listing) -> SecondLook:
    """As torch_xla's consolidation: all ranks' tensors of one key behind each other, what is behind the size cut off."""
    by_rank: dict[int, Mapping[str, Any]] = {}
    for name in listing.files:
        root = mapping(listing.open(name).root) if name.endswith((".pth", ".bin")) else {}
        if "shard_metadata" in root:
            by_rank[mapping(root["shard_metadata"])["rank"]] = root  # type: ignore[index]
    files = [by_rank[rank] for rank in sorted(by_rank)]
    if len(files) != files[0]["shard_metadata"]["world_size"]:
        raise ValueError("files are missing")
    names: dict[str, Shape | None] = {}
    runs: list[HeldRun] = []
    for key, first in files[0]["model"].items():
        prefix, mark, rest = key.partition("_fsdp_shard")
        if not mark:
            names[_plain(key)] = first.shape
            for file in files:
                runs += hold_whole(_plain(key), "", file["model"][key])
            continue
        info = files[0]["shard_metadata"]["shard_info"][prefix.removesuffix(".")][mark + rest]
        name, shape = prefix + info["_orig_name"], shape_of(info["_orig_size"])
        inner = [(name, shape, math.prod(shape))]
        if "_fsdp_wrapped_module.flat_param_" in name:
            said = zip(*files[0]["shard_metadata"]["flatten_info"][name], strict=True)
            inner = [(name[: name.rindex(".") + 1] + own, shape_of(one), numel) for own, one, numel in said]
        names.update((_plain(own), one) for own, one, _ in inner)
        runs += _split_vectors(
            [file["model"][key] for file in files], [(_plain(own), numel) for own, _, numel in inner]
        )
    return SecondLook(names, runs)


def _split_vectors(parts: list[TensorRef], wanted: list[tuple[str, int]]) -> Iterator[HeldRun]:
    """The runs of parameters that lie one after the other in vectors that do too."""
    rest = iter(parts)
    part, used = next(rest), 0
    for name, numel in wanted:
        start = 0
        while start < numel:
            if used == part.numel:
                part, used = next(rest), 0
            taken = min(numel - start, part.numel - used)
            if taken:
                yield hold_elements(name, "", part, used, taken, start)
            start, used = start + taken, used + taken


def _plain(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")


def find_nanotron(listing: Listing) -> SecondLook:
    """As nanotron's loader, which assigns `whole[global slices] = file[local slices]` of every file `model_<name>*`."""
    names: dict[str, Shape | None] = {}
    runs: list[HeldRun] = []
    for path in listing.files:
        if not path.startswith("model/") or not path.endswith(".safetensors"):
            continue
        *modules, file = path.removesuffix(".safetensors").split("/")[1:]
        base, mark, _ = file.removeprefix("model_").partition("_pp-rank-")
        name = ".".join((*modules, base))
        container = listing.open(path)
        ref = container.root["data"]  # type: ignore[index]
        if not mark:
            names[name] = ref.shape
            runs += hold_whole(name, "", ref)
            continue
        shape = tuple(
            int(number) for number in re.findall(r"(?<!np\.int)(?<!\d)\d+", container.metadata["unsharded_shape"])
        )
        names[name] = shape
        for pair in container.metadata["local_global_slices_pairs"].split(";"):
            part, offsets = ref, list[int]()
            local, whole = (side.split("|") for side in pair.split("#"))
            for dim, (own, to) in enumerate(zip(local, whole, strict=True)):
                low, high, _ = slice(*map(_number, own.split(","))).indices(ref.shape[dim])
                part = rows_of(part, dim, low, high - low)
                offsets.append(slice(*map(_number, to.split(","))).indices(shape[dim])[0])
            runs += hold_box(name, "", part, offsets, shape)
    return SecondLook(names, runs)


def _number(text: str) -> int | None:
    return None if text == "None" else int(text)
