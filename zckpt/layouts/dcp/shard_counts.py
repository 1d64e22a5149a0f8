"""What shards of torch's `HuggingFaceStorageWriter` prove of the ranks that wrote them: they do not say how many there were.

For `read`. A shard is `shard-RANK-model-FILE-of-FILES.safetensors`: what one rank has of the tensors of one file of the model.

[Note: chunks of ranks] torch cuts `n` rows over `W` ranks into chunks of `c = ceil(n / W)`, so rank `r` has rows from `c * r`.
Then `n > (c - 1) * W`, and at least `ceil(((c - 1) * W + 1) / c)` ranks have rows. Two things follow. Where some tensors have
chunks of `W` ranks, and all tensors of a file of the model have fewer than they must, a rank's shard of that file is lost: a
shard that is here is whole, so a chunk can only be in a file that is not here. And where `n` is known (a last chunk that is
shorter; a rank without rows, with a chunk that begins at `n`; the vocabulary or the width in a config), `W <= (n -
1) // (c - 1)`: if
that many chunks are here, they are all. Experts may be cut over other ranks than the rest, so nothing is concluded where there
are any.
Source: torch 2.13, distributed/tensor/_utils.py `compute_local_shape_and_global_offset`, distributed/checkpoint/hf_storage.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zckpt.base.errors import IncompleteError
from zckpt.containers import value_at
from zckpt.core.evidence import Evidence
from zckpt.layouts.dcp import SAFETENSORS
from zckpt.layouts.dcp.metadata import TensorItem
from zckpt.layouts.save.listing import Listing

_EMBEDDING = ("embed_tokens.weight", "lm_head.weight", "wte.weight")
_NORMS = ("model.norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight")


class CutRows(NamedTuple):
    """How a tensor is cut along one dimension.

    Attributes:
        name: of the tensor.
        dim: the dimension.
        step: rows of the chunk that begins at 0.
        chunks: how many with rows there are.
        held: rows that all chunks together have.
        total: rows of the whole, where something says it; None where nothing does.
        files: numbers of the model's files that have some of it.
    """

    name: str
    dim: int
    step: int
    chunks: int
    held: int
    total: int | None
    files: frozenset[int]


def evidence_of_shards(listing: Listing, items: Mapping[str, TensorItem], config: Mapping[str, object]) -> Evidence:
    """What proves that no rank's shards are missing; see [Note: chunks of ranks].

    Args:
        listing: the shards.
        items: the tensors, as far as the shards have them.
        config: the model's, or an empty one.

    Raises:
        IncompleteError: shards are missing.
    """
    matches = [match for match in map(SAFETENSORS.fullmatch, listing.files) if match]
    there = {(int(match["rank"]), int(match["file"])) for match in matches}
    files = max(int(match["files"]) for match in matches)
    ranks = max(rank for rank, _ in there)
    numbers = {match[0]: int(match["file"]) for match in matches}
    cuts = list(_cuts(listing, items, numbers, config))
    missing = "the model's config.json, or the optimizer's save beside it,"
    unknown = Evidence("unknown", "the shards do not say how many ranks wrote them", missing)
    if not cuts or any("experts" in name for name in items):
        return unknown
    most = max(cut.chunks for cut in cuts)
    for file in range(1, files + 1):
        own = [cut for cut in cuts if file in cut.files]
        lacking = [rank for rank in range(1, ranks + 1) if (rank, file) not in there]
        if own and lacking and max(cut.chunks for cut in own) < max(_owners(cut.step, most) for cut in own):
            raise IncompleteError(
                "shards are missing", file=listing.directory,
                found=f"no shard-{lacking[0]:05d}-model-{file:05d}-of-{files:05d}.safetensors",
                expected=f"chunks of {most} ranks of every tensor, as other shards have them",
                remedy="Copy it from the node that wrote it (--also DIR lays further directories over this one).",
            )  # fmt: skip
    short_cut = next((cut for cut in cuts if cut.total is not None and cut.held < cut.total), None)
    if short_cut is not None:
        raise IncompleteError(
            f"rows of tensor {short_cut.name!r} are missing", file=listing.directory, found=f"{short_cut.held:,} rows",
            expected=f"{short_cut.total:,} rows",
            remedy="Copy the shards of the other ranks here (--also DIR lays further directories over this one).",
        )  # fmt: skip
    bounds = [(cut.total - 1) // (cut.step - 1) for cut in cuts if cut.total is not None and cut.step > 1]
    alike = all(cut.chunks >= _owners(cut.step, most) for cut in cuts)
    return Evidence("shapes", "the sizes of the ranks' chunks") if alike and bounds and min(bounds) == most else unknown


def _owners(step: int, ranks: int) -> int:
    """The least number of ranks that have rows, if the first one has `step`."""
    return -(-((step - 1) * ranks + 1) // step)


def _cuts(
    listing: Listing, items: Mapping[str, TensorItem], numbers: Mapping[str, int], config: Mapping[str, object]
) -> Iterator[CutRows]:
    """Every tensor of more than one row, and the dimension in which it is cut: the first, where nothing shows another."""
    paths = {listing.files[name].path: number for name, number in numbers.items()}
    for name, item in items.items():
        chunks = list(item.chunks)
        if not item.size:
            continue
        dims = [dim for dim in range(len(item.size)) if any(chunk.offsets[dim] for chunk in chunks)]
        if len(dims) > 1:
            continue  # of a mesh of several dimensions
        dim = dims[0] if dims else 0
        first = next((chunk.sizes[dim] for chunk in chunks if not chunk.offsets[dim]), 0)
        if first < 1:
            continue
        full = [chunk for chunk in chunks if chunk.sizes[dim]]
        held = sum(chunk.sizes[dim] for chunk in full)
        ends = {chunk.offsets[dim] for chunk in chunks if not chunk.sizes[dim]}
        last = max((chunk.offsets[dim] + chunk.sizes[dim] for chunk in full), default=0)
        total = max(ends, default=None)
        if total is None and any(chunk.sizes[dim] < first for chunk in full):
            total = last
        said = _rows_in_config(name, config) if not dim else None
        total = said if said is not None and (total is None or said > total) else total
        of = frozenset(paths[str(chunk.place.store)] for chunk in chunks)  # type: ignore[union-attr]
        yield CutRows(name, dim, first, len(full), held, total, of)


def _rows_in_config(name: str, config: Mapping[str, object]) -> int | None:
    """The number of rows of a tensor by the model's config; None where the config does not say it."""
    key = "vocab_size" if name.endswith(_EMBEDDING) else "hidden_size" if name.endswith(_NORMS) else ""
    found = config.get(key, value_at(config, "text_config", key))
    return found if type(found) is int and found > 0 else None
