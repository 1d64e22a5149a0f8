"""Reads what each rank of torch_xla's FullyShardedDataParallel saved: `model`, and `shard_metadata` that say how it was cut.

A parameter, or several that lie end to end in a `flat_param_0`, is cut into as many equal parts as there are ranks; what is
behind its last element is padding: 5 elements over 2 ranks are 3 and 2, and one of padding. A part's key is the path of its
module, and from `_fsdp_shard` on what `shard_info` describes by path and rest: the name below the path, and the size.
`flatten_info` has the names, shapes and numbers of elements of what lies in a flat one. Buffers are whole in every file: rank 0's
are taken. Optimizer states are not read.
Source: pytorch/xla, torch_xla/distributed/fsdp/{state_dict_utils,xla_fully_sharded_data_parallel,xla_flatten_params_wrapper}.py,
test/test_train_mp_imagenet_fsdp.py (names of files); transformers 4.57, trainer.py `_save_tpu`. From the source alone: no file
of a real run was at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, InconsistentError
from zckpt.base.words import count
from zckpt.containers import TensorRef, brief
from zckpt.containers.tensor_ref import as_shape, is_count
from zckpt.core.catalog import Catalog, Source, TensorEntry, Topology
from zckpt.core.evidence import Evidence
from zckpt.core.fragments import Fragment
from zckpt.layouts.run.values import missing_ranks
from zckpt.layouts.save.family import RankFacts
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import Shape, as_mapping, as_tensor, root_of, whole

_NONE = "no files of ranks with 'shard_metadata'"
_MARK = "_fsdp_shard"
_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")
_FLAT = "_fsdp_wrapped_module.flat_param_"


class ShardFile(NamedTuple):
    """One rank's file: its path, the state dict, and how it was cut."""

    file: str
    model: Mapping[str, object]
    metadata: Mapping[str, Any]


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not. Opens the first one."""
    if listing.directory in listing.files.values():
        return "one file"
    root = listing.open(next(iter(_names_of_ranks(listing).values()))).root
    return None if isinstance(root, Mapping) and isinstance(root.get("shard_metadata"), Mapping) else _NONE


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save.

    Raises:
        IncompleteError: files of ranks are missing. InconsistentError: they are of several saves.
        CorruptError: metadata cannot be read, or do not fit the tensors.
    """
    ranks = _read_ranks(listing)
    tensors: dict[str, TensorEntry] = {}
    for key in ranks[0].model:
        for entry in _entries(ranks, key):
            if entry.name in tensors:
                raise InconsistentError(
                    f"two tensors would both be called {entry.name!r}", file=ranks[0].file, found=repr(key),
                    expected="each name once", remedy=OTHER_SAVE,
                )  # fmt: skip
            tensors[entry.name] = entry
    source = Source("torch_xla", listing.directory.path, listing.tag, ("torch_xla", ""))
    evidence = Evidence("metadata", "the world size and the rank in each file")
    return Catalog(tensors, source, evidence, topology=Topology(len(ranks)))


def facts(listing: Listing, name: str) -> RankFacts:
    """The world size that a file records."""
    return RankFacts(_read_rank(listing, name).metadata.get("world_size"))


def unread_states(listing: Listing) -> str:
    """Optimizer states of a save, which are not read, in words; empty if there are none."""
    names = list(_names_of_ranks(listing).values())
    entries = map(str, root_of(listing, names[0]))
    return next((f"the entry {key!r} of {names[0]!r}" for key in entries if "optim" in key.lower()), "")


def _names_of_ranks(listing: Listing) -> dict[int, str]:
    from zckpt.layouts.weights_alone import OF_TRAINER, SHARD

    found = {int(m["dp"]): m[0] for m in map(SHARD.fullmatch, listing.files) if m}
    return dict(sorted((found or {int(m["dp"]): m[0] for m in map(OF_TRAINER.fullmatch, listing.files) if m}).items()))


