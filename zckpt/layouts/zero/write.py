"""Lays out a ZeRO save of any stage and world size: DeepSpeed's files, names and contents.

For resharding and for the trainer. The sources may be files or a live model's memory; the arithmetic is `partition`'s, as
in reading, so that what is written here is what `zero12` and `zero3` read.

[Note: what DeepSpeed's loader insists on] The world size is that of the run. Moments are as long as the padded partition;
masters are padded by the loader. The order of parameters and the padding between them follow from its config
(`round_robin_gradients`, `parameter_alignment`), and so do the sub-groups of stage 3 (`sub_group_size`). At stage 3 a loss
scaler must be there, an object of DeepSpeed's own class; at stages 1 and 2 an absent one leaves the run's own.

Without ZeRO, all is in one file, with masters and states in its `optimizer`: fp32 runs keep torch's own state dict there;
half-precision runs a state dict of DeepSpeed's unfused optimizer: the same, beside masters and the loss scale.
Source: DeepSpeed 0.19.8, runtime/engine.py `_load_zero_checkpoint`, `_common_checkpoint_state`; runtime/zero/stage_1_and_2.py
`_load_legacy_checkpoint`; runtime/zero/stage3.py `_rigid_load_state_dict`, `_create_fp16_sub_groups`;
runtime/bf16_optimizer.py; runtime/fp16/unfused_optimizer.py `state_dict`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError
from zckpt.base.words import examples
from zckpt.containers import Placeholder, TensorSpec
from zckpt.containers.emit import Size
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import BF16, F16, F32, DType
from zckpt.core.plan import Plan
from zckpt.layouts.run.training import Form, ParameterGroup, Training, new_scaler
from zckpt.layouts.run.vectors import VectorRun
from zckpt.layouts.zero.partition import (
    alignment_paddings,
    flat_offsets,
    flat_pieces,
    in_order,
    partition_numel,
    partition_of,
    round_robin,
    sub_groups,
)
from zckpt.layouts.zero.torch_files import Filling, TorchFile

DEFAULT_SUB_GROUP_SIZE = 1_000_000_000
"""DeepSpeed's own (runtime/zero/config.py)."""


@dataclass(frozen=True, slots=True)
class ZeroTarget:
    """The save to be written.

    Attributes:
        tag: its directory.
        stage: 1, 2 or 3.
        world_size: data-parallel ranks.
        precision: dtype of the module's own weights.
        form: the optimizer that the files are for; "bf16" at stage 1 only.
        round_robin: lay parameters as `round_robin_gradients` does; stages 1 and 2.
        align: pad between parameters as `parameter_alignment` does; stages 1 and 2.
        sub_group_size: elements of a rank from which on a sub-group is full; stage 3.
        plain: leave out what only DeepSpeed's converters need, for the sake of files without foreign classes.
        copies: groups of ranks that hold the same, where one writes (MiCS).
        no_frozen: frozen parameters are left out; DeepSpeed's loader must then not find an empty collection of them.
    """

    tag: str
    stage: int
    world_size: int
    precision: DType
    form: Form = "zero"
    round_robin: bool = False
    align: bool = False
    sub_group_size: int = DEFAULT_SUB_GROUP_SIZE
    plain: bool = False
    copies: int = 1
    no_frozen: bool = False

    def as_json(self) -> dict[str, object]:
        """The target's facts for a manifest."""
        return {"stage": self.stage, "world_size": self.world_size, "precision": self.precision.torch_name}

    def file_of(self, rank: int, kind: str) -> str:
        """The name of a rank's `model` or `optim` file."""
        prefix = "bf16_" if self.precision == BF16 and kind == "optim" else ""
        return f"{self.tag}/{prefix}zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"


def lay_out(catalog: Catalog, training: Training, target: ZeroTarget) -> Plan:
    """The files of a save, without `latest`.

    Args:
        catalog: the weights, under the model's own names; trainable parameters are the masters.
        training: all else.
        target: the form of the save.

    Raises:
        InconsistentError: the groups and the trainable parameters are not the same.
        UnsupportedError: something in the client state cannot be written.
    """
    writer = _writer(catalog, training, target)
    return Plan.of(file for rank in range(target.world_size) for file in writer.files(rank))


def lay_out_rank(catalog: Catalog, training: Training, target: ZeroTarget, rank: int) -> Plan:
    """The files of one rank of a save; otherwise as `lay_out`."""
    return Plan.of(_writer(catalog, training, target).files(rank))


def lay_out_model(catalog: Catalog, training: Training, target: ZeroTarget) -> Plan:
    """The model file alone, of stages 1 and 2; otherwise as `lay_out`."""
    return _Stage12(catalog, training, target).model_file()


