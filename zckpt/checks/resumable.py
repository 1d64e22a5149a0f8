"""Whether a run can resume from an output as it can from its checkpoint: states, step counts, settings, client state.

For `verify`. Weights are not compared here. What the indexes show is compared at once; elements are returned in pairs, to be
derived from the shards once more and compared as bytes. Of outputs under another program's names (what `to-mcore --optimizer`
writes), optimizer states, steps and settings are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Any, TypeGuard

from zckpt import layouts
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import ZckptError
from zckpt.base.words import count, examples
from zckpt.checks.examined import Examined
from zckpt.checks.second import compare_states
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.engine.independent import differences
from zckpt.layouts.joining.slices import as_float
from zckpt.layouts.run.agreement import disagreements, unlike
from zckpt.layouts.run.training import ParameterGroup, Training
from zckpt.layouts.run.values import single_value
from zckpt.layouts.save.listing import MODEL_NAME, SHARD_NAME, Listing
from zckpt.layouts.save.module_states import read_model_states, root_of, whole
from zckpt.layouts.save.state_names import WRAPPERS
from zckpt.layouts.save.trainers import complete_settings, optimizer_beside

Pair = tuple[str, TensorEntry, TensorEntry]
"""A description in words, the tensor of the checkpoint, and that of the output."""


@dataclass(slots=True)
class Comparison:
    """What an output holds of a run, beside its weights.

    Attributes:
        held: what is in the output, in words; empty where it holds weights alone.
        only: what is only in the shards, in words.
        problems: what is wrong, as far as it shows without the elements of tensors.
        pairs: tensors of both sides that must be equal.
    """

    held: list[str] = field(default_factory=list[str])
    only: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    pairs: list[Pair] = field(default_factory=list[Pair])

    def same(self, a: object, b: object, where: str) -> None:
        """Compares two inert values; tensors in them are added to `pairs`."""
        self.problems += unlike(a, b, where, self.pairs)


_BESIDE_STATES = ("step counts", "settings")
_OF_MODEL = ("schedules", "counters", "client state")


def compare_runs(source: Examined, output: Examined) -> Comparison:
    """Compares what a run needs to resume, in a checkpoint and its output; both have a catalog."""
    assert source.catalog is not None and output.catalog is not None
    found = Comparison()
    if strangers := _strangers(source.place.listing, output.place.listing):
        found.only.append(f"files that are not DeepSpeed's ({examples(strangers)})")
    there = _training(output)
    made = output.catalog.source
    if isinstance(there, ZckptError):
        if made.zero_stage or made.optimizer_states:
            found.problems.append(str(there))
        states = source.catalog.source.optimizer_states
        found.only += [f"the optimizer states ({', '.join(states)})"] * bool(states)
        if not states and (unread := layouts.family_of(source.place.listing).unread_states(source.place.listing)):
            found.only.append(f"optimizer states, which are not read ({unread.partition(': ')[2] or unread})")
        found.only += [*_BESIDE_STATES, *_OF_MODEL] * bool(states or source.catalog.source.zero_stage)
        return found
    here = _training(source)
    if isinstance(here, ZckptError):
        found.only.append(f"whatever else a run needs to resume, which zckpt does not read ({here.what})")
        return found
    for side, training in ((source, here), (output, there)):
        assert side.catalog is not None
        masters = {name: side.catalog.tensors[own] for name, own in side.names.items() if own in side.catalog.tensors}
        places = compare_states(side.place.listing, training, masters)
        found.problems += places.problems
        if places.by == "none" and side.places.by != "none":
            side.places = places
    names = [side.names for side in (source, output)]
    _compare_states(found, here, there, *names)
    if drifted := _odd_copies(here):
        found.only.append(f"optimizer states that ranks hold differently ({examples(drifted)})")
    tagged = layouts.family_of(source.place.listing).tagged
    if tagged and optimizer_beside(output.place.listing.directory) is not None:  # which accelerate asks more of
        here = replace(here, groups=tuple(
            replace(group, settings=complete_settings(group.settings, group.states)) for group in here.groups
        ))  # fmt: skip
    _compare_groups(found, here, there, *names)
    _compare_scalers(found, here, there)
    family = layouts.family_of(output.place.listing)
    if family.holds_run:
        _compare_model(found, here, there)
    else:
        found.only += _OF_MODEL
    if family.keeps_model_files:
        if source.catalog.source.zero_stage:  # of a run without ZeRO the file is made
            _compare_copies(found, source.place.listing, output.place.listing)
        _compare_beside(found, source, output.place.listing)
    else:
        odd = list(_odd_files(source, here))
        found.only += [f"what some ranks' files say otherwise ({examples(odd)})"] * bool(odd)
        found.problems += _odd_files(output, there)
    if left := layouts.family_of(source.place.listing).left_out(source.place.listing):
        found.only.append(f"tensors of other state dicts ({examples(left)})")
    if beside := _beside(source.place.listing):
        found.only.append(f"further entries of the optimizer files ({examples(beside)})")
    return found


def _strangers(source: Listing, output: Listing) -> list[str]:
    """Files in a tag directory that do not belong to the save."""
    family = layouts.family_by_names(source)
    if not source.tag or not family.tagged:
        return []
    return [name for name in source.files if not family.owns(name) and name not in output.files]


def _training(side: Examined) -> Training | ZckptError:
    try:
        return layouts.read_training(side.place.listing)
    except ZckptError as error:
        return error


def _compare_states(
    found: Comparison, here: Training, there: Training, names: Mapping[str, str], others: Mapping[str, str]
) -> None:
    """Compares the optimizer states of every element; masters are compared with the weights."""
    held = {others.get(name, name): dict(states) for name, states in there.states.items()}
    missing: list[str] = []
    for name, states in here.states.items():
        own = names.get(name, name)
        for state, entry in states.items():
            what = f"{state} of {own!r}"
            other = held.get(own, {}).pop(state, None)
            if other is None:
                missing.append(what)
            elif (entry.shape, entry.dtype) != (other.shape, other.dtype):
                found.problems.append(
                    f"{what} is {other.dtype} {list(other.shape)}, in the checkpoint {entry.dtype} {list(entry.shape)}"
                )
            else:
                found.pairs.append((what, entry, other))
    strange = [f"{state} of {name!r}" for name, states in held.items() for state in states]
    if missing:
        found.problems.append(
            f"it lacks {count(len(missing), 'optimizer state')} of the checkpoint: {examples(missing)}"
        )
    if strange:
        found.problems.append(
            f"it has {count(len(strange), 'optimizer state')} that the checkpoint has not: {examples(strange)}"
        )
    kinds = dict.fromkeys(state for states in here.states.values() for state in states)
    found.held += [f"the optimizer states ({', '.join(kinds)})"] * bool(kinds)


def _odd_copies(training: Training) -> list[str]:
    """States that several ranks hold and that differ between them; the first rank's are taken."""
    copies = [
        (f"{state} of {name!r} on {copy.rank}", replace(entry, replicas=()), replace(entry, fragments=copy.fragments))
        for name, states in training.states.items()
        for state, entry in states.items()
        for copy in entry.replicas
    ]
    return [copies[bad.number][0] for bad in differences([(a, b) for _, a, b in copies])]


