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


class NativeKernels:
    """The loops of `csrc/kernels.cpp`; each lets other threads of Python run."""

    def accumulate(self, total: Floats, numbers: Floats, weight: float) -> None:
        """As `Kernels.accumulate`."""
        _core.accumulate(_address(total), _address(numbers), len(total), weight)


class ReferenceKernels:
    """The same in numpy."""

    def accumulate(self, total: Floats, numbers: Floats, weight: float) -> None:
        """As `Kernels.accumulate`."""
        import numpy as np

        with np.errstate(all="ignore"):
            total += np.float32(weight) * numbers


def kernels_of(engine: str) -> Kernels:
    """The loops of the engine that works: "native" or "reference"."""
    return NativeKernels() if engine == "native" else ReferenceKernels()


def _address(array: Any) -> int:
    """Of the first byte of a dense array."""
    if not array.flags.c_contiguous:
        raise ValueError("the array is not dense")
    return int(array.ctypes.data)
