"""Steps an optimizer with weights and states in files: sub-group after sub-group, through a few buffers.

For `install`. [Note: a step] While a sub-group is updated, the next ones are read and those before are written, in as many
buffers as `buffer_count` says. All arithmetic is of single elements, so a vector may be cut anywhere. Where the C++ engine knows
the rule (`kernel_of`), it does it; otherwise the optimizer's own step works on views of the buffer. Either way the numbers are
those of the same run without swapping. A step that fails half-way has updated some sub-groups and others not: the run must not
go on from there.

The C++ kernel steps as torch's fused Adam, AdamW and Adagrad do, and as Lion, bit for bit. The optimizer's own step is also the
reference that the kernel must equal: `kernel_of` tries both on some numbers, since another version of torch, or another
processor, may round elsewhere.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any

import torch
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError
from zckpt.runtime.optimizers.lion_lamb import Lion
from zckpt.runtime.swapping.files import BufferPlaces, Region, SwapFile, Transfer, Transfers, elements_in, padded_size
from zckpt.runtime.swapping.gathering import SwappedRows

try:
    from zckpt._core import step as native_step
except ImportError:  # built without a compiler
    native_step = None  # type: ignore[assignment]

_SAMPLE = 1037
"""The number of elements in the test of a kernel: whole vectors and a rest."""

_UNUSUAL = ("amsgrad", "maximize", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A rule that the C++ engine knows, by its number in csrc/optimizers.h, with the names of its states in its order."""

    number: int
    states: tuple[str, ...]


_ADAM = Kernel(0, ("exp_avg", "exp_avg_sq"))
_KERNELS: dict[type[Optimizer], Kernel] = {
    Adam: _ADAM,
    AdamW: _ADAM,
    Adagrad: Kernel(1, ("sum",)),
    Lion: Kernel(2, ("exp_avg",)),
}


def kernel_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Kernel | None:
    """The kernel for an optimizer's group; None if there is none."""
    kernel = _KERNELS.get(type(optimizer))
    if native_step is None or kernel is None or any(group.get(name) for name in _UNUSUAL):
        return None
    if not group.get("fused", isinstance(optimizer, Lion)):
        return None
    if not all(isinstance(number, int | float) for number in (group.get("lr"), *group.get("betas", ()))):
        return None
    adds_decay = bool(group["weight_decay"]) and not _is_decoupled(optimizer, group)
    cls: Any = type(optimizer)
    return kernel if _equals_torch(cls, adds_decay) else None


def _is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    return isinstance(optimizer, Lion) or bool(group.get("decoupled_weight_decay"))