def _compare_groups(
    found: Comparison, here: Training, there: Training, names: Mapping[str, str], others: Mapping[str, str]
) -> None:
    """Compares parameter groups: their parameters, their settings, and states of one value for all of them."""
    found.held += _BESIDE_STATES
    own, other = ([group for group in run.groups if group.names] for run in (here, there))
    if len(own) != len(other):
        found.problems.append(f"it has {count(len(other), 'parameter group')}, the checkpoint {len(own)}")
        return
    for number, (a, b) in enumerate(zip(own, other, strict=True)):
        if [names.get(name, name) for name in a.names] != [others.get(name, name) for name in b.names]:
            found.problems.append(f"parameter group {number} has other parameters, or the same in another order")
        found.problems += _unlike_group(number, a, b.scalars, b.settings, found.pairs)


def _unlike_group(
    number: int, group: ParameterGroup, scalars: Mapping[str, object], settings: Mapping[str, object], pairs: list[Pair]
) -> Iterator[str]:
    where = f"of parameter group {number}"
    here, there = ({key: single_value(value) for key, value in held.items()} for held in (group.scalars, scalars))
    yield from unlike(here, there, f"a single state {where}", pairs)
    own, other = ({key: value for key, value in held.items() if key != "params"} for held in (group.settings, settings))
    yield from unlike(own, other, f"a setting {where}", pairs)


