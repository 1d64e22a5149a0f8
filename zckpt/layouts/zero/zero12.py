"""Where each parameter is in the flat fp32 groups of a ZeRO-1 or ZeRO-2 checkpoint, the bf16 optimizer's included.

For `zero.read`. Arithmetic and the words used here: [Note: flat groups, partitions, padding] in `partition`.
Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py `state_dict`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, InconsistentError
from zckpt.containers import TensorRef
from zckpt.core.catalog import Padding, TensorEntry
from zckpt.core.fragments import Fragment
from zckpt.layouts.run.training import Form, ParameterGroup, Training
from zckpt.layouts.run.values import missing_model_file
from zckpt.layouts.run.vectors import VectorRun, fragment_of
from zckpt.layouts.save.listing import MODEL_NAME, Listing
from zckpt.layouts.save.module_states import ModelStates, Shape, read_model_states, replicas_of, without_shapes
from zckpt.layouts.zero.optimizer_states import (
    OptimizerShard,
    check_ranks,
    group_of,
    per_element,
    read_shards,
    state_vector,
    training_of,
)
from zckpt.layouts.zero.partition import flat_offsets, flat_pieces, in_original_order

_KNOWN = frozenset((
    *("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", "base_optimizer_state",),
    *("base_optimizer_state_step", "single_partition_of_fp32_groups", "zero_stage", "group_paddings",),
    *("groups_padding", "param_alignment_paddings", "partition_count", "ds_version",),
    *("param_slice_mappings", "universal_checkpoint_info", "ds_config", "param_shapes",),
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Zero12Save:
    """One model-parallel rank's files of a save, read and checked."""

    model: ModelStates
    shards: list[OptimizerShard]
    world_size: int
    known: list[_Group] = field(default_factory=list["_Group"], init=False, repr=False, compare=False)

    @property
    def groups(self) -> list[_Group]:
        """The groups, found once. Raises InconsistentError if the lengths of their vectors do not add up."""
        if not self.known:
            self.known[:] = _groups(self)
        return self.known

    @property
    def stage(self) -> int:
        """The stage of ZeRO, 1 or 2."""
        return self.shards[0].stage or _configured_stage(self.model)

    @property
    def form(self) -> Form:
        """The optimizer that wrote the files: the ZeRO optimizers name their stage, the bf16 optimizer does not."""
        return "zero" if "zero_stage" in self.shards[0].root else "bf16"

    def frozen(self) -> None:
        """Frozen parameters are whole in the model file."""

    def masters(self) -> dict[str, TensorEntry]:
        """Trainable parameters by name, with the module's own weights as replicas."""
        found: dict[str, TensorEntry] = {}
        files = [shard.file for shard in self.shards]
        for group in self.groups:
            for entry in group.entries([shard.vectors[group.number] for shard in self.shards], files, self.model):
                found[entry.name] = entry
        return found

    def padding(self) -> Iterator[Padding]:
        """The elements of the masters and of Adam's moments that belong to no parameter, vector by vector; all are zero.

        DeepSpeed fills them with zeros, in masters and gradients; so no step of an optimizer such as Adam changes them.
        """
        for group in self.groups:
            yield from _padding(group, self.shards, None)
            for name in _ADAM:
                if all(name in per_element(shard.states[group.number]) for shard in self.shards):
                    yield from _padding(group, self.shards, name)

    def training(self) -> Training:
        """What the run needs beside its weights. Raises IncompleteError if a rank's file does not have a state that others
        have.
        """
        groups: list[ParameterGroup] = []
        padding: list[Padding] = []
        states: dict[str, dict[str, TensorEntry]] = {name: {} for shapes in self.model.param_shapes for name in shapes}
        first = self.shards[0]
        for group in self.groups:
            names = tuple(per_element(first.states[group.number]))
            for state in names:
                vectors = [state_vector(shard, group.number, state) for shard in self.shards]
                for entry in group.entries(vectors, [shard.file for shard in self.shards]):
                    states[entry.name][state] = entry
                padding += _padding(group, self.shards, state)
            order = tuple(group.shapes)
            if self.form == "zero" and self.model.zero_config.get("round_robin_gradients"):
                order = tuple(in_original_order(order, self.world_size))
            groups.append(group_of(order, first, group.number, group.number))
        return training_of(self.model, first, groups, states, padding, self.form)


