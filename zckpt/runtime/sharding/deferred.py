"""Builds a model that no rank could hold: parameters keep only this rank's rows from the moment they are created.

For `zero.Init` and `shard`.
[Note: deferred parameters]
While `Recorder` is active, a parameter that a module registers becomes a tensor of its shape on the meta device, and its
numbers shrink to this rank's rows of dim 0. What the model's code then does to the parameter is seen op by op:
- an op that only looks at the shape, or makes a view, runs on the meta tensor;
- an op that overwrites the whole parameter (all random fills are of this kind) runs on whole memory, made for it and dropped,
  so the random generator moves as it does for the plain model, and the same seed gives the same weights;
- an op that treats every element alike runs on the rows;
- anything else runs on the whole parameter, gathered for it: all ranks build the model by the same code, so all take part.
At no time is more than one parameter whole. To Python code the parameter looks as if it were on the device where its numbers
are: torch's own initialisations leave meta tensors alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from zckpt.base.dataclass import dataclass
from zckpt.runtime.sharding.labels import label
from zckpt.runtime.sharding.older_torch import gather
from zckpt.runtime.world import rows_of

_ATTRIBUTE = "_zckpt_rows"
_FILLS = frozenset(("fill_", "zero_"))
_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Rows:
    """This rank's rows of a parameter that exists nowhere whole.

    Attributes:
        values: shape (rows, ...); a parameter without dims or elements is whole on every rank.
        shape: of the whole parameter.
        group: the ranks that share it, in the order of their rows.
        number: counts the parameters in the order in which they were made, which is the same on all ranks.
    """

    values: torch.Tensor
    shape: torch.Size
    group: Any
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def size(self) -> int:
        """The number of ranks that share the parameter."""
        return dist.get_world_size(self.group)

    @property
    def whole(self) -> bool:
        """Whether every rank has the whole parameter."""
        return self.size == 1 or not self.shape or not self.shape.numel()

    def join(self) -> torch.Tensor:
        """The whole tensor, in new memory. All ranks of the group take part."""
        return self.values.clone() if self.whole else gather_rows(self.values, self.shape, self.group)


class DeferredParameter(nn.Parameter):
    """A parameter on the meta device that tells scripts where its rows are, when they ask for its device.

    torch's own code sees the real device: it makes results on that device, and would make some of no numbers.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of the rows."""
        rows = rows_held_by(self)
        asks = str(sys._getframe(1).f_globals.get("__name__"))
        return torch.device("meta") if rows is None or asks.partition(".")[0] == "torch" else rows.values.device

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In another dtype; `initialize` decides on the device."""
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        return self if dtype in (None, self.dtype) else super().to(dtype=dtype)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Itself, likewise."""
        return self

    cuda = cpu


def local_rows(tensor: torch.Tensor, group: Any, dtype: torch.dtype | None = None, *, unwritten: bool = False) -> Rows:
    """This rank's rows of a whole tensor, in memory of their own. `dtype`: for floating-point numbers, their own if not
    given; `unwritten`: the numbers are any that were in the memory, and are not copied.
    """
    tensor = part = tensor.detach()
    size = dist.get_world_size(group)
    if size > 1 and tensor.ndim and tensor.numel():
        rows = rows_of(tensor.shape[0], size, dist.get_rank(group))
        part = tensor[rows.start : rows.stop]
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    values = room(part.shape, dtype, tensor.device)
    if not unwritten:
        values.copy_(part)
    return Rows(values, tensor.shape, group)


