"""Experts without ZeRO: every expert-parallel rank has an optimizer state of its own, with all of its masters.

For `mixture`. Masters have no names: `unsharded.assign` tells which parameters they belong to. Where experts are
spread over tensor-parallel
ranks too, what a rank holds beside them is a slice: that of the model-parallel rank that its file names.
Source: DeepSpeed 0.19.8, runtime/engine.py `_save_moe_checkpoint`, `_get_optimizer_ckpt_name`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import IncompleteError, InconsistentError, UnsupportedError
from zckpt.containers import TensorRef
from zckpt.core.catalog import Replica, TensorEntry
from zckpt.layouts.moe.experts import Layer, Layers
from zckpt.layouts.run.agreement import parameter_groups, steps_of
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.listing import EXPERT_OPTIMIZER_NAME, Listing
from zckpt.layouts.save.module_states import ModelStates, root_of
from zckpt.layouts.save.origins import check_alike
from zckpt.layouts.zero import unsharded
from zckpt.layouts.zero.unsharded_training import training_of


@dataclass(frozen=True, slots=True)
class NamedMasters:
    """Masters of a half-precision run, by name.

    Attributes:
        experts: of experts, each with a weight of its own.
        stacks: of stacked experts, by expert-parallel rank of their layer.
        dense: model-parallel rank -> its masters beside those of experts.
    """

    experts: dict[str, TensorEntry] = field(default_factory=dict[str, TensorEntry])
    stacks: dict[str, dict[int, TensorEntry]] = field(default_factory=dict[str, dict[int, TensorEntry]])
    dense: dict[int, dict[str, TensorEntry]] = field(default_factory=dict[int, dict[str, TensorEntry]])


class Optimizers:
    """The optimizers' states of ranks that share experts; all have taken the same number of steps.

    Args:
        listing: the files.
        models: model-parallel rank -> model file, of all that share these experts.

    Attributes:
        states: rank in the widest expert-parallel group -> its optimizer's state.

    Raises:
        InconsistentError: numbers of steps differ, or two files are of the same experts.
    """

    def __init__(self, listing: Listing, models: Mapping[int, ModelStates]) -> None:
        self._listing = listing
        self._models = models
        self.states: dict[int, object] = {}
        self._files: dict[int, tuple[int, str]] = {}
        steps = {os.path.basename(model.file): steps_of(model.root.get("optimizer")) for model in models.values()}
        for name in listing.matching(EXPERT_OPTIMIZER_NAME):
            match = EXPERT_OPTIMIZER_NAME.fullmatch(name)
            assert match is not None
            rank, home = int(match["ep"]), int(match["mp"])
            if home not in models:
                continue
            if rank in self.states:
                raise InconsistentError(
                    "two optimizer files hold the same experts", file=listing.files[name].path,
                    found=f"{os.path.basename(self._files[rank][1])!r}, also of expert-parallel rank {rank}",
                    remedy="Move the one of another save away.",
                )  # fmt: skip
            optimizer = root_of(listing, name).get("optimizer")
            self.states[rank], self._files[rank] = optimizer, (home, listing.files[name].path)
            steps[name] = steps_of(optimizer)
        check_alike(listing, "the step", {name: step for name, step in steps.items() if step is not None})

    @property
    def keep_masters(self) -> bool:
        """Whether any optimizer has masters; an fp32 run does not."""
        states = (*(model.root.get("optimizer") for model in self._models.values()), *self.states.values())
        return any(unsharded.master_groups(state, "") is not None for state in states)

    def masters(self, model: ModelStates, layers: Layers, rank_in: Callable[[Layer, int], int]) -> NamedMasters:
        """The masters, if there are any.

        Args:
            model: the first model file, with all experts under the names they have among all.
            layers: of experts, spread over ranks.
            rank_in: expert-parallel rank, in a layer's group, of the writer that has a number in the widest one.

        Raises:
            IncompleteError: a rank's file is missing.
        """
        found = NamedMasters()
        for rank in range(layers.ep if self.keep_masters else 0):
            home, file = self._file_of(rank)
            groups = unsharded.master_groups(self.states[rank], file) or []
            held = _weights(self._held(rank, home, model, layers, rank_in), layers, rank, rank_in)
            dense = found.dense.setdefault(home, {})
            for name, entry in unsharded.assign(held, groups, file).items():
                owner = layers.owner(name)
                if owner is not None and owner[0].stacked:
                    found.stacks.setdefault(name, {}).setdefault(rank_in(owner[0], rank), entry)
                    continue
                own = dense if owner is None else found.experts
                if name in own:
                    copy = Replica(entry.dtype, entry.fragments, f"expert-parallel rank {rank}", True)
                    own[name] = replace(own[name], replicas=(*own[name].replicas, copy))
                else:
                    own[name] = entry
        return found

    def _file_of(self, rank: int) -> tuple[int, str]:
        """The model-parallel rank and the path of an expert-parallel rank's file."""
        if rank not in self._files:
            likely = sorted(self._models)[rank % len(self._models)]
            raise IncompleteError(
                "optimizer files of experts are missing", file=self._listing.directory,
                found=f"files of {len(self.states)} expert-parallel ranks",
                expected=f"'expp_rank_{rank}_mp_rank_{likely:02d}_optim_states.pt'",
                remedy="Copy it from the node that wrote it (--also DIR lays further directories over this one).",
            )  # fmt: skip
        return self._files[rank]

    def trainings(
        self, model: ModelStates, layers: Layers, rank_in: Callable[[Layer, int], int]
    ) -> Iterator[tuple[int, Training]]:
        """For each expert-parallel rank: the model-parallel rank of its slices, and what its run needs beside its weights.

        Arguments as in `masters`; all have their groups in the first one's order.

        Raises:
            IncompleteError: a rank's file is missing.
            InconsistentError: the parameters of the states cannot be found.
            UnsupportedError: experts are stacked.
        """
        if any(layer.stacked for layer in layers.all):
            raise UnsupportedError(
                "cannot read the optimizer states of stacked experts without ZeRO", file=model.file,
                found="AutoEP, with an optimizer on each expert-parallel rank",
                expected="AutoEP under ZeRO, or DeepSpeed's own experts",
                remedy="Convert the weights alone (to-fp32).",
            )  # fmt: skip
        order: dict[tuple[str, int], int] = {}
        for rank in range(layers.ep):
            home, _ = self._file_of(rank)
            held = self._held(rank, home, model, layers, rank_in)
            root = {**model.root, "optimizer": self.states[rank]}
            training = training_of(replace(held, root=root), _names(self.states[rank], held, layers))
            counts: Counter[str] = Counter()
            places: list[int] = []
            for group in training.groups:
                name = str(group.settings.get("name"))
                places.append(order.setdefault((name, counts[name]), len(order)))
                counts[name] += 1
            groups = (group for _, group in sorted(zip(places, training.groups, strict=True), key=lambda item: item[0]))
            yield home, replace(training, groups=tuple(groups))

    def _held(
        self, rank: int, home: int, model: ModelStates, layers: Layers, rank_in: Callable[[Layer, int], int]
    ) -> ModelStates:
        """The model file with the experts of one expert-parallel rank, under their names among all."""
        own, module = self._models[home].module, dict[str, TensorRef]()
        for name, ref in model.module.items():
            owner = layers.owner(name)
            if name not in model.shared and (owner is None or owner[1] in owner[0].held[rank_in(owner[0], rank)]):
                module[name] = own.get(name, ref) if owner is None else ref
        return replace(model, module=module)


