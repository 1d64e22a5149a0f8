"""Reads what a checkpoint holds of a run, and checks it against the run before anything is changed.

For `loading`. Only indexes are read, and what is small: elements of weights, states and buffers are still in their files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from zckpt import layouts
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError
from zckpt.base.words import examples, join_words
from zckpt.containers import Placeholder, TensorRef
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.jobs.open import Opened, as_named_by
from zckpt.layouts.run.training import ParameterGroup, Training
from zckpt.layouts.run.values import number_in
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import RESERVED, whole
from zckpt.layouts.zero import same_layout, unsharded_training
from zckpt.layouts.zero.partition import partition_numel
from zckpt.layouts.zero.same_layout import Held, SameLayout
from zckpt.live.plain_values import from_inert, mapping
from zckpt.runtime.saves import rank_states
from zckpt.runtime.saves.description import OWN, target_of
from zckpt.runtime.saves.rank_states import MOMENT
from zckpt.runtime.saves.run_state import buffers_of, group_members
from zckpt.runtime.sharding.parameter import ShardedParameter
from zckpt.runtime.training_run import TrainingRun
from zckpt.runtime.world import elements_of

_log = logging.getLogger("zckpt.runtime")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The parts of a checkpoint that are wanted beside the weights.

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


SavedGroup = tuple[dict[str, Any], list[tuple[ShardedParameter, Mapping[str, Held], Mapping[str, float]]]]
"""Of a parameter group, the settings that a checkpoint changes; and for each parameter that it knows, per-element states and
states of one number.
"""


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A checkpoint, for one rank of a run; what the options leave out and what the files do not have is None or empty.

    Attributes:
        directory: of the save.
        weights: those of the model's tensors that it has, by the model's names, the buffers among them.
        buffers: this rank's own, if they differ from those of `weights`.
        buffers_lost: buffers differed from rank to rank when the run was saved, and this rank's are missing.
        precision: dtype of the module's own weights.
        groups: by the number of the group in the optimizer.
        scaler: state of the loss scale.
        schedule: state of the schedule.
        counters: those of `RunState` by name; empty if it has none.
        data: position of the loader; empty likewise.
        rng: random generators of the rank of this number.
        gradients: of the micro batches since the last step.
        full: parameters with all of their elements, for those that stay whole in a load; empty if they are gathered after it.
        file: name of the file that DeepSpeed would read this rank's counters from; empty where there is none.
        client_state: the entries of that file which are small: what the caller had saved, and DeepSpeed's own.
    """

    directory: str
    weights: Mapping[str, Held]
    buffers: Mapping[str, TensorEntry]
    buffers_lost: bool
    precision: torch.dtype | None
    groups: Mapping[int, SavedGroup]
    scaler: Mapping[str, Any] | None
    schedule: Any
    counters: Mapping[str, int]
    data: Mapping[str, int]
    rng: Mapping[str, Any]
    gradients: Mapping[str, Mapping[str, TensorRef]] | None
    full: Mapping[str, Held]
    file: str
    client_state: dict[str, Any]


def read(run: TrainingRun, opened: Opened, options: LoadOptions, seen: Listing) -> SavedRun:
    """Reads and checks a checkpoint; changes nothing. Raises InconsistentError if it is of another model or optimizer;
    another kind of ZckptError says what is wrong with it.
    """
    catalog, called = as_named_by(_names(run), opened.catalog)
    _check_model(run, catalog, options.strict)
    training = _training(run, opened, options, called)
    rest: Mapping[str, Any] = {} if training is None else training.model
    own = mapping(rest.get(OWN))
    refs: Mapping[str, TensorRef] = {}
    gradients: Mapping[str, Mapping[str, TensorRef]] | None = None
    groups: dict[int, SavedGroup] = {}
    if training is not None:
        _check_states(run, training)
        refs, gradients = rank_states.read(run, seen, {key: {**own, **rest}.get(key) for key in MOMENT}, called)
        if options.optimizer:
            groups = dict(_saved_groups(run, training, training.states))
    buffers = _own_buffers(run, catalog, refs, seen, called) if run.world_size > 1 else {}
    weights = {name: catalog[name] for name in _names(run) if has(catalog, name)}
    seen_by_all = opened.place.listing
    file, rng = _state_file(run, seen_by_all), _rng(run, seen_by_all, own) if options.counters else {}
    made = _saved_run(run, options, seen_by_all, training, weights, groups, catalog.extras, file, rng)
    wanted = gradients if options.counters and options.optimizer else None
    return replace(made, buffers=buffers, buffers_lost=_lacks_buffers(run, own, buffers), gradients=wanted)


