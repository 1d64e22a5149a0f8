"""Reads what each rank of FairScale's FullyShardedDataParallel saved: `local_state_dict` and `local_metadata_dict`.

For `fairscale.states`. fairseq writes `checkpoint_last-shard0.pt` with the entries `model` and `fsdp_metadata`, metaseq the
same with `shard_metadata` (the package's own docstring draws the names of the files); a script of one's own may call the file
`shard0.pt` and have the tensors on top. A wrapped module's parameters lie end to end in a vector `flat_param_0`, or each in a
vector of its own; of either, a rank has one of equal parts, and what is behind the last element is padding; the rank's own
metadata say its length: 5 elements over 4 ranks are 2, 2, 1, 0.

[Note: FairScale's experts] A module with `no_broadcast_optim_state` is each rank's own: all ranks have it whole, under the same
names, with other numbers. FairScale's own consolidation takes rank 0's. Here `experts.I` of rank R becomes `experts.{R *
experts of a rank + I}`, which is how `MOELayer` sends tokens to experts. Without such a number in the names nothing says what
the ranks' modules are.

[Note: FairScale's tied names] `shared_param_info` has (kept, dropped) of each module, below its path, with the last parts of
the two names in each other's places: ("embed.table", "head.weight") where `head.table` is `embed.weight`. FairScale's own
consolidation reads those of the last module alone, and without its path.
Source: fairscale 0.4.13, nn/data_parallel/fully_sharded_data_parallel.py (`_get_shard`, `local_metadata_dict`,
`consolidate_shard_weights`), nn/misc/flatten_params_wrapper.py (`_init_flatten_params`), nn/moe/moe_layer.py; fairseq 0.12 and
metaseq 0.0.1, trainer.py (`state_dict`, `checkpoint_suffix`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from zckpt.base import limits
from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, IncompleteError, InconsistentError, UnsupportedError
from zckpt.base.words import count, examples
from zckpt.containers import TensorRef, brief, list_at, value_at
from zckpt.containers.tensor_ref import MAX_NUMBER, as_shape, is_count
from zckpt.layouts.fairscale import EXPERTS, NONE, SHARD, SHARED, WHOLE_EXPERTS, WHOLE_PART, WHOLE_SHARED
from zckpt.layouts.run.values import missing_ranks, step_of
from zckpt.layouts.save.family import RankFacts
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import Shape, as_tensor, root_of


def shards_of(listing: Listing) -> dict[int, tuple[str, ...]]:
    """Rank -> the files that hold its part: one, or that of its experts and that of the rest.

    Raises:
        IncompleteError: files are missing. InconsistentError: they are of several saves.
    """
    found: dict[int, tuple[str, ...]] = {}
    experts, shared = (
        {int(p[2]): n for n in listing.matching(p_) if (p := p_.fullmatch(n))} for p_ in (EXPERTS, SHARED)
    )
    part = ""
    for name in listing.matching(SHARD):
        match = SHARD.fullmatch(name)
        if match is None or name in (*experts.values(), *shared.values()):
            continue
        part = f"model_part-{match['mp']} " if match["mp"] else ""
        other = found.setdefault(int(match["dp"]), (name,))
        if other != (name,):
            raise _twice(listing, int(match["dp"]), other[0], name)
    for rank, name in sorted(experts.items()):
        if rank in found:
            raise _twice(listing, rank, found[rank][0], name)
        found[rank] = (name, shared.get(rank, ""))
    if lacking := sorted(rank for rank, names in found.items() if "" in names):
        raise missing_ranks(listing, "shared", sorted(shared), lacking, 1 + max(found))
    if lacking := sorted(shared.keys() - found.keys()):
        raise missing_ranks(listing, "experts", sorted(experts), lacking, 1 + max(shared))
    there = sorted(found)
    if missing := sorted(set(range(there[-1])) - set(there)):
        raise missing_ranks(listing, f"{part}{'experts' if experts else 'shard'}", there, missing, 1 + there[-1])
    return {rank: found[rank] for rank in there}


def _twice(listing: Listing, rank: int, one: str, other: str) -> InconsistentError:
    return InconsistentError(
        f"has two files of rank {rank}", file=listing.directory, found=f"{one!r} and {other!r}",
        expected="files of one save", remedy=OTHER_SAVE,
    )  # fmt: skip


def partners(listing: Listing, name: str) -> tuple[str, ...]:
    """A file, with the file that holds the rest of the same rank's part, if there is one."""
    for pattern, other in ((EXPERTS, SHARED), (SHARED, EXPERTS)):
        if match := pattern.fullmatch(name):
            beside = [
                n for n in listing.matching(other) if (found := other.fullmatch(n)) and found["dp"] == match["dp"]
            ]
            return tuple(sorted((name, *beside)))
    return (name,)