def load(
    listing: Listing, mp_rank: int = 0, *, allow_unknown: bool = False, model: ModelStates | None = None
) -> Zero12Save:
    """The files of one model-parallel rank.

    Args:
        listing: all files.
        mp_rank: which rank's.
        allow_unknown: go on although an optimizer file holds keys that this version of zckpt does not know.
        model: the model file, if it has been read.

    Raises:
        IncompleteError, InconsistentError, CorruptError, UnsupportedError: see those.
    """
    name = next((n for n in listing.matching(MODEL_NAME) if int(n.split("_")[2]) == mp_rank), None)
    if model is None and name is None:  # first of all: it may be that the keys in other files are those of stage 3
        raise missing_model_file(listing, mp_rank)
    shards = read_shards(listing, _KNOWN, mp_rank, allow_unknown=allow_unknown)
    if model is None:
        assert name is not None
        model = read_model_states(listing, name)
    world_size = check_ranks(listing, shards, model)
    if not model.param_shapes:
        raise without_shapes(model)
    counts = {len(shard.vectors) for shard in shards}
    if counts != {len(model.param_shapes)}:
        raise InconsistentError(
            "the optimizer groups do not match the model's", file=shards[0].file,
            found=f"{sorted(counts)} groups of master weights",
            expected=f"{len(model.param_shapes)} groups, as in {model.file!r}", remedy=OTHER_SAVE,
        )  # fmt: skip
    return Zero12Save(model, shards, world_size)


def _configured_stage(model: ModelStates) -> int:
    """The stage of the bf16 optimizer, which its files do not name; the config can only give 1."""
    stage = model.zero_config.get("stage")
    return stage if isinstance(stage, int) and stage in (1, 2) else 1


@dataclass(frozen=True, slots=True)
class _Group:
    """One optimizer group, and the places of its parameters in the ranks' vectors."""

    number: int
    shapes: Mapping[str, Shape]
    offsets: list[int]
    total: int
    size: int
    pieces: list[tuple[VectorRun, ...]]

    def alignment(self) -> Iterator[VectorRun]:
        """The padding between the parameters."""
        stops = (offset + math.prod(shape) for shape, offset in zip(self.shapes.values(), self.offsets, strict=True))
        for stop, start in zip(stops, [*self.offsets, self.total][1:], strict=True):
            if stop < start:
                yield from flat_pieces(stop, start - stop, self.size)

    def end(self, vectors: Sequence[TensorRef], files: Sequence[str]) -> Iterator[VectorRun]:
        """The elements that fill up the group, so that all ranks share it evenly; states may have them where masters do
        not. Raises InconsistentError if there are more than that needs.
        """
        real = [max(0, min(self.size, self.total - rank * self.size)) for rank in range(len(vectors))]
        left = [max(0, vector.numel - own) for vector, own in zip(vectors, real, strict=True)]
        if sum(left) >= 2 * len(vectors):
            raise InconsistentError(
                f"the padding of optimizer group {self.number} is too long",
                file=files[max(range(len(left)), key=left.__getitem__)],
                found=f"{sum(left):,} elements after the last parameter",
                expected=f"fewer than {2 * len(vectors)} elements",
                remedy=OTHER_SAVE,
            )
        for rank, (own, count) in enumerate(zip(real, left, strict=True)):
            yield VectorRun(rank, own, 0, count)

    def entries(
        self, vectors: Sequence[TensorRef], files: Sequence[str], model: ModelStates | None = None
    ) -> Iterator[TensorEntry]:
        """The parameters in vectors with the layout of the masters: the masters, a state, or replicas."""
        dtype = vectors[0].dtype
        for (name, shape), pieces in zip(self.shapes.items(), self.pieces, strict=True):
            fragments = [fragment_of(vectors[p.index], p, p.start, files[p.index]) for p in pieces]
            replicas = () if model is None else replicas_of(name, shape, model)
            yield TensorEntry(name, shape, dtype, "parameter", tuple(fragments), replicas)