def _compare_scalers(found: Comparison, here: Training, there: Training) -> None:
    """Compares the loss scaler. It starts again in another precision, and torch's own checkpoints have no place for it."""
    if here.precision != there.precision or not there.scaler:
        found.only += ["the loss scaler"] * bool(here.scaler)
        return
    kept = {key: there.scaler[key] for key in here.scaler if key in there.scaler}
    found.same(dict(here.scaler), kept, "the loss scaler")
    found.held += ["the loss scaler"] * bool(here.scaler)


def _compare_model(found: Comparison, here: Training, there: Training) -> None:
    """Compares counters, schedules, config and client state."""
    other_precision = here.precision != there.precision
    own, other = (_neutral(run.model, other_precision) for run in (here, there))
    found.same(own, {key: other[key] for key in own if key in other}, "the model file")
    found.held += _OF_MODEL


def _neutral(model: Mapping[str, object], other_precision: bool) -> dict[str, object]:
    """A model file's entries, without those of the config that another shape or precision changes."""
    config = model.get("ds_config")
    if not isinstance(config, Mapping):
        return dict(model)
    zero = config.get("zero_optimization")
    zero = {key: value for key, value in zero.items() if key != "stage"} if isinstance(zero, Mapping) else {}
    left_out = ("fp16", "bf16") if other_precision else ()
    kept = {key: value for key, value in config.items() if key not in left_out}
    return {**model, "ds_config": {**kept, "zero_optimization": zero}}


def _compare_copies(found: Comparison, source: Listing, output: Listing) -> None:
    """Compares a universal checkpoint's model files, which are copies of the source's; AutoEP's record is in them
    twice.
    """
    for name in _model_files(source):
        if name not in output.files:
            found.problems.append(f"it lacks {name!r}")
            continue
        own, other = (root_of(listing, name) for listing in (source, output))
        if own.get("ds_autoep_layers") is not None:
            own, other = ({**root, "universal_checkpoint_info": None} for root in (own, other))
        found.same(own, other, repr(name))


def _compare_beside(found: Comparison, source: Examined, output: Listing) -> None:
    """Compares the files of a universal checkpoint for tensors that are not trained, which it stores as floats, and for
    tied names.
    """
    from zckpt.layouts.universal.read import beside

    assert source.catalog is not None
    for raw, ref in beside(output).items():
        name = source.names.get(raw, WRAPPERS.sub("", raw))
        entry = source.catalog.tensors.get(source.catalog.aliases.get(name, name))
        if entry is not None and entry.numel == ref.numel:
            if (copy := entry.own_copy) is not None:
                entry = replace(entry, dtype=copy.dtype, fragments=copy.fragments)
            found.pairs.append(
                (f"{name!r} in a file of its own", as_float(entry), whole(name, ref, "buffer", entry.shape))
            )
        else:
            found.problems.append(f"{name!r} in a file of its own is of another shape, or not of the checkpoint")


def _model_files(listing: Listing) -> list[str]:
    shards = [name for name in listing.matching(SHARD_NAME) if name.endswith("_model_states.pt")]
    return [*listing.matching(MODEL_NAME), *shards]


