"""Models of FairScale's users that are cut once more: metaseq's parts by tensor parallelism, fairseq's files of experts.

For `layouts`. Each part of metaseq's is a save of its own, of slices, sharded or not; they are joined as metaseq's own scripts do
(`joining`). Of fairseq's files that are not sharded, one holds what all ranks have, and the others each rank's experts, which are
numbered as sharded ones are ([Note: FairScale's experts] in `read`).
Source: metaseq 0.0.1, scripts/reshard_mp.py; fairseq, branch moe, moe_checkpoint_utils.py `merge_multi_local_expert_states`;
fairscale 0.4.13, nn/moe/top2gate.py (`wg` has a row per expert).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, IncompleteError, InconsistentError, UnsupportedError
from zckpt.base.words import count, examples
from zckpt.containers import Placeholder, mapping_at
from zckpt.core.catalog import Catalog, Source, TensorEntry, Topology
from zckpt.core.evidence import OWN_INDEX, Evidence, weakest
from zckpt.layouts.fairscale import SHARD, WHOLE_PART, WHOLE_SHARED, states
from zckpt.layouts.fairscale.read import EXPERT, experts_of_a_rank, model_parts, renumber_expert, step_in, whole_experts
from zckpt.layouts.joining.rules import check_loads, rules_of_file, unknown_rule
from zckpt.layouts.joining.slices import Joint, cut_off, join
from zckpt.layouts.run.training import Training
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.module_states import as_mapping, flatten, own_tensors, root_of

_RULES = "metaseq"
_UNREAD = "The optimizer's states are not read: files that are not sharded do not name them."


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save in any of the forms that `files` lists; errors as in `states.read`.

    Raises:
        IncompleteError: parts are missing. InconsistentError: they do not fit each other.
        UnsupportedError: no rule says how a tensor's slices are joined.
    """
    parts = model_parts(listing)
    if not parts:
        if listing.matching(SHARD):
            return states.read(listing, allow_unknown=allow_unknown)
        return _with_experts(listing, allow_unknown)
    slices = [_part(part, allow_unknown) for part in parts.values()]
    padding = [pad for one in slices for pad in one.padding]
    tensors: dict[str, TensorEntry] = {}
    for name, (held, joint) in _joints(slices, listing).items():
        tensors[name] = join(name, held, joint)
        padding += cut_off(name, held, joint)
    first = slices[0]
    source = replace(first.source, path=listing.directory.path, tag=listing.tag)
    aliases = {dropped: kept for dropped, kept in first.aliases.items() if kept in tensors}
    evidence = weakest([*(one.evidence for one in slices), _parts_evidence(parts.values())])
    return Catalog(tensors, source, evidence, aliases, Topology(first.topology.dp, len(slices)), padding=tuple(padding))


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What a run needs beside the weights; arguments and errors as in `read` and `states.read_training`."""
    parts = model_parts(listing)
    if not parts and listing.matching(SHARD):
        return states.read_training(listing, allow_unknown=allow_unknown)
    if not parts or any(not part.matching(SHARD) for part in parts.values()):
        raise UnsupportedError(
            "has optimizer states that cannot be named", file=listing.directory, found="files that are not sharded",
            expected="files such as checkpoint_last-shard0.pt", remedy="Convert the weights alone (to-fp32).",
        )  # fmt: skip
    slices = [_part(part, allow_unknown) for part in parts.values()]
    held = [states.read_training(part, allow_unknown=allow_unknown) for part in parts.values()]
    first = held[0]
    for number, training in enumerate(held[1:], 1):
        if [group.names for group in training.groups] != [group.names for group in first.groups]:
            raise InconsistentError(
                "parts of the model do not have the same parameters", file=listing.directory,
                found=f"groups of model_part-{number}", expected="those of model_part-0", remedy=OTHER_SAVE,
            )  # fmt: skip
    joints = _joints(slices, listing)
    padding = [pad for training in held for pad in training.padding]
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, own in first.states.items():
        joint = joints[name][1]
        found[name] = {}
        for state in own:
            entries = [replace(training.state(name, state), replicas=()) for training in held]
            found[name][state] = join(name, entries, joint)
            padding += cut_off(name, entries, joint)
    joined = {name: joint for name, (_, joint) in joints.items() if name in found}
    return replace(first, states=found, joined=joined, padding=tuple(padding))


def unread_states(listing: Listing) -> str:
    """Why optimizer states of a save are not read, in words; empty if they are read, or there are none."""
    parts = list(model_parts(listing).values()) or [listing]
    for part in parts:
        if not part.matching(SHARD):
            return _UNREAD.rstrip(".") if any(_has_states(part, name) for name in part.files) else ""
        if said := states.unread_states(part):
            return said
    return ""


def _part(listing: Listing, allow_unknown: bool) -> Catalog:
    if listing.matching(SHARD):
        return states.read(listing, allow_unknown=allow_unknown)
    (name, *_) = listing.matching(WHOLE_PART)
    tensors, aliases = _of_file(listing, name)
    return Catalog(tensors, _source(listing, name, ()), OWN_INDEX, aliases, Topology())


def _parts_evidence(parts: Iterable[Listing]) -> Evidence:
    """What says how many parts the model has: `model_parallel_size` of metaseq's and fairseq's settings."""
    parts = list(parts)
    for name in parts[0].files:
        for key in ("cfg", "args"):
            if _parallel_size(parts[0].entry(name, key)) == len(parts):
                return Evidence("metadata", f"model_parallel_size in {key!r} of the files")
    return Evidence("unknown", "the files do not say how many parts the model has", "the run's model_parallel_size")


def _parallel_size(settings: object, depth: int = 0) -> int | None:
    """The value of `model_parallel_size` in settings, at any of the depths in which fairseq's groups have it."""
    inner = settings.state if isinstance(settings, Placeholder) else settings
    if not isinstance(inner, Mapping) or depth > 3:
        return None
    found = inner.get("model_parallel_size")
    if type(found) is int:
        return found
    return next((size for value in inner.values() if (size := _parallel_size(value, depth + 1)) is not None), None)


