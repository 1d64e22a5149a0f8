"""Plain weights as input: one file or a sharded directory, `.safetensors` or torch's `.bin`, as `transformers` names them.

[Note: parts] A file that holds one rank's part of a model could be converted, verified and uploaded like a model, without being
one. The evidence is a name (`model_world_size_8_rank_3.pt`, `checkpoint-shard0.pt`), torch's DTensors and ShardedTensors, flat
parameters of FSDP and FairScale, FairScale's `shard_metadata`, and parameters under FSDP's own names that are all vectors.
Source: torch 2.13, distributed/fsdp/_state_dict_utils.py (`_local_post_state_dict_hook`), _flat_param.py (`FLAT_PARAM`);
fairscale 0.4.13, nn/data_parallel/fully_sharded_data_parallel.py (`local_state_dict`, `local_metadata_dict`);
transformers 4.57-5.23, utils/__init__.py (file names); huggingface_hub 0.36-2.4, _torch.py (dropped names).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from zckpt.base.errors import IncompleteError, InconsistentError, ZckptError
from zckpt.base.patterns import compile_late
from zckpt.base.words import examples
from zckpt.containers import Container, TensorRef
from zckpt.core.catalog import Catalog, Source, TensorEntry
from zckpt.core.claims import ByteSpan
from zckpt.core.evidence import BY_MANIFEST, LEFT_OUT, OWN_INDEX, Evidence
from zckpt.layouts.plain.files import chosen_index, match, size_in_index, weight_files
from zckpt.layouts.plain.state_dict import composers_prefix, composers_state, left_out_of, model_in
from zckpt.layouts.save.cut_tensors import class_of, cut_tensor
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import own_tensors, views_of
from zckpt.layouts.save.weight_files import files_counted_with
from zckpt.output import manifest as manifests
from zckpt.output.manifest import Manifest
from zckpt.storage.location import Location

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


def _part_by_contents(root: Mapping[object, object]) -> str:
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


def _part_by_name(file: str, root: Mapping[object, object]) -> str:
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


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of plain weights.

    Raises:
        IncompleteError: shards are missing; or, unless `allow_unknown` is set, parameters have no elements (ZeRO-3
            placeholders), or a file holds one rank's part of a model and is not wanted as such (`Listing.part`).
        InconsistentError: files that are one model by their names have tensors of the same name.
        UnsafeError: the index names files outside its directory.
    """
    names = weight_files(listing)
    tensors: dict[str, TensorEntry] = {}
    aliases: dict[str, str] = {}
    notes: list[str] = []
    views: list[ByteSpan] = []
    prefix = ""
    for shard in names:
        container = listing.open(shard)
        if not allow_unknown and not listing.part:
            _refuse_part(container, listing.files[shard].path, named=listing.directory == listing.files[shard])
        state = model_in(container, listing.files[shard].path, notes, listing.options.key)
        if not chosen_index(listing) and (again := [tensor for tensor in state if tensor in tensors]):
            raise _same_names(listing, names[: names.index(shard) + 1], again)
        prefix = prefix or composers_prefix(container.root)
        views += views_of(state.values())
        entries, tied = own_tensors(state)
        tensors |= entries
        aliases |= tied
        said = container.metadata if container.kind == "safetensors" else {}
        aliases.update({d: k for d, k in said.items() if k in tensors and d not in tensors and d != "format"})
    if not allow_unknown:
        _refuse_placeholders(tensors, listing)
    source = Source(layout="plain", path=listing.directory.path, tag=listing.tag, notes=tuple(notes), prefix=prefix)
    held = sum(tensors[aliases.get(name, name)].nbytes for name in (*tensors, *aliases))
    return Catalog(tensors, source, _evidence(listing, names, held), aliases, views=tuple(views))


def _evidence(listing: Listing, names: Sequence[str], held: int) -> Evidence:
    """The evidence for weights: their index, or for weights that zckpt wrote, the evidence of their source.

    A file alone proves nothing: it lists the tensors that it has, and a model may have more. See `save.whole`.

    Args:
        listing: the files of the save.
        names: those with weights.
        held: bytes of all tensors in them.
    """
    place = manifests.find(listing.directory)
    facts: Manifest | None = None
    with suppress(ZckptError, OSError):  # which `verify` reports; the weights can be read all the same
        facts = manifests.read(place) if place is not None else None
    said = facts.source.get("evidence") if facts is not None and place is not None and _fits(facts, place) else None
    if facts is not None and isinstance(said, Mapping):
        lacks, by, doubt = said.get("lacks"), said.get("by"), str(said.get("doubt") or "")
        lacking = tuple(map(str, lacks)) if isinstance(lacks, list) else ()
        if by == LEFT_OUT:
            return Evidence("unknown", LEFT_OUT, lacks=lacking)
        if chosen := [str(fate.get("name")) for fate in facts.left_out if fate.get("kind") == "option"]:
            return Evidence("metadata", "zckpt.json, in which options left them out", lacks=(*chosen, *lacking))
        if said.get("level") == "unknown":
            return Evidence("unknown", f"they were made from such a save: {by}", lacks=lacking)
        if by != OWN_INDEX.by:
            return Evidence("metadata", BY_MANIFEST, doubt=doubt)
    if index := chosen_index(listing):
        if (size := size_in_index(listing, index)) > held:
            return Evidence(
                "unknown", f"the index {index!r} says {size:,} bytes of weights, and its files have {held:,}"
            )
        return Evidence("metadata", f"the index {index!r}")
    if len(names) < 2:
        return Evidence(
            "unknown", "one file does not say what its model has", "a config.json of a model that zckpt knows"
        )
    if files_counted_with(names[0], ()):
        return Evidence("metadata", "the count in the names of its files")
    return Evidence("unknown", "the names of its files do not say how many there are", "an index of its shards")


