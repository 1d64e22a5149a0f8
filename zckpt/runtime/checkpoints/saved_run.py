"""What a checkpoint says of a run, read and checked against it before anything is changed.

For `loading`. Only indexes are read, and what is small: elements of weights, states and buffers are still in their files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from zckpt import layouts
from zckpt.base.errors import InconsistentError
from zckpt.base.words import examples
from zckpt.containers import Placeholder, TensorRef
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.jobs.open import Opened, as_named_by
from zckpt.layouts.run.training import ParameterGroup, Training
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import whole
from zckpt.layouts.zero import unsharded_training
from zckpt.runtime import rank_states
from zckpt.runtime.description import OWN
from zckpt.runtime.engine import Engine
from zckpt.runtime.inert import from_inert
from zckpt.runtime.rank_states import MOMENT, RankStates
from zckpt.runtime.sharded_parameter import ShardedParameter
from zckpt.runtime.state import buffers_of

_log = logging.getLogger("zckpt.runtime")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What of a checkpoint is wanted beside the weights.

    Attributes:
        optimizer: its states, settings and the loss scale.
        schedule: that of the learning rate.
        counters: steps, samples, random generators and the position of the data.
        strict: every tensor of the model must be there.
    """

    optimizer: bool
    schedule: bool
    counters: bool
    strict: bool = True


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """What a checkpoint has for a parameter group of the run's optimizer.

    Attributes:
        options: settings that it changes.
        states: for each parameter that it knows, per-element states and states of one number.
    """

    options: Mapping[str, Any]
    states: tuple[tuple[ShardedParameter, Mapping[str, TensorEntry], Mapping[str, float]], ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """Where a run is.

    Attributes:
        global_steps: and the others as in `Engine`.
        pending: micro batches since the last step, among `micro_steps`.
        data: position of the loader.
    """

    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int
    pending: int
    data: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A checkpoint, for one rank of a run; what is not wanted or not there is None or empty.

    Attributes:
        directory: of the save.
        catalog: the weights, under the model's names.
        buffers: this rank's own, where they are others than those of `catalog`.
        buffers_lost: buffers of ranks differed when the run was saved, and this rank's are not at hand.
        precision: dtype of the module's own weights.
        groups: by the number of the group in the optimizer.
        scaler: state of the loss scale.
        schedule: state of the schedule.
        counters: where the run was.
        rng: random generators of the rank of this number.
        gradients: of the micro batches since the last step.
        client_state: what the caller had saved.
    """

    directory: str
    catalog: Catalog
    buffers: Mapping[str, TensorEntry]
    buffers_lost: bool
    precision: torch.dtype | None
    groups: Mapping[int, SavedGroup]
    scaler: Mapping[str, Any] | None
    schedule: Any
    counters: Counters | None
    rng: Mapping[str, Any]
    gradients: Mapping[str, Mapping[str, TensorRef]] | None
    client_state: dict[str, Any]


def read(engine: Engine, opened: Opened, wishes: LoadOptions, seen: Listing) -> SavedRun:
    """Reads and checks; changes nothing.

    Args:
        engine: the run.
        opened: the checkpoint.
        wishes: what of it is wanted.
        seen: its files as this rank sees them.

    Raises:
        InconsistentError: it is of another model, or of another optimizer.
        ZckptError: another kind says what is wrong with it.
    """
    catalog, called = as_named_by(_names(engine), opened.catalog)
    _check_model(engine, catalog, wishes.strict)
    training = _training(engine, opened, wishes, called)
    rest: Mapping[str, Any] = {} if training is None else training.model
    own = _mapping(rest.get(OWN))
    mine: RankStates | None = None
    groups: dict[int, SavedGroup] = {}
    if training is not None:
        _check_states(engine, training)
        mine = rank_states.read(engine, seen, {key: {**own, **rest}.get(key) for key in MOMENT}, called)
        if wishes.optimizer:
            groups = dict(_saved_groups(engine, training))
    buffers = _own_buffers(engine, catalog, mine, seen, called) if engine.world_size > 1 else {}
    schedule = rest.get("lr_scheduler") if wishes.schedule and engine.lr_scheduler is not None else None
    return SavedRun(
        directory=opened.place.listing.directory,
        catalog=catalog,
        buffers=buffers,
        buffers_lost=_lost(engine, own, buffers),
        precision=None if training is None else getattr(torch, training.precision.torch_name),
        groups=groups,
        scaler=_scaler(training) if training is not None and wishes.optimizer else None,
        schedule=None if schedule is None else from_inert(schedule),
        counters=_counters(engine, rest, own) if wishes.counters else None,
        rng=from_inert(dict(_rng(engine, opened, own))) if wishes.counters else {},
        gradients=None if mine is None or not (wishes.counters and wishes.optimizer) else mine.gradients,
        client_state={key: from_inert(value) for key, value in catalog.extras.items()},
    )


def _names(engine: Engine) -> list[str]:
    """The names of all tensors of the model, the tied ones too."""
    return [*(held.name for held in engine.sharded.held), *engine.sharded.aliases, *buffers_of(engine)]


def _training(engine: Engine, opened: Opened, wishes: LoadOptions, called: Mapping[str, str]) -> Training | None:
    """What the checkpoint holds beside the weights, under the model's names.

    Args:
        engine: the run.
        opened: the checkpoint.
        wishes: what is wanted.
        called: for each name of the checkpoint, what the model calls it.
    """
    if not (wishes.optimizer or wishes.schedule or wishes.counters):
        return None
    if opened.catalog.source.layout == "unsharded":
        theirs = {ours: name for name, ours in called.items()}
        groups = [[theirs.get(name, name) for name in group] for group in _groups(engine)]
        training = unsharded_training.read_training(opened.place.listing, names=groups)
    else:
        training = layouts.read_training(opened.place.listing)
    own = _mapping(training.model.get(OWN))
    odd = {called.get(name, name): value for name, value in _mapping(own.get("scalars")).items()}
    return replace(
        training,
        model={**training.model, OWN: {**own, "scalars": odd}},
        groups=tuple(replace(group, names=_renamed(group.names, called)) for group in training.groups),
        states={called.get(name, name): value for name, value in training.states.items()},
    )


def _renamed(names: Iterable[str], called: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(called.get(name, name) for name in names)


def _groups(engine: Engine) -> list[list[str]]:
    """The names of the parameters of the run's optimizer."""
    groups = [] if engine.optimizer is None else engine.optimizer.param_groups
    names = {id(held.master): held.name for held in engine.sharded.held if held.master is not None}
    return [[names[id(master)] for master in group["params"]] for group in groups]


def _check_model(engine: Engine, catalog: Catalog, strict: bool) -> None:
    """Every tensor of the model is there, in its shape; frozen ones may be missing together.

    Raises:
        InconsistentError: one is not.
    """
    shapes = {held.name: tuple(held.shape) for held in engine.sharded.held}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers_of(engine).items()}
    frozen = {held.name for held in engine.sharded.held if not held.trained}
    missing = [name for name in shapes if not has(catalog, name)]
    without_frozen = frozen == set(missing)
    if len(missing) == len(shapes) or (missing and strict and not without_frozen):
        raise InconsistentError(
            "a checkpoint of another model", file=catalog.source.path, found=f"it has no {examples(missing)}",
            expected=f"its names are such as {examples(catalog)}", remedy="Nothing was changed.",
        )  # fmt: skip
    if missing and engine.global_rank == 0:
        _log.warning("%r has no %s: they stay as they are.", catalog.source.path, examples(missing))
    shapes = {name: shape for name, shape in shapes.items() if name not in missing}
    wrong = [
        f"{name!r} is {list(catalog[name].shape)} and should be {list(shape)}"
        for name, shape in shapes.items()
        if catalog[name].shape != shape
    ]
    if wrong:
        raise InconsistentError(
            "a checkpoint of a model of other shapes", file=catalog.source.path, found=examples(wrong),
            remedy="Nothing was changed.",
        )  # fmt: skip


