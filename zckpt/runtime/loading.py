"""Loading a run: any checkpoint that the catalog knows, of any stage and world size, into the parts that this rank holds.

For `Engine.load_checkpoint`. A rank reads the indexes of all files, and of their elements only those it holds itself.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zckpt import layouts, live
from zckpt.catalog import Catalog, TensorEntry
from zckpt.checkpoint import Opened, as_named_by, open_catalog
from zckpt.containers import Placeholder, TensorRef
from zckpt.errors import InconsistentError, some
from zckpt.layouts import unsharded_training
from zckpt.layouts.training import Group, Training
from zckpt.overlaps import clip
from zckpt.runtime.description import OWN
from zckpt.runtime.engine import Engine
from zckpt.runtime.generators import set_rng_state
from zckpt.runtime.held import Held
from zckpt.runtime.inert import from_inert
from zckpt.runtime.nodes import Want, spread
from zckpt.runtime.state import buffers_of, put_part

_log = logging.getLogger("zckpt.runtime")


@dataclass(frozen=True, slots=True)
class Wishes:
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


def load(engine: Engine, directory: str, tag: str | None, wishes: Wishes) -> tuple[str, dict[str, Any]]:
    """Loads a checkpoint.

    Returns:
        Its directory, and the client state that was saved with it.

    Raises:
        InconsistentError: it is of another model, or of another optimizer. Nothing was changed.
        ZckptError: another kind says what is wrong with it.
    """
    nodes = spread(engine, directory, tag) if engine.settings.config.checkpoint.use_node_local_storage else None
    if nodes is None:
        return _load(engine, open_catalog(directory, tag), wishes, _fill)
    with nodes:
        _, client_state = _load(engine, open_catalog(nodes.directory, nodes.tag), wishes, nodes.fill)
        return os.path.join(directory, nodes.tag), client_state


Fill = Callable[[Sequence[Want]], None]


def _fill(wanted: Sequence[Want]) -> None:
    """Fills tensors from files that this rank sees."""
    live.move([(entry if held is None else _part(entry, held), tensor) for entry, held, tensor in wanted])


def _load(engine: Engine, opened: Opened, wishes: Wishes, fill: Fill) -> tuple[str, dict[str, Any]]:
    catalog, called = as_named_by(_names(engine), opened.catalog)
    _check_model(engine, catalog, wishes.strict)
    training = _training(engine, opened, wishes, called)
    if training is not None:
        _check_states(engine, training)
    engine.reshard()
    engine.zero_grad()
    with torch.no_grad():
        _load_weights(engine, catalog, fill)
        if training is not None and wishes.optimizer:
            _load_optimizer(engine, training, fill)
        if training is not None and not engine.settings.zero.load_from_fp32_weights:
            _round_masters(engine, training)
    rest = training.model if training is not None else {}
    own = rest.get(OWN)
    if wishes.counters:
        _load_counters(engine, rest, own if isinstance(own, Mapping) else {})
    if wishes.schedule and engine.lr_scheduler is not None and rest.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(from_inert(rest["lr_scheduler"]))
    if wishes.counters:
        _load_rng(engine, opened, own if isinstance(own, Mapping) else {})
    return opened.place.listing.directory, {key: from_inert(value) for key, value in catalog.extras.items()}


def _names(engine: Engine) -> list[str]:
    """The names of all tensors of the model, the tied ones too."""
    return [*(held.name for held in engine.sharded.held), *engine.sharded.aliases, *buffers_of(engine)]


def _training(engine: Engine, opened: Opened, wishes: Wishes, called: Mapping[str, str]) -> Training | None:
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
    missing = [name for name in shapes if not _has(catalog, name)]
    without_frozen = frozen == set(missing)
    if len(missing) == len(shapes) or (missing and strict and not without_frozen):
        raise InconsistentError(
            "a checkpoint of another model", file=catalog.source.path, found=f"it has no {some(missing)}",
            expected=f"its names are such as {some(catalog)}", remedy="Nothing was changed.",
        )  # fmt: skip
    if missing and engine.global_rank == 0:
        _log.warning("%r has no %s: they stay as they are.", catalog.source.path, some(missing))
    shapes = {name: shape for name, shape in shapes.items() if name not in missing}
    wrong = [
        f"{name!r} is {list(catalog[name].shape)} and should be {list(shape)}"
        for name, shape in shapes.items()
        if catalog[name].shape != shape
    ]
    if wrong:
        raise InconsistentError(
            "a checkpoint of a model of other shapes", file=catalog.source.path, found=some(wrong),
            remedy="Nothing was changed.",
        )  # fmt: skip


def _has(catalog: Catalog, name: str) -> bool:
    return name in catalog.tensors or name in catalog.aliases


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


def _part(entry: TensorEntry, held: Held) -> TensorEntry:
    """The elements that this rank holds, as a vector."""
    fragments = clip(entry.fragments, held.start, held.start + held.count, entry.dtype.itemsize)
    return TensorEntry(entry.name, (held.count,), entry.dtype, entry.role, fragments)


def _load_weights(engine: Engine, catalog: Catalog, fill: Fill) -> None:
    wanted: list[Want] = []
    for held in engine.sharded.held:
        if not _has(catalog, held.name):
            continue
        held.bind()
        target = held.local() if held.master is None else held.master.data
        wanted.append((catalog[held.name], held, target.view(-1)))
    wanted += [(catalog[name], None, buffer) for name, buffer in buffers_of(engine).items() if _has(catalog, name)]
    fill(wanted)
    for held in engine.sharded.held:
        held.give_back()


def _round_masters(engine: Engine, training: Training) -> None:
    """Masters as they are after a way through the module weights of the checkpoint."""
    dtype = getattr(torch, training.precision.torch_name)
    for held in engine.sharded.held:
        if held.master is not None:
            held.master.copy_(held.master.to(dtype))
            held.give_back()


def _load_optimizer(engine: Engine, training: Training, fill: Fill) -> None:
    """States, settings and loss scale."""
    if engine.optimizer is None:
        return
    owner = {name: group for group in training.groups for name in group.names}
    by_master = {id(held.master): held for held in engine.sharded.held if held.master is not None}
    odd = _mapping(_mapping(training.model.get(OWN)).get("scalars"))
    wanted: list[Want] = []
    for group in engine.optimizer.param_groups:
        members = [by_master[id(master)] for master in group["params"]]
        theirs = next((owner[held.name] for held in members if held.name in owner), None)
        if theirs is None:
            continue
        options = {key: from_inert(value) for key, value in theirs.settings.items() if key in _keys(group)}
        group.update(options)
        for held in members:
            if held.name not in owner:
                continue
            scalars = _mapping(odd.get(held.name)) or _scalars(owner[held.name])
            states = training.states.get(held.name, {})
            assert held.master is not None
            engine.optimizer.state[held.master].clear()
            if not states and not scalars:
                continue
            own = engine.optimizer.state[held.master]
            for name, entry in states.items():
                own[name] = torch.empty_like(held.master, memory_format=torch.contiguous_format)
                wanted.append((entry, held, own[name].view(-1)))
            put_part(engine, held, scalars=scalars)
    fill(wanted)
    engine.scaler.load_state(_scaler(training))


def _keys(group: Mapping[str, Any]) -> set[str]:
    """Settings that a checkpoint may change: not those that choose a kernel."""
    chosen = {"params", "fused", "foreach", "capturable", "differentiable"}
    return (set(group) | {"initial_lr"}) - chosen


def _scalars(group: Group) -> dict[str, float]:
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


def _load_counters(engine: Engine, rest: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    steps = rest.get("global_steps")
    if not isinstance(steps, int):
        return
    engine.global_steps = steps
    samples, skipped = rest.get("global_samples"), rest.get("skipped_steps")
    engine.global_samples = samples if isinstance(samples, int) else steps * engine.train_batch_size()
    engine.skipped_steps = skipped if isinstance(skipped, int) else 0
    micro = own.get("micro_steps")
    before = _mapping(rest.get("ds_config")).get("gradient_accumulation_steps")
    same = before is None or before == engine.gradient_accumulation_steps()
    engine.micro_steps = micro if isinstance(micro, int) and same else steps * engine.gradient_accumulation_steps()
    data = own.get("data")
    if engine.loader is not None and isinstance(data, Mapping):
        engine.loader.load_state_dict(from_inert(dict(data)))


def _load_rng(engine: Engine, opened: Opened, own: Mapping[str, Any]) -> None:
    """The random generators of the rank of this number, where there was one in a world of the same size."""
    listing = opened.place.listing
    rngs, shards = own.get("rngs"), listing.shards("optim")
    rng: Mapping[str, Any] = {}
    if isinstance(rngs, list) and len(rngs) == engine.world_size:
        rng = _mapping(rngs[engine.global_rank])
    elif rngs is None and len(shards) == engine.world_size:
        root = _mapping(listing.open(shards[engine.global_rank]).root)
        rng = _mapping(_mapping(root.get(OWN)).get("rng"))
    if rng:
        set_rng_state(from_inert(dict(rng)))