def _read_ranks(listing: Listing) -> list[ShardFile]:
    names = _names_of_ranks(listing)
    ranks = {number: _read_rank(listing, name) for number, name in names.items()}
    first = next(iter(ranks.values()))
    world = first.metadata.get("world_size")
    if not is_count(world):
        raise CorruptError(
            "its metadata have no usable world_size", file=first.file, found=brief(world), expected="a whole number",
            remedy=COPY_AGAIN,
        )  # fmt: skip
    for number, rank in ranks.items():
        said = (rank.metadata.get("rank"), rank.metadata.get("world_size"))
        if said != (number, world) or rank.model.keys() != first.model.keys():
            raise InconsistentError(
                "is not a file of this save", file=rank.file, found=f"rank {said[0]} of {said[1]}, {len(rank.model):,} tensors",
                expected=f"rank {number} of {world}, with the {len(first.model):,} tensors of the other files", remedy=OTHER_SAVE,
            )  # fmt: skip
    if lacking := [number for number in range(world) if number not in ranks]:
        raise missing_ranks(listing, "shard", list(ranks), lacking, world)
    return [ranks[number] for number in range(world)]


def _read_rank(listing: Listing, name: str) -> ShardFile:
    file, root = listing.files[name].path, root_of(listing, name)
    model, metadata = (as_mapping(root.get(key), repr(key), file) for key in ("model", "shard_metadata"))
    return ShardFile(file, model, metadata)


def _entries(ranks: Sequence[ShardFile], key: str) -> Iterator[TensorEntry]:
    """The model's tensors under one key of the state dicts."""
    first = ranks[0]
    words = key.split(".")
    at = next((n for n, word in enumerate(words) if word.startswith(_MARK)), None)
    if at is None:
        ref = as_tensor(first.model[key], repr(key), first.file)
        yield whole(_bare(key), ref, "buffer")
        return
    prefix, rest = ".".join(words[:at]), ".".join(words[at:])
    try:
        said = first.metadata["shard_info"][prefix][rest]
        shape = as_shape(said["_orig_size"])
        name = ".".join(filter(None, (prefix, str(said["_orig_name"]))))
        inner = _inside(first, name, shape) if _FLAT in name else [(name, shape)]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"its metadata do not describe {key!r}", file=first.file, found=f"{type(error).__name__}: {error}"[:200],
            expected="a name and a size under 'shard_info'", remedy=COPY_AGAIN,
        ) from error  # fmt: skip
    parts = _parts(ranks, key, math.prod(shape))
    start = 0
    for own, extents in inner:
        numel = math.prod(extents)
        fragments = tuple(_clip_parts(parts, start, numel))
        yield TensorEntry(_bare(own), extents, parts[0].dtype, "parameter", fragments)
        start += numel


def _inside(rank: ShardFile, name: str, shape: Shape) -> list[tuple[str, Shape]]:
    """The parameters that lie in a flat one, in order."""
    names, shapes, numels = rank.metadata["flatten_info"][name]
    above = name.rpartition(".")[0]
    found = [(f"{above}.{own}", as_shape(one)) for own, one in zip(names, shapes, strict=True)]
    if [math.prod(one) for _, one in found] != list(numels) or sum(numels) != math.prod(shape):
        raise ValueError(f"{brief(numels)} elements in {math.prod(shape):,}")
    return found


def _parts(ranks: Sequence[ShardFile], key: str, numel: int) -> list[TensorRef]:
    """Every rank's part; all have one size and dtype, and together are the whole with its padding."""
    parts = [as_tensor(rank.model[key], repr(key), rank.file) for rank in ranks]
    size, dtype = parts[0].numel, parts[0].dtype
    for rank, part in zip(ranks, parts, strict=True):
        if (part.numel, part.dtype) != (size, dtype) or not part.is_contiguous:
            raise InconsistentError(
                f"ranks do not agree on {key!r}", file=rank.file, found=f"{part.dtype}, {count(part.numel, 'element')}",
                expected=f"{dtype}, {count(size, 'element')}, as rank 0 has it", remedy=OTHER_SAVE,
            )  # fmt: skip
    if numel > size * len(ranks):
        raise InconsistentError(
            f"the parts of {key!r} are not the whole", file=ranks[0].file, found=count(size * len(ranks), "element"),
            expected=f"{numel:,} at least", remedy=OTHER_SAVE,
        )  # fmt: skip
    return parts


def _clip_parts(parts: Sequence[TensorRef], start: int, numel: int) -> Iterator[Fragment]:
    """The fragments of elements [start, start + numel) of parts that lie end to end."""
    size = parts[0].numel
    for number, part in enumerate(parts):
        low, high = max(start, number * size), min(start + numel, (number + 1) * size)
        if low < high:
            offset = part.byte_offset + (low - number * size) * part.dtype.itemsize
            yield Fragment(part.store, offset, low - start, high - low)


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
