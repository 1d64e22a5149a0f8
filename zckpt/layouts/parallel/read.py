"""Checkpoints of models that are split over ranks: tensor parallel, pipeline parallel, and both with ZeRO of any stage.

For `layouts.FAMILIES`. Each model-parallel rank's files are read as a save of their own, of slices under the names they have
there (`zero12`, `zero3`, `unsharded`); the slices of one pipeline stage are joined (`slices`, `rules`), and the stages are
put one after another. A parameter that several stages hold is tied: its copies must agree, and one is kept.

[Note: names in a pipeline] Layer files hold local names (`up.weight`). The model file of a stage lists its parameters under
global ones: `<layer>.<local name>`, or `tied_modules.<key>.<local name>` for a layer with a weight that is used
twice; a layer file with names that are in no list under its own number is that of a tied module.
[Note: lost layers] Gaps in the numbers of layer files alone say nothing, for some layers have none: each stage lists its buffers
and, under ZeRO, its parameters, so these lists say which files there must be.
Source: DeepSpeed 0.19.8, runtime/pipe/module.py `save_state_dict`, `ckpt_layer_path`; runtime/engine.py
`_get_zero_param_shapes`, `_get_ckpt_name` (model-parallel ranks count stages first, tensor ranks within a stage).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from zckpt.base import words
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, IncompleteError, InconsistentError, UsageError
from zckpt.base.words import count, examples
from zckpt.containers import TensorRef, list_at, mapping_at, value_at
from zckpt.core.catalog import Catalog, Padding, Replica, Source, TensorEntry, Topology
from zckpt.core.evidence import NO_LIST_OF_FROZEN, Evidence, weakest
from zckpt.layouts.joining.rules import (
    CheckpointRules,
    FileRules,
    check_loads,
    check_patterns,
    rules_of_checkpoint,
    rules_of_file,
    unknown_rule,
)
from zckpt.layouts.joining.slices import Joint, cut_off, join, join_replicas
from zckpt.layouts.run.agreement import merge_groups
from zckpt.layouts.run.training import ParameterGroup, Training
from zckpt.layouts.run.values import missing_model_file, missing_ranks
from zckpt.layouts.save.listing import LAYER_NAME, MODEL_NAME, Listing
from zckpt.layouts.save.module_states import ModelStates, flatten, read_model_states, root_of
from zckpt.layouts.save.origins import check_alike, other_kind
from zckpt.layouts.zero import read as zero
from zckpt.layouts.zero import unsharded, unsharded_training
from zckpt.layouts.zero.assembly import assemble, source_of

if TYPE_CHECKING:
    from zckpt.layouts.zero.read import Save


def check_numbered(listing: Listing, owned: Set[str], present: Set[int], tp_rank: int) -> None:
    """Checks that the layers with tensors that a stage lists have files.

    Args:
        listing: the files.
        owned: what the global names of the stage's parameters and buffers begin with.
        present: numbers of the layers with files.
        tp_rank: the tensor-parallel rank.

    Raises:
        IncompleteError: files are missing.
    """
    if lost := sorted({int(layer) for layer in owned if layer.isdigit()} - present):
        files = examples(f"layer_{layer:02d}-model_{tp_rank:02d}-model_states.pt" for layer in lost)
        raise _missing_error(listing, f"no {files}")


def check_tied(listing: Listing, tied: Iterable[str], held: Iterable[Collection[str]], tp_rank: int) -> None:
    """Checks that each parameter of a tied module is in a file of some stage.

    Args:
        listing: the files.
        tied: global names of these parameters.
        held: names of the tensors of each stage.
        tp_rank: the tensor-parallel rank.

    Raises:
        IncompleteError: a file is missing.
    """
    held = list(held)
    if lost := [name for name in tied if not any(name in names for names in held)]:
        more = sorted({name for names in held for name in names if name.split(".")[0].isdigit()} - {*tied})
        file = f"layer_NN-model_{tp_rank:02d}-model_states.pt"
        raise _missing_error(
            listing, f"no file {file} with {examples(lost)}, and files with {examples(more)}",
            "If no file is missing, the layers' state dicts have other names than their parameters: zckpt does not read "
            "such saves of several pipeline stages.",
        )  # fmt: skip


def _missing_error(listing: Listing, found: str, more: str = "") -> IncompleteError:
    return IncompleteError(
        "files of layers are missing", file=listing.directory, found=found,
        expected="a file of every layer with tensors that a pipeline stage lists",
        remedy="Copy them from the nodes that wrote them (--also DIR lays further directories over this one). "
        f"{more}".rstrip(),
    )  # fmt: skip


def evidence_without_lists(optimizers: Iterable[object], layers: Iterable[tuple[int, ...]]) -> Evidence:
    """What proves that all layer files of a run without ZeRO are there: its stages list no parameters, but train them.

    A tied module's parameters have states on each of its stages, and are in one layer file: there nothing can be proved.

    Args:
        optimizers: of each pipeline stage.
        layers: shapes of the tensors in the layer files that are not buffers.
    """
    trained: Counter[tuple[int, ...]] = Counter()
    for optimizer in optimizers:
        listed = [number for group in list_at(optimizer, "param_groups") for number in list_at(group, "params")]
        shapes = [_shape_in(value_at(optimizer, "state", number)) for number in listed]
        if not shapes or None in shapes:
            return Evidence("unknown", "nothing in the save lists the parameters of its layers")
        trained.update(shape for shape in shapes if shape is not None)
    if lost := trained - Counter(layers):
        many = count(lost.total(), "parameter")
        where = "of tied modules, or of layers without a file here"
        return Evidence("unknown", f"the optimizers have states of {many} that no layer file has: {where}")
    return Evidence("shapes", "the parameters that the stages' optimizers have states of", doubt=NO_LIST_OF_FROZEN)


def _shape_in(states: object) -> tuple[int, ...] | None:
    """The shape of a parameter by its states; None where they do not say it."""
    held = mapping_at(states).values()
    return max((value.shape for value in held if isinstance(value, TensorRef)), key=len, default=None)


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a model-parallel save; arguments as in `zero12.load`.

    Raises:
        IncompleteError: slices or stages are missing.
        InconsistentError: slices are of different saves, or do not fit their rules; tied copies differ.
        UnsupportedError: no rule says how a tensor's slices are joined.
        UsageError: the rules that were given do not fit.
    """
    return ParallelSave(listing, allow_unknown).catalog()


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What the run needs beside its weights, of whole parameters; arguments and errors as in `read`."""
    return ParallelSave(listing, allow_unknown).training()


@dataclass(frozen=True, slots=True)
class ModelSlice:
    """The slices of one model-parallel rank.

    Attributes:
        catalog: of slices.
        model: the model file.
        training: reads what the run needs beside them.
        save: its files, under ZeRO.
    """

    catalog: Catalog
    model: ModelStates
    training: Callable[[], Training]
    save: Save | None = None


class ParallelSave:
    """A save with all ranks' slices, `stages[pp][tp]`."""

    def __init__(self, listing: Listing, allow_unknown: bool) -> None:
        self.listing = listing
        self.allow_unknown = allow_unknown
        self.layers = _layers(listing)
        self.lost = ""
        ranks = listing.model_parallel_ranks()
        models = {rank: self._model(rank) for rank in ranks}
        self.topology = self._topology(models)
        tp, pp = self.topology.tp, self.topology.pp
        missing = sorted(set(range(tp * pp)) - set(ranks))
        if missing:
            raise IncompleteError(
                "files of model-parallel ranks are missing",
                file=listing.directory,
                found=f"files of mp_rank {', '.join(f'{rank:02d}' for rank in ranks)}",
                expected=f"{pp} pipeline stages of {tp} tensor-parallel ranks",
                remedy=f"Copy the files of mp_rank {', '.join(f'{rank:02d}' for rank in missing)} from the nodes that wrote "
                "them (--also DIR lays further directories over this one).",
            )
        tied = _tied_names(models.values())
        slices = [self.slice_of(rank, models[rank], tied) for rank in range(tp * pp)]
        _check_steps(listing, slices)
        for stage in range(pp):
            _check_kinds([held.model for held in slices[stage * tp : (stage + 1) * tp]])
        if not tied:
            self._check_layers(models.values())
        for rank in range(tp if self.layers else 0):
            check_tied(listing, tied.values(), (held.model.module for held in slices[rank::tp]), rank)
        self.stages = [slices[stage * tp : (stage + 1) * tp] for stage in range(pp)]
        self.rules = self._rules(models[0])

    # -- what is there -----------------------------------------------------------------------------------------------

    def _model(self, rank: int) -> ModelStates:
        """A rank's model file; under ZeRO-3, of any data-parallel rank. In a pipeline it has weights if it has experts."""
        names = [n for n in self.listing.matching(MODEL_NAME) if int(n.split("_")[2]) == rank]
        names += self.listing.shards("model", rank).values()
        if not names:
            raise missing_model_file(self.listing, rank)
        root = self.listing.open(names[0]).root
        elsewhere = self.layers and not (isinstance(root, Mapping) and isinstance(root.get("module"), Mapping))
        return read_model_states(self.listing, names[0], module={} if elsewhere else None)

    def _topology(self, models: Mapping[int, ModelStates]) -> Topology:
        """The ranks per axis: from the options, from the files, or from the number of ranks."""
        first = models[min(models)]
        recorded = first.topology(first.ranks("dp_world_size") or 1)
        given = self.listing.options
        total = max(len(models), first.ranks("mp_world_size") or 1)
        if given.tp or given.pp:
            tp = given.tp or total // (given.pp or 1)
            pp = given.pp or total // tp
        elif recorded.tp * recorded.pp > 1:
            tp, pp = recorded.tp, recorded.pp
        elif self.layers:
            tp = len({tp_rank for _, tp_rank in self.layers})
            pp = total // tp
        else:
            tp, pp = total, 1
        if tp * pp != total and tp * pp < len(models):
            raise UsageError(
                "the files are of another topology", file=self.listing.directory,
                found=f"{len(models)} model-parallel ranks", expected=f"{pp} pipeline stages of {tp} tensor-parallel ranks",
                remedy="Pass --tp and --pp as the run had them.",
            )  # fmt: skip
        return Topology(recorded.dp, tp, pp)

    def slice_of(self, rank: int, model: ModelStates, tied: Mapping[str, str]) -> ModelSlice:
        """The slices of one model-parallel rank; overridden for saves with more files."""
        if self.layers and not model.module:
            model = replace(model, module=self._stage_module(rank, model, tied))
        source = Source("", self.listing.directory.path)
        save = zero.load(self.listing, rank, allow_unknown=self.allow_unknown, model=model)
        if save is not None:
            catalog = zero.catalog_of(save, source, self.topology)
            return ModelSlice(catalog, save.model, save.training, save)
        if model.is_zero():
            size = model.ranks("dp_world_size") or 1
            own = unsharded.own_weights(model)
            if own is None or any(self.listing.shards("optim", other) for other in self.listing.model_parallel_ranks()):
                raise missing_ranks(self.listing, f"mp_rank_{rank:02d} optimizer", [], list(range(size)), size)
            self.lost = unsharded.lost_masters(own, size * self.topology.tp * self.topology.pp)
            catalog = assemble(model, own, source, self.topology)
            return ModelSlice(catalog, model, lambda: unsharded_training.training_of(model))
        masters, _ = unsharded.masters(model)
        catalog = assemble(model, masters, source, self.topology, frozen={})
        return ModelSlice(catalog, model, lambda: unsharded_training.training_of(model))

    def _stage_module(self, rank: int, model: ModelStates, tied: Mapping[str, str]) -> dict[str, TensorRef]:
        """The tensors of a stage's layer files under their global names; of a run without ZeRO, those of all layers."""
        tp_rank = rank % self.topology.tp
        listed = {*model.shapes, *model.buffer_names}
        owned = _layers_of(listed)
        has_tied = not listed.isdisjoint(tied.values())
        module: dict[str, TensorRef] = {}
        for (layer, owner), file in self.layers.items():
            mine = str(layer) in owned or not model.is_zero()
            if owner != tp_rank or not (mine or has_tied):
                continue
            for local, ref in self._layer_tensors(file).items():
                own = f"{layer}.{local}"
                name = own if own in listed or str(layer) in owned else tied.get(local, own)
                if mine or name in listed:
                    module.setdefault(name, ref)
        check_numbered(self.listing, owned, {layer for layer, owner in self.layers if owner == tp_rank}, tp_rank)
        return module

    def _layer_tensors(self, file: str) -> dict[str, TensorRef]:
        notes: list[str] = []
        tensors = flatten(root_of(self.listing, file), notes)
        if notes:
            raise CorruptError(
                "holds more than tensors", file=self.listing.files[file].path, found=notes[0], remedy=COPY_AGAIN
            )
        return tensors

    def _check_layers(self, models: Iterable[ModelStates]) -> None:
        """Checks that layer files that no stage lists are empty, as those of activations are."""
        models = list(models)
        owned = {layer for model in models for layer in _layers_of({*model.shapes, *model.buffer_names})}
        for (layer, _), file in self.layers.items():
            if all(model.is_zero() for model in models) and str(layer) not in owned and self._layer_tensors(file):
                raise InconsistentError(
                    "no pipeline stage uses this layer file", file=self.listing.files[file].path,
                    remedy="Move it away if it is of another save or run; if not, copy all files of one save again.",
                )  # fmt: skip

    def _rules(self, model: ModelStates) -> FileRules | CheckpointRules | None:
        names = list(dict.fromkeys(name for stage in self.stages for name in stage[0].catalog))
        if self.listing.options.tp_rules:
            rules = rules_of_file(self.listing.options.tp_rules)
            check_loads(rules, names)
            return rules
        return check_patterns(rules_of_checkpoint(model), names)

    # -- putting it together -----------------------------------------------------------------------------------------

    def _joint(self, name: str, slices: Sequence[TensorEntry]) -> Joint:
        shapes = [entry.shape for entry in slices]
        if len(slices) == 1 or (slices[0].role == "buffer" and len(set(shapes)) == 1):
            return join_replicas(shapes)
        joint = self.rules.joint(name, shapes) if self.rules else None
        if joint is None:
            raise unknown_rule(name, shapes, self.listing.directory.path)
        return joint

    def _stage_tensors(self, stage: Sequence[ModelSlice], padding: list[Padding]) -> Iterator[TensorEntry]:
        """The whole tensors of one pipeline stage; elements of slices outside them are added to `padding`."""
        names = dict.fromkeys(name for held in stage for name in held.catalog.tensors)
        for name in names:
            yield self._whole(name, [held.catalog.tensors.get(name) for held in stage], padding)

    def _whole(self, name: str, slices: Sequence[TensorEntry | None], padding: list[Padding]) -> TensorEntry:
        held = [entry for entry in slices if entry is not None]
        if len(held) < len(slices):
            raise IncompleteError(
                f"tensor {name!r} is not in the files of all tensor-parallel ranks",
                file=self.listing.directory,
                found=f"slices of {words.ranks([n for n, entry in enumerate(slices) if entry is not None])}",
                expected=f"{len(slices)} slices",
                remedy="Copy the files of the other ranks again, or choose another tag.",
            )
        joint = self._joint(name, held)
        padding += cut_off(name, held, joint)
        return join(name, held, joint)

    def catalog(self) -> Catalog:
        """The whole model; errors as in `read`."""
        tensors: dict[str, TensorEntry] = {}
        aliases: dict[str, str] = {}
        padding = [pad for stage in self.stages for held in stage for pad in held.catalog.padding]
        for number, stage in enumerate(self.stages):
            for entry in self._stage_tensors(stage, padding):
                first = tensors.get(entry.name)
                tensors[entry.name] = entry if first is None else _tie_entries(first, entry, number)
            aliases |= stage[0].catalog.aliases
        model, save = self.stages[0][0].model, self.stages[0][0].save
        dp = self._data_parallel()
        notes = (*self._notes(), *model.notes)
        zero_stage = save.stage if save else unsharded.stage_of(model) if self.lost else 0
        source = source_of(self.listing, model, zero_stage, tuple(self._state_names()), notes)
        kept = {dropped: kept for dropped, kept in aliases.items() if kept in tensors and dropped not in tensors}
        views = tuple(view for stage in self.stages for held in stage for view in held.catalog.views)
        proofs = [held.catalog.evidence for stage in self.stages for held in stage]
        if self.layers and not any(held.model.is_zero() for stage in self.stages for held in stage):
            proofs = [self._evidence_of_layers([stage[0].model for stage in self.stages])]
        evidence = weakest([*proofs, self._evidence(model)])
        return Catalog(
            tensors, source, evidence, kept, replace(self.topology, dp=dp), model.extras, tuple(padding), views
        )

    def _evidence(self, model: ModelStates) -> Evidence:
        """The evidence for the number of model-parallel ranks."""
        if model.ranks("mp_world_size"):
            return Evidence("metadata", "mp_world_size of the model files")
        if self.listing.options.tp or self.listing.options.pp:
            return Evidence("metadata", "--tp and --pp")
        return Evidence(
            "unknown", "the files do not say how many model-parallel ranks there were", "--tp and --pp of the run"
        )

    def _evidence_of_layers(self, models: Sequence[ModelStates]) -> Evidence:
        """The evidence that no layer file is missing, where the stages do not list their parameters."""
        if all(unsharded.master_groups(model.root.get("optimizer"), model.file) for model in models):
            return Evidence("shapes", "the fp32 masters of its stages", doubt=NO_LIST_OF_FROZEN)
        buffers = {name for model in models for name in model.buffer_names}
        held = {f"{layer}.{name}": ref.shape for (layer, owner), file in self.layers.items() if owner == 0
                for name, ref in self._layer_tensors(file).items()}  # fmt: skip
        shapes = (shape for name, shape in held.items() if name not in buffers)
        return evidence_without_lists((model.root.get("optimizer") for model in models), shapes)

    def _data_parallel(self) -> int:
        return len(self.listing.shards("optim", 0)) or self.topology.dp

    def _state_names(self) -> Iterator[str]:
        first = self.stages[0][0]
        if first.save is None:
            yield from unsharded.state_names(first.model.root.get("optimizer"))
        else:
            yield from dict.fromkeys(state for group in first.training().groups for state in group.states)

    def _notes(self) -> Iterator[str]:
        if self.lost:
            yield self.lost
        if self.listing.options.tp_rules:
            yield f"Slices were joined by the rules of {self.listing.options.tp_rules!r}."
        if self.layers and self.topology.pp > 1:
            yield (
                "Tensors have the names that DeepSpeed's pipeline gives them: <layer>.<name>, and "
                "tied_modules.<key>.<name> for tied layers. Use --layer-names or --to for other names."
            )

    def training(self) -> Training:
        """What the run needs beside its weights; errors as in `read`."""
        groups: list[list[ParameterGroup]] = []
        states: dict[str, dict[str, TensorEntry]] = {}
        joined: dict[str, Joint] = {}
        first: Training | None = None
        padding: list[Padding] = []
        for stage in self.stages:
            held = [s.training() for s in stage]
            padding += (pad for h in held for pad in h.padding)
            first = first or held[0]
            for name, by_state in held[0].states.items():
                if name in states:
                    padding += _not_read(name, held)
                    continue
                weights = [s.catalog.tensors[name] for s in stage]
                joint = self._joint(name, weights)
                if said := self.rules and self.rules.joint(name, [entry.shape for entry in weights]):
                    joined[name] = said
                if joint.total == "sum":  # its parts have the same gradient, and so the same states
                    joint = replace(joint, total="mean")
                parts = {state: [replace(h.state(name, state), replicas=()) for h in held] for state in by_state}
                states[name] = {state: join(name, entries, joint) for state, entries in parts.items()}
                padding += (pad for entries in parts.values() for pad in cut_off(name, entries, joint))
            groups.append(list(held[0].groups))
        assert first is not None
        return replace(first, groups=merge_groups(groups), states=states, joined=joined, padding=tuple(padding))