def read_same(run: TrainingRun, options: LoadOptions, listing: Listing) -> tuple[SavedRun, str] | None:
    """As `read`, of a save that this run would write now, all of it; and a text that is the same on all ranks if their files
    are of one such save. None if it may be another: only `read` says what is wrong with one.
    """
    size, zero = run.world_size, run.settings.zero
    every = LoadOptions(optimizer=True, schedule=True, counters=True, strict=options.strict)
    if options != every or not run.groups or zero.stage == 0 or run.sharded.size != size:
        return None
    parameters = run.sharded.parameters
    groups = [{one.name: tuple(one.shape) for one in members} for members in group_members(run) if members]
    trained = {name for group in groups for name in group}
    layout = SameLayout(
        target=target_of(run, ""),
        rank=run.sharded.rank,
        groups=groups,
        frozen={one.name: tuple(one.shape) for one in parameters if one.name not in trained},
        buffers={name: tuple(buffer.shape) for name, buffer in buffers_of(run).items()},
        aliases=run.sharded.aliases,
        held={one.name: range(one.start, one.start + one.count) for one in parameters},
        spans=size > 1 and (zero.stage < 3 or any(
            one.replicated or elements_of(one.shape, size, 0)[1] != partition_numel(one.shape.numel(), size) for one in parameters
        )),
        full=_stays_whole(run),
    )  # fmt: skip
    found = same_layout.read(listing, layout)
    if found is None:
        return None
    training, weights, states, full, text, file = found
    own = mapping(training.model.get(OWN))
    differ = own.get("differing_buffers") and zero.stage < 3
    if not own.get("scaler") or own.get("world_size") != size or differ or "rngs" in own:
        return None
    _check_states(run, training)
    saved_groups = dict(_saved_groups(run, training, states))
    client = {key: value for key, value in training.model.items() if key not in RESERVED}
    rng = mapping(mapping(training.beside.get(OWN)).get("rng"))
    saved = _saved_run(run, options, listing, training, weights, saved_groups, client, file, rng)
    return replace(saved, full=full), text


def _stays_whole(run: TrainingRun) -> bool:
    """Whether a load can fill the whole parameters where they are: it takes less than to gather them, if they are few."""
    cut = [one for one in run.sharded.parameters if not one.replicated]
    few = sum(one.shape.numel() for one in cut) <= _MOST_WHOLE and run.settings.zero.load_from_fp32_weights
    return few and all(one.is_whole and one.whole is not None and one.whole.untyped_storage().size() for one in cut)


_MOST_WHOLE = 4 << 20
"""Elements of whole parameters that every rank reads itself: a gather sends half of the bytes, but takes some milliseconds."""


def _saved_run(
    run: TrainingRun,
    options: LoadOptions,
    listing: Listing,
    training: Training | None,
    weights: Mapping[str, Held],
    groups: Mapping[int, SavedGroup],
    extras: Mapping[str, object],
    file: str,
    rng: Mapping[str, Any],
) -> SavedRun:
    """What both ways of reading have found, and what is left to be said of it."""
    rest: Mapping[str, Any] = {} if training is None else training.model
    own = mapping(rest.get(OWN))
    schedule = rest.get("lr_scheduler") if options.schedule and run.lr_scheduler is not None else None
    root = {**extras, **mapping(listing.open(file).root if file else None)}
    return SavedRun(
        directory=listing.directory.path,
        weights=weights,
        buffers={},
        buffers_lost=False,
        precision=None if training is None else getattr(torch, training.precision.torch_name),
        groups=groups,
        scaler=_scaler(training) if training is not None and options.optimizer else None,
        schedule=None if schedule is None else from_inert(schedule),
        counters=_counters(run, rest, own) if options.counters else {},
        data=from_inert(dict(mapping(own.get("data")))),
        rng=from_inert(dict(rng)),
        gradients=None,
        full={},
        file=file,
        client_state={
            key: _with_sizes(value) if key in ("param_shapes", "frozen_param_shapes") else from_inert(value)
            for key, value in root.items()
            if key != OWN and (value is None or key not in _LARGE)
        },
    )


