"""Puts the attributes on parameters that scripts expect at DeepSpeed's stage 3: `dtype`, `ds_id`, `ds_shape`,
`ds_numel`, `ds_status`, `ds_tensor`.

For `shard`, `deferred` and `init_context`. Scripts ask `hasattr(parameter, "ds_id")` to learn that a parameter has to be
gathered, and `ds_numel` for its size.
Source: DeepSpeed 0.19.8, runtime/zero/partition_parameters.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from itertools import count
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_numbers = count()
_COMPUTE = "_zckpt_compute_dtype"
_PLAIN = "_zckpt_plain"
_READS = ("bfloat16", "clone", "cpu", "detach", "float", "half", "numpy", "to")


def _dtype(self: DTensor) -> torch.dtype:
    """The dtype of the numbers for torch and zckpt; that of the computation for scripts, which would compute in it."""
    own: torch.dtype = torch._C.TensorBase.dtype.__get__(self)  # type: ignore[attr-defined]
    asks = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
    return own if asks in ("torch", "zckpt") else vars(self).get(_COMPUTE, own)


def _data(self: DTensor) -> torch.Tensor:
    """What scripts that took the parameter from the module before they gathered it find of it: a plain tensor."""
    plain = vars(self).get(_PLAIN)
    own: torch.Tensor = torch._C.TensorBase.data.__get__(self) if plain is None else plain()  # type: ignore[attr-defined]
    return own


DTensor.dtype = property(_dtype)  # type: ignore[assignment]
DTensor.data = property(_data, torch._C.TensorBase.data.__set__)  # type: ignore[assignment,attr-defined]


class ZeroParamType(Enum):
    """The way in which a parameter is stored; DeepSpeed's names and numbers."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """The availability of a parameter; DeepSpeed's names and numbers."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def label(
    parameter: Any, shape: Sequence[int], part: torch.Tensor, *, whole: bool = False, dtype: torch.dtype | None = None
) -> None:
    """Puts DeepSpeed's attributes on a parameter, which keeps the `ds_id` that it may have. `shape`: of the whole; `part`:
    this rank's rows (`ds_tensor` is a flat view of them); `whole`: it is gathered now; `dtype`: of the computation, which
    scripts see from now on.
    """
    if dtype is not None:
        setattr(parameter, _COMPUTE, dtype)
    if not hasattr(parameter, "ds_id"):
        parameter.ds_id = next(_numbers)
    parameter.ds_shape, parameter.ds_numel = torch.Size(shape), prod(shape)
    parameter.ds_tensor = part.detach().view(-1)
    parameter.ds_persist = False
    parameter.ds_param_type = ZeroParamType.PARTITIONED
    parameter.ds_status = ZeroParamStatus.AVAILABLE if whole else ZeroParamStatus.NOT_AVAILABLE


def show_plain(parameter: torch.Tensor, plain: Callable[[], torch.Tensor] | None) -> None:
    """Lets scripts that read a parameter in parts find a plain tensor; None takes it back."""
    for name in _READS:
        if plain is None:
            vars(parameter).pop(name, None)
        else:
            vars(parameter)[name] = partial(_read, name, plain)
    vars(parameter)[_PLAIN] = plain


def _read(name: str, plain: Callable[[], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    return getattr(plain(), name)(*args, **kwargs)
