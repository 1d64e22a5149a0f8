"""A form of quantised weights: `X_steps` holds bytes, `X_size` how much a step of each row is; 128 stands for 0."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zckpt.core.catalog import TensorEntry
from zckpt.core.folds import Tools
from zckpt.quantized.configs import Quantization
from zckpt.quantized.forms import FLOATS, PackedForm
from zckpt.quantized.packed import Part


@dataclass(frozen=True)
class Steps:
    """A recipe: the numbers that bytes stand for, in fp32, computed a few rows at a time."""

    name: str
    shape: tuple[int, ...]
    inputs: tuple[TensorEntry, ...]
    facts: tuple[object, ...] = ("steps",)

    @property
    def unit(self) -> int:
        return self.shape[1]

    def compute(self, start: int, stop: int, tools: Tools) -> Any:
        codes, sizes = self.inputs
        numbers = tools.read(codes, start, stop).astype(np.float32) - 128
        return numbers * np.repeat(tools.read_floats(sizes, start // self.unit, stop // self.unit), self.unit)


def read(part: Part, known: Quantization, values: Mapping[str, Any]) -> Steps:
    return Steps(part.stem, part.codes.shape, (part.codes, *part.beside))


def again(
    tensors: Mapping[str, TensorEntry], stem: str, codes: TensorEntry, config: Mapping[str, Any], values: Any
) -> Any:
    """The same for `verify`, which shares nothing with the above: exact products of fp64, which are rounded once."""
    sizes = tensors.get(stem + "_size")
    if sizes is None:
        return None
    width = math.prod(codes.shape) // codes.shape[0]

    def rows(first: int, last: int, tools: Tools) -> Any:
        steps = tools.read(codes, first * width, last * width).reshape(last - first, width).astype(np.int64) - 0x80
        return steps.astype(np.float64) * tools.read_floats(sizes, first, last).astype(np.float64)[:, None]

    return stem, codes.shape, (codes, sizes), width, rows


def _fits(shapes: Any) -> bool:
    codes, sizes = shapes
    return len(codes) == 2 and sizes == codes[:1]


FORM = PackedForm("bytes of zckpt-rows", "_steps", "U8", (("_size", FLOATS),), _fits, read=read, again=again)
