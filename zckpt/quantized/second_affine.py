"""MLX's form of a tensor a second time: in doubles that are rounded to fp32 after each step, bit by bit.

For `verify`, which compares an output with these, and not with what `affine` and the kernels made; nothing of those is used.
Source: mlx 0.32.4, backend/metal/kernels/quantized.h `affine_quantize`, which is another text of the same arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F16, F32, U32, DType
from zckpt.core.recipes import derive_entry

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Tools

_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class AffineAgain:
    """A recipe (`core.recipes`): one of the three tensors that a quantised tensor becomes.

    Attributes:
        inputs: the tensor.
        name: "weight", "scales" or "biases".
        group: columns of a group.
        bits: of a code.
        dtype: of the model.
    """

    inputs: tuple[TensorEntry]
    name: str
    group: int
    bits: int
    dtype: DType

    @property
    def facts(self) -> tuple[object, ...]:
        return ("affine again", self.name, self.group, self.bits, self.dtype.name)

    @property
    def unit(self) -> int:
        columns = self.inputs[0].shape[-1]
        return columns * self.bits // 32 if self.name == "weight" else columns // self.group

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        import numpy as np

        first, last, columns = start // self.unit, stop // self.unit, self.inputs[0].shape[-1]
        step = max(1, _AT_ONCE // columns)
        found = []
        for row in range(first, last, step):
            stop_row = min(row + step, last)
            wide = tools.read_floats(self.inputs[0], row * columns, stop_row * columns)
            found.append(self._part(_in_dtype(wide.astype(np.float64), self.dtype).reshape(-1, self.group)))
        whole: Array = np.concatenate(found)
        return whole

    def _part(self, x: Any) -> Any:
        """Computes the codes, scales or biases of groups of columns; `x` has a row of doubles for each group."""
        import numpy as np

        most = 2**self.bits - 1
        ends = np.sort(x, axis=1)[:, [0, -1]]
        is_low = -ends[:, 0] > abs(ends[:, 1])
        edge = np.where(is_low, ends[:, 0], ends[:, 1])
        least = float(np.float32(1e-7))
        size = np.maximum(_single(_single(ends[:, 1] - ends[:, 0]) / most), least)
        steps = np.rint(_single(edge / size)) * np.where(is_low, 1, -1)
        has_edge = steps != 0
        scale = np.where(has_edge, _single(edge / np.where(has_edge, steps, 1)), np.where(is_low, size, -size))
        bias = np.where(has_edge, edge, 0.0)
        if self.name != "weight":
            return _bits(scale if self.name == "scales" else bias, self.dtype)
        codes = np.rint(_single(_single(x - bias[:, None]) / scale[:, None])).clip(0, most).astype(np.int64)
        places = codes.reshape(-1, 32)[:, :, None] >> np.arange(self.bits) & 1
        weights = np.uint64(1) << np.arange(32, dtype=np.uint64)
        words = (places.reshape(-1, self.bits, 32).astype(np.uint64) * weights).sum(axis=2)
        return words.reshape(-1).astype(np.uint32)


def affine_again(entry: TensorEntry, group: int, bits: int, dtype: DType) -> dict[str, TensorEntry]:
    """The tensors that stand for a quantised one in an output: name -> tensor."""
    columns, stem = entry.shape[-1], entry.name[: -len("weight")]
    found: dict[str, TensorEntry] = {}
    beside = columns // group
    for name, width, of in (
        ("weight", columns * bits // 32, U32),
        ("scales", beside, dtype),
        ("biases", beside, dtype),
    ):
        recipe = AffineAgain((entry,), name, group, bits, dtype)
        found[stem + name] = derive_entry(stem + name, (*entry.shape[:-1], width), of, recipe, entry.role)
    return found


def _single(numbers: Any) -> Any:
    """Rounds doubles to fp32; returns doubles."""
    return numbers.astype("float32").astype("float64")


def _in_dtype(numbers: Any, dtype: DType) -> Any:
    """Rounds doubles to a dtype, to nearest even: to multiples of the step that its digits leave. Returns doubles."""
    import numpy as np

    if dtype == F32:
        return numbers
    digits, least = {BF16: (8, -133), F16: (11, -24)}[dtype]
    step = np.ldexp(1.0, np.maximum(np.frexp(numbers)[1] - digits, least))
    return np.rint(numbers / step) * step


def _bits(numbers: Any, dtype: DType) -> Any:
    """Converts doubles to a dtype; returns the elements as they are stored."""
    import numpy as np

    rounded = _in_dtype(numbers, dtype)
    if dtype == F16:
        return rounded.astype(np.float16)
    single = rounded.astype(np.float32)
    return (single.view(np.uint32) >> 16).astype(np.uint16) if dtype == BF16 else single
