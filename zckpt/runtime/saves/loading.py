"""Loading a run: any checkpoint that the catalog knows, of any stage and world size, into the parts that this rank holds.

For `Engine.load_checkpoint`. A rank reads the indexes of all files, and of their elements only those it holds itself.
[Note: the order of a load]
1. Every rank reads and checks all but the elements, and makes room for them. If one fails, all fail, and nothing has changed.
2. Elements go straight into the run's memory, or through a buffer into its swap files: there is no room for a second copy. If
that fails on one rank, it fails on all, and the run's state is undefined.
3. Counters and generators follow, when all ranks have got this far.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch

from zckpt import live
from zckpt.base.collector import pause_collections
from zckpt.base.errors import InconsistentError, ZckptError
from zckpt.base.words import count
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog
from zckpt.layouts.joining import rules
from zckpt.layouts.run import agreement
from zckpt.layouts.save.listing import Listing, list_files
from zckpt.layouts.save.pointers import check_tag
from zckpt.layouts.zero import read as zero_read
from zckpt.layouts.zero import zero12
from zckpt.layouts.zero.same_layout import Held
from zckpt.live.plain_values import from_inert
from zckpt.runtime.loader import set_rng_state
from zckpt.runtime.saves.nodes import Want, gather_indexes
from zckpt.runtime.saves.run_state import buffers_of, group_members
from zckpt.runtime.saves.saved_run import LoadOptions, SavedRun, read, read_same
from zckpt.runtime.sharding import gradients
from zckpt.runtime.sharding.parameter import ShardedParameter
from zckpt.runtime.swapping.files import Filled, fill_through
from zckpt.runtime.swapping.install import mend, state_room
from zckpt.runtime.training_run import TrainingRun
from zckpt.storage.location import locate
from zckpt.team.meeting import Attempt, Meetings

_log = logging.getLogger("zckpt.runtime")
_NEEDED = (agreement, rules, zero12, zero_read)  # they are imported before a script takes the time of a load

_UNCHANGED = "Nothing was changed."
_UNDEFINED = "A part of the run's state was replaced and a part was not: load a checkpoint again before you train on."

Fill = Callable[[Sequence[Want]], None]


States = Sequence[tuple[ShardedParameter, dict[str, torch.Tensor], Mapping[str, float]]]
"""By parameter, the tensors of its states, which become the optimizer's when they are filled, and its numbers."""


@pause_collections()  # until what was read of the files is freed: a collection would look at all of it
def load(
    run: TrainingRun,
    meetings: Meetings,
    directory: str,
    tag: str | None,
    options: LoadOptions,
    same: OpenedSame | None = None,
) -> tuple[str, dict[str, Any]]:
    """Loads a checkpoint; see [Note: the order of a load]. `same`: what `open_same` has opened on every rank, of one save.

    Returns:
        Of DeepSpeed's files the one with this rank's counters, otherwise its directory; and the small entries of that file.

    Raises:
        InconsistentError: it is of another model, or of another optimizer. Nothing was changed.
        ZckptError: another kind says what is wrong with it, here or on another rank, and what has become of the run.
    """
    saved: SavedRun | None = None
    with ExitStack() as stack:
        if same is not None:
            _, saved, place, fill, (wanted, states) = same
            takes_gradients = lost = False
        else:
            with Attempt() as tried:
                saved, fill, place = _open(run, directory, tag, options, stack)
                wanted, states = _room(run, saved)
            found = saved is not None and (saved.gradients is not None, saved.buffers_lost)
            said = meetings.agree("load_checkpoint", tried.error, found, state=_UNCHANGED)
            takes_gradients, lost = all(one[0] for one in said), any(one[1] for one in said)
        assert saved is not None
        with Attempt() as tried:
            _take_up(run, saved, states, lambda: fill(wanted))
            if takes_gradients and saved.gradients is not None:
                gradients.put_gradients(run.module, run.sharded.parameters, from_inert(saved.gradients))
        error = None if tried.error is None else _with_undefined_state(tried.error)
        meetings.agree("load_checkpoint", error, state=_UNDEFINED)
    if not saved.full:
        run.gather()
    _set_counters(run, saved, begins_step_again=not takes_gradients)
    if lost and run.global_rank == 0:
        _log.warning(
            "The buffers in %s differed from rank to rank, and those of some ranks are missing: these ranks take rank 0's.",
            directory,
        )
    run.loaded_checkpoint_dp_world_size = saved.client_state.get("dp_world_size")
    if options.counters:
        run.loaded_checkpoint_mp_world_size = saved.client_state.get("mp_world_size")
    return place, saved.client_state


