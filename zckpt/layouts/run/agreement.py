"""Whether the optimizer files of a DeepSpeed save are of one run: step counts, settings and loss scaler, file by file.

For `layouts.read_training`, which refuses files that do not agree, and for `verify`. It is one check for all of DeepSpeed's
families: ranks of data, tensor, pipeline and expert parallelism all step together and have the same settings.

[Note: what must agree] What the run's config and schedule set (`BINDING`), the step, and the loss scaler are the same in all
files. What an optimizer finds for itself (Prodigy's `d`, Adafactor's `RMS`) may differ from rank to rank: that is reported, and
the first rank's is taken. Groups of experts may be in any order, but those of one name are in the order of the groups that they
were split from; so a group is known by its name, where it has one, else by its number. A stage of a pipeline may have fewer
groups than the others: only files with as many groups are compared group by group.
Source: DeepSpeed 0.19.8, moe/utils.py `split_params_into_different_moe_groups_for_optimizer`; `state_dict` of its optimizers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError
from zckpt.base.words import count, examples
from zckpt.containers import NumpyArray, Placeholder, TensorRef, brief, list_at
from zckpt.core.catalog import TensorEntry
from zckpt.layouts.run.training import ParameterGroup
from zckpt.layouts.run.values import SCALER, is_vector, single_value, step_of
from zckpt.layouts.save.listing import EXPERT_OPTIMIZER_NAME, MODEL_NAME, SHARD_NAME, Listing
from zckpt.layouts.save.module_states import whole

BINDING = frozenset(("lr", "initial_lr", "betas", "momentum", "eps", "weight_decay"))
"""Settings that come from the config or a schedule, and so are the same on all ranks."""

_OF_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "base_optimizer_state_step")
_OF_LAST_STEP = "overflow"
_ENTRIES = ((SHARD_NAME, "optimizer_state_dict"), (EXPERT_OPTIMIZER_NAME, "optimizer"), (MODEL_NAME, "optimizer"))
"""Kind of file, and the key of the optimizer's state in it."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A difference between what two optimizer files say.

    Attributes:
        file: its name.
        difference: as a clause that names the other file.
        binding: whether it is an error; see [Note: what must agree].
    """

    file: str
    difference: str
    binding: bool

    def __str__(self) -> str:
        return f"in {self.file!r}, {self.difference}"


@dataclass(frozen=True, slots=True)
class _Said:
    """One file's statements, by topic in words: those that must agree (`scaler`, `groups`), and those that may differ
    (`own`).
    """

    file: str
    rank: str
    scaler: Mapping[str, object]
    groups: Mapping[str, Mapping[str, object]]
    own: Mapping[str, Mapping[str, object]]


def files_of_optimizers(listing: Listing) -> list[str]:
    """Names of the files that hold an optimizer's state: of each rank under ZeRO; without it the model files, if they do."""
    return [name for name in listing.files if _optimizer(listing, name) is not None]


def disagreements(listing: Listing) -> Iterator[Disagreement]:
    """The differences between each optimizer file and the first of its kind; none where there are fewer than two files.
    Raises CorruptError if a file ends before the step that it holds.
    """
    like: dict[int, _Said] = {}
    of_rank: dict[str, _Said] = {}
    for name in listing.files:
        if (found := _optimizer(listing, name)) is None:
            continue
        said = _read_statement(name, *found)
        same_rank, first = of_rank.setdefault(said.rank, said), like.setdefault(len(said.groups), said)
        every = next(iter(like.values()))
        if len(same_rank.groups) != len(said.groups):
            counts = f"{len(said.groups)} parameter groups, in {same_rank.file!r} {len(same_rank.groups)}"
            yield Disagreement(name, f"there are {counts}", True)
        yield from _unlike({"the loss scaler": every.scaler}, {"the loss scaler": said.scaler}, every, said, True)
        yield from _unlike(first.groups, said.groups, first, said, True)
        yield from _unlike(first.own, said.own, first, said, False)


def contradictions(listing: Listing) -> list[Disagreement]:
    """The differences that are errors; raises as `disagreements` does."""
    return [bad for bad in disagreements(listing) if bad.binding]


