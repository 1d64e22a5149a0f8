"""Reads what nanotron saves: a directory for each module, in it a file for each parameter, or for each rank's slice of it.

A slice's header says the shape of the whole (`unsharded_shape`) and which slices of the file go where in it: pairs separated by
";", the file's side and the whole's by "#", dimensions by "|", each as start, stop and step ("None" where Python has None). A
file without a rank in its name is whole. Tied parameters are saved once, under the first name. Layers keep their numbers over
stages. What the model has say the optimizer's files, which name the parameters of their stage; or `model_config.json`, by the
numbers of its layers. Optimizer states are not read.
Source: nanotron 2411b02, serialize/{weights,utils,metadata,optimizer}.py, parallel/parameters.py, parallel/sharded_parameters.py,
optim/named_optimizer.py, config/models_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zckpt.base import limits
from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, IncompleteError, InconsistentError
from zckpt.base.words import count, examples
from zckpt.containers import TensorRef, brief, value_at
from zckpt.containers.tensor_ref import MAX_DIMS, MAX_NUMBER
from zckpt.core.catalog import Catalog, Source, TensorEntry, Topology
from zckpt.core.evidence import Evidence
from zckpt.layouts.dcp.chunks import DcpChunk
from zckpt.layouts.dcp.items import Items
from zckpt.layouts.dcp.metadata import TensorItem
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import Shape, as_mapping, as_tensor
from zckpt.layouts.weights_alone import NANOTRON, OPTIMIZER, SLICE
from zckpt.storage.json_files import read_json

_DATA = "data"
_CONFIG = "model_config.json"
_MOST_BYTES = 16 << 20
_MOST_PAIRS = 4096
"""The most pairs of one slice; a fused matrix has three."""
_EXTENT = re.compile(r"\s*(?:np\.int\d+\()?(\d+)\)?\s*")

_LAYER = "model.decoder.{}.pp_block."
_LAYERS = re.compile(r"model\.decoder\.(\d+)\.pp_block\.(.+)")
_EMBEDDING, _NORM = (
    "model.token_position_embeddings.pp_block.token_embedding.weight",
    "model.final_layer_norm.pp_block.weight",
)
_HEAD = "model.lm_head.pp_block.weight"
_IN_LAYER = (
    "input_layernorm.weight", "attn.qkv_proj.weight", "attn.o_proj.weight", "post_attention_layernorm.weight",
    "mlp.gate_up_proj.weight", "mlp.down_proj.weight",
)  # fmt: skip
"""The tensors of a layer of nanotron's Llama, and of its Qwen2 without experts."""