OpenedSame = tuple[str, SavedRun, str, Fill, tuple[list[Want], States]]
"""A text that is the same on all ranks if they have opened one save; and that save, as `_open` and `_room` return it."""


@pause_collections()
def open_same(run: TrainingRun, directory: str, tag: str, options: LoadOptions) -> OpenedSame | None:
    """A save with the layout that this run itself would write, opened in a fraction of the time; None if it is another, or
    anything is wrong with it. Changes nothing but that the optimizer has room.
    """
    place = locate(directory) / tag
    if place.is_remote or os.path.basename(tag) != tag or run.settings.config.checkpoint.use_node_local_storage:
        return None
    with suppress(
        ZckptError, OSError, RuntimeError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError
    ):
        check_tag(tag, locate(directory), "'latest'")
        listing = Listing(place, tag, {name: place / name for name in place.names()})
        if (found := read_same(run, options, listing)) is not None:
            saved, text = found
            return text, saved, (place / saved.file).path, _fill, _room(run, saved)
    return None


def _open(
    run: TrainingRun, directory: str, tag: str | None, options: LoadOptions, stack: ExitStack
) -> tuple[SavedRun, Fill, str]:
    """Opens the checkpoint; returns it, the function that fills tensors from it, and its place; `stack` closes it."""
    local = run.settings.config.checkpoint.use_node_local_storage
    nodes = gather_indexes(run, directory, tag) if local else None
    if nodes is None:
        opened = open_catalog(directory, Reading(tag=tag))
        saved = read(run, opened, options, opened.place.listing)
        return saved, _fill, opened.place.listing.where(saved.file).path if saved.file else saved.directory
    stack.callback(nodes.close)
    place = locate(directory) / nodes.tag
    opened = open_catalog(nodes.directory, Reading(tag=nodes.tag))
    here = list_files(place, nodes.tag) if place.is_dir() else Listing(place, nodes.tag, {})
    saved = read(run, opened, options, here)
    return saved, nodes.fill, (place / saved.file).path if saved.file else place.path


def _fill(wanted: Sequence[Want]) -> None:
    """Fills tensors from files that this rank sees."""

    def read_pieces(pieces: Sequence[Filled]) -> None:
        first = [0 if parameter is None else parameter.start for _, parameter, _ in wanted]
        runs = [(wanted[number][0], memory) for number, _, memory in pieces]
        live.move(runs, [first[number] + start for number, start, _ in pieces])

    fill_through([tensor for *_, tensor in wanted], read_pieces)


def _room(run: TrainingRun, saved: SavedRun) -> tuple[list[Want], States]:
    """The destinations of all elements, and the states among them; creates those that the optimizer lacks."""
    wanted: list[Want] = []
    weights = saved.weights
    for parameter in run.sharded.parameters:
        if parameter.name in weights:
            parameter.bind()
            wanted.append((weights[parameter.name], parameter, parameter.part().view(-1)))
    wanted += [(weights[name], None, buffer) for name, buffer in buffers_of(run).items() if name in weights]
    states: list[tuple[ShardedParameter, dict[str, torch.Tensor], Mapping[str, float]]] = []
    for parameter, entries, numbers in (one for _, several in saved.groups.values() for one in several):
        master, optimizer = parameter.master, run.optimizer
        assert master is not None and optimizer is not None
        there = optimizer.state.get(master, {})
        own: dict[str, torch.Tensor] = {}
        for name, entry in entries.items():
            old = there.get(name)
            fits = isinstance(old, torch.Tensor) and old.shape == master.shape and old.is_contiguous()
            own[name] = old if fits else state_room(optimizer, master, name)
            wanted.append((entry, parameter, own[name].view(-1)))
        states.append((parameter, own, numbers))
    return wanted, states