_LARGE = ("module", "optimizer", "frozen_param_fragments")
"""Entries of a model states file that hold elements of weights or states: they are not read a second time."""


def _with_sizes(value: Any) -> Any:
    """The value with `torch.Size` for the shapes in it, which are plain tuples in an inert one."""
    if isinstance(value, Mapping):
        return {name: _with_sizes(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_sizes(one) for one in value]
    return torch.Size(value) if isinstance(value, tuple) else value


def _state_file(run: TrainingRun, listing: Listing) -> str:
    """The name of the model states file of this rank, or of the first."""
    shards = listing.shards("model")
    name = shards.get(run.global_rank, next(iter(shards.values()), "mp_rank_00_model_states.pt"))
    return name if name in listing.files else ""


def _names(run: TrainingRun) -> list[str]:
    """The names of all tensors of the model, the tied ones too."""
    return [*(one.name for one in run.sharded.parameters), *run.sharded.aliases, *buffers_of(run)]


def _training(run: TrainingRun, opened: Opened, options: LoadOptions, called: Mapping[str, str]) -> Training | None:
    """The data of the checkpoint beside the weights, under the model's names. `called`: for each name of the checkpoint, what
    the model calls it.
    """
    if not (options.optimizer or options.schedule or options.counters):
        return None
    if opened.catalog.source.layout == "unsharded":
        theirs = {ours: name for name, ours in called.items()}
        groups = [[theirs.get(one.name, one.name) for one in members] for members in group_members(run)]
        training = unsharded_training.read_training(opened.place.listing, names=groups)
    else:
        training = layouts.read_training(opened.place.listing)
    own = mapping(training.model.get(OWN))
    odd = {called.get(name, name): value for name, value in mapping(own.get("scalars")).items()}
    return replace(
        training,
        model={**training.model, OWN: {**own, "scalars": odd}},
        groups=tuple(
            replace(group, names=tuple(called.get(name, name) for name in group.names)) for group in training.groups
        ),
        states={called.get(name, name): value for name, value in training.states.items()},
    )


def _check_model(run: TrainingRun, catalog: Catalog, strict: bool) -> None:
    """Checks that every tensor of the model is there, in its shape; frozen ones may be missing together. Raises
    InconsistentError if one is not.
    """
    shapes = {one.name: tuple(one.shape) for one in run.sharded.parameters}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers_of(run).items()}
    frozen = {one.name for one in run.sharded.parameters if not one.trained}
    missing = [name for name in shapes if not has(catalog, name)]
    if len(missing) == len(shapes) or (missing and strict and frozen != set(missing)):
        raise InconsistentError(
            "is a checkpoint of another model", file=catalog.source.path, found=f"tensors such as {examples(catalog)}",
            expected=f"all tensors of the model, also {examples(missing)}",
            remedy="Nothing was changed. Load the checkpoint into the model that was trained. To leave tensors that it "
            "does not have as they are, pass load_module_strict=False.",
        )  # fmt: skip
    if missing and run.global_rank == 0:
        _log.warning("%s does not have %s of the model: left as they are.", catalog.source.path, examples(missing))
    wrong = [
        f"{name!r} of shape {list(catalog[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name not in missing and catalog[name].shape != shape
    ]
    if wrong:
        raise InconsistentError(
            "has tensors of other shapes than the model", file=catalog.source.path,
            found=join_words(wrong if len(wrong) < 5 else [*wrong[:3], f"{len(wrong) - 3:,} more"]),
            expected="the shapes of the model",
            remedy="Nothing was changed. Make the model with the sizes that the checkpoint was trained with.",
        )  # fmt: skip


