"""To safetensors of an optimizer's states, each tensor called `STATE/PARAMETER`. For `zckpt to-states`.

Plan, engine and commit are those of every conversion. Steps and parameter groups lie beside, as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from zckpt.base.errors import UsageError
from zckpt.base.progress import Progress
from zckpt.core.plan import Plan, literal_file
from zckpt.jobs.convert import PlannedConversion, order_for
from zckpt.jobs.declarations import TO_STATES, Asked
from zckpt.jobs.open import open_asked, states_of
from zckpt.jobs.options import Options
from zckpt.jobs.planned import Report, carry_out, protected_places
from zckpt.jobs.selection import resolve_selection, select
from zckpt.layouts.plain import OPTIMIZER
from zckpt.layouts.plain.write import WeightsTarget, lay_out
from zckpt.output.publish import check_output
from zckpt.storage.location import locate

GROUPS = f"{OPTIMIZER}.json"
"""The file of steps and parameter groups."""


def to_states(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    options: Options | None = None,
    progress: Progress = None,
) -> Report:
    """Writes the optimizer's states as safetensors, in constant memory; in the dtypes and bytes that they have.

    Args:
        checkpoint: as for `zckpt.convert`, with optimizer states in any layout that `reshard` reads.
        out: a directory: shards `optimizer_states*.safetensors` of tensors such as `exp_avg/model.norm.weight`, with an index if
            there are several, and `optimizer_states.json` with steps and parameter groups.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        options: everything else, such as `Options(include=["exp_avg/*"])`. The dtype does not count: states keep theirs.
        progress: as for `zckpt.convert`, with the bytes written so far.

    Raises:
        UnsupportedError: the checkpoint names no states, or none that zckpt reads; it says why.
        OutputError: `out` exists (`Options(overwrite=True)` replaces it), cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> zckpt.to_states("run", "states/", progress=False).out
        'states/'
    """
    asked = (options or Options()).split(TO_STATES, tag=tag, also=also)
    return carry_out(lambda: prepare(checkpoint, out, asked), progress, "to states")


def prepare(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[None]) -> PlannedConversion:
    """Plans a conversion; arguments as for `to_states`. Writes nothing."""
    source, place = locate(checkpoint), locate(out)
    if os.path.splitext(place.name)[1] in (".safetensors", ".bin", ".pt"):
        raise UsageError(
            "states are written to a directory", file=place, found="the name of a file",
            remedy="Give OUT a name without such an ending.",
        )  # fmt: skip
    opened = open_asked(source, asked)
    check_output(place, single=False, overwrite=asked.publishing.overwrite, protected=protected_places(opened, source))
    named = states_of(opened, allow_unknown=asked.reading.allow_unknown_layout)
    _, notes = resolve_selection(named.catalog(opened.catalog), asked.selecting, asked.naming)
    catalog = select(named.catalog(opened.catalog), asked.selecting)
    target = WeightsTarget("safetensors", max_shard_size=asked.sharding.max_shard_size, stem=OPTIMIZER)
    destination = lay_out([(entry, entry.dtype) for entry in catalog.tensors.values()], catalog.aliases, target)
    text = json.dumps({"steps": dict(named.steps), "param_groups": list(named.groups)}, indent=1, ensure_ascii=False)
    files = (*destination.files, literal_file(GROUPS, f"{text}\n".encode()))
    plan = Plan(files, [(catalog.tensors[name], entry) for name, entry in destination.entries.items()])
    order = order_for(asked, plan, place, catalog, (), {"states": True})
    return PlannedConversion(opened, order, opened.catalog.source.notes + notes, asked)