@cache
def _equals_torch(cls: Any, adds_decay: bool) -> bool:
    """Whether kernel and optimizer give the same bits, in two steps on some numbers."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(_SAMPLE, generator=generator))
    own: dict[str, Any] = {} if cls is Lion else {"fused": True}
    optimizer = cls([weight], weight_decay=0.1 if adds_decay or cls is not Adam else 0.0, **own)
    kernel, group = _KERNELS[cls], optimizer.param_groups[0]
    mine = [weight.detach().clone(), *(torch.zeros(_SAMPLE) for _ in kernel.states)]
    for number in (1, 2):
        weight.grad = torch.randn(_SAMPLE, generator=generator)
        optimizer.step()
        step(kernel, rates(optimizer, group, number), mine[0], weight.grad, mine[1:], threads=1)
    theirs = [weight.detach(), *(optimizer.state[weight][name] for name in kernel.states)]
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def rates(optimizer: Optimizer, group: Mapping[str, Any], step: float) -> bytes:
    """The factors of a step, as `Rates` of csrc/optimizers.h."""
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    rate, root, eps = lr, 1.0, float(group.get("eps", 0.0))
    if isinstance(optimizer, Adam):
        rate, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
    elif isinstance(optimizer, Adagrad):
        rate = lr / (1 + (step - 1) * group["lr_decay"])
    shrink, decay = (1 - lr * weight_decay, 0.0) if _is_decoupled(optimizer, group) else (1.0, weight_decay)
    return struct.pack("<9f", rate, shrink, decay, beta1, 1 - beta1, beta2, 1 - beta2, root, eps)


def step(
    kernel: Kernel,
    factors: bytes,
    weights: torch.Tensor,
    gradients: torch.Tensor,
    states: Sequence[torch.Tensor],
    threads: int,
) -> None:
    """Updates weights and states in place: contiguous fp32 vectors of one length in host memory."""
    first, second = (*(state.data_ptr() for state in states), 0)[:2]
    weight, gradient = weights.data_ptr(), gradients.data_ptr()
    native_step(kernel.number, factors, weight, gradient, first, second, weights.numel(), threads)


Group = dict[str, Any]

_F32 = torch.float32
ONE_NUMBER = frozenset(("step", "eta", "mu", "mu_product"))
"""States that are one number, whatever the shape of the weight."""


@dataclass(slots=True, eq=False)
class Vectors:
    """The tensors of one parameter that a step changes.

    Attributes:
        master: the parameter as the optimizer has it.
        group: its settings.
        regions: "" for the weight, and states by name: those that are in files.
        kernel: that updates it; None for the optimizer's own step.
        factors: for the kernel.
        before: its states before the step.
        scalars: states of one number after the step, by the optimizer's own step.
    """

    master: torch.Tensor
    group: Group
    regions: dict[str, Region]
    kernel: Kernel | None
    factors: bytes = b""
    before: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)

    def vector(self, name: str) -> torch.Tensor:
        """The weight or a state as a vector."""
        return (self.before[name] if name else self.master.detach()).view(-1)

    def is_large(self, name: str) -> bool:
        """Whether a state that existed before the step has an element for each of the weight's."""
        value = self.before.get(name)
        return isinstance(value, torch.Tensor) and value.shape == self.master.shape and name not in ONE_NUMBER


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one parameter, with the places of its swapped vectors in a buffer, in bytes."""

    vectors: Vectors
    start: int
    count: int
    places: dict[str, int]


@dataclass(slots=True)
class SubGroup:
    """Pieces that are read, updated and written together."""

    pieces: list[Piece] = field(default_factory=list)
    places: BufferPlaces = field(default_factory=BufferPlaces)
    elements: int = 0

    def add(self, vectors: Vectors, start: int, count: int) -> None:
        """Adds a piece."""
        first, nbytes = start * _F32.itemsize, count * _F32.itemsize
        regions = vectors.regions.items()
        places = {name: self.places.add(one.file, one.offset + first, nbytes) for name, one in regions}
        self.pieces.append(Piece(vectors, start, count, places))
        self.elements += count


class SwappedStep:
    """The replacement of the `step` of an optimizer on masters. By the `id` of a master, `rows` has its rows in a file; others
    are in memory. `file` is for the states; None keeps them in memory. At a time, `sub_groups` sub-groups are in memory, of
    `elements` elements at most, a multiple of 1024. `changed` is called before anything changes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rows: Mapping[int, SwappedRows],
        file: SwapFile | None,
        transfers: Transfers,
        sub_groups: int,
        elements: int,
        changed: Callable[[], None],
    ) -> None:
        self._optimizer, self._rows, self._file, self._transfers = optimizer, rows, file, transfers
        self._sub_groups, self._elements, self._changed = sub_groups, elements, changed
        own: Any = type(optimizer).step
        self._own = own.__wrapped__ if getattr(own, "hooked", False) else own  # without the hooks, which run once
        self._regions: dict[tuple[int, str], Region] = {}
        self._broken: Exception | None = None
        self._threads = torch.get_num_threads()
        self._reserve()

    def room(self, master: torch.Tensor, name: str) -> torch.Tensor:
        """A tensor for a state of a master: in the file, if its states are there. Its elements are arbitrary."""
        if self._file is None or not self._is_swapped(master):
            return torch.empty_like(master, memory_format=torch.contiguous_format)
        return self._region(master, name).tensor.view(master.shape)

    def mend(self) -> None:
        """Lets the run step again, after its state was loaded."""
        self._broken = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient. Raises OutputError if a swap file cannot be read or written,
        InconsistentError if an earlier step failed half-way.
        """
        for before in self._optimizer._optimizer_step_pre_hooks.values():
            before(self._optimizer, (), {})
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._broken is not None:
            raise InconsistentError(
                "the weights are a mixture of two steps, since an earlier step failed half-way", found=str(self._broken),
                remedy="Load a checkpoint with engine.load_checkpoint, then continue.",
            )  # fmt: skip
        self._changed()
        groups: list[tuple[Group, list[torch.Tensor]]] = [(one, one["params"]) for one in self._optimizer.param_groups]
        try:
            due = [(p, group) for group, ps in groups for p in ps if p.grad is not None and self._is_swapped(p)]
            swapped = [self._vectors(p, group) for p, group in due]
            self._call_own({id(group): [p for p in params if not self._is_swapped(p)] for group, params in groups})
            self._run(swapped)
            for one in swapped:
                self._finish(one)
        except BaseException as error:
            self._broken = error if isinstance(error, Exception) else InterruptedError(type(error).__name__)
            raise
        finally:
            for group, params in groups:
                group["params"] = params
        for after in self._optimizer._optimizer_step_post_hooks.values():
            after(self._optimizer, (), {})
        return loss

    def _is_swapped(self, master: torch.Tensor) -> bool:
        """Whether the step goes through files; a parameter without rows on this rank gets empty states in memory."""
        if not master.numel():
            return False
        return id(master) in self._rows or (self._file is not None and master.numel() > 1 and master.dtype == _F32)

    def _reserve(self) -> None:
        """Makes room for the states that are known by now, and moves the existing ones."""
        if self._file is None:
            return
        masters = [(p, group) for group in self._optimizer.param_groups for p in group["params"] if self._is_swapped(p)]
        kernels = {id(group): kernel_of(self._optimizer, group) for group in self._optimizer.param_groups}
        nbytes = 0
        for master, group in masters:
            kernel = kernels[id(group)]
            names = set(kernel.states if kernel else ()) | self._tensors(master).keys()
            nbytes += len(names) * padded_size(master.numel() * _F32.itemsize)
        if nbytes:
            self._file.reserve(nbytes)
        for master, group in masters:
            kernel = kernels[id(group)]
            for name in kernel.states if kernel else ():
                self._region(master, name)
            self._absorb(master)

    def _region(self, master: torch.Tensor, name: str) -> Region:
        assert self._file is not None
        key = id(master), name
        if key not in self._regions:
            self._regions[key] = self._file.region(master.numel(), _F32)
        return self._regions[key]

    def _tensors(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """The states of a master that are as large as it."""
        state = self._optimizer.state.get(master, {})
        return {
            name: value
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
            and value.shape == master.shape
            and value.dtype == _F32
            and name not in ONE_NUMBER
        }

    def _absorb(self, master: torch.Tensor) -> None:
        """Moves states from memory to the file."""
        for name, value in self._tensors(master).items():
            place = self._region(master, name).tensor.view(master.shape)
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
                self._optimizer.state[master][name] = place

    def _vectors(self, master: torch.Tensor, group: Group) -> Vectors:
        """The tensors of a parameter that the step changes; creates missing states where they are known."""
        regions, state = {}, self._optimizer.state[master]
        kernel = kernel_of(self._optimizer, group)
        if kernel is not None and not state:
            state["step"] = torch.zeros((), dtype=_F32)
            for name in kernel.states:
                state[name] = (
                    self.room(master, name).zero_()
                    if self._file is None
                    else self._region(master, name).tensor.view(master.shape)
                )
        if id(master) in self._rows:
            regions[""] = self._rows[id(master)].region
        if self._file is not None:
            self._absorb(master)
            regions |= {name: self._region(master, name) for name in self._tensors(master)}
        if kernel is not None and not set(kernel.states) <= state.keys():
            kernel = None
        factors = b"" if kernel is None else rates(self._optimizer, group, float(state["step"]) + 1)
        return Vectors(master, group, regions, kernel, factors, dict(state))

    def _run(self, swapped: list[Vectors]) -> None:
        waiting = deque(self._cut(swapped))
        size = max((one.places.nbytes for one in waiting), default=0)
        free = [self._transfers.make_buffer(size) for _ in range(min(self._sub_groups, len(waiting)))]
        reading: deque[tuple[SubGroup, torch.Tensor, list[Transfer]]] = deque()
        writing: deque[tuple[torch.Tensor, list[Transfer]]] = deque()
        try:
            while waiting or reading:
                while waiting and free:
                    sub_group, buffer = waiting.popleft(), free.pop()
                    reading.append((sub_group, buffer, sub_group.places.begin(self._transfers, buffer, write=False)))
                if not reading:
                    free.append(_wait(*writing.popleft()))
                    continue
                sub_group, buffer, transfers = reading.popleft()
                _wait(buffer, transfers)
                self._update(sub_group, buffer)
                writing.append((buffer, sub_group.places.begin(self._transfers, buffer, write=True)))
                if waiting and not free:
                    free.append(_wait(*writing.popleft()))
            while writing:
                _wait(*writing.popleft())
        finally:
            for transfers in [*(one[2] for one in reading), *(one[1] for one in writing)]:
                for transfer in transfers:
                    transfer.engine.wait(transfer.number)

    def _cut(self, swapped: list[Vectors]) -> Iterator[SubGroup]:
        """The sub-groups, each of parameters of one group."""
        now = SubGroup()
        for one in swapped:
            start, total = 0, one.master.numel()
            while start < total:
                if now.elements >= self._elements or (now.pieces and now.pieces[-1].vectors.group is not one.group):
                    yield now
                    now = SubGroup()
                count = min(total - start, self._elements)
                now.add(one, start, count)
                start += count
        if now.pieces:
            yield now

    def _update(self, sub_group: SubGroup, buffer: torch.Tensor) -> None:
        by_torch: list[tuple[Piece, torch.nn.Parameter]] = []
        for piece in sub_group.pieces:
            one, span = piece.vectors, slice(piece.start, piece.start + piece.count)
            assert one.master.grad is not None
            grad = one.master.grad.reshape(-1)[span]

            def part(name: str, piece: Piece = piece, span: slice = span) -> torch.Tensor:
                if name in piece.places:
                    return elements_in(buffer, piece.places[name], piece.count, _F32)
                return piece.vectors.vector(name)[span]

            if one.kernel is not None:
                step(one.kernel, one.factors, part(""), grad, [part(name) for name in one.kernel.states], self._threads)
            else:
                view = torch.nn.Parameter(part(""))
                view.grad = grad
                self._optimizer.state[view] = {
                    name: part(name)
                    if one.is_large(name)
                    else value.clone()
                    if isinstance(value, torch.Tensor)
                    else value
                    for name, value in one.before.items()
                }
                by_torch.append((piece, view))
        if by_torch:
            self._call_own({id(by_torch[0][0].vectors.group): [view for _, view in by_torch]})
            for piece, view in by_torch:
                self._take_states(piece, buffer, self._optimizer.state.pop(view))
        for piece in sub_group.pieces:
            rows = self._rows.get(id(piece.vectors.master))
            if rows is not None and rows.cache is not None:
                updated = elements_in(buffer, piece.places[""], piece.count, _F32)
                rows.cache[piece.start : piece.start + piece.count].copy_(updated)

    def _call_own(self, params: Mapping[int, list[Any]]) -> None:
        """The optimizer's own step on these parameters, by the `id` of their group."""
        for group in self._optimizer.param_groups:
            group["params"] = params.get(id(group), [])
        if any(params.values()):
            self._own(self._optimizer)

    def _take_states(self, piece: Piece, buffer: torch.Tensor, state: dict[str, Any]) -> None:
        """Keeps the results of the optimizer's own step on a piece: numbers, and in its first step its states."""
        one, kept = piece.vectors, self._optimizer.state[piece.vectors.master]
        for name, value in state.items():
            if name in piece.places:
                if value.data_ptr() != elements_in(buffer, piece.places[name], piece.count, _F32).data_ptr():
                    elements_in(buffer, piece.places[name], piece.count, _F32).copy_(value)
            elif one.is_large(name) or (
                name not in ONE_NUMBER and name not in one.before and _is_vector(value, piece.count)
            ):
                if name not in kept:
                    kept[name] = self.room(one.master, name)
                kept[name].view(-1)[piece.start : piece.start + piece.count].copy_(value)
            else:
                one.scalars[name] = value

    def _finish(self, one: Vectors) -> None:
        """Counts the step of a parameter, when all its pieces are done."""
        state, rows = self._optimizer.state[one.master], self._rows.get(id(one.master))
        if one.kernel is not None:
            state["step"] += 1
        state.update(one.scalars)
        if rows is not None:
            rows.is_updated()


def _is_vector(value: object, count: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == _F32 and value.shape == (count,)


def _wait(buffer: torch.Tensor, transfers: list[Transfer]) -> torch.Tensor:
    for transfer in transfers:
        transfer.wait()
    return buffer