def _odd_files(side: Examined, training: Training) -> Iterator[str]:
    """Sentences on files that contradict the first file, which readers take."""
    assert side.catalog is not None
    listing = side.place.listing
    odd: dict[str, list[str]] = {}
    pairs: list[Pair] = []
    names: list[str] = []
    for name in _model_files(listing):
        rest = read_model_states(listing, name, module={}).rest
        rest = {key: rest[key] for key in training.model if key in rest}
        for what in unlike(dict(training.model), rest, "the model file", pairs):
            odd.setdefault(what, []).append(name)
        names += [name] * (len(pairs) - len(names))
    for bad in differences([(a, b) for _, a, b in pairs]):
        odd.setdefault(f"{pairs[bad.number][0]} has another tensor", []).append(names[bad.number])
    for other in disagreements(listing):
        odd.setdefault(other.difference, []).append(other.file)
    for what, files in odd.items():
        yield f"{what} (in {examples(files)})"


_OPTIMIZER_FILE = frozenset(("optimizer_state_dict", "ds_config", "ds_version", "param_shapes", "folding"))


def _beside(listing: Listing) -> list[str]:
    """Entries of optimizer files that no other shape has a place for, such as the ranks' random states."""
    shards = (name for name in listing.matching(SHARD_NAME) if name.endswith("_optim_states.pt"))
    roots = (listing.open(name).root for name in shards)
    return sorted({str(key) for root in roots if isinstance(root, Mapping) for key in root.keys() - _OPTIMIZER_FILE})


def has_renamed_states(form: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a manifest's form says that states were written under another program's names."""
    return isinstance(form, Mapping) and "optimizer" in form and "names" in form


def own_weights(catalog: Catalog) -> Catalog:
    """The tensors, with the model's own weights in place of the optimizer's fp32 ones where there are both."""
    tensors = {
        name: entry if (own := entry.own_copy) is None else entry.as_in(own) for name, entry in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors)


def compare_renamed(source: Examined, output: Examined, form: Mapping[str, Any]) -> Comparison:
    """Compares the states of an output, with this form in its manifest, with those of its checkpoint; both have a catalog."""
    from zckpt.jobs.to_mcore import megatron_states
    from zckpt.naming.writers import name_for_writer, naming_of

    chosen = source.catalog
    assert chosen is not None and output.catalog is not None
    found = Comparison()
    naming = naming_of(form)
    try:
        model = name_for_writer(chosen, source.place, naming)
        known = {own: theirs for theirs, own in source.names.items()}
        wanted, _ = megatron_states(source.place, chosen, known, model, naming, experts_apart=False)
        there = layouts.read_training(output.place.listing)
    except ZckptError as error:
        found.problems.append(str(error))
        return found
    missing: list[str] = []
    for state, entry in wanted.states:
        held = (
            output.catalog.tensors.get(entry.name)
            if state == "param"
            else there.states.get(entry.name, {}).get(state)
        )  # fmt: skip
        if held is None or held.shape != entry.shape:
            missing.append(f"{state} of {entry.name!r}")
        else:
            found.pairs.append((f"{state} of {entry.name!r}", entry, replace(held, replicas=())))
    if missing:
        found.problems.append(
            f"it lacks {count(len(missing), 'optimizer state')} of the checkpoint: {examples(missing)}"
        )
    for group in there.groups:
        found.same({"step": float(wanted.step)}, {"step": float(str(group.scalars.get("step")))}, "a parameter group")
        kept = {key: group.settings.get(key) for key in ("lr", "betas", "eps")}
        found.same({key: wanted.settings[key] for key in kept}, kept, "a parameter group")
    found.held = ["the fp32 weights", "the optimizer states (exp_avg, exp_avg_sq)", "step counts"]
    found.only = ["schedules", "counters", "client state"]
    return found
