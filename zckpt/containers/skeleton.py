"""The values from which a container is laid out before any element exists, and the result.

For the writers of `torch_zip` and `safetensors_file`, and the layouts that call them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.base.words import examples
from zckpt.core.dtypes import DType
from zckpt.core.plan import Checksum


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of a tensor to be written, and attributes that Python code set on it, if any."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    attributes: Mapping[str, str] | None = field(default=None, compare=False)

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
        checksums: places of CRC-32s, which are filled in when the elements are known.
        offsets: tensor name -> byte offset of its first element; elements are dense and row-major.
    """

    size: int
    literals: tuple[tuple[int, bytes], ...]
    checksums: tuple[Checksum, ...]
    offsets: dict[str, int]


def check_names(specs: Sequence[TensorSpec], aliases: Mapping[str, str]) -> None:
    """Checks that tensors have different names, and that each alias (dropped name -> kept name) is of one of them.
    Raises UsageError otherwise.
    """
    names = {spec.name for spec in specs}
    if len(names) < len(specs) or not names.isdisjoint(aliases) or not names.issuperset(aliases.values()):
        raise UsageError(
            "two tensors have the same name, or an alias has no tensor", found=examples(spec.name for spec in specs),
            remedy="Give each tensor a name of its own.",
        )  # fmt: skip
