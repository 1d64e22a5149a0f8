"""Small things of `deepspeed.utils`.

Source: DeepSpeed 0.19.8, utils/init_on_device.py, utils/nvtx.py, utils/module_utils.py, runtime/dataloader.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["OnDevice", "RepeatingLoader", "instrument_w_nvtx", "recursive_getattr", "recursive_setattr"]

Function = TypeVar("Function", bound=Callable[..., Any])


class RepeatingLoader:
    """A loader that begins again when it has ended.

    Args:
        loader: what is repeated.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice:
    """Makes what is constructed inside on a device, with floating-point numbers of a dtype.

    Args:
        dtype: of floating-point tensors that are made without one.
        device: where tensors are made that do not say it; "meta" by default.
        enabled: False does nothing.
    """

    def __init__(self, dtype: torch.dtype | None, device: torch.device | str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._inside = ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._inside.enter_context(torch.device(self.device))
            if self.dtype is not None:
                self._inside.enter_context(_OfDtype(self.dtype))
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)


class _OfDtype(TorchDispatchMode):
    """Makes new floating-point tensors in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        new = func.overloadpacket.__name__ in ("empty", "zeros", "ones", "full", "randn", "rand")
        if new and isinstance(made, torch.Tensor) and made.is_floating_point():
            made = made.to(self._dtype)
        return made


def instrument_w_nvtx(func: Function) -> Function:
    """A function whose calls torch.profiler shows by its name."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def recursive_getattr(model: Any, module_name: str) -> Any:
    """An attribute by its dotted name."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Sets an attribute by its dotted name."""
    place, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, place) if place else model, last, module)