def _groups(save: Zero12Save) -> Iterator[_Group]:
    for number, shapes in enumerate(save.model.param_shapes):
        paddings = save.shards[0].alignment_paddings
        if paddings is not None:
            paddings = (_group_paddings(paddings, number, len(shapes), save.shards[0]),)
        numels = [math.prod(shape) for shape in shapes.values()]
        offsets, total = flat_offsets(numels, paddings and paddings[0])
        _check_lengths(number, len(shapes), total, save)
        # See the note in `partition`: rank 0's vector is full, or holds all.
        size = save.shards[0].vectors[number].numel
        pieces = [tuple(flat_pieces(offset, numel, size)) for offset, numel in zip(offsets, numels, strict=True)]
        yield _Group(number, shapes, offsets, total, size, pieces)


def _group_paddings(
    paddings: tuple[tuple[int, ...], ...], number: int, expected: int, shard: OptimizerShard
) -> tuple[int, ...]:
    found = len(paddings[number]) if number < len(paddings) else 0
    if found != expected:
        raise CorruptError(
            f"alignment paddings of optimizer group {number} do not fit its parameters", file=shard.file,
            found=f"{found} paddings", expected=f"{expected} paddings", remedy=COPY_AGAIN,
        )  # fmt: skip
    return paddings[number]


_ADAM = ("exp_avg", "exp_avg_sq")


def _padding(group: _Group, shards: Sequence[OptimizerShard], state: str | None) -> Iterator[Padding]:
    """The padding of the masters, or of a state with the same layout, vector by vector."""
    number = group.number
    vectors = [shard.vectors[number] if state is None else state_vector(shard, number, state) for shard in shards]
    files = [shard.file for shard in shards]
    places = {
        "alignment of parameters": group.alignment(),
        "the end of a group that ranks share evenly": group.end(vectors, files),
    }
    for why, pieces in places.items():
        held: dict[int, list[Fragment]] = {}
        for piece in pieces:
            if piece.count:
                vector = vectors[piece.index]
                held.setdefault(piece.index, []).append(fragment_of(vector, piece, piece.offset, files[piece.index]))
        for rank, fragments in held.items():
            yield Padding(vectors[rank].dtype, tuple(fragments), why, zero=state is None or state in _ADAM)


def _check_lengths(number: int, parameters: int, total: int, save: Zero12Save) -> None:
    """Checks that every rank holds its whole partition, or all of it but the padding at the end. Raises
    InconsistentError if the element counts do not add up.
    """
    vectors = [shard.vectors[number] for shard in save.shards]
    lengths = [vector.numel for vector in vectors]
    size, world_size = lengths[0], save.world_size
    padded = size * world_size
    for rank, length in enumerate(lengths):
        real = max(0, min(size, total - rank * size))
        if length not in (real, size) or padded < total or (size != total and padded - total >= 2 * world_size):
            raise InconsistentError(
                f"element counts of optimizer group {number} do not add up",
                file=save.shards[rank].file,
                found=f"{length:,} elements in this rank's partition (rank 0 has {size:,}, all ranks {sum(lengths):,})",
                expected=f"{real:,} elements, of the {total:,} that its {parameters:,} parameters need",
                remedy=OTHER_SAVE,
            )
    dtypes = {vector.dtype.name for vector in vectors}
    if len(dtypes) != 1:
        raise InconsistentError(
            f"master weights of optimizer group {number} have several dtypes",
            file=save.shards[0].file, found=", ".join(sorted(dtypes)),
            remedy=OTHER_SAVE,
        )  # fmt: skip
