"""A mixture of experts, joined from its ranks' parts: masters, stacks of experts, names among all experts.

For `moe`. Layers and their files: `experts`; what each data-parallel group of ranks holds under ZeRO: `groups`.
Experts' files hold module weights: they name and shape the experts, and prove the masters.
Source: DeepSpeed 0.19.8, runtime/engine.py `_save_moe_checkpoint`, module_inject/auto_ep_layer.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, IncompleteError, InconsistentError
from zckpt.base.words import examples, ranks
from zckpt.containers import TensorRef
from zckpt.core.catalog import Catalog, Replica, Role, TensorEntry
from zckpt.layouts.joining.rules import rules_of_checkpoint
from zckpt.layouts.joining.slices import Joint, join
from zckpt.layouts.moe.experts import Layer, Layers, modules, second_routers, sharers, without_experts
from zckpt.layouts.moe.groups import parts_of, with_shapes
from zckpt.layouts.moe.optimizers import NamedMasters, Optimizers, spread_of
from zckpt.layouts.run.agreement import merge_groups
from zckpt.layouts.run.training import ParameterGroup, Training
from zckpt.layouts.run.values import missing_model_file, missing_ranks
from zckpt.layouts.save.listing import MODEL_NAME, Listing
from zckpt.layouts.save.module_states import ModelStates, Shape, renamed_experts
from zckpt.layouts.zero import read as zero
from zckpt.layouts.zero import unsharded
from zckpt.layouts.zero.assembly import assemble, source_of

if TYPE_CHECKING:
    from zckpt.layouts.zero.read import Save

_EXPERTS = ".deepspeed_experts."


class MixtureReader:
    """Reads the part of a set of data-parallel ranks: for a model that is not split, everything.

    Args:
        listing: the files.
        save: what of them is ZeRO's, if any.
        model: the first model file.
        layers: of experts.
        mp_ranks: the model-parallel ranks that these ranks belong to.
        slices: without ZeRO, the model files of all of these; None for the first one alone.
    """

    def __init__(
        self,
        listing: Listing,
        save: Save | None,
        model: ModelStates,
        layers: Layers,
        mp_ranks: range = range(1),
        slices: Sequence[ModelStates] = (),
    ) -> None:
        self.listing = listing
        self.save = save
        self.mp_ranks = mp_ranks
        self.world_size = save.world_size if save else (model.ranks("dp_world_size") or 1) * len(mp_ranks)
        self.data_first = model.config.get("use_data_before_expert_parallelism") is True
        self.optimizers = None if save else Optimizers(listing, dict(zip(mp_ranks, slices or [model])))
        self.first_state = self.optimizers.states.get(0) if self.optimizers else None
        spread = spread_of(layers, self.first_state)
        listed = list(model.shapes)
        _check_prefixes(model, listed, layers)
        self.layers = layers.spread((*listed, *model.buffer_names), lambda layer: spread.get(layer.experts, 1))
        self.model = _everywhere(model, self.layers)
        self.parts = list(parts_of(save, self.model, self.layers, data_first=self.data_first)) if save else []

    @cached_property
    def unsharded(self) -> NamedMasters | None:
        """Masters of a half-precision run without ZeRO."""
        return self.optimizers.masters(self.model, self.layers, self._rank_in) if self.optimizers else None

    def _rank_in(self, layer: Layer, widest: int) -> int:
        """The expert-parallel rank, in a layer's group, of the writer with the number `widest` in the widest group."""
        return widest * layer.ep // self.layers.ep if self.data_first else widest % layer.ep

    # -- putting it together -----------------------------------------------------------------------------------------

    def _masters(self) -> dict[str, TensorEntry]:
        """The trainable parameters by name."""
        if self.unsharded is not None:
            dense = next(iter(self.unsharded.dense.values()), {})
            return dense | self.unsharded.experts | self._stacked(self.unsharded.stacks)
        found: dict[str, TensorEntry] = {}
        slices: dict[str, dict[int, TensorEntry]] = {}
        for save, _, rank in self.parts:
            for name, entry in save.masters().items():
                if rank is not None and self._is_stacked(name):
                    slices.setdefault(name, {})[rank] = entry
                else:
                    found[name] = entry
        return found | self._stacked(slices)

    def _is_stacked(self, name: str) -> bool:
        owner = self.layers.owner(name)
        return owner is not None and owner[0].stacked

    def _stacked(self, slices: Mapping[str, Mapping[int, TensorEntry]]) -> dict[str, TensorEntry]:
        """Stacked weights, or states of them, joined from each expert-parallel rank's."""
        found: dict[str, TensorEntry] = {}
        for name, held in slices.items():
            owner = self.layers.owner(name)
            assert owner is not None
            if missing := sorted(set(range(owner[0].ep)).difference(held)):
                raise IncompleteError(
                    f"no file holds the part of {name!r} of expert-parallel {ranks(missing)}", file=self.model.file,
                    remedy=COPY_AGAIN,
                )  # fmt: skip
            entries = [replace(held[rank], replicas=()) for rank in range(owner[0].ep)]
            try:
                joint = owner[0].joint([entry.shape for entry in entries])
            except ValueError as error:
                raise InconsistentError(
                    f"stacked experts do not fit layer {owner[0].number}", file=self.model.file, found=str(error),
                    remedy=OTHER_SAVE,
                ) from error  # fmt: skip
            found[name] = join(name, entries, joint)
        return found

    def catalog(self) -> Catalog:
        """The whole model."""
        masters = self._masters()
        trained = dict(masters)
        copies = {kept: self.model.module[dropped] for dropped, kept in self.model.shared.items() if kept in masters}
        weights = {name: Replica(ref.dtype, ref.fragments()) for name, ref in copies.items() if ref.numel}
        for name, weight in self._stacks("frozen" if masters else "parameter").items():
            if name in masters:
                weights[name] = Replica(weight.dtype, weight.fragments)
            else:
                masters[name] = weight
        for name, copy in weights.items():
            masters[name] = replace(masters[name], replicas=(*masters[name].replicas, copy))
        notes = () if trained else unsharded.without_masters(self.model)
        stage = self.save.stage if self.save else 0
        source = source_of(self.listing, self.model, stage, self._state_names(), notes)
        topology = replace(
            self.model.topology(self.world_size),
            ep=self.layers.ep,
            experts=tuple(tuple(self._spread(layer)) for layer in self.layers.all),
        )
        if self.save is None:
            catalog = assemble(self.model, masters, source, topology, frozen={})
            return unsharded.frozen_without_master(catalog, trained) if trained else catalog
        frozen = replace(self.save, model=self.model).frozen()
        padding = (pad for save, _, _ in self.parts for pad in save.padding())
        return assemble(self.model, masters, source, topology, frozen, padding)

    def _state_names(self) -> tuple[str, ...]:
        return self.save.shards[0].state_names if self.save else unsharded.state_names(self.first_state)

    def _stacks(self, role: Role) -> dict[str, TensorEntry]:
        return {name: entry for layer in self.layers.all for name, entry in layer.stacks(role).items()}

    def _spread(self, layer: Layer) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The experts of each expert-parallel rank, and the data-parallel ranks that hold them."""
        for rank, held in enumerate(layer.held):
            yield held, tuple(sharers(layer.ep, rank, self.world_size, data_first=self.data_first))

    def training(self) -> Training:
        """What the run needs beside its weights; of slices, the first model-parallel rank's."""
        if self.save is None:
            return self.training_of(self.mp_ranks[0])
        held = [(rank, own, save.training()) for save, own, rank in self.parts]
        states: dict[str, Mapping[str, TensorEntry]] = {}
        slices: dict[str, dict[str, dict[int, TensorEntry]]] = {}
        groups: dict[int, ParameterGroup] = {}
        for rank, own, training in held:
            for name, by_state in training.states.items():
                if rank is None or not self._is_stacked(name):
                    states[name] = by_state
                    continue
                for state, entry in by_state.items():
                    slices.setdefault(state, {}).setdefault(name, {})[rank] = entry
            for number, group in zip(own, training.groups, strict=True):
                first = groups.setdefault(number, group)
                groups[number] = replace(first, names=tuple(dict.fromkeys((*first.names, *group.names))))
        for state, by_name in slices.items():
            for name, entry in self._stacked(by_name).items():
                states[name] = {**states.get(name, {}), state: entry}
        first_part = held[0][2]
        numbers = sorted(groups)
        return without_experts(
            replace(
                first_part,
                groups=tuple(groups[n] for n in numbers),
                states=states,
                raw=self.save.shards[0].root,
                joined=self._joined(),
                padding=tuple(pad for _, _, training in held for pad in training.padding),
            )
        )

    def training_of(self, mp_rank: int) -> Training:
        """Without ZeRO: what the run of one model-parallel rank needs beside its weights, with all experts."""
        first = next(training for home, training in self._trainings if home == mp_rank)
        states = {name: own for _, training in self._trainings for name, own in training.states.items()}
        groups = merge_groups([training.groups for _, training in self._trainings])
        return without_experts(replace(first, groups=groups, states={**states, **first.states}, joined=self._joined()))

    @cached_property
    def _trainings(self) -> list[tuple[int, Training]]:
        assert self.optimizers is not None
        return list(self.optimizers.trainings(self.model, self.layers, self._rank_in))

    def _joined(self) -> dict[str, Joint]:
        """The entries of a universal checkpoint for each parameter: by the checkpoint's own rules, and for stacks."""
        rules = rules_of_checkpoint(self.model) if self.save is None or self.save.stage < 3 else None
        found: dict[str, Joint] = {}
        for name, shape in ((name, shape) for group in self.model.param_shapes for name, shape in group.items()):
            if (owner := self.layers.owner(name)) is not None and owner[0].stacked:
                words = {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": owner[0].experts}
                found[name] = Joint(shape, (), words=words)
            elif rules is not None:
                found[name] = rules.joint(name, [shape])
        return found


def _check_prefixes(model: ModelStates, listed: Sequence[str], layers: Layers) -> None:
    """Checks that the experts' files and the list of parameters give the layers of experts the same names. Raises
    InconsistentError if they do not.
    """
    files = {layer.prefix for layer in layers.all if not layer.stacked}
    lists = {f"{name.partition(_EXPERTS)[0]}{_EXPERTS[:-1]}" for name in listed if _EXPERTS in name}
    if lists and files and (other := files - lists):
        raise renamed_experts(model.file, examples(sorted(other)), examples(sorted(lists)))


def load(listing: Listing, allow_unknown: bool, model: ModelStates, layers: Layers, mp_rank: int = 0) -> Save | None:
    """One model-parallel rank's files as a ZeRO save, with experts among all parameters; None without ZeRO."""
    optimizers = listing.shards("optim", mp_rank).values()
    if optimizers and not listing.shards("model", mp_rank) and not model.is_zero():
        model = with_shapes(model, [listing.open(name).root for name in optimizers], layers)
    save = zero.load(listing, mp_rank, allow_unknown=allow_unknown, model=model)
    if save is None and model.is_zero():
        world_size = model.ranks("dp_world_size") or 1
        raise missing_ranks(listing, "optimizer", [], list(range(world_size)), world_size)
    return save


def model_name(listing: Listing, mp_rank: int = 0) -> str:
    """The model file of a model-parallel rank; under ZeRO-3, the first data-parallel rank's."""
    names = (name for name in listing.matching(MODEL_NAME) if int(name.split("_")[2]) == mp_rank)
    name = next(iter((*names, *listing.shards("model", mp_rank).values())), None)
    if name is None:
        raise missing_model_file(listing)
    return name


def _everywhere(model: ModelStates, layers: Layers) -> ModelStates:
    """The first rank's model file with all experts, under their names among all, after the rest of their layer."""
    homes = {layer.home: layer for layer in layers.all}
    last = {home: name for name in model.module for home in modules(name) if home in homes}
    after: dict[str, dict[str, TensorRef]] = {}
    for home, layer in homes.items():
        after.setdefault(last.get(home, ""), {}).update(layer.module())
    module: dict[str, TensorRef] = {}
    for name, ref in model.module.items():
        module[name] = ref
        module |= after.get(name, {})
    module |= after.get("", {})

    def named(shapes: Mapping[str, Shape], *, stacked: bool) -> dict[str, Shape]:
        owners = {name: layers.owner(name) for name in shapes}
        return {
            own: (owner[0].experts, *shapes[name][1:]) if owner and owner[0].stacked else shapes[name]
            for name, owner in owners.items()
            for own in layers.names_everywhere(name)
            if stacked or not (owner and owner[0].stacked)
        }

    shared = dict(second_routers(model))
    for dropped, kept in model.shared.items():
        shared |= dict(zip(layers.names_everywhere(dropped), itertools.cycle(layers.names_everywhere(kept))))
    return replace(
        model,
        module=module,
        buffer_names=frozenset(own for name in model.buffer_names for own in layers.names_everywhere(name)),
        param_shapes=tuple(named(group, stacked=True) for group in model.param_shapes),
        frozen_shapes=named(model.frozen_shapes, stacked=False),
        frozen_fragments={n: ref for n, ref in model.frozen_fragments.items() if layers.owner(n) is None},
        shared=shared,
    )