@torch.no_grad()
def _take_up(run: TrainingRun, saved: SavedRun, states: States, fill: Callable[[], None]) -> None:
    """Replaces everything except counters and generators."""
    if saved.full:
        run.copies.give_back()
    else:
        run.reshard(keep=not all(one.name in saved.weights for one in run.sharded.parameters))
    run.zero_grad()
    fill()
    buffers = buffers_of(run)
    _fill([(entry, None, buffers[name]) for name, entry in saved.buffers.items()])
    for parameter in run.sharded.parameters:
        if (
            parameter.master is not None
            and saved.precision is not None
            and not run.settings.zero.load_from_fp32_weights
        ):
            parameter.master.copy_(parameter.master.to(saved.precision))  # as if it were read from the module weights
        parameter.give_back()
    _fill_whole(run, saved)
    if run.optimizer is not None:
        for number, (settings, _) in saved.groups.items():
            run.optimizer.param_groups[number].update(settings)
        _put_states(run, states)
        if saved.scaler is not None:
            run.scaler.load_state(saved.scaler)
    if saved.schedule is not None:
        run.lr_scheduler.load_state_dict(saved.schedule)


def _fill_whole(run: TrainingRun, saved: SavedRun) -> None:
    """Gives whole parameters their elements, rounded, as a gather would: this rank's own are there, all others are read."""
    wanted: list[tuple[Held, torch.Tensor]] = []
    starts: list[int] = []
    rest: list[torch.Tensor] = []
    for one in run.sharded.parameters if saved.full else ():
        if one.whole is None:
            continue
        rows, entry = one.whole.detach().view(-1), saved.full[one.name]
        rows[one.elements].copy_(one.part().view(-1))
        for start, stop in ((0, one.start), (one.start + one.count, rows.numel())):
            if start < stop:
                wanted.append((entry, torch.empty(stop - start, dtype=getattr(torch, entry.dtype.torch_name))))
                starts.append(start)
                rest.append(rows[start:stop])
    live.move(wanted, starts)
    for part, (_, exact) in zip(rest, wanted, strict=True):
        part.copy_(exact)
    for one in run.sharded.parameters if saved.full else ():
        one.settle()


def _put_states(run: TrainingRun, states: States) -> None:
    """Gives the optimizer the filled states; a number takes the optimizer's own form, or becomes a tensor of one
    element.
    """
    assert run.optimizer is not None
    group_of = {
        id(one): group for members, group in zip(group_members(run), run.groups, strict=True) for one in members
    }
    for parameter, own, numbers in states:
        assert parameter.master is not None
        group = group_of[id(parameter)]
        on_device = group.get("fused") or group.get("capturable")
        device = parameter.master.device if on_device else torch.device("cpu")
        scalars = {name: torch.tensor(number, device=device) for name, number in numbers.items()}
        state = run.optimizer.state[parameter.master]
        state.clear()
        state.update(own | scalars)
    mend(run.optimizer)


def _with_undefined_state(error: Exception) -> Exception:
    """The error, with a note that the run cannot continue from its present state."""
    if isinstance(error, ZckptError):
        error.remedy = f"{error.remedy} {_UNDEFINED}".strip()
        return error
    made = InconsistentError("the load failed half-way", found=f"{type(error).__name__}: {error}", remedy=_UNDEFINED)
    made.__cause__ = error
    return made


def _set_counters(run: TrainingRun, saved: SavedRun, *, begins_step_again: bool) -> None:
    """Sets counters, the loader's position and random generators; a step that was begun continues or begins again."""
    if saved.counters:
        again = saved.counters["pending_micro_steps"] if begins_step_again else 0
        for name, number in saved.counters.items():
            setattr(run, name, number)
        run.micro_steps -= again
        run.pending_micro_steps -= again
        if run.training_dataloader is not None and saved.data:
            run.training_dataloader.load_state_dict({**saved.data, "batch": max(0, saved.data["batch"] - again)})
        if again and run.global_rank == 0:
            _log.warning(
                "%s was saved after %s of a step. Their gradients cannot be used in this run, so the step begins again, "
                "with a whole batch.",
                saved.directory,
                count(again, "micro batch", "micro batches"),
            )
    if saved.rng:
        set_rng_state(saved.rng)
