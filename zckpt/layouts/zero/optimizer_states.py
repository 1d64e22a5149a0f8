"""Reads the `*_optim_states.pt` files of a ZeRO save, and checks that they belong together.

For zero12 and zero3. Reads the index of each file; of tensors, at most the one number a step counter is.
Source: DeepSpeed runtime/engine.py `_save_zero_checkpoint`; `state_dict` of the ZeRO and bf16 optimizers (0.19.8).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from zckpt.base import words
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, CorruptError, IncompleteError, InconsistentError, UnsupportedError, ZckptError
from zckpt.containers import TensorRef, brief, enum_value, list_at, mapping_at
from zckpt.core.catalog import Padding, TensorEntry
from zckpt.core.dtypes import BF16, F16, F32, DType
from zckpt.layouts.run.values import SCALER, missing_ranks, step_of
from zckpt.layouts.save.listing import MODEL_NAME, Listing
from zckpt.layouts.save.module_states import ModelStates, as_mapping, as_tensor, rank_count, root_of
from zckpt.layouts.save.origins import check_alike

if TYPE_CHECKING:
    from zckpt.layouts.run.training import Form, ParameterGroup, Training


@dataclass(frozen=True, slots=True)
class OptimizerShard:
    """One rank's optimizer file.

    Attributes:
        file: its path.
        rank: data-parallel rank, from its name.
        stage: ZeRO stage; None if the file does not record it (bf16 optimizer).
        partition_count: ranks that share a group, or None if the file does not record it.
        vectors: flat fp32 masters, one per group (ZeRO-1/2) or sub-group (ZeRO-3).
        alignment_paddings: per group and parameter, elements that follow it; None for none.
        states: per flat group, the wrapped optimizer's states by name: vectors like the masters', or single values.
        settings: the wrapped optimizer's parameter groups (learning rate, ...); empty in the elastic form.
        step: the optimizer's step count, or None if no state has one.
        root: everything in `optimizer_state_dict`.
        absent: `ds_id` of a state -> why its swap file cannot be read; see `swapped`.
    """

    file: str
    rank: int
    stage: int | None
    partition_count: int | None
    vectors: tuple[TensorRef, ...]
    alignment_paddings: tuple[tuple[int, ...], ...] | None
    states: tuple[Mapping[str, object], ...]
    settings: tuple[Mapping[str, object], ...]
    step: int | None
    root: Mapping[str, object]
    absent: Mapping[str, ZckptError] = field(default_factory=dict[str, ZckptError])

    @property
    def name(self) -> str:
        """The file's name, for a person."""
        return os.path.basename(self.file)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of per-element optimizer states of all groups."""
        return tuple(dict.fromkeys(name for states in self.states for name in per_element(states)))


def per_element(states: Mapping[str, object]) -> dict[str, TensorRef]:
    """The states of a group that are vectors; the others, such as the step, are one value for the whole group."""
    return {name: value for name, value in states.items() if isinstance(value, TensorRef) and value.shape}


def read_shards(
    listing: Listing, known: frozenset[str], mp_rank: int = 0, *, allow_unknown: bool
) -> list[OptimizerShard]:
    """All optimizer files of one model-parallel rank, by data-parallel rank. Raises UnsupportedError if a file holds
    keys outside `known`, which may change the layout, and `allow_unknown` is off.
    """
    names = listing.shards("optim", mp_rank)
    listing.open_alike(list(names.values()))
    return [_read(listing, rank, name, known, allow_unknown) for rank, name in names.items()]


def _read(listing: Listing, rank: int, name: str, known: frozenset[str], allow_unknown: bool) -> OptimizerShard:
    file, root = listing.files[name].path, root_of(listing, name)
    if "optimizer_state_dict" not in root:
        raise CorruptError(
            "is not an optimizer states file", file=file, found="no 'optimizer_state_dict'", remedy=COPY_AGAIN
        )
    state = as_mapping(root["optimizer_state_dict"], "optimizer_state_dict", file)
    unknown = state.keys() - known
    if unknown and not allow_unknown:
        raise UnsupportedError(
            "holds keys that may change the layout", file=file, found=", ".join(map(repr, sorted(map(str, unknown)))),
            remedy="If you know that these keys do not move weights, pass --allow-unknown-layout.",
            expected="keys that zckpt knows",
        )  # fmt: skip
    if "local_sub_partitions_of_fp32_groups" in state:
        raise UnsupportedError(
            "is a ZeRO-1 checkpoint of a DeepSpeed before 0.3.17", file=file, found="sub-partitions",
            remedy="Load it with the DeepSpeed that wrote it and save it with a newer one.",
        )  # fmt: skip
    vectors = state.get("single_partition_of_fp32_groups", state.get("fp32_flat_groups"))
    if not isinstance(vectors, list | tuple):
        raise CorruptError(
            "holds no fp32 master weights", file=file, found=f"keys {', '.join(map(str, state))}", remedy=COPY_AGAIN
        )
    refs: list[TensorRef] = []
    for vector in vectors:
        refs.append(ref := as_tensor(vector, "a flat group", file))
        if not ref.is_contiguous or len(ref.shape) != 1:
            raise CorruptError(
                "the flat group of master weights is not a dense vector", file=file, found=f"shape {list(ref.shape)}",
                remedy=COPY_AGAIN,
            )  # fmt: skip
    base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    states, settings = _inner_state(base, len(refs))
    step = None
    for place in (*states, *settings, {"step": state.get("base_optimizer_state_step")}):
        if (step := step_of(place.get("step"))) is not None:
            break
    return OptimizerShard(
        file=file,
        rank=rank,
        stage=_stage(state, file),
        partition_count=rank_count(_count(state.get("partition_count")), "partition_count", file),
        vectors=tuple(refs),
        alignment_paddings=_paddings(state.get("param_alignment_paddings"), file),
        states=states,
        settings=settings,
        step=step,
        root=state,
    )


def _stage(state: Mapping[str, object], file: str) -> int | None:
    stage = enum_value(state.get("zero_stage"))
    if stage is None or (isinstance(stage, int) and 1 <= stage <= 3):
        return stage
    raise UnsupportedError(
        "the ZeRO stage is unknown", file=file, found=brief(stage), expected="stage 1, 2 or 3",
        remedy="Convert it with the DeepSpeed that wrote it (zero_to_fp32.py).",
    )  # fmt: skip


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
            raise CorruptError(
                "alignment paddings are not whole numbers", file=file, found=brief(group), remedy=COPY_AGAIN
            )
        groups.append(tuple(group))
    return tuple(groups)


def _inner_state(base: object, count: int) -> tuple[tuple[Mapping[str, object], ...], tuple[Mapping[str, object], ...]]:
    """The states of each flat group, and the parameter groups of the wrapped torch optimizer.

    The rigid form is a torch state dict, with states numbered as the parameter groups list them; the elastic one is
    a list of states per group.
    """
    settings: tuple[Mapping[str, object], ...] = ()
    states: list[object]
    if isinstance(base, Mapping):
        settings = tuple(group for group in list_at(base, "param_groups") if isinstance(group, Mapping))
        inner = mapping_at(base, "state")
        listed = [inner.get(n) if isinstance(n, int) else None for group in settings for n in list_at(group, "params")]
        states = listed or list(inner.values())
    else:
        states = list_at(base)
    found = [mapping_at(state) for state in states[:count]]
    return (*found, *[{}] * (count - len(found))), settings


def check_ranks(listing: Listing, shards: list[OptimizerShard], model: ModelStates) -> int:
    """Checks that every rank's file exists and is of the same save; returns the world size. Raises IncompleteError if
    rank files are missing; InconsistentError if files of another world size, stage or step are among them.
    """
    for fact, field_name in (("world size", "partition_count"), ("ZeRO stage", "stage"), ("step", "step")):
        check_alike(listing, f"the {fact}", {shard.name: getattr(shard, field_name) for shard in shards})
    said = [shards[0].partition_count, model.ranks("dp_world_size")]
    if model.root.get("num_experts"):  # these may be cut over more ranks than all else: tensor-parallel ones too
        said.reverse()
    recorded = said[0] or said[1] or len(shards)
    ranks = {shard.rank for shard in shards}
    missing = sorted(set(range(recorded)) - ranks)
    if missing:
        whole = shards[0].stage in (None, 1, 2) and listing.matching(MODEL_NAME)
        rescue = (
            f"The half-precision weights alone: put {whole[0]} into a directory of its own, and convert that."
            if whole
            else ""
        )
        raise missing_ranks(listing, "optimizer", sorted(ranks), missing, recorded, rescue)
    extra = sorted(ranks - set(range(recorded)))
    if extra:
        raise InconsistentError(
            "holds rank files of another save",
            file=listing.directory,
            found=f"optimizer files of {words.ranks(extra)}",
            expected=f"{words.ranks(range(recorded))} (world size {recorded})",
            remedy="Move these files away if an earlier save left them over; if not, copy all files of one save again.",
        )
    return recorded


def state_vector(shard: OptimizerShard, number: int, state: str) -> TensorRef:
    """A per-element optimizer state of one of the shard's flat groups. Raises IncompleteError if it is missing."""
    found = shard.states[number].get(state)
    if isinstance(found, TensorRef) and (error := shard.absent.get(str((found.attributes or {}).get("ds_id")))):
        raise error
    if isinstance(found, TensorRef) and found.is_contiguous and len(found.shape) == 1:
        return found
    raise IncompleteError(
        f"optimizer state {state!r} of flat group {number} is missing", file=shard.file,
        found=f"states {', '.join(map(repr, shard.states[number]))}" if shard.states[number] else "no states",
        expected=f"{state!r}, as in other ranks' files", remedy="Copy that file again, or choose another tag.",
    )  # fmt: skip


