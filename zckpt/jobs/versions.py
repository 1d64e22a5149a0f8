"""Two versions of the same weights: which tensors are compared, in which dtype; and what an older version is written as.

For `delta` and `apply_delta`, which must agree on it.

[Note: dtypes] A delta is of bytes, so it needs the dtype in which whoever applies it holds the weights. If the old version is
plain weights, each tensor has the dtype that it has there, unless another one is asked for. If it is a checkpoint, its weights
are those that `to-bf16` makes of it; or `to-fp16`, if that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError, UnsupportedError
from zckpt.base.words import count, examples
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, DType, can_cast
from zckpt.engine import replicas
from zckpt.jobs.casting import output_dtype
from zckpt.jobs.declarations import Asked
from zckpt.jobs.groups import Form
from zckpt.jobs.open import open_catalog
from zckpt.jobs.opened import WorkingModel
from zckpt.jobs.steps import open_model, reform, select_wanted


@dataclass(frozen=True, slots=True)
class TensorPair:
    """A tensor in both versions, in the new one perhaps under another of its names; `dtype`: of the bytes that are
    compared.
    """

    old: TensorEntry
    new: TensorEntry
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return self.old.numel * self.dtype.itemsize


def open_version(path: str, asked: Asked[object]) -> WorkingModel:
    """Opens a version. Names, rows and selection that the options ask for are those of checkpoints: plain weights keep
    theirs. Raises ZckptError if it cannot be read, contradicts itself, or the options do not fit it.
    """
    opened = open_catalog(path, asked.reading, as_stored=True)
    is_plain = opened.catalog.source.layout == "plain"
    form = Form() if is_plain else asked.naming.form
    model = reform(open_model(opened), form, to_directory=True, exclude=tuple(asked.selecting.exclude))
    if not is_plain:
        model = select_wanted(model, asked.selecting, asked.naming)
    if not is_plain or asked.casting.dtype is not None:
        opened.check_read(model.catalog.tensors.values())
    replicas.check(model.catalog)
    return model


def dtype_in(version: WorkingModel, entry: TensorEntry, wanted: DType | None) -> DType:
    """The dtype of a tensor of the old version; see [Note: dtypes]."""
    if wanted is None and version.opened.catalog.source.layout == "plain":
        return entry.dtype
    return output_dtype(entry, wanted or BF16)


def pair_tensors(
    old: WorkingModel,
    tensors: Mapping[str, TensorEntry],
    aliases: Mapping[str, str],
    where: str,
    wanted: DType | None,
) -> list[TensorPair]:
    """Every tensor of the old version with the same of the new one, in the old one's order; `where` names the new one for
    errors.

    Raises:
        InconsistentError: the versions have different tensors; names them.
        UnsupportedError: a tensor cannot be cast to the dtype that it has in the old version.
    """
    known = {*old.catalog, *old.catalog.aliases}
    names = {name: {name} for name in tensors}
    for dropped, kept in aliases.items():
        names[kept].add(dropped)
    _refuse(old, [name for name, own in names.items() if not own & known], "only the new version has", "new")
    there = {*tensors, *aliases}
    _refuse(old, [name for name in old.catalog if name not in there], "the new version lacks", "removed")
    pairs: list[TensorPair] = []
    for name, entry in old.catalog.tensors.items():
        other = tensors[aliases.get(name, name)]
        if other.shape != entry.shape:
            raise InconsistentError(
                f"tensor {name!r} has another shape in the new version", file=where,
                found=str(list(other.shape)), expected=f"{list(entry.shape)}, as in {old.catalog.source.path}",
                remedy="A delta is between two versions of one model. Write the new version whole instead: zckpt to-bf16.",
            )  # fmt: skip
        dtype = dtype_in(old, entry, wanted)
        for side in (entry, other):
            if not can_cast(side.dtype, dtype):
                raise UnsupportedError(
                    f"tensor {name!r} cannot be cast", file=where, found=f"{side.dtype} to {dtype}",
                    expected="the same dtype in both versions, or floats that become fp32, fp16 or bf16",
                    remedy="Write the new version in the dtypes of the old one first.",
                )  # fmt: skip
        pairs.append(TensorPair(entry, replace(other, name=name), dtype))
    return pairs


def _refuse(old: WorkingModel, names: Iterable[str], who: str, kind: str) -> None:
    names = list(names)
    if names:
        raise InconsistentError(
            f"{who} {count(len(names), 'tensor')}", file=old.catalog.source.path, found=examples(names),
            expected="the same tensors in both versions: a delta has no room for those that are " + kind,
            remedy="If the names differ only in a prefix, use --strip-prefix or --rename; if not, write the new version whole: "
            "zckpt to-bf16.",
        )  # fmt: skip