def _joints(slices: Sequence[Catalog], listing: Listing) -> dict[str, tuple[list[TensorEntry], Joint]]:
    """Name -> its slices, and how they are joined."""
    given = listing.options.tp_rules
    rules = rules_of_file(given or _RULES)
    if given:
        check_loads(rules, list(slices[0]))
    found: dict[str, tuple[list[TensorEntry], Joint]] = {}
    for name in dict.fromkeys(name for one in slices for name in one.tensors):
        held = [one.tensors[name] for one in slices if name in one.tensors]
        if len(held) < len(slices):
            raise IncompleteError(
                f"tensor {name!r} is not in all parts of the model", file=listing.directory,
                found=count(len(held), "slice"), expected=f"{len(slices)}, one of each model_part", remedy=OTHER_SAVE,
            )  # fmt: skip
        shapes = [entry.shape for entry in held]
        joint = rules.joint(name, shapes)
        if joint is None:
            raise unknown_rule(name, shapes, listing.directory.path)
        found[name] = held, joint
    return found


def _with_experts(listing: Listing, allow_unknown: bool) -> Catalog:
    """The catalog of what all ranks have, and of each rank's experts. Raises UnsupportedError if ranks have tensors of
    the same names that are not experts; unless `allow_unknown` is set, IncompleteError if a gate chooses among more
    experts than the files hold.
    """
    shared, *others = listing.matching(WHOLE_SHARED)
    if others:
        raise InconsistentError(
            "has two files of what all ranks have", file=listing.directory, found=examples((shared, *others)),
            expected="files of one save", remedy=OTHER_SAVE,
        )  # fmt: skip
    tensors, aliases = _of_file(listing, shared)
    numbered: list[str] = []
    experts: dict[str, int] = {}
    ranks = whole_experts(listing)
    for rank, name in ranks.items():
        own, _ = _of_file(listing, name)
        local = experts_of_a_rank(own)
        experts.update((head, max(experts.get(head, 0), (rank + 1) * number)) for head, number in local.items())
        for tensor, entry in own.items():
            if not EXPERT.fullmatch(tensor):
                if not allow_unknown and len(ranks) > 1:
                    raise UnsupportedError(
                        "holds modules that each rank has of its own, under the same names", file=listing.files[name],
                        found=examples([tensor]), expected="'experts.', and a number, in these names",
                        remedy="To take those of rank 0, convert with --allow-unknown-layout.",
                    )  # fmt: skip
                tensors.setdefault(tensor, entry)
                continue
            target = renumber_expert(tensor, rank, local)
            tensors[target] = replace(entry, name=target)
            numbered.append(target)
    for head, there in experts.items():
        gate = tensors.get(f"{head.removesuffix('experts.')}gate.wg.weight")
        if gate is not None and gate.shape[0] != there:
            raise IncompleteError(
                "files of ranks' experts are missing", file=listing.directory, found=f"{count(there, 'expert')} {head}*",
                expected=f"{gate.shape[0]}, as rows of {gate.name}",
                remedy="Copy the other files -rank-N.pt of the save (--also DIR lays further directories over this one).",
            )  # fmt: skip
    note = (
        f"{count(len(numbered), 'tensor')} of experts that each rank has of its own ({examples(numbered)}): numbered by rank.",
    )
    gated = all(f"{head.removesuffix('experts.')}gate.wg.weight" in tensors for head in experts)
    evidence = (
        Evidence("metadata", "the rows of the gates, one for each expert")
        if gated
        else Evidence("unknown", "the files do not say how many ranks have experts", "the number of ranks of the run")
    )
    return Catalog(tensors, _source(listing, shared, note), evidence, aliases, Topology(dp=len(ranks)))


def _of_file(listing: Listing, name: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of a file that is not sharded, and further names of them."""
    path = listing.files[name].path
    refs = flatten(as_mapping(root_of(listing, name).get("model"), "its entry 'model'", path), [])
    if not refs:
        raise CorruptError("holds no tensors", file=path, found="an empty 'model'", remedy=COPY_AGAIN)
    return own_tensors(refs)


def _source(listing: Listing, name: str, notes: tuple[str, ...]) -> Source:
    unread = (_UNREAD,) if _has_states(listing, name) else ()
    return Source(
        layout="fairscale", path=listing.directory.path, tag=listing.tag, framework=("FairScale", ""),
        global_steps=step_in(root_of(listing, name)), notes=notes + unread,
    )  # fmt: skip


def _has_states(listing: Listing, name: str) -> bool:
    values = map(mapping_at, mapping_at(listing.open(name).root).values())
    return any("param_groups" in value and value.get("state") for value in values)
