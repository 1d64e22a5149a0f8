"""Mixtures of experts: DeepSpeed's own layer without ZeRO and under ZeRO-1 and -2, AutoEP under ZeRO-3 too.

For `layouts.detect`. How they are put together: `mixture`. Here are those whose model is split over tensor-parallel ranks too.

[Note: experts under tensor parallelism] Either each expert is split like the rest (`enable_expert_tensor_parallelism`): every
tensor-parallel rank has files of all experts, which is a mixture of its own, of slices; or experts are whole, and spread over
all ranks: rank D x tp + T is data-parallel rank D of tensor-parallel rank T, each expert has one file, and the groups of ranks
that share experts are counted in these numbers.

[Note: experts in a pipeline] A stage is a mixture of its own: its model file holds its weights (there are no layer files), and
its layers of experts are counted from 0.
Source: DeepSpeed 0.19.8, utils/groups.py `_create_expert_and_data_parallel`, `_create_expert_data_and_model_parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zckpt.catalog import Catalog, Source
from zckpt.errors import UnsupportedError
from zckpt.layouts import model_parallel, unsharded, zero3, zero12
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
        UnsupportedError: experts in a pipeline that are spread over tensor-parallel ranks.
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
        self.held: dict[int, Reader] = {}
        self.saves: dict[int, Save] = {}
        ranks = listing.model_parallel_ranks()
        elsewhere = bool(listing.matching(LAYER_NAME))
        first = read_model_states(listing, model_name(listing, ranks[0]), module={} if elsewhere else None)
        tp, pp = _degrees(listing, first, len(ranks))
        whole = tp > 1 and not _are_sliced(listing, tp)
        if elsewhere or (whole and pp > 1):
            raise UnsupportedError(
                "experts in a pipeline, in some of its stages only or spread over tensor-parallel ranks too",
                file=listing.directory, found=f"{pp} stages of {tp} tensor-parallel ranks",
                expected="pipelines with experts in all stages, spread over data-parallel ranks, are read",
                remedy="Load it with the DeepSpeed that wrote it, and save each rank's module.",
            )  # fmt: skip
        self.spread = read_layers(listing, first) if whole else None
        super().__init__(listing, allow_unknown)
        self.whole = self._of_all(self.spread, first) if self.spread else None

    def slice_of(self, rank: int, model: ModelStates, tied: Mapping[str, str]) -> Slice:
        """Of a rank: all its slices, or those that are not experts'."""
        save = load(self.listing, self.allow_unknown, rank)
        if self.spread is None:
            layers = read_layers(self.listing, model, rank)
            reader = self.held[rank] = Reader(self.listing, save, model, layers, rank)
            shard = save.shards[0] if save else None
            return Slice(reader.catalog(), reader.model, reader.training if save else None, shard)
        if save is None:
            if unsharded.master_groups(model.root.get("optimizer"), model.file) is not None:
                raise UnsupportedError(
                    "masters of experts that are spread over tensor-parallel ranks, without ZeRO", file=model.file,
                    expected="fp32 runs, and ZeRO of any stage, are read",
                )  # fmt: skip
            return super().slice_of(rank, replace(model, shared=dict(second_routers(model))), tied)
        self.saves[rank] = save
        dense, _ = told_apart(save, self.spread)
        shared = {**dense.model.shared, **dict(second_routers(dense.model))}
        dense = replace(dense, model=replace(dense.model, shared=shared))
        source = Source("", self.listing.directory)
        if isinstance(dense, zero3.Save):
            zero3.check_lengths(dense)
            catalog = assemble(dense.model, zero3.masters(dense), source, self.topology, zero3.frozen(dense))
            return Slice(catalog, save.model, lambda: zero3.training(dense), dense.shards[0])
        catalog = assemble(dense.model, zero12.masters(dense), source, self.topology)
        return Slice(catalog, save.model, lambda: zero12.training(dense), dense.shards[0])

    def _of_all(self, layers: Layers, model: ModelStates) -> Reader:
        """What all ranks hold of experts, as a mixture of nothing else."""
        save: Save | None = None
        if self.saves:
            apart = [told_apart(self.saves[rank], layers)[1] for rank in sorted(self.saves)]
            shards = [shard for same in zip(*(save.shards for save in apart), strict=True) for shard in same]
            save = replace(apart[0], shards=shards, world_size=len(shards))
            if isinstance(save, zero3.Save):
                names = [
                    name
                    for same in zip(*(list(own.names.values()) for own in apart if isinstance(own, zero3.Save)))
                    for name in same
                ]
                save = replace(save, names=dict(enumerate(names)), shard_size=len(shards))
            model = save.model
        else:
            own = {name: ref for name, ref in model.module.items() if layers.owner(name) is not None}
            model = replace(model, module=own)
        return Reader(self.listing, save, model, layers)

    def catalog(self) -> Catalog:
        """The whole model; errors as in `read`."""
        catalog = super().catalog()
        if self.whole is None:
            stages = [self.held[rank].catalog().topology for rank in range(0, len(self.held), self.topology.tp)]
            experts = tuple(layer for stage in stages for layer in stage.experts)
            ep = max(stage.ep for stage in stages)
            return replace(catalog, topology=replace(catalog.topology, ep=ep, experts=experts))
        whole = self.whole.catalog()
        topology = replace(catalog.topology, ep=whole.topology.ep, experts=whole.topology.experts)
        return replace(
            catalog,
            tensors={**catalog.tensors, **whole.tensors},
            aliases={**catalog.aliases, **whole.aliases},
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


def _degrees(listing: Listing, model: ModelStates, ranks: int) -> tuple[int, int]:
    """Tensor-parallel ranks and pipeline stages: what a person said, what the files say, or all are of one stage."""
    wished, recorded = listing.wishes, model.topology(1)
    if wished.tp or wished.pp:
        tp = wished.tp or ranks // (wished.pp or 1) or 1
        return tp, wished.pp or ranks // tp
    return (recorded.tp, recorded.pp) if recorded.tp * recorded.pp > 1 else (ranks, 1)


def _are_sliced(listing: Listing, tp: int) -> bool:
    """Whether any expert has a file of more than one of a stage's tensor-parallel ranks."""
    matches = [EXPERT_NAME.fullmatch(name) for name in listing.files]
    experts = [(int(match["mp"]) // tp, int(match["layer"]), int(match["expert"])) for match in matches if match]
    return len(set(experts)) < len(experts)
