"""Converts values of a run to the plain ones that a checkpoint holds, and back; reading them needs no class of others.

For saving and loading: client states, schedules, settings of parameter groups, random generators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zckpt.base.errors import UnsupportedError
from zckpt.containers import NumpyArray, TensorRef
from zckpt.containers.emit import Size
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BY_TORCH_NAME, DType
from zckpt.core.fragments import Fragment
from zckpt.core.stores import MemoryStore
from zckpt.jobs.open import read_tensor
from zckpt.layouts.save.module_states import whole

_PLAIN = (type(None), bool, int, float, str, bytes)
_BASES: tuple[type, ...] = (bool, int, float, str, bytes, bytearray, complex)


def to_inert(value: Any, where: str, *, copied: bool = False) -> Any:
    """The value as `emit` writes it; tensors become entries of their own memory, or (`copied`) of copies that nobody changes.

    It may be dicts, lists, tuples, sets, text, numbers, tensors, numpy arrays and scalars, dtypes, devices, sizes, and
    subclasses of these, which become the plain kind. `where`: its name, for errors. Raises UnsupportedError if an object of
    another class is in it.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return _entry(value, where, copied)
    if isinstance(value, torch.Size):
        return Size(value)
    if isinstance(value, torch.dtype):
        return dtype_of(value)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, Mapping):
        return {
            to_inert(key, f"a key of {where}", copied=copied): to_inert(item, f"{where}[{key!r}]", copied=copied)
            for key, item in value.items()
        }
    for sequence in (list, tuple, set, frozenset):
        if isinstance(value, sequence):
            items = [to_inert(item, f"{where}[{number}]", copied=copied) for number, item in enumerate(value)]
            return sequence(items)
    for base in _BASES:
        if isinstance(value, base):
            return base(value)
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        if not value.shape and value.dtype.kind in "biufc":
            return value.item()
        if value.dtype.kind in "biufcSU":
            array = value.astype(value.dtype.newbyteorder("<"), order="C", copy=False)
            return NumpyArray(array.dtype.str, array.shape, array.tobytes())
    if isinstance(value, range | slice):
        return value
    raise UnsupportedError(
        f"{where} cannot be saved in a checkpoint", found=f"a {kind.__module__}.{kind.__qualname__}",
        expected="dicts, lists, numbers, text, tensors and arrays", remedy="Save its state_dict() or its fields instead.",
    )  # fmt: skip


def _entry(tensor: torch.Tensor, name: str, copied: bool) -> TensorEntry:
    """A tensor as an entry of its own memory, or of a copy if that is not dense memory of the host. Raises
    UnsupportedError if it is sparse, quantized or of a dtype that no checkpoint holds.
    """
    if _name_of(tensor.dtype) not in BY_TORCH_NAME or tensor.layout is not torch.strided or tensor.is_meta:
        raise UnsupportedError(
            f"{name} cannot be saved in a checkpoint", found=f"a tensor of {tensor.dtype} and layout {tensor.layout}",
            expected="a dense tensor with elements, of a dtype that safetensors or torch saves hold",
            remedy="Convert it with .to_dense(), .dequantize() or .to(dtype) before you save it.",
        )  # fmt: skip
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if copied and host.data_ptr() == tensor.data_ptr():
        host = host.clone()
    store = MemoryStore(host.data_ptr(), host.numel() * host.element_size(), host)
    return TensorEntry(name, tuple(host.shape), dtype_of(host.dtype), "buffer", (Fragment(store, 0, 0, host.numel()),))


def from_inert(value: Any) -> Any:
    """The value that `to_inert` was given, from a file; objects of foreign classes stay inert."""
    if isinstance(value, TensorRef):
        return read_tensor(whole("", value, "buffer"), "pt")
    if isinstance(value, DType):
        return getattr(torch, value.torch_name)
    if isinstance(value, dict):
        return {from_inert(key): from_inert(item) for key, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(from_inert(item) for item in value)
    if isinstance(value, NumpyArray) and value.dtype[1:2] in "biufcSU":
        import numpy

        array = numpy.frombuffer(value.data, value.dtype).reshape(value.shape, order="F" if value.fortran else "C")
        return array.copy() if value.shape else array[()]
    return value


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a mapping, otherwise an empty mapping: files may hold anything."""
    return value if isinstance(value, Mapping) else {}


def dtype_of(dtype: torch.dtype) -> DType:
    """The core's dtype for one of torch's. Raises KeyError if no file holds it."""
    return BY_TORCH_NAME[_name_of(dtype)]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
