"""What the `*_optim_states.pt` files of a ZeRO save say, and whether they belong together.

For zero12 and zero3. Reads the index of each file; of tensors, at most the one number a step counter is.
Source: DeepSpeed runtime/engine.py `_save_zero_checkpoint`; `state_dict` of the ZeRO and bf16 optimizers (0.19.8).
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from zckpt.containers import TensorRef, brief, enum_value
from zckpt.errors import CorruptError, IncompleteError, InconsistentError, UnsupportedError, ranges
from zckpt.layouts.listing import Listing
from zckpt.layouts.module_states import ModelStates, as_mapping, as_tensor


@dataclass(frozen=True, slots=True)
class OptimizerShard:
    """One rank's optimizer file.

    Attributes:
        file: its path.
        rank: data-parallel rank, from its name.
        stage: ZeRO stage; None where the file does not say (bf16 optimizer).
        partition_count: ranks that share a group, or None where the file does not say.
        vectors: flat fp32 masters, one per group (ZeRO-1/2) or sub-group (ZeRO-3).
        alignment_paddings: per group and parameter, elements that follow it; None for none.
        state_names: names of per-element optimizer states.
        step: the optimizer's step count, or None where no state has one.
    """

    file: str
    rank: int
    stage: int | None
    partition_count: int | None
    vectors: tuple[TensorRef, ...]
    alignment_paddings: tuple[tuple[int, ...], ...] | None
    state_names: tuple[str, ...]
    step: int | None


def read_shards(listing: Listing, known: frozenset[str], *, allow_unknown: bool) -> list[OptimizerShard]:
    """All optimizer files of model-parallel rank 0, by rank.

    Raises:
        UnsupportedError: a file holds keys outside `known`, which may change the layout, and `allow_unknown` is off.
    """
    return [_read(listing, rank, name, known, allow_unknown) for rank, name in listing.shards("optim").items()]


def _read(listing: Listing, rank: int, name: str, known: frozenset[str], allow_unknown: bool) -> OptimizerShard:
    file = listing.files[name]
    root = as_mapping(listing.open(name).root, "an optimizer states file", file)
    if "optimizer_state_dict" not in root:
        raise CorruptError("a file that is not an optimizer states file", file=file, found="no 'optimizer_state_dict'")
    state = as_mapping(root["optimizer_state_dict"], "optimizer_state_dict", file)
    unknown = sorted(str(key) for key in state.keys() - known)
    if unknown and not allow_unknown:
        raise UnsupportedError(
            "an optimizer file with keys that may change the layout",
            file=file,
            found=", ".join(repr(key) for key in unknown),
            remedy="zckpt does not know them and will not guess. If you know that they do not move weights, "
            "pass --allow-unknown-layout.",
        )
    if "local_sub_partitions_of_fp32_groups" in state:
        raise UnsupportedError(
            "a ZeRO-1 checkpoint of a DeepSpeed before 0.3.17", file=file, found="sub-partitions",
            remedy="Load it with the DeepSpeed that wrote it and save it with a newer one.",
        )  # fmt: skip
    vectors = state.get("single_partition_of_fp32_groups", state.get("fp32_flat_groups"))
    if not isinstance(vectors, list | tuple):
        raise CorruptError(
            "an optimizer file without fp32 master weights", file=file, found=f"keys {', '.join(map(str, state))}"
        )
    refs = tuple(as_tensor(vector, "a flat group", file) for vector in vectors)
    for ref in refs:
        if not ref.is_contiguous or len(ref.shape) != 1:
            raise CorruptError("a flat group that is not a dense vector", file=file, found=f"shape {list(ref.shape)}")
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    names, step = _inner_state(base, state)
    return OptimizerShard(
        file=file,
        rank=rank,
        stage=_stage(state, file),
        partition_count=_count(state.get("partition_count")),
        vectors=refs,
        alignment_paddings=_paddings(state.get("param_alignment_paddings"), file),
        state_names=names,
        step=step,
    )


def _stage(state: Mapping[str, object], file: str) -> int | None:
    stage = enum_value(state.get("zero_stage"))
    if stage is None or (isinstance(stage, int) and 1 <= stage <= 3):
        return stage
    raise UnsupportedError("an unknown ZeRO stage", file=file, found=brief(stage), expected="1, 2 and 3 are known")


def _count(value: object) -> int | None:
    if isinstance(value, list | tuple):
        return max((n for n in value if isinstance(n, int)), default=None)
    return value if isinstance(value, int) else None


def _paddings(value: object, file: str) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    groups: list[tuple[int, ...]] = []
    for group in value if isinstance(value, list | tuple) else [None]:
        if not isinstance(group, list | tuple) or not all(isinstance(n, int) and n >= 0 for n in group):
            raise CorruptError("alignment paddings that are not whole numbers", file=file, found=brief(group))
        groups.append(tuple(group))
    return tuple(groups)


def _inner_state(base: object, state: Mapping[str, object]) -> tuple[tuple[str, ...], int | None]:
    """Names of per-element states, and the step, of the wrapped torch optimizer.

    The rigid form is a torch state dict; the elastic one a list of per-group dicts, with the step beside it.
    """
    if isinstance(base, Mapping):
        inner = base.get("state")
        groups = list(inner.values()) if isinstance(inner, Mapping) else []
        settings = base.get("param_groups")
        settings = [g for g in settings if isinstance(g, Mapping)] if isinstance(settings, list) else []
    else:
        groups = list(base) if isinstance(base, list | tuple) else []
        settings = [{"step": state.get("base_optimizer_state_step")}]
    states = [group for group in groups if isinstance(group, Mapping)]
    names = dict.fromkeys(
        str(name) for group in states for name, value in group.items() if isinstance(value, TensorRef) and value.shape
    )
    steps = (_step(group.get("step")) for group in (*states, *settings))
    return tuple(names), next((step for step in steps if step is not None), None)


def _step(value: object) -> int | None:
    if isinstance(value, TensorRef) and value.numel == 1 and value.dtype.name in ("F32", "I64"):
        with open(value.store.path, "rb") as file:
            number = os.pread(file.fileno(), value.dtype.itemsize, value.byte_offset)
        if len(number) < value.dtype.itemsize:
            return None
        order = "<" if value.store.byteorder == "little" else ">"
        value = struct.unpack(order + ("f" if value.dtype.name == "F32" else "q"), number)[0]
    return int(value) if isinstance(value, int | float) and abs(value) < 2**53 else None


def check_ranks(listing: Listing, shards: list[OptimizerShard], model: ModelStates) -> int:
    """The world size, after making sure that every rank's file is there and of the same save.

    Raises:
        IncompleteError: rank files are missing.
        InconsistentError: files of another world size, stage or step are among them.
    """
    for fact, values in {
        "the world size": [shard.partition_count for shard in shards],
        "the ZeRO stage": [shard.stage for shard in shards],
        "the step": [shard.step for shard in shards],
    }.items():
        _check_agreement(listing, shards, fact, values)
    recorded = shards[0].partition_count or model.number("dp_world_size") or len(shards)
    ranks = {shard.rank for shard in shards}
    missing = sorted(set(range(recorded)) - ranks)
    if missing:
        raise missing_ranks(listing, "optimizer", sorted(ranks), missing, recorded)
    extra = sorted(ranks - set(range(recorded)))
    if extra:
        raise InconsistentError(
            "rank files of another save",
            file=listing.directory,
            found=f"optimizer files of ranks {ranges(extra)}",
            expected=f"the save had world size {recorded}",
            remedy="They are left over from an earlier save with more ranks: move them away.",
        )
    return recorded


def _check_agreement(listing: Listing, shards: list[OptimizerShard], fact: str, values: list[int | None]) -> None:
    counts = Counter(values)
    if len(counts) == 1:
        return
    usual = counts.most_common(1)[0][0]
    odd = {value: [s.rank for s, v in zip(shards, values, strict=True) if v == value] for value in counts}
    told = "; ".join(f"ranks {ranges(ranks)} say {'nothing' if v is None else v}" for v, ranks in odd.items())
    raise InconsistentError(
        "files of different saves",
        file=listing.directory,
        found=f"they do not agree on {fact}: {told}",
        remedy=f"Copy the files of ranks {ranges([r for v, ranks in odd.items() if v != usual for r in ranks])} again, "
        "or choose another tag.",
    )


def missing_ranks(
    listing: Listing, kind: str, found: list[int], missing: list[int], world_size: int
) -> IncompleteError:
    """The error for rank files that are not there."""
    return IncompleteError(
        "missing rank files",
        file=listing.directory,
        found=f"{kind} files of ranks {ranges(found)}" if found else f"no {kind} files",
        expected=f"the save had world size {world_size} (ranks {ranges(missing)} missing)",
        remedy=f"Copy the {kind} files of ranks {ranges(missing)} from the nodes that wrote them (--also DIR lays further "
        "directories over this one), or choose another tag.",
    )


def missing_model_file(listing: Listing) -> IncompleteError:
    """The error for a save without a model states file."""
    return IncompleteError(
        "no model states file",
        file=listing.directory,
        found="optimizer files only",
        expected="mp_rank_00_model_states.pt (ZeRO-1, -2) or zero_pp_rank_*_model_states.pt (ZeRO-3) beside them",
        remedy="Copy it from the node that wrote it (--also DIR lays further directories over this one).",
    )
