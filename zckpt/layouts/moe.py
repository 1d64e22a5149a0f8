"""Mixtures of experts: DeepSpeed's own layer without ZeRO and under ZeRO-1 and -2, AutoEP under ZeRO-3 too.

For `layouts.detect`. How they are put together: `mixture`. Here are those whose model is split over tensor-parallel ranks too.

[Note: experts under tensor parallelism] Either each expert is split like the rest (`enable_expert_tensor_parallelism`): every
tensor-parallel rank has files of all experts, which is a mixture of its own, of slices; or experts are whole, and spread over
all ranks: rank D x tp + T is data-parallel rank D of tensor-parallel rank T, each expert has one file, and the groups of ranks
that share experts are counted in these numbers.
Source: DeepSpeed 0.19.8, utils/groups.py `_create_expert_and_data_parallel`, `_create_expert_data_and_model_parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zckpt.catalog import Catalog, Source
from zckpt.errors import UnsupportedError
from zckpt.layouts import model_parallel, unsharded, zero12
from zckpt.layouts.assembly import assemble
from zckpt.layouts.expert_groups import Save, told_apart
from zckpt.layouts.expert_records import second_routers
from zckpt.layouts.experts import Layers, read_layers
from zckpt.layouts.listing import EXPERT_NAME, EXPERT_OPTIMIZER_NAME, LAYER_NAME, MODEL_NAME, Listing
from zckpt.layouts.mixture import Reader, load, model_name
from zckpt.layouts.model_parallel import Slice
from zckpt.layouts.module_states import ModelStates, read_model_states
from zckpt.layouts.training import Training


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not."""
    if listing.matching(EXPERT_NAME) or listing.matching(EXPERT_OPTIMIZER_NAME):
        return None
    first = next(iter((*listing.matching(MODEL_NAME), *listing.shards("model").values())), None)
    root = listing.open(first).root if first is not None else None
    counts = root.get("num_experts") if isinstance(root, Mapping) else None
    return None if isinstance(counts, list) and counts else "no experts"  # if there are, their files are missing


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a mixture of experts; arguments as in `zero12.read`.

    Raises:
        IncompleteError: an expert's file, or a rank's, is missing.
        InconsistentError: files are of different saves, or experts are left over from another.
        UnsupportedError: experts under pipeline parallelism.
    """
    return _open(listing, allow_unknown).catalog()


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What the run needs beside its weights, of experts under the names they have among all; as in `read`."""
    return _open(listing, allow_unknown).training()


def _open(listing: Listing, allow_unknown: bool) -> Reader | Split:
    """Of a model that is split over tensor-parallel ranks, experts may be too, or are spread over all ranks."""
    if len(listing.model_parallel_ranks()) < 2:
        save = load(listing, allow_unknown)
        model = save.model if save else read_model_states(listing, model_name(listing))
        return Reader(listing, save, model, read_layers(listing, model))
    return Split(listing, allow_unknown)


class Split(model_parallel.Reader):
    """A model that is split over tensor-parallel ranks; see [Note: experts under tensor parallelism]."""

    def __init__(self, listing: Listing, allow_unknown: bool) -> None:
        if listing.matching(LAYER_NAME) or listing.shards("model"):
            raise UnsupportedError(
                "experts under pipeline parallelism, or under ZeRO-3 and tensor parallelism", file=listing.directory,
                found=f"files of {len(listing.model_parallel_ranks())} model-parallel ranks",
                expected="experts under data and tensor parallelism are read",
            )  # fmt: skip
        self.held: dict[int, Reader] = {}
        self.saves: dict[int, zero12.Save] = {}
        first = read_model_states(listing, model_name(listing, listing.model_parallel_ranks()[0]))
        self.spread = None if _are_sliced(listing) else read_layers(listing, first)
        super().__init__(listing, allow_unknown)
        self.whole = self._of_all(self.spread, first) if self.spread else None

    def slice_of(self, rank: int, model: ModelStates, tied: Mapping[str, str]) -> Slice:
        """Of a rank: all its slices, or those that are not experts'."""
        save = load(self.listing, self.allow_unknown, rank)
        if self.spread is None:
            layers = read_layers(self.listing, model, rank)
            reader = self.held[rank] = Reader(self.listing, save, model, layers, rank)
            return Slice(reader.catalog(), reader.model, reader.training if save else None)
        if not isinstance(save, zero12.Save):
            if unsharded.master_groups(model.root.get("optimizer"), model.file) is not None:
                raise UnsupportedError(
                    "masters of experts that are spread over tensor-parallel ranks, without ZeRO", file=model.file,
                    expected="fp32 runs, and ZeRO-1 and -2, are read",
                )  # fmt: skip
            return super().slice_of(rank, replace(model, shared=dict(second_routers(model))), tied)
        self.saves[rank] = save
        dense, _ = told_apart(save, self.spread)
        shared = {**dense.model.shared, **dict(second_routers(dense.model))}
        dense = replace(dense, model=replace(dense.model, shared=shared))
        catalog = assemble(dense.model, zero12.masters(dense), Source("", self.listing.directory), self.topology)
        return Slice(catalog, save.model, lambda: zero12.training(dense))

    def _of_all(self, layers: Layers, model: ModelStates) -> Reader:
        """What all ranks hold of experts, as a mixture of nothing else."""
        save: Save | None = None
        if self.saves:
            apart = [told_apart(self.saves[rank], layers)[1] for rank in sorted(self.saves)]
            shards = [shard for same in zip(*(save.shards for save in apart), strict=True) for shard in same]
            save = zero12.Save(apart[0].model, shards, len(shards))
            model = save.model
        else:
            own = {name: ref for name, ref in model.module.items() if layers.owner(name) is not None}
            model = replace(model, module=own)
        return Reader(self.listing, save, model, layers)

    def catalog(self) -> Catalog:
        """The whole model; errors as in `read`."""
        catalog = super().catalog()
        if self.whole is None:
            spread = self.held[0].catalog().topology
            return replace(catalog, topology=replace(catalog.topology, ep=spread.ep, experts=spread.experts))
        experts = self.whole.catalog()
        topology = replace(catalog.topology, ep=experts.topology.ep, experts=experts.topology.experts)
        return replace(
            catalog,
            tensors={**catalog.tensors, **experts.tensors},
            aliases={**catalog.aliases, **experts.aliases},
            topology=topology,
        )

    def training(self) -> Training:
        """What the run needs beside its weights; errors as in `read`."""
        training = super().training()
        if self.whole is None:
            return training
        experts = self.whole.training()
        return replace(
            experts,
            groups=(*training.groups, *experts.groups),
            states={**training.states, **experts.states},
            joined=training.joined,
        )


def _are_sliced(listing: Listing) -> bool:
    """Whether any expert has a file of more than one model-parallel rank."""
    matches = [EXPERT_NAME.fullmatch(name) for name in listing.files]
    experts = [(int(match["layer"]), int(match["expert"])) for match in matches if match]
    return len(set(experts)) < len(experts)