def model_parts(listing: Listing) -> dict[int, Listing]:
    """Number of each part of the model -> its files; empty where the model is not in parts. See the names above. Raises
    IncompleteError if a part is missing.
    """
    names: dict[int, dict[str, None]] = {}
    for pattern in (SHARD, WHOLE_PART):
        for name in listing.matching(pattern):
            match = pattern.fullmatch(name)
            if match is not None and match["mp"]:
                names.setdefault(int(match["mp"]), {})[name] = None
    if not names:
        return {}
    wanted = max(1 + max(names), _parts_in_config(listing, next(iter(names[min(names)]))))
    if missing := sorted(set(range(wanted)) - names.keys()):
        raise IncompleteError(
            "parts of the model are missing", file=listing.directory,
            found=f"files of {examples([f'model_part-{number}' for number in sorted(names)])}",
            expected=f"files of model_part-0 to model_part-{wanted - 1}",
            remedy=f"Copy those of {examples([f'model_part-{number}' for number in missing])} here too (--also DIR lays "
            "another directory over this one).",
        )  # fmt: skip
    return {
        number: replace(listing, files={name: listing.files[name] for name in names[number]})
        for number in sorted(names)
    }


def _parts_in_config(listing: Listing, name: str) -> int:
    """The number of the model's parts, as metaseq's config in a file says it; 0 where it does not."""
    size = value_at(listing.entry(name, "cfg"), "model", "model_parallel_size")
    return size if type(size) is int and 0 <= size <= limits.RANKS else 0


def whole_experts(listing: Listing) -> Mapping[int, str]:
    """Rank -> its file of experts, where these are not sharded. Raises IncompleteError if files are missing."""
    found = {int(p[2]): name for name in listing.matching(WHOLE_EXPERTS) if (p := WHOLE_EXPERTS.fullmatch(name))}
    if missing := sorted(set(range(max(found, default=0))) - found.keys()):
        raise missing_ranks(listing, "experts", sorted(found), missing, 1 + max(found))
    return dict(sorted(found.items()))


EXPERT = re.compile(r"(?P<head>(?:^|.*\.)experts\.)(?P<number>\d+)(?P<tail>\..*)")
_MODELS = ("model", "state_dict", "model_state_dict", "weights")


class Own(NamedTuple):
    """What one rank's metadata say of one stored parameter.

    Attributes:
        key: in the state dict.
        shapes: name in the model -> shape, in the order in which they lie in it.
        padding: elements behind them on this rank.
        alone: whether each rank has one of its own.
    """

    key: str
    shapes: Mapping[str, Shape]
    padding: int
    alone: bool

    @property
    def numel(self) -> int:
        """The elements of all its parameters, on all ranks together."""
        return sum(math.prod(shape) for shape in self.shapes.values())


class Held(NamedTuple):
    """A stored parameter: the model's parameters in it, and the ranks with parts that make it up, end to end.

    Attributes:
        key: in their state dicts.
        shapes: name in the model -> shape, in order.
        used: rank -> how many elements of its part are parameters'.
    """

    key: str
    shapes: Mapping[str, Shape]
    used: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's file.

    Attributes:
        file: its path.
        root: everything in it.
        model: its state dict.
        params: key -> what the metadata say of it.
        buffers: names of the buffers.
        tied: dropped name -> kept name.
    """

    file: str
    root: Mapping[str, object]
    model: Mapping[str, object]
    params: Mapping[str, Own]
    buffers: frozenset[str]
    tied: Mapping[str, str]

    def tensor(self, key: str) -> TensorRef:
        """A tensor of the state dict."""
        return as_tensor(self.model.get(key), repr(key), self.file)


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not. Opens the first one."""
    if listing.directory in listing.files.values():
        return "one file"
    for name in listing.matching(SHARD)[:1]:
        root = listing.open(name).root
        if isinstance(root, Mapping) and metadata_in(root) is not None:
            return None
    if listing.matching(WHOLE_PART) or (listing.matching(WHOLE_SHARED) and listing.matching(WHOLE_EXPERTS)):
        return None
    return NONE


def facts(listing: Listing, name: str) -> RankFacts:
    """The world size that one rank's parts imply, if only one fits; and the step, where a trainer records it."""
    if not SHARD.fullmatch(name):
        return RankFacts(None, step_in(root_of(listing, name)))
    rank = read_rank(listing, *partners(listing, name))
    least, most = world_sizes([rank])
    return RankFacts(least if least == most else None, step_in(rank.root))


def step_in(root: Mapping[str, object]) -> int | None:
    """Optimizer steps, as fairseq and metaseq count them; None where a file does not say."""
    history = list_at(root, "optimizer_history")
    return step_of(value_at(history[-1], "num_updates")) if history else None


