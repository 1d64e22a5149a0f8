"""Mixtures of experts: DeepSpeed's own layer without ZeRO and under ZeRO-1 and -2, AutoEP under ZeRO-3 too.

For `layouts.FAMILIES`. How they are put together: `mixture`. Here are those with a model that is split over
tensor-parallel ranks too.

[Note: experts under tensor parallelism] Either each expert is split like the rest (`enable_expert_tensor_parallelism`): every
tensor-parallel rank has files of all experts, which is a mixture of its own, of slices; or experts are whole, and spread over
all ranks: rank D x tp + T is data-parallel rank D of tensor-parallel rank T, each expert has one file, and the groups of ranks
that share experts are counted in these numbers.

[Note: experts in a pipeline] A stage is a mixture of its own: its model file holds its weights (there are no layer files), its
layers of experts are counted from 0, and "all ranks" above are those of the stage. A stage without experts is an ordinary one,
with layer files.

[Note: model files that DeepSpeed does not write] Whole experts on fewer ranks than there are tensor-parallel ones: those that
only hold copies of experts leave the save before they write their `mp_rank_XX_model_states.pt`. Under ZeRO their masters are
there. Shapes are those of the tensor-parallel rank before, if the optimizer files name the same parameters of the same sizes;
buffers are its own; frozen slices are lost.
Source: DeepSpeed 0.19.8, utils/groups.py `_create_expert_and_data_parallel`, `_create_expert_data_and_model_parallel`;
runtime/engine.py `save_checkpoint`, `_save_moe_checkpoint`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.base.errors import InconsistentError
from zckpt.base.words import examples
from zckpt.containers import Placeholder, list_at, mapping_at, value_at
from zckpt.core.catalog import Catalog, Source, Topology
from zckpt.layouts.moe import holds_experts
from zckpt.layouts.moe.experts import Layers, is_own, read_layers, second_routers, without_experts
from zckpt.layouts.moe.groups import split_by_experts
from zckpt.layouts.moe.mixture import MixtureReader, load, model_name
from zckpt.layouts.parallel import read as model_parallel
from zckpt.layouts.parallel.read import ModelSlice
from zckpt.layouts.run.agreement import merge_groups
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.listing import EXPERT_NAME, MODEL_NAME, Listing
from zckpt.layouts.save.module_states import ModelStates, read_model_states
from zckpt.layouts.zero import read as zero
from zckpt.layouts.zero import unsharded, zero3
from zckpt.layouts.zero.assembly import assemble

if TYPE_CHECKING:
    from zckpt.layouts.zero.read import Save


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a mixture of experts; arguments as in `zero12.load`. Raises IncompleteError if an expert's file,
    or a rank's, is missing; InconsistentError if files are of different saves, or experts are left over from another;
    UnsupportedError if masters of a kind that zckpt does not know.
    """
    return _open(listing, allow_unknown).catalog()


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What the run needs beside its weights, with experts named as among all; arguments and errors as in `read`."""
    return _open(listing, allow_unknown).training()


def _open(listing: Listing, allow_unknown: bool) -> MixtureReader | Split:
    """Opens a save: experts of a model that is split over tensor-parallel ranks may be split too, or be spread over all ranks."""
    ranks = len(listing.model_parallel_ranks())
    if ranks < 2 and listing.numbers(model_name(listing), "mp_world_size").get("mp_world_size", 1) < 2:
        model = read_model_states(listing, model_name(listing))
        layers = read_layers(listing, model)
        save = load(listing, allow_unknown, model, layers)
        return MixtureReader(listing, save, save.model if save else model, layers)
    return Split(listing, allow_unknown)


class Split(model_parallel.ParallelSave):
    """A save of a model that is split over tensor-parallel ranks; see [Note: experts under tensor parallelism]."""

    def __init__(self, listing: Listing, allow_unknown: bool) -> None:
        self.held: dict[int, Topology] = {}
        self.saves: dict[int, Save] = {}
        self.spread: dict[int, Layers] = {}
        self.unwritten: list[str] = []
        self.whole: dict[int, MixtureReader] = {}
        super().__init__(listing, allow_unknown)
        for ranks in self._stages():
            if ranks[0] in self.spread.keys() - self.whole.keys():
                self.whole[ranks[0]] = self._of_all(ranks)

    def _stages(self) -> list[range]:
        """The model-parallel ranks of each pipeline stage."""
        tp = self.topology.tp
        return [range(first, first + tp) for first in range(0, tp * self.topology.pp, tp)]

    def _model(self, rank: int) -> ModelStates:
        """A rank's model file, or one derived from what is known of it; see [Note: model files that DeepSpeed does not
        write].
        """
        written = [int(name.split("_")[2]) for name in self.listing.matching(MODEL_NAME)]
        shards = self.listing.shards("optim", rank).values()
        before = max((other for other in written if other < rank), default=None)
        if rank in written or before is None or not shards or _expert_files(self.listing, range(rank, rank + 1)):
            return super()._model(rank)
        model = super()._model(before)
        if not holds_experts(model.root) or _sizes(model) != _held_sizes(
            self.listing.open(name).root for name in shards
        ):
            return super()._model(rank)
        self.unwritten.append(f"mp_rank_{rank:02d}_model_states.pt")
        buffers = {name: ref for name, ref in model.module.items() if name in model.buffer_names}
        return replace(model, module=buffers, frozen_shapes={}, frozen_fragments={})

    def _notes(self) -> Iterator[str]:
        yield from super()._notes()
        if self.unwritten:
            yield (
                f"DeepSpeed does not write {examples(self.unwritten)} if experts are on fewer ranks than there are "
                "tensor-parallel ranks, and cannot load such a save. Slices of these ranks come from the fp32 master weights of "
                "the optimizer, without a second copy to check them against."
            )

    def slice_of(self, rank: int, model: ModelStates, tied: Mapping[str, str]) -> ModelSlice:
        """The slices of a rank: all, or those outside experts."""
        stage = self._stages()[rank // self.topology.tp]
        if self.topology.pp > 1 and not holds_experts(model.root):
            self._check_none(rank)
            return super().slice_of(rank, model, tied)
        if rank == stage[0] and len(stage) > 1 and not _are_sliced(self.listing, stage):
            self.spread[rank] = read_layers(self.listing, model, stage)
        own, spread = range(rank, rank + 1), self.spread.get(stage[0])
        layers = spread or read_layers(self.listing, model, own)
        save = load(self.listing, self.allow_unknown, model, layers, rank)
        if spread is None:
            reader = MixtureReader(self.listing, save, save.model if save else model, layers, own)
            catalog = reader.catalog()
            self.held[rank] = catalog.topology
            return ModelSlice(catalog, reader.model, reader.training, save)
        if save is None:
            model = replace(model, shared=dict(second_routers(model)))
            if rank == stage[0]:
                self.whole[rank] = self._of_all(stage)
            whole = self.whole[stage[0]]
            masters = whole.unsharded.dense.get(rank) if whole.unsharded else None
            if not masters:
                return super().slice_of(rank, model, tied)
            catalog = assemble(model, masters, Source("", self.listing.directory.path), self.topology, frozen={})
            return ModelSlice(
                unsharded.frozen_without_master(catalog, masters),
                model,
                lambda: _those(whole.training_of(rank), whole.layers, experts=False),
            )
        self.saves[rank] = save
        dense, _ = split_by_experts(save, spread)
        shared = {**dense.model.shared, **dict(second_routers(dense.model))}
        dense = replace(dense, model=replace(dense.model, shared=shared))
        if isinstance(dense, zero3.Zero3Save):
            zero3.check_lengths(dense)
        catalog = zero.catalog_of(dense, Source("", self.listing.directory.path), self.topology)
        return ModelSlice(catalog, save.model, dense.training, dense)

    def _check_none(self, rank: int) -> None:
        """Checks that a stage without experts has no files of experts."""
        if strange := [match[0] for match in _expert_files(self.listing, range(rank, rank + 1))]:
            raise InconsistentError(
                "holds files of experts that the model does not have", file=self.listing.directory, found=examples(strange),
                expected=f"no experts of mp_rank {rank:02d}, a pipeline stage without experts",
                remedy="Move them away if another save left them over; if not, copy all files of one save again.",
            )  # fmt: skip

    def _of_all(self, ranks: range) -> MixtureReader:
        """The experts of all ranks of a stage, as a mixture of experts alone; without ZeRO, with the first rank's
        slices.
        """
        layers, saves = self.spread[ranks[0]], [self.saves[rank] for rank in ranks if rank in self.saves]
        if not saves:
            models = [self._model(rank) for rank in ranks]
            return MixtureReader(self.listing, None, models[0], layers, ranks, models)
        apart = [split_by_experts(save, layers)[1] for save in saves]
        shards = [shard for same in zip(*(save.shards for save in apart), strict=True) for shard in same]
        save = replace(apart[0], shards=shards, world_size=len(shards))
        if isinstance(save, zero3.Zero3Save):
            names = [
                name
                for same in zip(*(list(own.names.values()) for own in apart if isinstance(own, zero3.Zero3Save)))
                for name in same
            ]
            save = replace(save, names=dict(enumerate(names)), shard_size=len(shards))
        return MixtureReader(self.listing, save, save.model, layers, ranks)

    def catalog(self) -> Catalog:
        """The whole model; errors as in `read`."""
        catalog = super().catalog()
        tensors, aliases, padding = dict(catalog.tensors), dict(catalog.aliases), list(catalog.padding)
        views = list(catalog.views)
        stages: list[Topology] = []
        for ranks in self._stages():
            if whole := self.whole.get(ranks[0]):
                experts = whole.catalog()
                tensors |= {name: experts.tensors[name] for name in whole.layers.owned(experts.tensors, experts=True)}
                aliases |= {name: experts.aliases[name] for name in whole.layers.owned(experts.aliases, experts=True)}
                padding += experts.padding
                views += experts.views
                stages.append(experts.topology)
            elif held := self.held.get(ranks[0]):
                stages.append(held)
        layers = tuple(layer for stage in stages for layer in stage.experts)
        topology = replace(catalog.topology, ep=max(stage.ep for stage in stages), experts=layers)
        return replace(
            catalog, tensors=tensors, aliases=aliases, topology=topology, padding=tuple(padding), views=tuple(views)
        )

    def training(self) -> Training:
        """What the run needs beside its weights; errors as in `read`."""
        training = super().training()
        experts = [_those(whole.training(), whole.layers, experts=True) for whole in self.whole.values()]
        states, padding = dict(training.states), list(training.padding)
        for own in experts:
            states |= own.states
            padding += own.padding
        groups = (*training.groups, *merge_groups([own.groups for own in experts]))
        return replace(without_experts(training), groups=groups, states=states, padding=tuple(padding))


def _those(training: Training, layers: Layers, *, experts: bool) -> Training:
    """What a run needs for experts alone, or for all other parameters alone."""
    named = ((group, tuple(layers.owned(group.names, experts=experts))) for group in training.groups)
    groups = tuple(replace(group, names=names) for group, names in named if names)
    states = {name: training.states[name] for name in layers.owned(training.states, experts=experts)}
    return replace(training, groups=groups, states=states)


def _expert_files(listing: Listing, ranks: range) -> list[re.Match[str]]:
    """The names of experts' files of some model-parallel ranks."""
    matches = (EXPERT_NAME.fullmatch(name) for name in listing.files)
    return [match for match in matches if match and int(match["mp"]) in ranks]


def _are_sliced(listing: Listing, ranks: range) -> bool:
    """Whether any expert has a file of more than one of a stage's tensor-parallel ranks."""
    held = [(int(match["layer"]), int(match["expert"])) for match in _expert_files(listing, ranks)]
    return len(set(held)) < len(held)


def _sizes(model: ModelStates) -> dict[str, int]:
    """The number of elements of each trainable parameter outside experts, as a model file lists them."""
    sizes = {name: math.prod(shape) for group in model.param_shapes for name, shape in group.items()}
    return {name: numel for name, numel in sizes.items() if numel and not is_own(name)}


def _held_sizes(optimizers: Iterable[object]) -> dict[str, int]:
    """The same numbers of elements, as a rank's optimizer files have them."""
    sizes: dict[str, int] = {}
    for root in optimizers:
        for mapping in list_at(root, "optimizer_state_dict", "param_slice_mappings"):
            for name, address in mapping_at(mapping).items():
                numel = value_at(address.state, "numel") if isinstance(address, Placeholder) else None
                if not is_own(str(name)):
                    sizes[str(name)] = sizes.get(str(name), 0) + (numel if isinstance(numel, int) else 0)
    return sizes
