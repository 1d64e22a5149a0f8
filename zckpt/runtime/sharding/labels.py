"""The attributes that DeepSpeed's stage 3 puts on parameters: `ds_id`, `ds_shape`, `ds_numel`, `ds_status`, `ds_tensor`.

For `shard`, `deferred` and `init_context`. Scripts ask `hasattr(parameter, "ds_id")` to learn that a parameter has to be
gathered, and `ds_numel` for its size.
Source: DeepSpeed 0.19.8, runtime/zero/partition_parameters.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import count
from math import prod
from typing import Any

import torch

_numbers = count()


class ZeroParamType(Enum):
    """How a parameter is stored; DeepSpeed's names and numbers."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Whether a parameter can be used at once; DeepSpeed's names and numbers."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def label(parameter: Any, shape: Sequence[int], part: torch.Tensor, *, whole: bool = False) -> None:
    """Puts DeepSpeed's attributes on a parameter.

    Args:
        parameter: it keeps the `ds_id` that it may have.
        shape: of the whole parameter.
        part: this rank's rows, in their own memory; `ds_tensor` is a flat view of it.
        whole: it is gathered now.
    """
    if not hasattr(parameter, "ds_id"):
        parameter.ds_id = next(_numbers)
    parameter.ds_shape, parameter.ds_numel = torch.Size(shape), prod(shape)
    parameter.ds_tensor = part.detach().view(-1)
    parameter.ds_persist = False
    parameter.ds_param_type = ZeroParamType.PARTITIONED
    parameter.ds_status = ZeroParamStatus.AVAILABLE if whole else ZeroParamStatus.NOT_AVAILABLE
