"""Finds the unit at which ranks wait for each other for ever because they do not call the same units.

For `start`. A unit is gathered by all ranks together, so one that a rank leaves out (`if rank == 0: x = self.extra(x)`) hangs
all of them until torch's own timeout, half an hour later and without a name.
[Note: the watch] A hook notes the number of each unit that a forward calls, in a list. A thread looks every few seconds
whether the list still grows. If it has not for a while, the rank puts it into the store of the process group; rank 0
compares them, and logs what differs. Nothing is put into the store as long as the run makes progress. Lists that differ only in
how far they are mean nothing: a rank may be slow.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import DistError
from torch.distributed.fsdp import FSDPModule

from zckpt.base.words import ranks
from zckpt.runtime.world import World
from zckpt.team.rendezvous import default_store, own_connection

STILL_S = 15.0
"""The seconds without a call of a unit after which a rank reports its calls."""
LOOK_S = 5.0

_log = logging.getLogger("zckpt.runtime")
_numbers = itertools.count()


class Forward(NamedTuple):
    """A forward of the whole model: how many the rank has begun, the units it has called, in order, whether it ended."""

    number: int
    calls: list[int]
    done: bool


class Watch(threading.Thread):
    """Watches the forwards of a sharded model on this rank."""

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(name="zckpt watch", daemon=True)
        self._rank, self._size = world.rank, world.size
        self._prefix = f"zckpt/watch/{next(_numbers)}"
        self._names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule) and name]
        self._before = self._now = Forward(0, [], True)
        self._over = threading.Event()
        weakref.finalize(model, self._over.set)
        modules = dict(model.named_modules())
        for number, name in enumerate(self._names):
            modules[name].register_forward_pre_hook(_hook(partial(self.note, number)), prepend=True)
        model.register_forward_pre_hook(_hook(self.begin), prepend=True)
        model.register_forward_hook(_hook(self.end))
        self.start()

    def begin(self) -> None:
        """Notes that a forward begins."""
        self._before, self._now = self._now._replace(done=True), Forward(self._now.number + 1, [], False)

    def note(self, unit: int) -> None:
        """Notes that a unit is called, except by a backward that recomputes it."""
        if not self._now.done:
            self._now.calls.append(unit)

    def end(self) -> None:
        """Notes that the forward has ended."""
        self._now = self._now._replace(done=True)

    def run(self) -> None:
        """Watches until the model or the process group is gone, or the ranks are found to differ."""
        last, still_s, reported = (0, 0, True), 0.0, False
        while not self._over.wait(LOOK_S):
            state = (self._now.number, len(self._now.calls), self._now.done)
            if state != last:
                last, still_s, reported = state, 0.0, False
                continue
            still_s += LOOK_S
            if still_s < STILL_S or not state[0]:
                continue
            try:
                if not reported:
                    self._report()
                    reported = True
                if self._rank == 0 and self._compare():
                    return
            except (DistError, RuntimeError, ValueError):  # the process group has been destroyed
                return

    def _report(self) -> None:
        own_connection(default_store()).set(f"{self._prefix}/{self._rank}", json.dumps([self._before, self._now]))

    def _compare(self) -> bool:
        store = own_connection(default_store())
        keys = {rank: f"{self._prefix}/{rank}" for rank in range(self._size)}
        found = {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}
        forwards = {rank: {one[0]: Forward(*one) for one in both} for rank, both in found.items()}
        for number in (self._before.number, self._now.number):
            known = {rank: by_number[number] for rank, by_number in forwards.items() if number in by_number}
            differing = difference(known)
            if differing is not None:
                self._log_difference(number, *differing)
                return True
        return False

    def _log_difference(self, number: int, at: int, calls: Mapping[int, int | None]) -> None:
        after = next(one for one in (self._before, self._now) if one.number == number).calls[:at]
        by_unit: dict[int | None, list[int]] = {}
        for rank, unit in calls.items():
            by_unit.setdefault(unit, []).append(rank)
        what = "; ".join(_does(ranks, None if unit is None else self._names[unit]) for unit, ranks in by_unit.items())
        _log.error(
            "The ranks wait for each other for ever, because they do not call the same modules. In forward %d, %s: %s. Every "
            "rank has to call the same modules in the same order. On a rank that does not need a module's result, call the "
            "module all the same and add its result times zero.",
            number, f"after {self._names[after[-1]]!r}" if after else "at its beginning", what,
        )  # fmt: skip


def difference(forwards: Mapping[int, Forward]) -> tuple[int, dict[int, int | None]] | None:
    """The place where one forward differs between ranks: the number of the call, and the unit of each rank; None for
    the end.

    Ranks that have not come so far yet are left out.
    """
    for at in range(max((len(one.calls) for one in forwards.values()), default=0)):
        known = {rank: one for rank, one in forwards.items() if at < len(one.calls) or one.done}
        calls = {rank: one.calls[at] if at < len(one.calls) else None for rank, one in known.items()}
        if len(set(calls.values())) > 1:
            return at, calls
    return None


def _hook(note: Callable[[], None]) -> Any:
    def hook(*_: Any) -> None:
        if not torch.compiler.is_compiling():  # a list in a compiled graph would have it compiled again for each length
            note()

    return hook


def _does(numbers: list[int], name: str | None) -> str:
    s = "s" if len(numbers) == 1 else ""
    return f"{ranks(numbers)} end{s} it" if name is None else f"{ranks(numbers)} call{s} {name!r}"