def check(listing: Listing) -> None:
    """Makes sure that a run can resume from a save's optimizer files. Raises InconsistentError if they do not agree on
    a step, a setting or the loss scaler.
    """
    if found := contradictions(listing):
        more = f" (and {count(len(found) - 1, 'more difference')})" if len(found) > 1 else ""
        raise InconsistentError(
            "has optimizer files of different saves",
            file=listing.directory,
            found=f"{found[0]}{more}",
            remedy="Copy the files of one save again, or choose another tag. To convert the weights alone, run zckpt to-fp32 or "
            "zckpt to-bf16.",
        )


def merge_groups(stages: Iterable[Iterable[ParameterGroup]]) -> tuple[ParameterGroup, ...]:
    """The groups of all pipeline stages: those of the same number are one, if they have the same settings.

    A tied parameter is in the group that its first stage has it in.
    """
    numbered: dict[int, list[ParameterGroup]] = {}
    owned: set[str] = set()
    for groups in stages:
        before = frozenset(owned)
        for number, group in enumerate(groups):
            owned.update(group.names)
            names = tuple(name for name in group.names if name not in before)
            same = numbered.setdefault(number, [])
            at = next((at for at, other in enumerate(same) if _alike(other, group)), None)
            if at is not None:
                full = same[at] if same[at].states else group
                same[at] = replace(full, names=(*same[at].names, *names))
            elif names or not group.names:
                same.append(replace(group, names=names))
    return tuple(group for _, same in sorted(numbered.items()) for group in same)


def _alike(a: ParameterGroup, b: ParameterGroup) -> bool:
    """Whether two groups have the same settings and the same name."""
    x, y = ({**_binding(group.settings), **{k: group.settings.get(k) for k in ("name", "moe")}} for group in (a, b))
    return not list(unlike(x, y, "", []))


def steps_of(optimizer: object) -> int | None:
    """The steps that a torch optimizer's state dict has taken, DeepSpeed's around it or not; None where it does not say."""
    steps = [step for _, states in parameter_groups(optimizer) for step in _steps(states)]
    return max(steps, default=None)


def _unlike(
    a: Mapping[str, Mapping[str, object]],
    b: Mapping[str, Mapping[str, object]],
    first: _Said,
    other: _Said,
    binding: bool,
) -> Iterator[Disagreement]:
    if first is other:
        return
    for topic in (topic for topic in a if topic in b):
        x, y = a[topic], b[topic]
        if "step" not in x or "step" not in y:  # no state yet, or one that counts no steps
            x, y = ({key: value for key, value in side.items() if key != "step"} for side in (x, y))
        for difference in unlike(x, y, topic, [], repr(first.file)):
            yield Disagreement(other.file, difference, binding)


def _optimizer(listing: Listing, name: str) -> tuple[str, Mapping[str, object]] | None:
    """The model-parallel rank that a file is of, and what the file says of an optimizer."""
    for pattern, entry in _ENTRIES:
        match = pattern.fullmatch(name)
        if match and match.groupdict().get("kind") != "model":
            found = listing.entry(name, entry)
            return (match["mp"], found) if isinstance(found, Mapping) else None
    return None


def _read_statement(name: str, rank: str, outer: Mapping[str, object]) -> _Said:
    of_zero = SHARD_NAME.fullmatch(name) is not None
    groups: dict[str, Mapping[str, object]] = {}
    own: dict[str, Mapping[str, object]] = {"the loss scaler": {k: outer[k] for k in (_OF_LAST_STEP,) if k in outer}}
    seen: Counter[str] = Counter()
    for number, (settings, states) in enumerate(parameter_groups(outer)):
        topic = f"parameter group {number}"
        if isinstance(called := settings.get("name"), str):
            seen[called] += 1
            topic = f"parameter group {called!r}" + f" ({seen[called]})" * (seen[called] > 1)
        steps = sorted({*_steps([*states, settings])})
        # Whole vectors step together; of single parameters, one without a gradient is left out.
        step = None if not steps else steps[-1] if not of_zero or len(steps) == 1 else " and ".join(map(str, steps))
        groups[topic] = {**_binding(settings), **({} if step is None else {"step": step})}
        own[topic] = {k: single_value(v) for k, v in settings.items() if k not in (*BINDING, "params", "step")}
        for at, state in enumerate(states):
            single = {k: single_value(v) for k, v in state.items() if k != "step" and not is_vector(v)}
            own[f"{topic}, state {at}"] = single
    scaler = {k: single_value(outer[k]) for k in (*SCALER, *_OF_SCALE) if k in outer and k != _OF_LAST_STEP}
    return _Said(name, rank, scaler, groups, own)


