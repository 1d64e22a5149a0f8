"""Copies what a rank holds at a step: weights at once, the optimizer's states while the training goes on.

For saves in the background.
[Note: what is copied when] Scripts may write to weights and buffers, and a backward writes to gradients, so their copies are
complete when the save's call returns. States of the optimizer change when it steps. They are copied beside forward and backward,
and who is about to change them (`EngineOptimizer`: its step, and everybody who asks it for its states) first copies what is left.
A script that keeps a state in a variable and writes to it meanwhile is found out by torch's count of the tensor's changes: the
save fails, since nobody knows which numbers it has. What lies on a device is copied by the device, in its own order.
Fresh memory costs ten times what a copy costs, for the system fills each page with zeros first. So it is kept between saves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping

import torch

from zckpt.base.errors import InconsistentError, OutputError
from zckpt.base.words import size
from zckpt.live import device

try:
    from zckpt._core import copy_aside
except ImportError:  # built without a compiler
    copy_aside = None  # type: ignore[assignment]

Vectors = Mapping[Hashable, torch.Tensor]

_ALIGNMENT = 64


Pool = dict[bool, torch.Tensor]
"""Host memory that is kept for the next copy, one copy at a time: whether it is page-locked (to copy from a device) -> bytes."""


class Snapshot:
    """Copies of dense vectors, by keys with a name as their first part; see [Note: what is copied when]. `finish` before you read
    its `tensors`: the copies, by the same keys in the same order. `at_once`: whether the tensor of a key may be changed as soon
    as this returns. Raises OutputError if there is no memory.
    """

    def __init__(self, tensors: Vectors, at_once: Callable[[Hashable], bool], pool: Pool) -> None:
        # copies to be made: name, target and source, and the source's version when the copy was promised
        self._left: deque[tuple[str, torch.Tensor, torch.Tensor, int]] = deque()
        self._lock = threading.Lock()
        self._all_copied = threading.Event()
        self._changed: list[str] = []
        self._error: Exception | None = None
        self.tensors = _room_for(tensors, pool)
        for key, source in tensors.items():
            target = self.tensors[key]
            if at_once(key) or source.device.type != "cpu" or source.is_inference():
                _copy(target, source)
            elif source.numel():
                self._left.append((f"{key[0]!r}", target, source, source._version))  # type: ignore[index]
        self._open = len(self._left)
        self._arrived = device.copies_of(source.device for source in tensors.values())
        if not self._left:
            self._all_copied.set()

    def finish(self) -> None:
        """Makes the remaining copies, and waits for those of another thread."""
        while True:
            try:
                name, target, source, version = self._left.popleft()
            except IndexError:
                break
            try:
                _copy(target, source)
                if source._version != version:
                    self._changed.append(name)
            except Exception as error:
                self._error = error
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._all_copied.set()
        self._all_copied.wait()

    def check(self) -> None:
        """Waits until all copies are made. Raises InconsistentError if a state was changed before it was copied."""
        self.finish()
        self._arrived()
        if self._error is not None:
            raise self._error
        if self._changed:
            raise InconsistentError(
                "states of the optimizer were changed while the save copied them",
                found=f"new numbers in a state of {self._changed[0]}, before the next step",
                expected="states that only the optimizer's step changes",
                remedy="Take states from engine.optimizer.state each time that you change them, which waits for the copy.",
            )  # fmt: skip


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a dense vector; on the CPU past its caches, which the training uses."""
    if copy_aside is None or source.device.type != "cpu" or source.is_conj() or source.is_neg():
        device.copy(target, source)
    else:
        copy_aside(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())


def _room_for(tensors: Vectors, pool: Pool) -> dict[Hashable, torch.Tensor]:
    """Memory for a copy of each tensor, of the same dtype and length."""
    places: dict[Hashable, tuple[bool, int]] = {}
    taken = {False: 0, True: 0}
    for key, source in tensors.items():
        locked = source.device.type != "cpu" and device.pins()
        places[key] = locked, taken[locked]
        taken[locked] += -(-source.numel() * source.element_size() // _ALIGNMENT) * _ALIGNMENT
    for locked, nbytes in taken.items():
        if nbytes > (pool[locked].numel() if locked in pool else 0):
            pool.pop(locked, None)
            try:
                pool[locked] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=locked)
            except RuntimeError as error:
                raise OutputError(
                    "there is no memory for a copy of this rank's part of the run", found=str(error).splitlines()[0],
                    expected=f"{size(nbytes)} of host memory",
                    remedy="Free memory on this rank, or set checkpoint.async_save to false.",
                ) from error  # fmt: skip
    made: dict[Hashable, torch.Tensor] = {}
    for key, (locked, at) in places.items():
        source = tensors[key]
        nbytes = source.numel() * source.element_size()
        room = pool[locked][at : at + nbytes] if nbytes else torch.empty(0, dtype=torch.uint8)
        made[key] = room.view(source.dtype)
    return made