def _not_read(name: str, held: Sequence[Training]) -> Iterator[Padding]:
    """The states of a tied parameter on further stages, which are not used; the first stage's are."""
    entries = (entry for training in held for entry in training.states[name].values())
    return (Padding(e.dtype, e.fragments, "the same states on another stage", zero=False) for e in entries)


def _tie_entries(first: TensorEntry, other: TensorEntry, stage: int) -> TensorEntry:
    """One entry for a tensor that a further stage holds too, after a check that both are alike."""
    if (first.shape, first.dtype) != (other.shape, other.dtype):
        raise InconsistentError(
            f"two pipeline stages hold tensor {first.name!r} differently",
            found=f"{first.dtype} {list(first.shape)} and {other.dtype} {list(other.shape)}",
            remedy=OTHER_SAVE,
        )
    copies = [Replica(other.dtype, other.fragments, f"pipeline stage {stage}", True)]
    copies += [
        replace(copy, rank=f"pipeline stage {stage}, {copy.rank}")
        for copy in other.replicas
        if copy.rank and copy.whole
    ]
    return replace(first, replicas=(*first.replicas, *copies))


def _check_kinds(models: Sequence[ModelStates]) -> None:
    """Raises InconsistentError where a name is a tensor on one tensor-parallel rank and something else on another."""
    files = {name: model.file for model in models for name in model.module}
    for model in models:
        for name, value in model.others.items():
            if name in files and name not in model.module:
                raise other_kind(name, model.file, value, files[name])


