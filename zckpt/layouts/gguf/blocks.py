"""Elements in blocks of ggml's types: floats made from them, and blocks of Q8_0 made from floats, while they are moved.

For `read` and `write`. [Note: Q8_0] 32 elements of a row share a scale: the largest absolute value divided by 127, stored as
fp16. The elements are multiplied by the reciprocal of the scale before its rounding to fp16, and rounded to whole numbers, halves
away from zero. An element is that number times the stored scale, in fp32.
Source: gguf-py 0.19.0, quants.py `Q8_0` (the same bits as ggml, src/ggml-quants.c `quantize_row_q8_0_ref`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.containers.gguf_file import Q8_0, GgmlType
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32, U8
from zckpt.core.recipes import derive_entry

if TYPE_CHECKING:
    from zckpt.core.folds import Array, Tools


@dataclass(frozen=True, slots=True)
class BlocksOfFloats:
    """A recipe (`core.recipes`): blocks of Q8_0 as bytes; see [Note: Q8_0].

    Attributes:
        inputs: the tensor, with rows that are a multiple of 32.
    """

    inputs: tuple[TensorEntry]
    unit: int = Q8_0.nbytes

    @property
    def facts(self) -> tuple[object, ...]:
        """The type."""
        return ("to Q8_0",)

    def reads(self, start: int, stop: int) -> Iterable[tuple[TensorEntry, int, int]]:
        """What `compute` reads: `core.recipes.Recipe`."""
        return [(self.inputs[0], start // Q8_0.nbytes * Q8_0.block, stop // Q8_0.nbytes * Q8_0.block)]

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`."""
        import numpy as np

        ((_, first, last),) = self.reads(start, stop)
        blocks = np.empty(stop - start, np.uint8)
        tools.kernels.to_q8_0(tools.read_floats(self.inputs[0], first, last), blocks)
        return blocks


@dataclass(frozen=True, slots=True)
class FloatsOfBlocks:
    """A recipe (`core.recipes`): the numbers that blocks stand for, as fp32.

    Attributes:
        inputs: the blocks, as bytes.
        type: of the blocks.
    """

    inputs: tuple[TensorEntry]
    type: GgmlType = Q8_0

    @property
    def unit(self) -> int:
        """A block."""
        return self.type.block

    @property
    def facts(self) -> tuple[object, ...]:
        """The type."""
        return (f"of {self.type.name}",)

    def reads(self, start: int, stop: int) -> Iterable[tuple[TensorEntry, int, int]]:
        """What `compute` reads: `core.recipes.Recipe`."""
        block, nbytes = self.type.block, self.type.nbytes
        return [(self.inputs[0], start // block * nbytes, stop // block * nbytes)]

    def compute(self, start: int, stop: int, tools: Tools) -> Array:
        """As `Recipe.compute`."""
        import numpy as np

        ((_, first, last),) = self.reads(start, stop)
        numbers = np.empty(stop - start, np.float32)
        blocks: Any = tools.read(self.inputs[0], first, last)
        if self.type is Q8_0:
            tools.kernels.of_q8_0(blocks, numbers)
        else:
            tools.kernels.of_ggml(self.type.name, blocks, numbers)
        return numbers


def in_blocks(entry: TensorEntry) -> TensorEntry:
    """A tensor as bytes of Q8_0; its rows must be multiples of 32."""
    return derive_entry(entry.name, Q8_0.stored(entry.shape), U8, BlocksOfFloats((entry,)), entry.role)


def as_floats(blocks: TensorEntry, kind: GgmlType = Q8_0) -> TensorEntry:
    """The tensor that blocks of a type stand for, as fp32."""
    shape = (*blocks.shape[:-1], blocks.shape[-1] // kind.nbytes * kind.block)
    return derive_entry(blocks.name, shape, F32, FloatsOfBlocks((blocks,), kind), blocks.role)