def _check_states(run: TrainingRun, training: Training) -> None:
    """Checks that the checkpoint's optimizer is of the run's kind, as far as either says. Raises InconsistentError if
    it is another one.
    """
    if run.optimizer is None:
        return
    ours, theirs = type(run.basic_optimizer).__name__, mapping(training.model.get(OWN)).get("optimizer")
    states = {state for states in training.states.values() for state in states}
    states |= {state for group in training.groups for state in group.states}
    expected = _STATES.get(ours)
    if (isinstance(theirs, str) and _kind(theirs) != _kind(ours)) or (expected is not None and states - expected):
        raise InconsistentError(
            "the checkpoint's optimizer states are those of another optimizer",
            found=f"{theirs or 'states'} ({', '.join(sorted(states))})",
            expected=f"{ours}" + (f" ({', '.join(sorted(expected))})" if expected else ""),
            remedy="Nothing was changed. Train on with the optimizer that the run had, or pass load_optimizer_states=False.",
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
    """Whether a catalog has a name."""
    return name in catalog.tensors or name in catalog.aliases


def _own_buffers(
    run: TrainingRun, catalog: Catalog, refs: Mapping[str, Any], seen: Listing, called: Mapping[str, str]
) -> dict[str, TensorEntry]:
    """This rank's buffers, where the save was made by as many ranks and holds each one's; `refs` are those of the rank's file."""
    shards = seen.shards("model")
    last = run.world_size - 1
    if not refs and run.global_rank in shards and (last in shards) and max(shards) == last:
        module = mapping(mapping(seen.open(shards[run.global_rank]).root).get("module"))
        refs = {called.get(str(name), str(name)): ref for name, ref in module.items()}
    found: dict[str, TensorEntry] = {}
    for name in buffers_of(run):
        ref = refs.get(name)
        if isinstance(ref, TensorRef) and has(catalog, name) and tuple(ref.shape) == tuple(catalog[name].shape):
            found[name] = whole(name, ref, "buffer")
    return found


def _lacks_buffers(run: TrainingRun, own: Mapping[str, Any], buffers: Mapping[str, object]) -> bool:
    """Whether ranks had buffers of their own, and this rank's are missing."""
    ranks = own.get("differing_buffers") or []
    same_world = own.get("world_size") == run.world_size
    return run.global_rank in ranks and not buffers if same_world else bool(ranks)


def _saved_groups(
    run: TrainingRun, training: Training, held: Mapping[str, Mapping[str, Held]]
) -> Iterable[tuple[int, SavedGroup]]:
    """Settings and states, by the number of the group."""
    owner = {
        name: (group.settings, numbers)
        for group in training.groups
        for numbers in [_scalars(group)]
        for name in group.names
    }
    odd = mapping(mapping(training.model.get(OWN)).get("scalars"))
    for number, (members, group) in enumerate(zip(group_members(run), run.groups, strict=True)):
        known = [one for one in members if one.name in owner]
        if known:
            settings, keys = owner[known[0].name][0], _keys(group)
            options = {key: from_inert(value) for key, value in settings.items() if key in keys}
            states = [(one, held.get(one.name, {}), mapping(odd.get(one.name)) or owner[one.name][1]) for one in known]
            yield number, (options, states)


def _keys(group: Mapping[str, Any]) -> set[str]:
    """The settings that a checkpoint may change: all except those that choose a kernel."""
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
        value = number_in(value) if math.prod(value.shape) == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _scaler(training: Training) -> dict[str, Any]:
    own = mapping(mapping(training.model.get(OWN)).get("scaler"))
    if own:
        return dict(own)
    scaler = training.scaler.get("loss_scaler")
    state = scaler.state if isinstance(scaler, Placeholder) else training.scaler
    return {key: value for key, value in mapping(state).items() if isinstance(value, int | float)}


def _counters(run: TrainingRun, rest: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, int]:
    steps, accumulation = rest.get("global_steps"), run.batch.accumulation
    if not isinstance(steps, int):
        return {}
    samples, skipped = rest.get("global_samples"), rest.get("skipped_steps")
    micro, pending = own.get("micro_steps"), own.get("pending_micro_steps")
    before = mapping(rest.get("ds_config")).get("gradient_accumulation_steps")
    if not isinstance(micro, int) or not isinstance(pending, int):  # a save of DeepSpeed
        micro, pending = steps * accumulation, 0
    if before is not None and before != accumulation:
        micro = steps * accumulation + pending
    return {
        "global_steps": steps,
        "global_samples": samples if isinstance(samples, int) else steps * run.batch.total,
        "skipped_steps": skipped if isinstance(skipped, int) else 0,
        "micro_steps": micro,
        "pending_micro_steps": pending,
    }


def _rng(run: TrainingRun, listing: Listing, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """The random generators of the rank with this number, if the save was made by as many ranks."""
    rngs, shards = own.get("rngs"), listing.shards("optim")
    if isinstance(rngs, list) and len(rngs) == run.world_size:
        return mapping(rngs[run.global_rank])
    if rngs is None and len(shards) == run.world_size:
        root = mapping(listing.open(shards[run.global_rank]).root)
        return mapping(mapping(root.get(OWN)).get("rng"))
    return {}