def _layers(listing: Listing) -> dict[tuple[int, int], str]:
    """(layer, tensor-parallel rank) -> its file, in order."""
    found: dict[tuple[int, int], str] = {}
    for name in listing.matching(LAYER_NAME):
        match = LAYER_NAME.fullmatch(name)
        assert match is not None
        found[int(match["layer"]), int(match["tp"] or 0)] = name
    return dict(sorted(found.items()))


def _layers_of(names: Iterable[str]) -> set[str]:
    """The first parts of global names: numbers of layers, and `tied_modules`."""
    return {name.partition(".")[0] for name in names}


_TIED = re.compile(r"tied_modules\.[^.]+\.(?P<local>.+)")


def _tied_names(models: Iterable[ModelStates]) -> dict[str, str]:
    """Local name -> global name of parameters of tied modules."""
    found: dict[str, str] = {}
    for model in models:
        for name in model.shapes:
            if match := _TIED.fullmatch(name):
                found.setdefault(match["local"], name)
    return found


def _check_steps(listing: Listing, slices: Sequence[ModelSlice]) -> None:
    """Checks that the model files of all ranks, and the optimizer files of all ranks, are of one save."""
    models = (held.model for held in slices)
    check_alike(listing, "the step", {os.path.basename(model.file): model.number("global_steps") for model in models})
    shards = [held.save.shards[0] for held in slices if held.save is not None]
    check_alike(listing, "the step", {shard.name: shard.step for shard in shards if shard.step is not None})