def _writer(catalog: Catalog, training: Training, target: ZeroTarget) -> _Stage12 | _Stage3:
    owned = [name for group in training.groups for name in group.names]
    trained = [name for name, entry in catalog.tensors.items() if entry.role == "parameter"]
    if sorted(owned) != sorted(trained):
        raise InconsistentError(
            "the parameter groups are not the trainable parameters",
            file=catalog.source.path,
            found=f"only in one of them: {examples(set(owned) ^ set(trained))}",
        )
    return _Stage3(catalog, training, target) if target.stage == 3 else _Stage12(catalog, training, target)


class _ZeroWriter:
    """The common part of all stages: the model file, and the values around the vectors in the optimizer files."""

    def __init__(self, catalog: Catalog, training: Training, target: ZeroTarget) -> None:
        self.catalog = catalog
        self.training = training
        self.target = target
        order = self._order
        owned = [group for group in training.groups if group.names]  # a group of nothing has no vector
        self.groups = [replace(group, names=tuple(order(group.names))) for group in owned]
        self.shapes = [{name: catalog.tensors[name].shape for name in group.names} for group in self.groups]
        also = training.also_frozen
        self.frozen = {n: entry for n, entry in catalog.tensors.items() if entry.role == "frozen" or n in also}

    def _order(self, names: Sequence[str]) -> Sequence[str]:
        return names

    def listed(self) -> list[Sequence[str]]:
        """The parameters as in `param_shapes`: grouped by flat vectors."""
        return [group.names for group in self.groups]

    def model_root(
        self, file: TorchFile, rank: int, module: Mapping[str, object], frozen: Mapping[str, object]
    ) -> dict[str, object]:
        """The object of a model file."""
        world_size, none = self.target.world_size, self.target.stage == 1 or self.target.no_frozen
        sizes = {name: Size(entry.shape) for name, entry in self.frozen.items()}
        return {
            "module": {self.training.state_names.get(name, name): value for name, value in module.items()},
            "buffer_names": [name for name, entry in self.catalog.tensors.items() if entry.role == "buffer"],
            "optimizer": None,
            "param_shapes": [
                {name: Size(self.catalog.tensors[name].shape) for name in names} for names in self.listed()
            ],
            "frozen_param_shapes": None if none else sizes,
            "shared_params": dict(self.catalog.aliases) if rank == 0 else {},
            "frozen_param_fragments": None if none else dict(frozen),
            **file.adopt(self.training.model),
            "dp_world_size": world_size * self.target.copies,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        }

    def optim_root(self, file: TorchFile, state: Mapping[str, object]) -> dict[str, object]:
        """The object of an optimizer file."""
        config = file.adopt(self.training.model.get("ds_config"))
        version = self.training.model.get("ds_version")
        root: dict[str, object] = {"optimizer_state_dict": dict(state), "ds_config": config, "ds_version": version}
        beside: dict[str, object] = file.adopt(self.training.beside)
        return root | beside

    def settings(self, file: TorchFile, group: ParameterGroup, numbers: list[int]) -> object:
        """A parameter group of the wrapped optimizer."""
        return file.adopt({**group.settings, "params": numbers})

    def source(self, name: str, state: str | None) -> TensorEntry:
        """A parameter's masters, or one of its states."""
        if state is None:
            return self.catalog.tensors[name]
        return self.training.state(name, state)

    def dtype_of(self, group: ParameterGroup, state: str | None) -> DType:
        """The dtype of a group's vector of masters, or of one of its states."""
        return self.source(group.names[0], state).dtype

    def module_dtype(self, entry: TensorEntry) -> DType:
        """The dtype of a tensor in the module: its own, or that of the new precision; buffers keep theirs."""
        if entry.role == "buffer" or entry.dtype.kind != "float":
            return entry.dtype
        if self.target.precision != self.training.precision:
            return self.target.precision
        if (copy := entry.own_copy) is not None:
            return copy.dtype
        return entry.dtype if entry.role == "frozen" else self.target.precision

    def weight(self, file: TorchFile, entry: TensorEntry) -> TensorSpec:
        """The module's parameter or buffer: as it was saved, or rounded from the master."""
        dtype, copy = self.module_dtype(entry), entry.own_copy
        if copy is not None and copy.dtype == dtype:
            return file.tensor(replace(entry, dtype=dtype, fragments=copy.fragments, replicas=()))
        return file.tensor(entry, dtype)

    def scaler(self) -> dict[str, object]:
        """The loss scaler and the values beside it; a new one if the precision changes."""
        kept = dict(self.training.scaler)
        if self.target.precision != self.training.precision:
            for key in ("loss_scaler", "dynamic_loss_scale", "overflow"):
                kept.pop(key, None)
        if "loss_scaler" not in kept and self.target.stage == 3:
            kept |= {"loss_scaler": new_scaler(self.target.precision), "overflow": False}
            kept["dynamic_loss_scale"] = self.target.precision == F16
        return kept