class SliceFile(NamedTuple):
    """A file of a parameter: its name in the listing, its path, what it holds, and how it is cut; no text: it is whole."""

    name: str
    file: str
    ref: TensorRef
    metadata: Mapping[str, str]


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save.

    Raises:
        IncompleteError: slices or parameters are missing. InconsistentError: files are of several saves.
        CorruptError: metadata cannot be read, or do not fit the tensors.
    """
    del allow_unknown
    said = _read_metadata(listing)
    tp = said.get("tp")
    groups: dict[str, list[str]] = {}
    for name in listing.files:
        if found := SLICE.fullmatch(name):
            if found["rank"] and (type(tp) is not int or int(found["tps"]) != tp):
                raise InconsistentError(
                    "is not a file of this save", file=listing.files[name].path, found=f"tensor-parallel rank of {found['tps']}",
                    expected=f"of {brief(tp)}, as {NANOTRON!r} says", remedy=OTHER_SAVE,
                )  # fmt: skip
            groups.setdefault(f"{found['modules'].replace('/', '.')}{found['last']}", []).append(name)
    tensors = {name: _entry(listing, name, _check_ranks(listing, name, files)) for name, files in groups.items()}
    step = value_at(said, "metas", "last_train_step")
    stages = [int(found["pps"]) for found in map(OPTIMIZER.fullmatch, listing.files) if found]
    ranks = [value if type(value) is int and 0 < value <= limits.RANKS else 1 for value in (said.get("dp"), tp)]
    source = Source("nanotron", listing.directory.path, listing.tag, ("nanotron", ""),
                    global_steps=step if type(step) is int else None)  # fmt: skip
    evidence = _by_optimizer(listing, tensors) or _by_config(listing, tensors)
    topology = Topology(dp=ranks[0], tp=ranks[1], pp=min(max(stages, default=1), limits.RANKS))
    return Catalog(tensors, source, evidence, topology=topology)


def unread_states(listing: Listing) -> str:
    """Optimizer states of a save, which are not read, in words; empty if there are none."""
    return count(len(names), "file") + " in 'optimizer/'" if (names := listing.matching(OPTIMIZER)) else ""


def _read_metadata(listing: Listing) -> Mapping[str, object]:
    if NANOTRON not in listing.files:
        raise IncompleteError(
            f"has no {NANOTRON!r}", file=listing.directory, expected="what nanotron writes last into a save",
            remedy="Copy that file too. If there is none, the save was not finished: use another.",
        )  # fmt: skip
    file = listing.files[NANOTRON].path
    return as_mapping(read_json(file, _MOST_BYTES, "nanotron's metadata of a save"), "its content", file)


def _check_ranks(listing: Listing, name: str, files: Sequence[str]) -> Sequence[str]:
    """The files of a parameter: one that is whole, or those of all ranks. Raises IncompleteError, InconsistentError if
    ranks are missing, or there are both kinds.
    """
    found = [match for match in map(SLICE.fullmatch, files) if match]
    if len(found) == 1 and not found[0]["rank"]:
        return files
    if len({(match["pp"], match["tps"], match["eps"]) for match in found}) > 1:
        raise InconsistentError(
            f"files of {name!r} are of several saves", file=listing.directory, found=examples(files),
            expected="one file, or those of one stage's ranks", remedy=OTHER_SAVE,
        )  # fmt: skip
    first = found[0]
    wanted = [(tp, ep) for tp in range(int(first["tps"])) for ep in range(int(first["eps"] or 1))]
    there = {(int(match["tp"]), int(match["ep"] or 0)) for match in found}
    if lacking := [rank for rank in wanted if rank not in there]:
        tp, ep = lacking[0]
        rank = f"tp-rank-{tp}" + (f"_exp-rank-{ep}" if first["eps"] else "")
        raise IncompleteError(
            f"{count(len(lacking), 'slice is', 'slices are')} missing of {name!r}", file=listing.directory,
            found=f"{count(len(there), 'file')}, none of {rank}", expected=count(len(wanted), "file"),
            remedy="Copy the files of all ranks here (--also DIR lays further directories over this one).",
        )  # fmt: skip
    return files


def _entry(listing: Listing, name: str, files: Sequence[str]) -> TensorEntry:
    slices = [_read_slice(listing, file) for file in files]
    first = slices[0]
    try:
        shapes = [_parse_shape(one.metadata["unsharded_shape"]) if one.metadata else one.ref.shape for one in slices]
        for one, shape in zip(slices, shapes, strict=True):
            if (one.ref.dtype, shape) != (first.ref.dtype, shapes[0]):
                raise InconsistentError(
                    f"slices do not agree on {name!r}", file=one.file, found=f"{one.ref.dtype} of {list(shape)}",
                    expected=f"{first.ref.dtype} of {list(shapes[0])}, as in {first.name!r}", remedy=OTHER_SAVE,
                )  # fmt: skip
        chunks = [chunk for one, shape in zip(slices, shapes, strict=True) for chunk in _chunks(one, shape)]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"its metadata do not describe its slice of {name!r}", file=first.file,
            found=f"{type(error).__name__}: {error}"[:200],
            expected="'unsharded_shape' and 'local_global_slices_pairs'", remedy=COPY_AGAIN,
        ) from error  # fmt: skip
    item = TensorItem(name, (name,), first.ref.dtype, shapes[0], chunks)
    return Items(listing, first.file).tensors({name: item}, {name: "parameter"})[name]


def _read_slice(listing: Listing, name: str) -> SliceFile:
    container, file = listing.open(name), listing.files[name].path
    root = as_mapping(container.root, "its content", file)
    if len(root) != 1:
        raise CorruptError(
            "is not a file of one parameter", file=file, found=examples(map(str, root)), expected=f"a tensor {_DATA!r}",
            remedy=COPY_AGAIN,
        )  # fmt: skip
    found = SLICE.fullmatch(name)
    said = {key: text for key, text in container.metadata.items() if key != "format"}
    return SliceFile(name, file, as_tensor(root.get(_DATA), repr(_DATA), file), said if found and found["rank"] else {})


def _parse_shape(text: str) -> Shape:
    """A shape as Python prints a tuple; its numbers may be numpy's."""
    extents = [extent for extent in text.strip().removeprefix("(").removesuffix(")").split(",") if extent.strip()]
    found = [_EXTENT.fullmatch(extent) for extent in extents]
    numbers = [int(match[1]) if match and len(match[1]) < 20 else -1 for match in found]
    if len(numbers) > MAX_DIMS or not all(0 <= number <= MAX_NUMBER for number in numbers):
        raise ValueError(f"{brief(text)} instead of a shape")
    return tuple(numbers)


