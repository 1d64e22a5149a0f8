"""Plans and writes one rank's part of a save: outlined while nothing in the run changes, planned and written at any time.

For `saving`. An outline holds everything of the run but the elements of its tensors, so a plan can be made from it while the run
trains on.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.core.catalog import Catalog
from zckpt.core.plan import Plan
from zckpt.layouts.run.training import Training
from zckpt.layouts.zero.write import ZeroTarget, lay_out_rank, lay_out_unsharded
from zckpt.runtime.saves import rank_states
from zckpt.runtime.saves.description import Described, describe, describe_training, signature, target_of, tensors_of
from zckpt.runtime.saves.exchange import Exchange
from zckpt.runtime.saves.rounds import Rounds
from zckpt.runtime.saves.run_state import RunState
from zckpt.runtime.sharding.shard import home_of
from zckpt.runtime.training_run import TrainingRun

_known: WeakKeyDictionary[TrainingRun, tuple[Hashable, Described]] = WeakKeyDictionary()
"""The signature and the description that saves of a run share while its tensors keep names, shapes and dtypes."""


@dataclass(frozen=True, slots=True)
class Outlined:
    """The checked outline of what a rank has to save.

    Attributes:
        weights: what all ranks hold of them.
        training: all that is beside the weights.
        target: the save.
        own: the file of what only this rank has; None if it has nothing of the kind.
        takes_part: whether this rank writes other files than `own`.
        rank: of those that take part, `target.world_size` of them.
    """

    weights: Catalog
    training: Training
    target: ZeroTarget
    own: Plan | None
    takes_part: bool
    rank: int


def outline(state: RunState, client_state: Mapping[str, Any], place: str, *, copied: bool = False) -> Outlined:
    """Outlines everything except the elements, for files in a directory of the name `place`. `copied`: small tensors,
    gradients and a rank's own buffers are copied, so that all but `state.parts` and `state.buffers` may change after this.
    Raises UsageError if there is no optimizer, or the client state uses a name of the checkpoint's own; UnsupportedError if
    something in it cannot be written.
    """
    run = state.run
    if not state.groups and run.settings.zero.stage:
        raise UsageError(
            "save_checkpoint needs an optimizer, and this engine has none",
            remedy="Call engine.save_16bit_model(dir) to write the weights.",
        )
    known, now = _known.get(run), signature(state)
    if known is None or known[0] != now:
        known = _known[run] = now, describe(state)
    weights, states = known[1]
    return Outlined(
        weights=weights,
        training=describe_training(state, states, client_state, copied=copied),
        target=target_of(
            run,
            place,
            no_frozen=all(part.group is not None for part in state.parts)
            and not all(one.trained for one in run.sharded.parameters),
        ),
        own=rank_states.lay_out(state, place, copied=copied),
        takes_part=run.world_size == run.sharded.size or run.global_rank < run.sharded.size,  # the first group writes
        rank=run.sharded.rank,
    )


def exchange_of(state: RunState) -> Exchange:
    """The exchange of what ranks hold now, by the process group of the training."""
    run, sharded, tensors = state.run, state.run.sharded, tensors_of(state)
    direct = home_of(run.settings.zero, run.device).type == "cpu"
    group = sharded.group if sharded.size > 1 else None
    return Exchange(sharded.rank, sharded.size, group, run.device, direct, tensors.__getitem__, list(tensors))


def plan(outlined: Outlined, exchange: Exchange) -> Rounds | None:
    """Plans this rank's files, and the rounds in which elements come to them, and to others from here; None on a rank that has
    no part in it. Writes nothing, and reads nothing of the run. Raises ZckptError if the files cannot be laid out, or there is no
    memory for the exchange.
    """
    own, weights, training = outlined.own, outlined.weights, outlined.training
    target = outlined.target
    if not outlined.takes_part:
        nothing: dict[Hashable, torch.Tensor] = {}  # `own` holds all that it needs
        alone = Exchange(0, 1, None, torch.device("cpu"), True, nothing.__getitem__, ())
        return None if own is None else Rounds(alone, own)
    if target.stage == 0:
        laid = lay_out_unsharded(weights, training, target.tag, target.world_size * target.copies)
    else:
        laid = lay_out_rank(weights, training, target, outlined.rank)
    return Rounds(exchange, laid if own is None else Plan.of([laid, own]))