def _check_states(engine: Engine, training: Training) -> None:
    """The checkpoint's optimizer is of the run's kind, as far as either says.

    Raises:
        InconsistentError: it is another one.
    """
    if engine.optimizer is None:
        return
    ours = type(engine.optimizer).__name__
    own = training.model.get(OWN)
    theirs = own.get("optimizer") if isinstance(own, Mapping) else None
    states = {state for states in training.states.values() for state in states}
    expected = _STATES.get(ours)
    if (isinstance(theirs, str) and _kind(theirs) != _kind(ours)) or (expected is not None and states - expected):
        raise InconsistentError(
            "optimizer states of another optimizer",
            found=f"{theirs or 'states'} ({', '.join(sorted(states))})",
            expected=f"{ours}" + (f" ({', '.join(sorted(expected))})" if expected else ""),
            remedy="Nothing was changed. Load with load_optimizer_states=False, or train on with the optimizer before.",
        )


def _kind(name: str) -> str:
    return "Adam" if name in ("Adam", "AdamW") else name


_ADAM = frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))
_STATES: Mapping[str, frozenset[str]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Lamb": _ADAM,
    "Lion": frozenset(("exp_avg",)),
    "Adagrad": frozenset(("sum",)),
    "SGD": frozenset(("momentum_buffer",)),
}
"""Per-element states of optimizers that DeepSpeed and torch have alike."""


def has(catalog: Catalog, name: str) -> bool:
    """Whether a catalog knows a name."""
    return name in catalog.tensors or name in catalog.aliases


