"""MLX's quantised weights: codes, and a scale and a bias for each group of columns.

For `jobs.to_mlx`. A number is code * scale + bias. Scales and biases are rounded to the model's dtype after the codes were
computed with them. They are kept until they are written, which follows at once in the file; those of very large tensors are
computed twice.
Source: mlx 0.32.4, backend/cpu/quantized.cpp.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any

from zckpt.base.errors import CastError
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, U32, DType
from zckpt.core.recipes import Formula, derive_entry
from zckpt.quantized.grids import in_dtype
from zckpt.quantized.targets import rounded_to, stored_bits

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Bytes, Floats, Tools

_AT_ONCE = 1 << 21
"""The most numbers that are computed at once."""
_COMPUTED, _GIVEN, _BOTH = 1, 2, 6
"""Bits of a row's state: its scales and biases were kept; its scales were given, or one bit higher its biases; both were."""
_MOST_KEPT = 1 << 23
"""The most groups of a tensor for which scales and biases are kept."""


class Affine:
    """Quantises one tensor of floats for MLX, in groups of columns; its codes of so many bits, scales and biases are
    computed together and read by three recipes. `dtype`: of scales and biases.
    """

    def __init__(self, entry: TensorEntry, group: int, bits: int, dtype: DType) -> None:
        self.entry = entry
        self.group = group
        self.bits = bits
        self.dtype = dtype
        self._lock = Lock()
        self._kept: list[Any] = []
        self._seen: Any = None

    @property
    def columns(self) -> int:
        """The elements of a row."""
        return self.entry.shape[-1]

    @property
    def _rows(self) -> int:
        return self.entry.numel // self.columns

    @property
    def words(self) -> int:
        """Elements of a row of codes as they are stored."""
        return self.columns * self.bits // 32

    @property
    def across(self) -> int:
        """Groups of a row."""
        return self.columns // self.group

    def packed(self, first: int, last: int, tools: Tools) -> Bytes:
        """The codes of rows [first, last)."""
        import numpy as np

        found = np.empty((last - first) * self.words * 4, np.uint8)
        step = max(1, _AT_ONCE // self.columns)
        for row in range(first, last, step):
            stop = min(row + step, last)
            part = found[(row - first) * self.words * 4 : (stop - first) * self.words * 4]
            self._keep(row, stop, self._compute(row, stop, tools, part))
        return found

    def beside(self, first: int, last: int, which: int, tools: Tools) -> Array:
        """The scales (0) or the biases (1) of rows [first, last), as they are stored; when all were given, none is kept."""
        import numpy as np

        with self._lock:
            seen = self._look()
            seen[first:last] |= _GIVEN << which
            found = None
            if self._kept and (seen[first:last] & _COMPUTED).all():
                found = self._kept[which][first:last].reshape(-1).copy()
            if self._kept and (seen & _BOTH == _BOTH).all():
                self._kept = []
        if found is not None:
            return found  # type: ignore[no-any-return]
        step = max(1, _AT_ONCE // self.columns)
        rows = [(row, min(row + step, last)) for row in range(first, last, step)]
        parts = [self._compute(*part, tools, np.empty((part[1] - part[0]) * self.words * 4, np.uint8)) for part in rows]
        return np.concatenate([part[which] for part in parts])

    def _compute(self, first: int, last: int, tools: Tools, packed: Bytes) -> tuple[Any, Any]:
        """Rows as codes, which are put into `packed`; their scales and biases as they are stored.

        Raises:
            CastError: there is NaN, infinity, or a number that is too large.
        """
        import numpy as np

        numbers = tools.read_floats(self.entry, first * self.columns, last * self.columns)
        scales, biases = np.empty((2, (last - first) * self.across), np.float32)
        bad = tools.kernels.to_affine(numbers, self.group, self.bits, packed, scales, biases)
        stored = self._stored(scales, tools), self._stored(biases, tools)
        if bad or any(not np.isfinite(rounded_to(each, self.dtype)).all() for each in (scales, biases)):
            raise CastError(
                f"tensor {self.entry.name!r} holds NaN, infinity or numbers that are too large for MLX's form",
                found=f"{bad or 1:,} of the groups that were looked at hold one", expected="finite numbers",
                remedy="Look at it with `zckpt verify CKPT --deep`; without --bits it is written as it is.",
            )  # fmt: skip
        return stored

    def _keep(self, first: int, last: int, stored: tuple[Any, Any]) -> None:
        """Keeps scales and biases of rows, if they are not too many."""
        import numpy as np

        if self._rows * self.across > _MOST_KEPT:
            return
        with self._lock:
            seen = self._look()
            if (seen & _BOTH == _BOTH).all():
                return
            if not self._kept:
                self._kept = [np.empty((self._rows, self.across), each.dtype) for each in stored]
            for kept, each in zip(self._kept, stored):
                kept[first:last] = each.reshape(last - first, self.across)
            seen[first:last] |= _COMPUTED

    def _look(self) -> Any:
        """What became of each row."""
        import numpy as np

        if self._seen is None:
            self._seen = np.zeros(self._rows, np.uint8)
        return self._seen

    def _stored(self, numbers: Floats, tools: Tools) -> Any:
        if self.dtype == BF16:  # biases may be negative
            sizes = rounded_to(abs(numbers), BF16)
            signs = numbers.view("uint32") >> 16 & 0x8000
            return stored_bits(sizes, BF16) | signs.astype("uint16")
        return stored_bits(numbers, self.dtype)


def affine_entries(entry: TensorEntry, group: int, bits: int, dtype: DType) -> dict[str, TensorEntry]:
    """The tensors that stand for `X.weight` in MLX's form: name -> tensor, in the order of a file."""
    affine = Affine(in_dtype(entry, dtype), group, bits, dtype)
    module, lead, across = entry.name.removesuffix(".weight"), entry.shape[:-1], affine.across

    def codes(start: int, stop: int, tools: Tools) -> Array:
        return affine.packed(start // affine.words, stop // affine.words, tools).view("<u4")

    def scales(start: int, stop: int, tools: Tools) -> Array:
        return affine.beside(start // across, stop // across, 0, tools)

    def biases(start: int, stop: int, tools: Tools) -> Array:
        return affine.beside(start // across, stop // across, 1, tools)

    found: dict[str, TensorEntry] = {}
    for name, compute, size, of in (
        ("weight", codes, affine.words, U32), ("scales", scales, across, dtype), ("biases", biases, across, dtype),
    ):  # fmt: skip
        facts = ("affine", name, group, bits, dtype.name)
        recipe = Formula((affine.entry,), facts, compute, size, is_byproduct=name != "weight")
        found[f"{module}.{name}"] = derive_entry(f"{module}.{name}", (*lead, size), of, recipe, entry.role)
    return found
