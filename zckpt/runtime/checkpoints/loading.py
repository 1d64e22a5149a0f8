"""Loading a run: any checkpoint that the catalog knows, of any stage and world size, into the parts that this rank holds.

For `Engine.load_checkpoint`. A rank reads the indexes of all files, and of their elements only those it holds itself.
[Note: the order of a load]
1. Every rank reads and checks all but the elements, and makes room for them. When one fails, all do, and nothing has changed.
2. Elements go straight into the run's memory: there is no room for a second copy. When that fails on one rank, it fails on all,
and the run's state is undefined.
3. Counters and generators follow, when all ranks have come so far.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from zckpt import live
from zckpt.base.errors import InconsistentError, ZckptError
from zckpt.core.catalog import TensorEntry
from zckpt.core.overlaps import clip
from zckpt.jobs.open import open_catalog
from zckpt.jobs.options import OpenOptions
from zckpt.layouts.save.listing import Listing, list_files
from zckpt.runtime import gradients
from zckpt.runtime.engine import Engine
from zckpt.runtime.generators import set_rng_state
from zckpt.runtime.inert import from_inert
from zckpt.runtime.nodes import Want, spread
from zckpt.runtime.saved_run import LoadOptions, SavedRun, has, read
from zckpt.runtime.sharded_parameter import ShardedParameter
from zckpt.runtime.state import buffers_of, put_part
from zckpt.team.meeting import Meetings

_log = logging.getLogger("zckpt.runtime")

_UNCHANGED = "Nothing was changed."
_UNDEFINED = "Part of the run's state was replaced and part was not: load a checkpoint again before you go on."


def load(
    engine: Engine, meetings: Meetings, directory: str, tag: str | None, wishes: LoadOptions
) -> tuple[str, dict[str, Any]]:
    """Loads a checkpoint; see [Note: the order of a load].

    Returns:
        Its directory, and the client state that was saved with it.

    Raises:
        InconsistentError: it is of another model, or of another optimizer. Nothing was changed.
        ZckptError: another kind says what is wrong with it, here or on another rank, and what has become of the run.
    """
    error: Exception | None = None
    saved: SavedRun | None = None
    fill: Fill = _fill
    wanted: list[Want] = []
    states: States = []
    with ExitStack() as stack:
        try:
            nodes = spread(engine, directory, tag) if engine.settings.config.checkpoint.use_node_local_storage else None
            if nodes is None:
                opened = open_catalog(directory, OpenOptions(tag=tag))
                saved = read(engine, opened, wishes, opened.place.listing)
            else:
                stack.enter_context(nodes)
                place, fill = os.path.join(directory, nodes.tag), nodes.fill
                opened = open_catalog(nodes.directory, OpenOptions(tag=nodes.tag))
                here = list_files(place, nodes.tag) if os.path.isdir(place) else Listing(place, nodes.tag, {})
                saved = read(engine, opened, wishes, here)
            wanted, states = _room(engine, saved)
        except Exception as caught:
            error = caught
        word = saved is not None and (saved.gradients is not None, saved.buffers_lost)
        said = meetings.agree("load_checkpoint", error, word, state=_UNCHANGED)
        assert saved is not None
        goes_on, lost = all(one[0] for one in said), any(one[1] for one in said)
        try:
            _take_up(engine, saved, wanted, states, fill)
            if goes_on and saved.gradients is not None:
                gradients.put(engine.module, engine.sharded.held, from_inert(saved.gradients))
        except Exception as caught:
            error = _undefined(caught)
        meetings.agree("load_checkpoint", error, state=_UNDEFINED)
    _go_on(engine, saved, goes_on=goes_on)
    if lost and engine.global_rank == 0:
        _log.warning(
            "Buffers differed from rank to rank in %r, and not each rank's are at hand: such ranks take rank 0's.",
            directory,
        )
    found = saved.directory if nodes is None else os.path.join(directory, nodes.tag)
    return found, saved.client_state


Fill = Callable[[Sequence[Want]], None]
States = list[tuple[ShardedParameter, dict[str, torch.Tensor], Mapping[str, float]]]


def _fill(wanted: Sequence[Want]) -> None:
    """Fills tensors from files that this rank sees."""
    live.move([(entry if held is None else _part(entry, held), tensor) for entry, held, tensor in wanted])


def _part(entry: TensorEntry, held: ShardedParameter) -> TensorEntry:
    """The elements that this rank holds, as a vector."""
    fragments = clip(entry.fragments, held.start, held.start + held.count, entry.dtype.itemsize)
    return TensorEntry(entry.name, (held.count,), entry.dtype, entry.role, fragments)


def _room(engine: Engine, saved: SavedRun) -> tuple[list[Want], States]:
    """Where all elements go; states that the optimizer does not have yet are made."""
    wanted: list[Want] = []
    catalog = saved.catalog
    for held in engine.sharded.held:
        if has(catalog, held.name):
            held.bind()
            target = held.local() if held.master is None else held.master.data
            wanted.append((catalog[held.name], held, target.view(-1)))
    wanted += [(catalog[name], None, buffer) for name, buffer in buffers_of(engine).items() if has(catalog, name)]
    states: States = []
    for group in saved.groups.values():
        for held, entries, scalars in group.states:
            assert held.master is not None and engine.optimizer is not None
            there = engine.optimizer.state.get(held.master, {})
            own: dict[str, torch.Tensor] = {}
            for name, entry in entries.items():
                old = there.get(name)
                fits = isinstance(old, torch.Tensor) and old.shape == held.master.shape and old.is_contiguous()
                own[name] = old if fits else torch.empty_like(held.master, memory_format=torch.contiguous_format)
                wanted.append((entry, held, own[name].view(-1)))
            states.append((held, own, scalars))
    return wanted, states


@torch.no_grad()
def _take_up(engine: Engine, saved: SavedRun, wanted: Sequence[Want], states: States, fill: Fill) -> None:
    """Everything but counters and generators."""
    engine.reshard()
    engine.zero_grad()
    fill(wanted)
    buffers = buffers_of(engine)
    _fill([(entry, None, buffers[name]) for name, entry in saved.buffers.items()])
    for held in engine.sharded.held:
        if held.master is not None and saved.precision is not None and not engine.settings.zero.load_from_fp32_weights:
            held.master.copy_(held.master.to(saved.precision))  # as after a way through the module weights
        held.give_back()
    if engine.optimizer is not None:
        for number, group in saved.groups.items():
            engine.optimizer.param_groups[number].update(group.options)
        for held, own, scalars in states:
            state = engine.optimizer.state[held.master]  # type: ignore[index]
            state.clear()
            state.update(own)
            put_part(engine, held, scalars=scalars)
        if saved.scaler is not None:
            engine.scaler.load_state(saved.scaler)
    if saved.schedule is not None:
        engine.lr_scheduler.load_state_dict(saved.schedule)


def _undefined(error: Exception) -> Exception:
    """An error after which the run cannot go on as it is, which says so."""
    if isinstance(error, ZckptError):
        error.remedy = f"{error.remedy} {_UNDEFINED}".strip()
        return error
    made = InconsistentError("a load that failed half-way", found=f"{type(error).__name__}: {error}", remedy=_UNDEFINED)
    made.__cause__ = error
    return made


def _go_on(engine: Engine, saved: SavedRun, *, goes_on: bool) -> None:
    """Counters, the loader's position and random generators; whether the step that was begun goes on or begins anew."""
    counters = saved.counters
    if counters is not None:
        again = 0 if goes_on else counters.pending
        engine.global_steps, engine.global_samples = counters.global_steps, counters.global_samples
        engine.skipped_steps = counters.skipped_steps
        engine.micro_steps = counters.micro_steps - again
        engine.pending_micro_steps = counters.pending - again
        if engine.loader is not None and counters.data is not None:
            engine.loader.load_state_dict({**counters.data, "batch": max(0, counters.data["batch"] - again)})
        if again and engine.global_rank == 0:
            _log.warning(
                "%r was saved after %d micro batches of a step, whose gradients cannot be taken up here: "
                "the step begins anew, with a whole batch.",
                saved.directory,
                again,
            )
    if saved.rng:
        set_rng_state(saved.rng)