def _own_buffers(
    engine: Engine, catalog: Catalog, mine: RankStates | None, seen: Listing, called: Mapping[str, str]
) -> dict[str, TensorEntry]:
    """This rank's buffers, where the save was made by as many ranks and holds each one's."""
    refs: Mapping[str, Any] = {} if mine is None else mine.buffers
    shards = seen.shards("model")
    last = engine.world_size - 1
    if not refs and engine.global_rank in shards and (last in shards) and max(shards) == last:
        module = _mapping(_mapping(seen.open(shards[engine.global_rank]).root).get("module"))
        refs = {called.get(str(name), str(name)): ref for name, ref in module.items()}
    found: dict[str, TensorEntry] = {}
    for name in buffers_of(engine):
        ref = refs.get(name)
        if isinstance(ref, TensorRef) and has(catalog, name) and tuple(ref.shape) == tuple(catalog[name].shape):
            found[name] = whole(name, ref, "buffer")
    return found


def _lost(engine: Engine, own: Mapping[str, Any], buffers: Mapping[str, object]) -> bool:
    """Whether ranks had buffers of their own, and this one's are not at hand."""
    ranks = own.get("differing_buffers") or []
    same_world = own.get("world_size") == engine.world_size
    return engine.global_rank in ranks and not buffers if same_world else bool(ranks)


def _saved_groups(engine: Engine, training: Training) -> Iterable[tuple[int, SavedGroup]]:
    """Settings and states, by the number of the group."""
    owner = {name: group for group in training.groups for name in group.names}
    by_master = {id(held.master): held for held in engine.sharded.held if held.master is not None}
    odd = _mapping(_mapping(training.model.get(OWN)).get("scalars"))
    for number, group in enumerate([] if engine.optimizer is None else engine.optimizer.param_groups):
        members = [by_master[id(master)] for master in group["params"]]
        known = [held for held in members if held.name in owner]
        if known:
            settings = owner[known[0].name].settings
            yield (
                number,
                SavedGroup(
                    {key: from_inert(value) for key, value in settings.items() if key in _keys(group)},
                    tuple(
                        (
                            held,
                            training.states.get(held.name, {}),
                            _mapping(odd.get(held.name)) or _scalars(owner[held.name]),
                        )
                        for held in known
                    ),
                ),
            )


def _keys(group: Mapping[str, Any]) -> set[str]:
    """Settings that a checkpoint may change: not those that choose a kernel."""
    chosen = {"params", "fused", "foreach", "capturable", "differentiable"}
    return (set(group) | {"initial_lr"}) - chosen


def _scalars(group: ParameterGroup) -> dict[str, float]:
    """States of one number; DeepSpeed's own optimizers keep the step among the settings."""
    found = {name: _number(value) for name, value in group.scalars.items()}
    if "step" not in found and "step" in group.settings:
        found["step"] = _number(group.settings["step"])
    return {name: value for name, value in found.items() if value is not None}


def _number(value: object) -> float | None:
    if isinstance(value, TensorRef):
        value = from_inert(value).item() if math.prod(value.shape) == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _scaler(training: Training) -> dict[str, Any]:
    own = _mapping(_mapping(training.model.get(OWN)).get("scaler"))
    if own:
        return dict(own)
    scaler = training.scaler.get("loss_scaler")
    state = scaler.state if isinstance(scaler, Placeholder) else training.scaler
    return {key: value for key, value in _mapping(state).items() if isinstance(value, int | float)}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _counters(engine: Engine, rest: Mapping[str, Any], own: Mapping[str, Any]) -> Counters | None:
    steps, accumulation = rest.get("global_steps"), engine.gradient_accumulation_steps()
    if not isinstance(steps, int):
        return None
    samples, skipped, data = rest.get("global_samples"), rest.get("skipped_steps"), own.get("data")
    micro, pending = own.get("micro_steps"), own.get("pending_micro_steps")
    before = _mapping(rest.get("ds_config")).get("gradient_accumulation_steps")
    if not isinstance(micro, int):
        micro, pending = steps * accumulation, 0
    elif not isinstance(pending, int):  # a save of an earlier version
        pending = micro % before if isinstance(before, int) and before > 0 else 0
    if before is not None and before != accumulation:
        micro = steps * accumulation + pending
    return Counters(
        global_steps=steps,
        global_samples=samples if isinstance(samples, int) else steps * engine.train_batch_size(),
        skipped_steps=skipped if isinstance(skipped, int) else 0,
        micro_steps=micro,
        pending=pending,
        data=from_inert(dict(data)) if isinstance(data, Mapping) else None,
    )


def _rng(engine: Engine, opened: Opened, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The random generators of the rank of this number, where there was one in a world of the same size."""
    listing = opened.place.listing
    rngs, shards = own.get("rngs"), listing.shards("optim")
    if isinstance(rngs, list) and len(rngs) == engine.world_size:
        return _mapping(rngs[engine.global_rank])
    if rngs is None and len(shards) == engine.world_size:
        root = _mapping(listing.open(shards[engine.global_rank]).root)
        return _mapping(_mapping(root.get(OWN)).get("rng"))
    return {}