class _Stage12(_ZeroWriter):
    """Stages 1 and 2: one model file, and flat groups cut into partitions."""

    def _order(self, names: Sequence[str]) -> Sequence[str]:
        return in_order(round_robin(len(names), self.target.world_size), names) if self.target.round_robin else names

    def files(self, rank: int) -> Iterator[Plan]:
        if rank == 0:
            yield self.model_file()
        yield self.optim_file(rank)

    def model_file(self) -> Plan:
        file = TorchFile(f"{self.target.tag}/mp_rank_00_model_states.pt")
        module = {name: self.weight(file, entry) for name, entry in self.catalog.tensors.items()}
        module |= {dropped: module[kept] for dropped, kept in self.catalog.aliases.items()}
        return file.finish(self.model_root(file, 0, module, {name: module[name] for name in self.frozen}))

    def optim_file(self, rank: int) -> Plan:
        target = self.target
        file = TorchFile(target.file_of(rank, "optim"))
        states: dict[int, object] = {}
        masters, end_paddings, paddings, mappings = [], [], [], []
        for number, group in enumerate(self.groups):
            numels = [math.prod(shape) for shape in self.shapes[number].values()]
            between, offsets, total, size = flat_group(numels, target)
            lean = max(0, min(size, total - rank * size))
            here = [
                (name, piece)
                for name, offset, numel in zip(group.names, offsets, numels, strict=True)
                for piece in flat_pieces(offset, numel, size)
                if piece.index == rank
            ]

            masters.append(self._vector(file, group, here, None, size if target.form == "bf16" else lean))
            vectors = {state: self._vector(file, group, here, state, size) for state in group.states}
            states[number] = {**file.adopt(group.scalars), **vectors}
            last = rank == target.world_size - 1
            end_paddings.append(size - lean if target.form == "zero" else (size * target.world_size - total) * last)
            paddings.append(between)
            mappings.append({name: _address(piece.count, piece.offset) for name, piece in here})
        groups = [self.settings(file, group, [number]) for number, group in enumerate(self.groups)]
        state: dict[str, object] = {
            **self.scaler(),
            "base_optimizer_state": {"state": states, "param_groups": groups},
            "single_partition_of_fp32_groups": masters,
            "group_paddings": end_paddings,
            "partition_count": [target.world_size] * len(groups),
            "ds_version": self.training.model.get("ds_version"),
        }
        if target.form == "zero":
            state |= {"zero_stage": target.stage, "param_alignment_paddings": paddings}
        else:
            state = {key: value for key, value in state.items() if key not in _ZERO_ONLY}
        if not target.plain:
            state["param_slice_mappings"] = mappings
        return file.finish(self.optim_root(file, state))

    def _vector(
        self,
        file: TorchFile,
        group: ParameterGroup,
        here: Sequence[tuple[str, VectorRun]],
        state: str | None,
        length: int,
    ) -> TensorSpec:
        """One rank's masters or states of a group."""
        fillings = [Filling(self.source(name, state), p.start, p.count, p.offset) for name, p in here]
        return file.vector(fillings, length, self.dtype_of(group, state))


