"""Which files are a model's weights, and which its optimizer's: `checkpoint.pt` beside `optimizer_rank0.pt`, or an entry
`optimizer` in it.

For `numbered`. FairScale's OSS and torch's ZeroRedundancyOptimizer keep each parameter's states on one rank. Scripts save each
rank's part (`optimizer.optim.state_dict()`), or all of them from one rank after `consolidate_state_dict()`, which has the form
of any optimizer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from zckpt.base.errors import ZckptError
from zckpt.base.patterns import compile_late
from zckpt.containers import mapping_at
from zckpt.layouts.numbered import RANK, WHOLE
from zckpt.layouts.plain import files as plain
from zckpt.layouts.save.listing import Listing

_WEIGHTS = compile_late(r"[\w.-]+\.(?:pt|pth|bin|ckpt|safetensors)(?:\.index\.json)?")
_OTHERS = compile_late(
    r"optim|sched|rng|random|scaler|sampler|loader|args|trainer|(?<![a-z])(?:rank|shard)[-_]?\d", re.IGNORECASE
)
_SHARD = compile_late(r"-\d{5}-of-\d{5}\.")
_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_state", "last_optimizer_state")


class OptimizerFiles(NamedTuple):
    """The files of a save.

    Attributes:
        weights: the model's alone.
        ranks: rank -> file and state dict of its part of the optimizer; empty where there is one for all.
        whole: file and state dict of the only optimizer.
    """

    weights: Listing
    ranks: Mapping[int, tuple[str, Mapping[str, object]]]
    whole: tuple[str, Mapping[str, object]] | None


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not. Opens a file of the optimizer, or the only file."""
    return None if find(listing) is not None else "no weights with an optimizer's state dict beside them"


def find(listing: Listing) -> OptimizerFiles | None:
    """The files of a save; None for anything else. Raises ZckptError if a file that is given by its name is damaged."""
    weights = _weights(listing)
    if weights is None:
        return None
    (name,) = list(weights.files)[:1]
    if not weights.matching(_SHARD) and not name.endswith((".safetensors", ".json")):
        inside = state_dict_in(weights.open(name).root)
        if inside is not None and inside is not weights.open(name).root:
            return OptimizerFiles(weights, {}, (weights.files[name].path, inside))
    beside = _beside(listing)
    ranks = {int(RANK.fullmatch(n)["dp"]): n for n in beside.matching(RANK)}  # type: ignore[index]
    try:
        if ranks:
            found = {
                rank: (beside.files[n].path, state_dict_in(beside.open(n).root)) for rank, n in sorted(ranks.items())
            }
            held = {rank: (file, state) for rank, (file, state) in found.items() if state is not None}
            return OptimizerFiles(weights, held, None) if held and len(held) == len(found) else None
        for n in beside.matching(WHOLE)[:1]:
            state = state_dict_in(beside.open(n).root)
            return None if state is None else OptimizerFiles(weights, {}, (beside.files[n].path, state))
    except ZckptError:  # `unread_states` names it
        pass
    return None


def _weights(listing: Listing) -> Listing | None:
    """The files of the model, if they are one file, or the shards of one index."""
    if listing.directory in listing.files.values():
        return listing if not _OTHERS.search(listing.directory.name) else None
    standard = [name for name in listing.files if name.endswith(".index.json") and plain.match(listing) is None]
    if standard:
        kept = {name: file for name, file in listing.files.items() if name in standard or _SHARD.search(name)}
        return replace(listing, files=kept)
    names = [name for name in listing.files if _WEIGHTS.fullmatch(name) and not _OTHERS.search(name)]
    usual = [name for name in names if name in ("model.safetensors", "pytorch_model.bin")]
    chosen = usual[:1] if usual else names if len(names) == 1 else []
    return replace(listing, files={name: listing.files[name] for name in chosen}) if chosen else None


def _beside(listing: Listing) -> Listing:
    """The files in the directory of a file that was given alone."""
    if listing.directory not in listing.files.values():
        return listing
    home = listing.directory.absolute().parent
    try:
        names = home.names() if not home.is_remote else []
    except (ZckptError, OSError):  # a directory that may not be listed
        names = []
    wanted = sorted(name for name in names if RANK.fullmatch(name) or WHOLE.fullmatch(name))
    return replace(listing, files={name: home / name for name in wanted})


def state_dict_in(root: object) -> Mapping[str, object] | None:
    """The optimizer's state dict that a file is, or has under a usual key."""
    if not isinstance(root, Mapping):
        return None
    for value in (root, *(root.get(key) for key in _KEYS)):
        held = mapping_at(value)
        if isinstance(held.get("param_groups"), list | tuple) and isinstance(held.get("state"), Mapping):
            return held
    return None