def _weights(held: ModelStates, layers: Layers, rank: int, rank_in: Callable[[Layer, int], int]) -> list[TensorEntry]:
    """The weights that may have a master, in the order of a rank's optimizer: AutoEP's new routers come last."""
    weights = unsharded.candidates(held)
    routers = tuple(f"{layer.home}.router." for layer in layers.all if layer.stacked)
    weights.sort(key=lambda weight: weight.name.startswith(routers))
    for layer in layers.all:
        weights += layer.stacks("parameter", rank_in(layer, rank)).values()
    return weights


def _names(optimizer: object, held: ModelStates, layers: Layers) -> list[list[str]] | None:
    """The parameters of each group, where groups of experts have names and all others form one group; None otherwise."""
    sizes = [_GROUP.fullmatch(str(settings.get("name"))) for settings, _ in parameter_groups(optimizer)]
    spread = {weight.name: layers.owner(weight.name) for weight in unsharded.candidates(held)}
    kinds = [int(size[1]) if size else None for size in sizes]
    if len(set(kinds)) < len(kinds):
        return None
    return [[name for name, owner in spread.items() if (owner[0].ep if owner else None) == kind] for kind in kinds]


_GROUP = re.compile(r"ep_size_(\d+)")


def spread_of(layers: Layers, optimizer: object) -> dict[int, int]:
    """Experts in a layer -> the ranks that they are spread over, by an optimizer's groups: `ep_size_2` stands for two
    ranks.

    If there are groups of several sizes, layers with the same number of experts are taken to be spread alike, so
    that the groups have as many elements as their layers on one rank.
    """
    sizes = [_GROUP.fullmatch(str(settings.get("name"))) for settings, _ in parameter_groups(optimizer)]
    counts = sorted({layer.experts for layer in layers.all if not layer.held})
    known = sorted({int(size[1]) for size in sizes if size}, reverse=True)
    choices = [[ep for ep in known if ep and count % ep == 0] or [1] for count in counts]
    masters = unsharded.master_groups(optimizer, "") or []
    for chosen in itertools.islice(itertools.product(*choices), 10_000):
        spread = dict(zip(counts, chosen, strict=True))
        wanted = dict.fromkeys(known, 0)
        for layer in layers.all:
            ep = layer.ep or spread[layer.experts]
            numel = sum(ref.numel for refs in layer.weights.values() for ref in refs.values())
            wanted[ep] = wanted.get(ep, 0) + numel // ep
        own = dict.fromkeys(known, 0)
        for size, group in zip(sizes, masters):
            if size:
                own[int(size[1])] += group.numel
        if not masters or own == wanted:
            return spread
    return dict(zip(counts, (choice[0] for choice in choices), strict=True))