def flat_group(numels: Sequence[int], target: ZeroTarget) -> tuple[list[int], list[int], int, int]:
    """Of a flat group of stages 1 and 2: padding after each parameter, where each begins, the length, and that of a partition."""
    between = alignment_paddings(numels, target.precision.itemsize) if target.align else [0] * len(numels)
    offsets, total = flat_offsets(numels, between)
    return between, offsets, total, -(-total // (2 * target.world_size)) * 2


_ZERO_ONLY = ("loss_scaler", "dynamic_loss_scale", "overflow")
"""The entries that the bf16 optimizer does not keep."""


def _address(numel: int, start: int) -> Placeholder:
    state: dict[str, object] = {"numel": numel, "start": start}
    return Placeholder("deepspeed.utils.tensor_fragment", "fragment_address", (), state, called=True, new=True)


class _Stage3(_ZeroWriter):
    """Stage 3: a model file for each rank, and each parameter cut by itself."""

    def __init__(self, catalog: Catalog, training: Training, target: ZeroTarget) -> None:
        super().__init__(catalog, training, target)
        size = target.world_size
        held = [[partition_numel(math.prod(s), size) for s in shapes.values()] for shapes in self.shapes]
        self.cuts = [sub_groups(numels, target.sub_group_size) for numels in held]

    def files(self, rank: int) -> Iterator[Plan]:
        yield self.model_file(rank)
        yield self.optim_file(rank)

    def listed(self) -> list[Sequence[str]]:
        return [in_order(cut, group.names) for group, cuts in zip(self.groups, self.cuts, strict=True) for cut in cuts]

    def _piece(self, entry: TensorEntry, rank: int, at: int = 0) -> Filling:
        held = partition_of(entry.numel, self.target.world_size, rank)
        return Filling(entry, held.start, len(held), at)

    def model_file(self, rank: int) -> Plan:
        target = self.target
        file = TorchFile(target.file_of(rank, "model"))
        module: dict[str, object] = {}
        fragments: dict[str, object] = {}
        empty: dict[DType, TensorSpec] = {}  # the placeholders
        for name, entry in self.catalog.tensors.items():
            if entry.role == "buffer":
                module[name] = file.tensor(entry)
                continue
            dtype = self.module_dtype(entry)
            module[name] = empty.get(dtype) or empty.setdefault(dtype, file.vector((), 0, dtype))
            if name in self.frozen:
                piece = self._piece(entry, rank)
                fragments[name] = file.vector([piece], partition_numel(entry.numel, target.world_size), dtype)
        module |= {dropped: module[kept] for dropped, kept in self.catalog.aliases.items()}
        return file.finish(self.model_root(file, rank, module, fragments))

    def optim_file(self, rank: int) -> Plan:
        target = self.target
        file = TorchFile(target.file_of(rank, "optim"))
        masters: list[TensorSpec] = []
        states: dict[int, object] = {}
        groups: list[object] = []
        for group, cuts in zip(self.groups, self.cuts, strict=True):
            numbers = range(len(masters), len(masters) + len(cuts))
            for number, cut in zip(numbers, cuts, strict=True):
                names = in_order(cut, group.names)
                masters.append(self._vector(file, rank, names, None))
                vectors = {state: self._vector(file, rank, names, state) for state in group.states}
                states[number] = {**file.adopt(group.scalars), **vectors}
            groups.append(self.settings(file, group, list(numbers)))
        state: dict[str, object] = {
            "zero_stage": 3,
            **self.scaler(),
            "partition_count": target.world_size,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
            "fp32_flat_groups": masters,
        }
        return file.finish(self.optim_root(file, state))

    def _vector(self, file: TorchFile, rank: int, names: Sequence[str], state: str | None) -> TensorSpec:
        """One sub-group's masters or states."""
        at = 0
        fillings: list[Filling] = []
        for name in names:
            source = self.source(name, state)
            fillings.append(self._piece(source, rank, at))
            at += partition_numel(source.numel, self.target.world_size)
        return file.vector(fillings, at, self.source(names[0], state).dtype)


def lay_out_unsharded(catalog: Catalog, training: Training, tag: str, world_size: int) -> Plan:
    """The file of a save, without `latest`.

    Args:
        catalog: the weights; trainable parameters are the masters, with the module's own weights as replicas.
        training: all else; `scaler` has the numbers of the loss scale.
        tag: its directory.
        world_size: of the run.

    Raises:
        UnsupportedError: something in the client state cannot be written.
    """
    file = TorchFile(f"{tag}/mp_rank_00_model_states.pt")
    module: dict[str, object] = {}
    for name, entry in catalog.tensors.items():
        weight = entry
        for replica in entry.replicas:
            weight = entry.as_in(replica)
        module[name] = file.tensor(weight)
    module |= {dropped: module[kept] for dropped, kept in catalog.aliases.items()}
    root: dict[str, object] = {
        "module": module,
        "buffer_names": [name for name, entry in catalog.tensors.items() if entry.role == "buffer"],
        "optimizer": _optimizer(file, catalog, training) if training.groups else None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        **file.adopt(training.model),
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
    }
    return file.finish(root)


def _optimizer(file: TorchFile, catalog: Catalog, training: Training) -> Mapping[str, object]:
    states: dict[int, object] = {}
    groups: list[object] = []
    for group in training.groups:
        numbers = range(len(states), len(states) + len(group.names))
        for number, name in zip(numbers, group.names, strict=True):
            vectors = {state: file.tensor(entry) for state, entry in training.states_of(name, group).items()}
            states[number] = {**file.adopt(group.scalars), **vectors}
        groups.append(file.adopt({**group.settings, "params": list(numbers)}))
    inner: dict[str, object] = {"state": {n: state for n, state in states.items() if state}, "param_groups": groups}
    if training.precision == F32:
        return inner
    masters = [[file.tensor(catalog.tensors[name], F32) for name in group.names] for group in training.groups]
    return {**training.scaler, "optimizer_state_dict": inner, "fp32_groups": masters}
