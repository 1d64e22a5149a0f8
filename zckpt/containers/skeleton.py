"""What a container needs to know to be laid out before any element exists, and what it answers.

For the writers of `torch_zip` and `safetensors_file`, and the layouts that call them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zckpt.core.dtypes import DType
from zckpt.core.plan import Checksum


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written: its name, dtype and shape."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A file without its elements.

    Attributes:
        size: bytes of the whole file.
        literals: (byte offset, bytes) of everything that is not an element.
        checksums: CRC-32 slots to be filled once the elements are there.
        offsets: tensor name -> byte offset of its first element; elements are dense and row-major.
    """

    size: int
    literals: tuple[tuple[int, bytes], ...]
    checksums: tuple[Checksum, ...]
    offsets: dict[str, int]
