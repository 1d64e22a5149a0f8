"""Which save is opened and how, and which dtype its tensors get in an output.

For every job. It stands apart from `options`, so that a look at a checkpoint imports nothing of what is written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, BY_TORCH_NAME, CAST_TARGETS, F16, F32, SHORT_NAMES, DType
from zckpt.layouts.save.listing import ReadOptions

_DTYPES = {name: dtype for dtype in CAST_TARGETS for name in (SHORT_NAMES[dtype], dtype.name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """Which save is read, and how.

    Attributes:
        tag: which save, where there are several.
        also: directories laid over the checkpoint: its parts from other nodes' disks.
        read_options: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.
        allow_unknown_layout: go on though optimizer files hold keys that zckpt does not know.
        as_part: take one part of a save (a shard, one rank's file or directory) alone, as if it were a whole one.
    """

    tag: str | None = None
    also: Sequence[str | os.PathLike[str]] = ()
    read_options: ReadOptions | None = None
    allow_unknown_layout: bool = False
    as_part: bool = False

    @property
    def keeps_dtypes(self) -> bool:
        """Whether what is made of the save has the dtypes that the save has: of what is only looked at, nothing is made."""
        return False


def output_dtype(entry: TensorEntry, dtype: DType | None) -> DType:
    """The dtype a tensor gets: floating parameters take the one asked for, if one is; buffers keep theirs.

    Half-precision buffers are lifted when fp32 is asked for. Integers, bools and complex numbers are never touched.
    """
    if entry.dtype.kind != "float" or dtype is None:
        return entry.dtype
    if entry.role == "buffer":
        return F32 if dtype == F32 and entry.dtype in (F16, BF16) else entry.dtype
    return dtype


def to_dtype(dtype: str | DType) -> DType:
    """A dtype by any of its names: "bf16", "BF16", "bfloat16", "torch.bfloat16".

    Raises:
        UsageError: weights cannot be cast to it, or no dtype is called so.
    """
    if isinstance(dtype, DType):
        return dtype
    name = str(dtype).removeprefix("torch.")
    found = _DTYPES.get(name) or BY_TORCH_NAME.get(name)
    if found not in CAST_TARGETS:
        raise UsageError(
            f"{dtype!r} is not a dtype that weights can be cast to", expected="fp32, fp16 or bf16",
            remedy="Use one of these, or their names in torch.",
        )  # fmt: skip
    return found