def parameter_groups(optimizer: object) -> list[tuple[Mapping[str, object], list[Mapping[str, object]]]]:
    """Settings and states of each parameter group; those of the elastic form have no settings."""
    inner = optimizer
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        nested = inner.get(key) if isinstance(inner, Mapping) else None
        inner = nested if isinstance(nested, Mapping | list | tuple) else inner
    if not isinstance(inner, Mapping):
        return [({}, [state]) for state in list_at(inner) if isinstance(state, Mapping)]
    listed, held = inner.get("param_groups"), inner.get("state")
    held = held if isinstance(held, Mapping) else {}
    groups = [group for group in list_at(listed) if isinstance(group, Mapping)]
    if not groups:
        return [({}, [state]) for state in held.values() if isinstance(state, Mapping)]
    return [
        (
            group,
            [held[n] for n in list_at(group.get("params")) if isinstance(n, int) and isinstance(held.get(n), Mapping)],
        )
        for group in groups
    ]


def _steps(places: Sequence[Mapping[str, object]]) -> list[int]:
    return [step for place in places if (step := step_of(place.get("step"))) is not None]


def _binding(settings: Mapping[str, object]) -> dict[str, object]:
    return {key: single_value(value) for key, value in settings.items() if key in BINDING}


def unlike(
    a: object, b: object, where: str, pairs: list[tuple[str, TensorEntry, TensorEntry]], there: str = "the checkpoint"
) -> Iterator[str]:
    """Places at which two inert values are not equal, as sentences. Tensors are added to `pairs` to be compared.

    Args:
        a: the right value.
        b: the value that is compared with it.
        where: what they are, for the sentences.
        pairs: gets the tensors.
        there: where `a` is from, for the sentences.
    """
    left = [(a, b, where)]
    seen: set[tuple[int, int]] = set()
    while left:  # as deep as values may be nested, or in each other
        x, y, at = left.pop()
        if (id(x), id(y)) in seen:
            continue
        seen.add((id(x), id(y)))
        match x, y:
            case TensorRef(), TensorRef() if (x.shape, x.dtype) == (y.shape, y.dtype):
                if x.place != y.place:
                    pairs.append((at, whole(at, x, "buffer"), whole(at, y, "buffer")))
            case Placeholder(), Placeholder() if str(x) == str(y):
                left += [(getattr(x, part), getattr(y, part), at) for part in ("args", "state", "kwargs", "items")]
            case NumpyArray(), NumpyArray() if (x.dtype, x.shape, x.data, x.fortran) == (
                *(y.dtype, y.shape, y.data, y.fortran),
            ):
                left.append((x.objects, y.objects, at))
            case Mapping(), Mapping():
                left += [(value, y[key], f"{at}: {key!r:.80}") for key, value in x.items() if key in y]
                if missing := [key for key in x if key not in y]:
                    yield f"{at} lacks {examples(missing)}, unlike {there}"
                if strange := [key for key in y if key not in x]:
                    yield f"{at} has {examples(strange)}, unlike {there}"
            case list() | tuple(), list() | tuple() if len(x) == len(y):
                left += [(p, q, at) for p, q in zip(x, y, strict=True)]
            case _ if _is_leaf(x) and _is_leaf(y) and (x == y or (x != x and y != y)):
                pass
            case _:
                yield f"{at} is {brief(y)}, in {there} {brief(x)}"


def _is_leaf(value: object) -> bool:
    return not isinstance(value, TensorRef | Placeholder | NumpyArray | Mapping | list | tuple)
