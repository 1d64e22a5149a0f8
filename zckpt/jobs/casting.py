"""Decides which dtype a tensor gets in an output.

For every job that writes tensors, and for what says beforehand what it would write.
"""

from __future__ import annotations

from zckpt.base.errors import UsageError
from zckpt.base.words import matches
from zckpt.core.catalog import TensorEntry, TensorForm
from zckpt.core.dtypes import BF16, BY_TORCH_NAME, CAST_TARGETS, F16, F32, SHORT_NAMES, DType
from zckpt.core.recipes import DerivedStore
from zckpt.jobs.groups import Casting

_DTYPES = {
    **{name: dtype for dtype in CAST_TARGETS for name in (SHORT_NAMES[dtype], dtype.name)},
    "half": F16,
    "float": F32,
}


def output_dtype(entry: TensorEntry | TensorForm, dtype: DType | None) -> DType:
    """The dtype that a tensor gets: floating parameters take the one asked for, if any; buffers keep theirs.

    Half-precision buffers are lifted when fp32 is asked for. Integers, bools and complex numbers are never touched.
    """
    if entry.dtype.kind != "float" or dtype is None:
        return entry.dtype
    if entry.role == "buffer":
        return F32 if dtype == F32 and entry.dtype in (F16, BF16) else entry.dtype
    return dtype


def to_dtype(dtype: str | DType) -> DType:
    """A dtype by any of its names: "bf16", "BF16", "bfloat16", "torch.bfloat16"; "half" is fp16. Raises UsageError if
    weights cannot be cast to it, or no dtype is called so.
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


def kept_dtype(entry: TensorEntry) -> DType | None:
    """The dtype of the base weight that adapters were merged into; None for a tensor that is not computed."""
    stores = [fragment.store for fragment in entry.fragments[:1]]
    return stores[0].recipe.inputs[0].dtype if stores and isinstance(stores[0], DerivedStore) else None


def dtype_of(entry: TensorEntry, casting: Casting, *, is_merged: bool = False) -> DType:
    """The dtype that a conversion gives a tensor; one that adapters were merged into has that of its weight if none is asked."""
    kept = kept_dtype(entry) if is_merged else None
    if casting.keep_dtype and matches(entry.name, casting.keep_dtype):
        return kept or entry.dtype
    return output_dtype(entry, casting.dtype or kept)