def _fits(facts: Manifest, place: Location) -> bool:
    """Whether the files that a manifest names have the sizes that it says."""
    files = [(place.parent / file.path, file.nbytes) for file in facts.files]
    return all(path.is_file() and path.size() == nbytes for path, nbytes in files)


def _same_names(listing: Listing, files: Sequence[str], tensors: Sequence[str]) -> InconsistentError:
    return InconsistentError(
        "files that are one model by their names have tensors of the same name", file=listing.directory,
        found=f"{examples(tensors)} in {files[-1]!r} and before", expected="each tensor in one of the files",
        remedy="They are slices of ranks, or models of their own. Join slices with the program that wrote them; give one file "
        "with --as-part where it is a model.",
    )  # fmt: skip


def left_out(listing: Listing) -> list[str]:
    """Names of tensors in torch files that are under other keys than the model that is read."""
    if match(listing) is not None or listing.options.key:
        return []
    beside = (left_out_of(listing.open(file).root) for file in weight_files(listing))
    return [name for found in beside for names in found.values() for name in names]


def _refuse_part(container: Container, file: str, *, named: bool) -> None:
    """Raises IncompleteError for one rank's part of a model; `named`: the user gave this file as the checkpoint."""
    root = container.root
    if not isinstance(root, Mapping):
        return
    inside = _part_by_contents(root)
    named = named and not composers_state(root)
    if found := inside or (_part_by_name(os.path.basename(file), root) if named else ""):
        raise IncompleteError(
            "holds one rank's part of a model",
            file=file,
            found=found,
            remedy="Save the whole model on one rank (a full state dict), or all parts with torch.distributed.checkpoint: "
            "zckpt reads its directories."
            if inside
            else "Give the directory of a checkpoint that zckpt reads. If this file holds the whole model, rename it. "
            "--as-part takes it as it is.",
            expected="a whole model",
        )


def unread_states(listing: Listing) -> str:
    """Optimizer states in plain weights or beside them, which are not read, in words; empty if none are found."""
    found = [
        f"the entry {key!r} of {name!r}"
        for name, container in listing.opened()
        if container.kind != "safetensors" and isinstance(container.root, Mapping)
        for key in map(str, composers_state(container.root) or container.root)
        if "optim" in key.lower()
    ]
    directory = listing.directory.parent if listing.directory.is_file() else listing.directory
    try:
        found += [f"the file {name!r}" for name in sorted(directory.names()) if "optim" in name.lower()]
    except (ZckptError, OSError):  # a directory that may not be listed
        pass
    return f"{', '.join(found[:3])}{f' and {len(found) - 3:,} more' if len(found) > 3 else ''}"


def _refuse_placeholders(tensors: Mapping[str, TensorEntry], listing: Listing) -> None:
    """Raises IncompleteError for tensors of shape (0,), which ZeRO-3 leaves in a model's own state dict."""
    empty = [entry.name for entry in tensors.values() if entry.shape == (0,) and entry.role == "parameter"]
    if empty and not _is_of_recorded_shapes(listing.directory):
        raise IncompleteError(
            "holds ZeRO-3 placeholders instead of weights",
            file=listing.directory,
            found=f"{len(empty):,} of {len(tensors):,} tensors have no elements ({examples(empty)})",
            remedy=f"The weights are in the sharded checkpoint: run zckpt on {_hint(listing.directory)}. "
            "If the model's own tensors have no elements, convert with --allow-unknown-layout.",
        )


def _is_of_recorded_shapes(path: Location) -> bool:
    """Whether zckpt made these weights from a checkpoint that records shapes, as their `zckpt.json` says."""
    place = manifests.find(path) or manifests.find(path.parent)
    if place is None:
        return False
    try:
        return manifests.read(place).source.get("layout") not in (None, "plain")
    except ZckptError:
        return False


def _hint(path: Location) -> str:
    """The place where the weights probably are, as a remedy."""
    place = path.parent if path.is_file() else path.absolute()
    for directory in (place, place.parent):
        if (directory / "latest").is_file():
            return f"{directory!r}"
    return "the folder that holds 'latest' and global_step*"