def group_of(names: tuple[str, ...], shard: OptimizerShard, number: int, flat_group: int) -> ParameterGroup:
    """Parameter group `number`, with the single values that one of its flat groups holds."""
    settings = shard.settings[number] if number < len(shard.settings) else {}
    vectors = per_element(shard.states[flat_group])
    from zckpt.layouts.run.training import ParameterGroup

    return ParameterGroup(
        names,
        {key: value for key, value in settings.items() if key != "params"},
        {key: value for key, value in shard.states[flat_group].items() if key not in vectors},
        tuple(vectors),
    )


def training_of(
    model: ModelStates, shard: OptimizerShard, groups: Iterable[ParameterGroup],
    states: dict[str, dict[str, TensorEntry]], padding: Iterable[Padding], form: Form = "zero",
) -> Training:  # fmt: skip
    """What a run needs beside its weights, of its groups and states, and of a model file and the first rank's optimizer file."""
    from zckpt.layouts.run.training import Training

    return Training(
        groups=tuple(groups),
        states=states,
        scaler={key: shard.root[key] for key in SCALER if key in shard.root},
        model=model.rest,
        precision=precision_of(model),
        form=form,
        raw=shard.root,
        padding=tuple(padding),
        state_names=model.state_names,
        also_frozen=model.also_frozen,
    )


def precision_of(model: ModelStates) -> DType:
    """The dtype of the module's trained weights or their placeholders; by the config if the file does not hold them."""
    for name in (name for shapes in model.param_shapes for name in shapes):
        if name in model.module:
            return model.module[name].dtype
    for key, dtype in {"bf16": BF16, "bfloat16": BF16, "fp16": F16}.items():
        section = model.config.get(key)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return dtype
    return F32
