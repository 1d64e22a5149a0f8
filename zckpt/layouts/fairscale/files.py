"""Which of FairScale's files hold one rank's part of a model; their names are drawn in the package's own docstring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zckpt.base import limits
from zckpt.base.errors import OTHER_SAVE, IncompleteError, InconsistentError
from zckpt.base.words import examples
from zckpt.containers import value_at
from zckpt.layouts.fairscale import EXPERTS, SHARD, SHARED, WHOLE_EXPERTS, WHOLE_PART
from zckpt.layouts.run.values import missing_ranks
from zckpt.layouts.save.listing import Listing


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
