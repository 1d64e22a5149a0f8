"""Loops over elements for recipes (`core.recipes`): those of the C++ engine, and the reference in numpy that they must equal.

For `bringing` and `elements`. Both give the same bits; of a NaN, that it is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zckpt.core.recipes import Kernels

if TYPE_CHECKING:
    from zckpt.core.recipes import Floats

try:
    from zckpt import _core
except ImportError:  # pragma: no cover - depends on the build
    _core = None  # type: ignore[assignment]


_LANES = 16
"""Sums that `products` takes side by side, in `csrc/kernels.cpp` too."""


class NativeKernels:
    """The loops of `csrc/kernels.cpp`; each lets other threads of Python run."""

    def accumulate(self, total: Floats, numbers: Floats, weight: float) -> None:
        """As `Kernels.accumulate`."""
        _core.accumulate(_address(total), _address(numbers), len(total), weight)

    def approach(self, total: Floats, numbers: Floats, divisor: float) -> None:
        """As `Kernels.approach`."""
        _core.approach(_address(total), _address(numbers), len(total), divisor)

    def blend(self, total: Floats, numbers: Floats, keep: float, weight: float) -> None:
        """As `Kernels.blend`."""
        _core.blend(_address(total), _address(numbers), len(total), keep, weight)

    def products(self, a: Floats, b: Floats) -> tuple[float, float, float]:
        """As `Kernels.products`."""
        return _core.products(_address(a), _address(b), len(a))


class ReferenceKernels:
    """The same in numpy."""

    def accumulate(self, total: Floats, numbers: Floats, weight: float) -> None:
        """As `Kernels.accumulate`."""
        import numpy as np

        with np.errstate(all="ignore"):
            total += np.float32(weight) * numbers

    def approach(self, total: Floats, numbers: Floats, divisor: float) -> None:
        """As `Kernels.approach`."""
        import numpy as np

        with np.errstate(all="ignore"):
            total += (numbers - total) / np.float32(divisor)

    def blend(self, total: Floats, numbers: Floats, keep: float, weight: float) -> None:
        """As `Kernels.blend`."""
        import numpy as np

        with np.errstate(all="ignore"):
            total *= np.float32(keep)
            total += np.float32(weight) * numbers

    def products(self, a: Floats, b: Floats) -> tuple[float, float, float]:
        """As `Kernels.products`."""
        import numpy as np

        found = []
        for x, y in ((a, b), (a, a), (b, b)):
            with np.errstate(all="ignore"):
                rows = np.zeros(-(-len(x) // _LANES) * _LANES)
                rows[: len(x)] = x.astype(np.float64) * y.astype(np.float64)
                lanes = rows.reshape(-1, _LANES).cumsum(axis=0)[-1:].ravel() if len(x) else np.zeros(_LANES)
                found.append(float(lanes.cumsum()[-1]))
        return found[0], found[1], found[2]


def kernels_of(engine: str) -> Kernels:
    """The loops of the engine that works: "native" or "reference"."""
    return NativeKernels() if engine == "native" else ReferenceKernels()


def _address(array: Any) -> int:
    """Of the first byte of a dense array."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not dense")
    return int(array.ctypes.data)