def read_ranks(listing: Listing) -> list[Rank]:
    """All ranks' files, in order.

    Raises:
        IncompleteError: files are missing. InconsistentError: they are of several saves. CorruptError: one contradicts itself.
    """
    names = shards_of(listing)
    there = list(names)
    ranks = [read_rank(listing, *names[rank]) for rank in there]
    for rank in ranks[1:]:
        _check_like(ranks[0], rank)
    least, most = world_sizes(ranks)
    if len(ranks) < least:
        raise missing_ranks(listing, "shard", there, list(range(len(ranks), least)), least)
    if len(ranks) > most:
        raise InconsistentError(
            "has more files than its parts need", file=listing.directory, found=f"{len(ranks)} shard files",
            expected=f"{most}, as the sizes of the parts say", remedy=OTHER_SAVE,
        )  # fmt: skip
    return ranks


def world_sizes(ranks: list[Rank]) -> tuple[int, int]:
    """The least and the greatest number of ranks over which parts of these sizes can have been cut.

    Every rank's part, with its padding, has ceil(elements / ranks) elements.
    """
    least, most = 1, MAX_NUMBER
    for key, own in ranks[0].params.items():
        part = ranks[0].tensor(key).numel
        if own.alone or not own.numel or not part:
            continue
        least = max(least, -(-own.numel // part))
        if part > 1:
            most = min(most, -(-own.numel // (part - 1)) - 1)
    return least, max(least, most)


def holders(ranks: list[Rank], *, allow_unknown: bool = False) -> list[Held]:
    """The stored parameters, in the order of the state dict; see [Note: FairScale's experts].

    Raises:
        UnsupportedError: each rank has a module of its own, with names that do not say which it is; unless `allow_unknown` is
            set, which takes rank 0's.
    """
    found: list[Held] = []
    local = experts_of_a_rank(name for own in ranks[0].params.values() if own.alone for name in own.shapes)
    for key in _order_names(ranks[0]):
        first = ranks[0].params[key]
        if not first.alone or len(ranks) == 1:
            used = {n: rank.tensor(key).numel - rank.params[key].padding for n, rank in enumerate(ranks)}
            found.append(Held(key, first.shapes, used))
            continue
        named = [EXPERT.fullmatch(name) for name in first.shapes]
        if not all(named):
            if not allow_unknown:
                raise UnsupportedError(
                    "holds modules that each rank has of its own, under the same names", file=ranks[0].file,
                    found=examples(first.shapes), expected="'experts.', and a number, in these names",
                    remedy="To take those of rank 0, as FairScale's consolidate_shard_weights does, convert with "
                    "--allow-unknown-layout.",
                )  # fmt: skip
            found.append(Held(key, first.shapes, {0: first.numel}))
            continue
        for number in range(len(ranks)):
            shapes = {renumber_expert(name, number, local): shape for name, shape in first.shapes.items()}
            found.append(Held(key, shapes, {number: first.numel}))
    return found


def _order_names(rank: Rank) -> list[str]:
    """The stored parameters in the model's order: that of the state dict, or of the metadata where there were two."""
    if EXPERTS.fullmatch(os.path.basename(rank.file)):
        return list(rank.params)
    return [key for key in rank.model if key in rank.params]


def experts_of_a_rank(names: Iterable[str]) -> dict[str, int]:
    """Name up to the expert's number -> how many experts a rank has there, which has tensors of these names."""
    found: dict[str, int] = {}
    for name in names:
        if expert := EXPERT.fullmatch(name):
            found[expert["head"]] = max(found.get(expert["head"], 0), 1 + int(expert["number"]))
    return found


def renumber_expert(name: str, rank: int, local: Mapping[str, int]) -> str:
    """The name of an expert's tensor among those of all ranks, each with so many experts of its own."""
    expert = EXPERT.fullmatch(name)
    assert expert is not None
    return f"{expert['head']}{rank * local[expert['head']] + int(expert['number'])}{expert['tail']}"


# -- one file --------------------------------------------------------------------------------------------------------


def read_rank(listing: Listing, name: str, *others: str) -> Rank:
    """One rank's file, or its files, checked. Raises CorruptError if it has no metadata of FairScale, or they do not
    fit its tensors.
    """
    file, root = listing.files[name].path, root_of(listing, name)
    for other in others:
        root = _with(root, root_of(listing, other))
    metadata = metadata_in(root)
    if metadata is None:
        raise CorruptError(
            "has no metadata of FairScale", file=file, found=f"entries {examples(map(str, root))}",
            expected="an entry with 'param_metadata', as local_metadata_dict() gives it", remedy=COPY_AGAIN,
        )  # fmt: skip
    try:
        params = {own.key: own for own in _params(metadata)}
        tied = dict(_tie_entries(metadata))
        buffers = frozenset(map(str, metadata.get("buffer_names") or ()))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            "its metadata cannot be read", file=file, found=f"{type(error).__name__}: {error}"[:200], remedy=COPY_AGAIN
        ) from error
    if not params:
        raise CorruptError("its metadata name no parameters", file=file, found="none", remedy=COPY_AGAIN)
    rank = Rank(file, root, _model(root, params), params, buffers, tied)
    for key, own in params.items():
        _check_part(rank, key, own)
    return rank


def _with(experts: Mapping[str, object], shared: Mapping[str, object]) -> dict[str, object]:
    """The contents of a rank's files as those of one, where fairseq wrote two: state dicts, the model's and the
    optimizer's, are united.
    """
    found = dict(experts)
    for key, value in shared.items():
        own = experts.get(key)
        if key in _MODELS and isinstance(value, Mapping) and isinstance(own, Mapping):
            found[key] = {**own, **value}
        elif isinstance(value, Mapping) and isinstance(own, Mapping) and "param_groups" in value:
            states = (held for held in (own.get("state"), value.get("state")) if isinstance(held, Mapping))
            found[key] = {**value, "state": {number: state for held in states for number, state in held.items()}}
    return found


def _check_part(rank: Rank, key: str, own: Own) -> None:
    numel = rank.tensor(key).numel
    used = own.numel == numel - own.padding if own.alone else numel - own.padding <= own.numel
    if own.padding > numel or not used:
        raise InconsistentError(
            f"the rank's part of {key!r} is not what its metadata say", file=rank.file, found=count(numel, "element"),
            expected=f"{'' if own.alone else 'a part of '}{own.numel:,}, and {own.padding:,} behind them", remedy=OTHER_SAVE,
        )  # fmt: skip


def _check_like(first: Rank, other: Rank) -> None:
    """Raises InconsistentError where two ranks do not have the same parameters in parts of the same size."""
    for key in dict.fromkeys((*first.params, *other.params)):
        a, b = first.params.get(key), other.params.get(key)
        same = a is not None and b is not None and list(a.shapes.items()) == list(b.shapes.items())
        if not same or first.tensor(key).numel != other.tensor(key).numel:
            raise InconsistentError(
                f"ranks do not agree on {key!r}", file=other.file, found=_describe_rank(other, key),
                expected=f"{_describe_rank(first, key)}, as rank 0 has it", remedy=OTHER_SAVE,
            )  # fmt: skip


def _describe_rank(rank: Rank, key: str) -> str:
    own = rank.params.get(key)
    if own is None:
        return "no such parameter"
    return f"{count(rank.tensor(key).numel, 'element')} of {count(len(own.shapes), 'parameter')}"


def metadata_in(root: Mapping[Any, object]) -> Mapping[str, Any] | None:
    """The metadata in a file, under whatever key."""
    for value in root.values():
        if isinstance(value, Mapping) and isinstance(value.get("param_metadata"), list | tuple):
            return value
    return None


def _model(root: Mapping[str, object], params: Mapping[str, Own]) -> Mapping[str, object]:
    """The state dict in a file: under a usual key, under another, or on top."""
    below = [*(root.get(key) for key in _MODELS), *root.values()]
    for state in (*below, root):
        if isinstance(state, Mapping) and all(isinstance(state.get(key), TensorRef) for key in params):
            return state
    return root


def _params(metadata: Mapping[str, Any]) -> Iterator[Own]:
    for module in metadata["param_metadata"]:
        home = _home(module)
        alone = bool(module.get("no_broadcast_optim_state", False))
        for key, own in module["params"].items():
            shapes = {f"{home}{name}": as_shape(shape) for name, shape in zip(own["names"], own["shapes"], strict=True)}
            if len(shapes) != len(own["names"]):
                raise ValueError(f"a name twice in {brief(own['names'])}")
            yield Own(f"{home}{key}", shapes, _whole(own["padding"]), alone)


def _tie_entries(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dropped name, kept name); see [Note: FairScale's tied names]."""
    for module in metadata["param_metadata"]:
        home = _home(module)
        there = {name for own in module["params"].values() for name in own["names"]}
        for said_kept, said_dropped in module.get("shared_param_info") or ():
            (kept_in, _, a), (dropped_in, _, b) = said_kept.rpartition("."), said_dropped.rpartition(".")
            swapped = (".".join(filter(None, (kept_in, b))), ".".join(filter(None, (dropped_in, a))))
            for kept, dropped in (swapped, (said_kept, said_dropped)):
                if kept in there and dropped not in there:
                    yield f"{home}{dropped}", f"{home}{kept}"
                    break


def _home(module: Mapping[str, Any]) -> str:
    path = module["fsdp_path"]
    if type(path) is not str:
        raise TypeError(f"{brief(path)} is not the path of a module")
    return f"{path}." if path else ""


def _whole(value: object) -> int:
    if not is_count(value):
        raise ValueError(f"{brief(value)} instead of a number of elements")
    return value