def room(shape: Iterable[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor with arbitrary numbers, in memory that returns to the system as soon as it is unused.

    What is larger than 128 KiB has pages of its own: among tensors of many sizes, made and freed in turn, malloc's heap
    would grow to twice what is in it.
    """
    shape = tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or nbytes < 1 << 17 or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def gather_rows(values: torch.Tensor, shape: Iterable[int], group: Any) -> torch.Tensor:
    """A tensor of a shape from every rank's rows of dim 0, `values`; the ranks of the group are in the order of their rows."""
    length, *inner = shape
    size = dist.get_world_size(group)
    step = -(-length // size)
    padded = values.new_zeros((step, *inner))
    padded[: values.shape[0]] = values
    whole = values.new_empty((step * size, *inner))
    gather(whole.view(-1).view(torch.uint8), padded.view(-1).view(torch.uint8), group)
    return whole[:length]


def rows_held_by(parameter: nn.Parameter) -> Rows | None:
    """The rows of a deferred parameter; None for any other."""
    rows = getattr(parameter, _ATTRIBUTE, None)
    return rows if isinstance(rows, Rows) else None


def defer(parameter: nn.Parameter, rows: Rows) -> None:
    """Turns a parameter object into a deferred one for all that refer to it; its attributes stay."""
    meta = torch.empty(rows.shape, dtype=rows.values.dtype, device="meta")
    attributes = dict(vars(parameter))
    torch.utils.swap_tensors(parameter, DeferredParameter(meta, requires_grad=parameter.requires_grad))
    vars(parameter).update(attributes)
    setattr(parameter, _ATTRIBUTE, rows)
    label(parameter, rows.shape, rows.values)


def recording() -> Recorder | None:
    """The active recorder; None outside `zero.Init`."""
    return _active[-1] if _active else None


class Recorder(TorchDispatchMode):
    """Follows operations on deferred parameters; see [Note: deferred parameters]. `group` shares each; `dtype`: of
    floating-point ones, where the model gives them another; `first`: called once, when the first one is registered.
    """

    def __init__(self, group: Any, dtype: torch.dtype | None = None, first: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.group = group
        self.dtype = dtype
        self.makes_meta = False
        self._first: Callable[[], None] | None = first
        self._home = torch.device("cpu")
        self._rows: dict[int, Rows] = {}
        self._kept: list[nn.Parameter] = []
        self._alive: list[torch.UntypedStorage] = []  # a place in `_rows` must not be given to another tensor
        self._fresh: StorageWeakRef | None = None  # what `torch.empty` gave, if no op but views came after it
        self._passing: list[StorageWeakRef] = []  # of tensors that may never become parameters
        self._device_mode = _DeviceMode(self)
        self._register: Callable[..., None] | None = None

    def __enter__(self) -> Recorder:
        self._register = plain = nn.Module.register_parameter
        recorder = self

        @functools.wraps(plain)
        def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            plain(module, name, param)
            if recorder._first is not None:
                once, recorder._first = recorder._first, None
                once()
            if param is None or type(param) not in (nn.Parameter, DeferredParameter):
                return
            if recorder.rows_of(param) is not None:
                recorder.keep(param)
            elif not param.is_meta:
                recorder.adopt(param)

        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        self._device_mode.__enter__()  # type: ignore[no-untyped-call]
        _active.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _active.remove(self)
        self._device_mode.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._register is not None:
            nn.Module.register_parameter = self._register  # type: ignore[method-assign]
        for parameter in self._kept:  # its data may have been exchanged since it was adopted
            setattr(parameter, _ATTRIBUTE, self._rows[_place(parameter)])
        for held in (self._rows, self._kept, self._alive, self._passing):  # who holds this may not hold replaced ones
            held.clear()

    def adopt(self, parameter: nn.Parameter) -> None:
        """Defers a parameter that has numbers."""
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            unwritten = self._fresh is not None and self._fresh.cdata == _place(parameter)
            self._take(parameter, local_rows(parameter, self.group, self.dtype, unwritten=unwritten))

    def keep(self, parameter: nn.Parameter) -> None:
        """Adopts a parameter that was made from a deferred tensor, such as one that `hold` returned."""
        rows = self._rows[_place(parameter)]
        if rows_held_by(parameter) is rows:
            return
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            if self.dtype is not None and rows.values.is_floating_point():
                rows.values = rows.values.to(self.dtype)
            self._take(parameter, rows)

    def _take(self, parameter: nn.Parameter, rows: Rows) -> None:
        defer(parameter, rows)
        self._know(parameter, rows)
        self._kept.append(parameter)

    def follow(self, parameter: nn.Parameter) -> None:
        """Follows a parameter that another recorder has deferred, from now on."""
        rows = rows_held_by(parameter)
        if rows is not None and self.rows_of(parameter) is None:
            self._know(parameter, rows)
            self._kept.append(parameter)

    def hold(self, rows: Rows) -> torch.Tensor:
        """A deferred tensor with these rows, for the memory that they are in; they are freed with it."""
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            meta = torch.empty(rows.shape, dtype=rows.values.dtype, device="meta")
            self._know(meta, rows, passing=True)
        return meta

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with its numbers: gathered, if it is deferred. All ranks of the group take part."""
        rows = self.rows_of(tensor)
        if rows is None:
            return tensor
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return rows.join()

    def forget_fresh(self) -> None:
        """Marks the result of `torch.empty` as written: other code has its memory."""
        self._fresh = None

    def rows_of(self, value: object) -> Rows | None:
        """The rows of a deferred parameter or a view of one; None for any other value."""
        return self._rows.get(_place(value)) if isinstance(value, torch.Tensor) else None

    def _know(self, tensor: torch.Tensor, rows: Rows, *, passing: bool = False) -> None:
        for gone in [one for one in self._passing if one.expired()]:
            self._passing.remove(gone)
            self._rows.pop(gone.cdata, None)
        storage = tensor.untyped_storage()
        if passing:
            self._passing.append(StorageWeakRef(storage))
        else:
            self._alive.append(storage)
        self._rows[_place(tensor)] = rows
        self._home = rows.values.device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an op on the numbers of its arguments."""
        kwargs = dict(kwargs or {})
        deferred = [t for t in tree_flatten((args, kwargs))[0] if self.rows_of(t) is not None]
        if _is_meta(kwargs.get("device")) and not self.makes_meta:
            kwargs["device"] = self._home  # a value for a parameter, made where it is
        if not deferred or (func.is_view and not func._schema.is_mutable):
            result = func(*args, **kwargs)
            if func.overloadpacket is torch.ops.aten.empty:
                self._fresh = StorageWeakRef(result.untyped_storage())  # so that its place is not given to another
            elif not func.is_view:
                self._fresh = None
            return result
        self._fresh = None
        first, name = deferred[0], func.overloadpacket.__name__
        is_mutable, alone = func._schema.is_mutable, len(deferred) == 1 and args and args[0] is first
        changes_one = is_mutable and alone and self._is_all(first)
        if changes_one and _is_elementwise(func, args[1:], kwargs):
            func(self._rows[_place(first)].values, *args[1:], **kwargs)
            return first
        stays = kwargs.get("device") in (None, self._rows[_place(first)].values.device)
        if name == "_to_copy" and not args[1:] and stays and self._is_all(first):
            return self._converted(first, kwargs.get("dtype"))
        random = torch.Tag.nondeterministic_seeded in func.tags
        overwrites = changes_one and (random or name in ("copy_", *_FILLS))
        reads = not overwrites and not name.startswith("new_") and not name.endswith("_like")
        return self._on_whole(func, args, kwargs, reads=reads)

    def _on_whole(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, reads: bool) -> Any:
        """Runs an op on whole parameters, and keeps this rank's rows of what it leaves in them. `reads`: they are gathered;
        otherwise the op gets memory without their numbers.
        """
        whole: dict[int, torch.Tensor] = {}

        def real(value: Any) -> Any:
            rows = self.rows_of(value)
            if rows is None:
                return value
            place = _place(value)
            if place not in whole:
                whole[place] = rows.join() if reads else rows.values.new_empty(rows.shape)
            return whole[place].as_strided(value.size(), value.stride(), value.storage_offset())

        result = func(*tree_map(real, args), **tree_map(real, kwargs))
        if not func._schema.is_mutable:
            return result
        for place, tensor in whole.items():
            self._rows[place].values = local_rows(tensor, self.group).values
        written = kwargs.get("out", args[0] if args else None)
        return written if self.rows_of(written) is not None else result

    def _converted(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        rows = self._rows[_place(tensor)]
        values = rows.values.to(dtype or rows.values.dtype, copy=True)
        meta = torch.empty(tensor.shape, dtype=values.dtype, device="meta")
        self._know(meta, Rows(values, rows.shape, rows.group), passing=True)
        return meta

    def _is_all(self, tensor: torch.Tensor) -> bool:
        shape = self._rows[_place(tensor)].shape
        return tensor.shape == shape and tensor.is_contiguous() and not tensor.storage_offset()


_active: list[Recorder] = []


class _DeviceMode(TorchFunctionMode):
    """Answers `is_meta` and `device` of a deferred parameter as its numbers would.

    It also notes when the model's code itself asks for the meta device, as inside `with torch.device("meta")`.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _DEVICE_GETTERS:
            rows = self.recorder.rows_of(args[0])
            if rows is not None:
                return func(rows.values)
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _GIVES_MEMORY:
            self.recorder.forget_fresh()
        if not _is_meta(kwargs.get("device")):
            return func(*args, **kwargs)
        self.recorder.makes_meta, before = True, self.recorder.makes_meta
        try:
            return func(*args, **kwargs)
        finally:
            self.recorder.makes_meta = before


_GIVES_MEMORY = frozenset(("numpy", "data_ptr", "__array__", "__dlpack__", "untyped_storage", "storage"))
_DEVICE_GETTERS = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("is_meta", "device"))


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _place(tensor: torch.Tensor) -> int:
    """The address that all views of a tensor share."""
    return int(tensor.untyped_storage()._cdata)


def _is_elementwise(func: Any, rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an in-place op treats every element alike, independently of its neighbours."""
    pointwise = torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in _FILLS
    others = tree_flatten((rest, dict(kwargs)))[0]
    scalar = all(not isinstance(other, torch.Tensor) or not other.ndim for other in others)
    return pointwise and scalar and torch.Tag.nondeterministic_seeded not in func.tags