def _chunks(one: SliceFile, shape: Shape) -> Iterator[DcpChunk]:
    """The boxes of the whole tensor that a file holds."""
    if not one.metadata:
        yield DcpChunk((0,) * len(shape), shape, one.ref)
        return
    texts = one.metadata["local_global_slices_pairs"].split(";")
    if len(texts) > _MOST_PAIRS:
        raise ValueError(f"{len(texts):,} slices")
    held = 0
    for text in texts:
        local, _, whole = text.partition("#")
        own, to = _parse_box(local, one.ref.shape), _parse_box(whole, shape)
        sizes = tuple(stop - start for start, stop in to)
        if sizes != tuple(stop - start for start, stop in own):
            raise ValueError(f"slices of different sizes, {brief(text)}")
        chunk = DcpChunk(tuple(start for start, _ in to), sizes, one.ref.box([start for start, _ in own], sizes))
        held += chunk.numel
        yield chunk
    if held != one.ref.numel:
        raise ValueError(f"{held:,} of {one.ref.numel:,} elements of {one.name!r} have a place")


def _parse_box(text: str, shape: Shape) -> list[tuple[int, int]]:
    dims = text.split("|")
    if len(dims) != len(shape):
        raise ValueError(f"{brief(text)} of a shape {list(shape)}")
    found: list[tuple[int, int]] = []
    for dim, extent in zip(dims, shape, strict=True):
        start, stop, step = (None if number.strip() == "None" else int(number) for number in dim.split(","))
        first, last = start or 0, extent if stop is None else stop
        if step not in (None, 1) or not 0 <= first <= last <= extent:
            raise ValueError(f"slice {brief(dim)} of {extent:,}")
        found.append((first, last))
    return found


def _by_optimizer(listing: Listing, tensors: Mapping[str, TensorEntry]) -> Evidence | None:
    """The evidence of the optimizer's files, which name the parameters of each stage; None if not all are there. Raises
    IncompleteError if they name parameters that are not there.
    """
    files = [(match[0], match) for match in map(OPTIMIZER.fullmatch, listing.files) if match]
    first = next((match for _, match in files), None)
    if first is None or int(first["pps"]) * int(first["dps"] or 1) > limits.RANKS:
        return None
    wanted = {(pp, dp) for pp in range(int(first["pps"])) for dp in range(int(first["dps"] or 1))}
    names: set[str] = set()
    for file, match in files:
        said = listing.entry(file, "names") if not int(match["tp"]) and not int(match["ep"] or 0) else None
        if isinstance(said, Mapping) and said:
            names |= {str(name).removeprefix("module.") for name in said.values()}
            wanted.discard((int(match["pp"]), int(match["dp"] or 0)))
    if wanted:
        return None
    if lacking := sorted(names - tensors.keys()):
        raise _missing(listing, lacking, "the parameters that the optimizer's files name")
    return Evidence("metadata", "the optimizer's files, which name all parameters")


def _by_config(listing: Listing, tensors: Mapping[str, TensorEntry]) -> Evidence:
    """The evidence of `model_config.json`, for a model of a known kind. Raises IncompleteError if tensors of its model
    are not there.
    """
    unknown = Evidence(
        "unknown", "no file says which parameters the model has", "the optimizer's files, or model_config.json"
    )
    if _CONFIG not in listing.files:
        return unknown
    file = listing.files[_CONFIG].path
    config = as_mapping(read_json(file, _MOST_BYTES, "a model's config"), "its content", file)
    layers = config.get("num_hidden_layers")
    known = config.get("is_llama_config") or config.get("is_qwen2_config")
    if not known or config.get("moe_config") or type(layers) is not int or not 0 < layers <= limits.RANKS:
        return unknown
    own = {found[2] for found in map(_LAYERS.fullmatch, tensors) if found}
    wanted = {_EMBEDDING, _NORM, *(() if config.get("tie_word_embeddings") else (_HEAD,))}
    wanted |= {_LAYER.format(number) + name for number in range(layers) for name in own | {*_IN_LAYER}}
    if lacking := sorted(wanted - tensors.keys()):
        raise _missing(listing, lacking, f"the tensors of the model of {_CONFIG}")
    return Evidence("shapes", f"{_CONFIG}, which says how many layers there are")


def _missing(listing: Listing, lacking: Sequence[str], expected: str) -> IncompleteError:
    return IncompleteError(
        f"{count(len(lacking), 'tensor is', 'tensors are')} missing", file=listing.directory, found=f"no {examples(lacking)}",
        expected=expected, remedy="Copy the files of all stages here (--also DIR lays further directories over this one).",
    )  # fmt: skip
