"""Finds a second time what is in saves that zckpt reads for the weights alone, as each format's own code joins its
files.

Source: pytorch/xla, torch_xla/distributed/fsdp/state_dict_utils.py `consolidate_sharded_state_dicts`; nanotron 2411b02,
serialize/utils.py `merge_and_shard_tp_tensors`, serialize/weights.py
 `load_sharded_param_latest`; the specifications of Zarr 2 and 3; of the others, as `sliced` says.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from zckpt.containers import TensorRef, ocdbt
from zckpt.core.dtypes import ALL, BY_TORCH_NAME
from zckpt.core.stores import FileStore
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import (
    HeldRun,
    SecondLook,
    Shape,
    fields_of,
    hold_box,
    hold_elements,
    hold_whole,
    mapping,
    rows_of,
    shape_of,
    tensors_in,
)


def find_xla(listing: Listing) -> SecondLook:
    """Finds the tensors as torch_xla's consolidation does: it joins all ranks' tensors of one key, and cuts off the
    padding.
    """
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
    """Finds the tensors as nanotron's loader does: `whole[global slices] = file[local slices]` for every file
    `model_<name>*`.
    """
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


def find_orbax(listing: Listing) -> SecondLook:
    """As a reader of Zarr: every file, or key of the store, is the chunk that its name says, where the metadata put it."""
    tree = json.loads(listing.files["_METADATA"].read())["tree_metadata"]
    values = None
    if "manifest.ocdbt" in listing.files:
        values = ocdbt.read_keys(lambda file, offset, nbytes: listing.files[file].read(nbytes, offset))
    below: dict[str, list[str]] = {}
    for key in listing.files if values is None else values:
        name, slash, rest = key.partition("/")
        if slash:
            below.setdefault(name, []).append(rest)
    names: dict[str, Shape | None] = {}
    runs: list[HeldRun] = []
    for leaf in tree.values():
        path = [str(key["key"]) for key in leaf["key_metadata"]]
        kind, name = leaf["value_metadata"]["value_type"], ".".join(path)
        if kind not in ("string", "scalar", "None") and name in below and not _OF_OPTIMIZER.fullmatch(name):
            names[name] = _find_array(name, below[name], listing, values, runs)
    return SecondLook(names, runs)


_OF_OPTIMIZER = re.compile(r"step|(?:[^.]*\.)?(?:opt_states?|optimizer(?:_states?)?)(?:\..*)?", re.DOTALL)


def _find_array(
    name: str, rest: list[str], listing: Listing, values: Mapping[str, ocdbt.StoredValue] | None, runs: list[HeldRun]
) -> Shape:
    """The shape of an array of Zarr; appends the runs of its chunks."""

    def place(key: str) -> tuple[str, int, bytes | None, int]:
        if values is None:
            return listing.files[key].path, 0, None, listing.files[key].size()
        value = values[key]
        file = listing.files[value.file].path
        return (
            (file, value.offset, None, value.nbytes)
            if value.inline is None
            else (f"{file}[{key}]", 0, value.inline, value.nbytes)
        )

    def data(key: str) -> bytes:
        _, offset, inline, nbytes = place(key)
        return inline if inline is not None else listing.files[values[key].file if values else key].read(nbytes, offset)

    modern = "zarr.json" in rest
    said = json.loads(data(f"{name}/{'zarr.json' if modern else '.zarray'}"))
    shape = tuple(said["shape"])
    outer = inner = tuple(said["chunk_grid"]["configuration"]["chunk_shape"] if modern else said["chunks"])
    codecs = said["codecs"] if modern else [said["compressor"] or {}]
    sharded = modern and codecs[0]["name"] == "sharding_indexed"
    if sharded:
        inner, codecs = tuple(codecs[0]["configuration"]["chunk_shape"]), codecs[0]["configuration"]["codecs"]
    packed = any("zstd" in (codec.get("name"), codec.get("id")) for codec in codecs)
    kind = said["data_type" if modern else "dtype"]
    dtype = BY_TORCH_NAME.get(kind) or next(one for one in ALL if one.numpy == kind)
    stride = tuple(math.prod(inner[dim + 1 :]) for dim in range(len(inner)))
    seen = set[tuple[int, ...]]()

    def hold(first: tuple[int, ...], path: str, offset: int, nbytes: int, what: str) -> None:
        sizes = tuple(max(0, min(own, all_ - low)) for own, all_, low in zip(inner, shape, first, strict=True))
        if 0 in sizes:
            return
        seen.add(first)
        if packed and not what:
            path, offset = f"{path}[{offset}:{offset + nbytes}]", 0
        numel = math.prod(inner) * dtype.itemsize
        ref = TensorRef(FileStore(what or path, 0), offset, dtype, sizes, stride, "", 0, numel, offset)
        runs.extend(hold_box(name, "", ref, first, shape))

    for own in (one for one in rest if not one.endswith(("zarray", "json"))):
        at = tuple(map(int, re.findall(r"\d+", own))) if shape else ()
        path, offset, _, nbytes = place(f"{name}/{own}")
        begin = tuple(number * size for number, size in zip(at, outer, strict=True))
        if not sharded:
            hold(begin, path, offset, nbytes, "")
            continue
        words = data(f"{name}/{own}")[:-4][-16 * math.prod(a // b for a, b in zip(outer, inner, strict=True)) :]
        boxes = itertools.product(*(range(0, whole, size) for whole, size in zip(outer, inner, strict=True)))
        for number, box in enumerate(boxes):
            start, length = (int.from_bytes(words[16 * number + 8 * n :][:8], "little") for n in range(2))
            if start < 2**64 - 1:
                hold(tuple(a + b for a, b in zip(begin, box, strict=True)), path, offset + start, length, "")
    for first in itertools.product(*(range(0, whole, size) for whole, size in zip(shape, inner, strict=True))):
        if first not in seen:
            key = ".".join(str(low // size) for low, size in zip(first, outer, strict=True)) or "0"
            hold(first, "", 0, 0, f"no {name}/{f'c/{key}'.replace('.', '/') if modern else key}")
    return shape


def find_llama(listing: Listing) -> SecondLook:
    """Finds the tensors as transformers' script for Llama's original files does: it joins the ranks' tensors by
    `torch.cat`.
    """
    params = json.loads(listing.files["params.json"].read())
    params = params.get("model", params)
    heads = params["n_heads"]
    wanted = (params.get("n_kv_heads") or heads) * (params.get("head_dim") or params["dim"] // heads)
    files = sorted(name for name in listing.files if name.startswith("consolidated."))
    states = [_tensors_in(listing.open(name).root) for name in files]
    names: dict[str, Shape | None] = {}
    runs: list[HeldRun] = []
    for name in states[0]:
        refs = [state[name] for state in states]
        kind = name.rsplit(".", 2)[-2]
        dim = {
            "wo": 1,
            "w2": 1,
            "tok_embeddings": int(refs[0].shape[1] != params["dim"]) if refs[0].shape[1:] else 0,
        }.get(kind, 0)
        if not kind.startswith("w") and kind not in ("tok_embeddings", "output"):
            dim = -1
        if kind in ("wk", "wv") and (times := len(refs) * refs[0].shape[0] // wanted) > 1:
            for other in range(1, times):
                runs += _concatenate(name, refs[other::times], dim, names)
            refs = refs[::times]
        runs += _concatenate(name, refs, dim, names)
    return SecondLook(names, runs)


def find_nemo(listing: Listing) -> SecondLook:
    """Finds the tensors as NeMo's model of one rank has them: slices of Megatron's parallel layers, layers counted over
    all stages.
    """
    archive = len(listing.files) == 1
    container = listing.open(next(iter(listing.files))) if archive else None
    config = (
        container.metadata["model_config.yaml"] if container else listing.files["model_config.yaml"].read().decode()
    )
    gated = re.search(r"^activation: *'?(?:fast-)?(?:swi|ge|re)glu", config, re.MULTILINE)
    roots = (
        mapping(container.root)
        if container
        else {name: listing.open(name).root for name in listing.files if name.endswith(".ckpt")}
    )
    ranks: dict[tuple[int, int], str] = {}
    for name in roots:
        numbers = [*map(int, re.findall(r"\d+", name.partition("/")[0])), 0, 0]
        ranks[numbers[1], numbers[0]] = name
    names: dict[str, Shape | None] = {}
    runs: list[HeldRun] = []
    before = 0
    for stage in sorted({stage for stage, _ in ranks}):
        states = [_tensors_in(roots[ranks[key]]) for key in sorted(ranks) if key[0] == stage]
        for local in states[0]:
            name = re.sub(r"\blayers\.(\d+)\.", lambda m, n=before: f"layers.{int(m[1]) + n}.", local, count=1)  # type: ignore[misc]
            end = ".".join(local.split(".")[-2:])
            dim = (
                0
                if re.match(
                    r"(query_key_value|linear_qkv|query|key_value|dense_h_to_4h|linear_fc1)\.(weight|bias)$", end
                )
                else -1
            )
            dim = 0 if re.match(r"(word_embeddings|output_layer|word_embeddings_for_head)\.", end) else dim
            dim = 1 if re.match(r"(dense|dense_4h_to_h|linear_proj|linear_fc2)\.weight", end) else dim
            halves = 2 if gated and re.match(r"(dense_h_to_4h|linear_fc1)\.(weight|bias)$", end) else 1
            runs += _concatenate(name, [state[local] for state in states], dim, names, halves)
        found = [int(m[1]) for m in (re.search(r"\blayers\.(\d+)\.", local) for local in states[0]) if m]
        before += 1 + max(found, default=-1)
    return SecondLook(names, runs)


def find_nxd(listing: Listing) -> SecondLook:
    """Finds the tensors as NxD's own parallel layers cut them, by transformers' names; a user's own rules are not
    applied.
    """
    if listing.options.tp_rules:
        raise ValueError("slices were joined by the rules of --tp-rules")
    ranks: dict[tuple[int, int], Mapping[str, TensorRef]] = {}
    for name in listing.files:
        if match := re.fullmatch(r"dp_rank_0+_tp_rank_(\d+)_pp_rank_(\d+)\.pt", name):
            root = mapping(listing.open(name).root)
            held: dict[str, object] = {}
            for key, value in (root["model"] if isinstance(root.get("model"), Mapping) else root).items():  # type: ignore[attr-defined]
                tid = fields_of(value).get("tid")
                held[key] = value if tid is None else listing.open(f"{name}.tensors/tensor_{tid}.pt").root
            ranks[int(match[2]), int(match[1])] = _tensors_in(held)
    names: dict[str, Shape | None] = {}
    runs: list[HeldRun] = []
    for stage in sorted({stage for stage, _ in ranks}):
        states = [ranks[key] for key in sorted(ranks) if key[0] == stage]
        for name in states[0]:
            module, kind = name.split(".")[-2:]
            by_columns = module in ("o_proj", "down_proj")
            dim = (
                0
                if module
                in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "embed_tokens", "lm_head")
                else -1
            )
            dim = 1 if by_columns and kind == "weight" else dim
            runs += _concatenate(name, [state[name] for state in states], dim, names, 1 + (module == "gate_up_proj"))
    return SecondLook(names, runs)


def _tensors_in(root: object) -> dict[str, TensorRef]:
    inner = mapping(root).get("model")
    return tensors_in(inner if isinstance(inner, Mapping) else root)


def _concatenate(
    name: str, refs: list[TensorRef], dim: int, names: dict[str, Shape | None], pieces: int = 1
) -> Iterator[HeldRun]:
    """The runs of a tensor that is cut in a dimension, in `pieces` pieces on each rank; a negative dimension: all ranks
    hold the same.
    """
    first = refs[0].shape
    if dim < 0 or len(refs) == 1:
        names[name] = first
        for ref in refs:
            yield from hold_whole(name, "", ref)
        return
    own = first[dim] // pieces
    shape = (*first[:dim], first[dim] * len(refs), *first[dim + 1 :])
    names[name] = shape
    for rank, ref in enumerate(refs):
        for piece in range(pieces):
            offsets = [0] * len(shape)
            offsets[dim] = (piece * len(refs) + rank) * own
            yield from hold_box(name, "", rows_of(ref, dim, piece * own, own), offsets, shape)
