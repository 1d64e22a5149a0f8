"""The table of element types: sizes, and their names in torch, safetensors and numpy.

For every module that uses a dtype. The C++ core numbers them the same way (`csrc/cast.h`).
Source: torch/storage.py (storage classes), safetensors 0.8.0 `Dtype`, numpy type strings.
"""

from __future__ import annotations

import sys
from typing import Literal

from zckpt.base.dataclass import dataclass

Kind = Literal["float", "int", "bool", "complex", "power"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: safetensors' name, used everywhere in zckpt (C128 and the fnuz floats are ours: safetensors lacks them).
        torch_name: attribute of the `torch` module.
        itemsize: bytes of one element.
        kind: as `torch.is_floating_point` and `torch.is_complex` have it; "power" for powers of two, which are scales and never
            cast.
        storage: torch's storage class, as pickled in files; empty if torch pickles the dtype itself.
        numpy: little-endian numpy type string; empty if numpy has no such type.
        number: the number of this type in the C++ core.
        component: bytes that are swapped together in a big-endian file (half the itemsize for complex numbers).
    """

    name: str
    torch_name: str
    itemsize: int
    kind: Kind
    storage: str
    numpy: str
    number: int

    @property
    def component(self) -> int:
        """Bytes of one number: a complex element holds two."""
        return self.itemsize // 2 if self.kind == "complex" else self.itemsize

    def swap(self, byteorder: str) -> int:
        """Bytes of each number that must be swapped in a file of this byte order; 0 if nothing must be swapped."""
        return self.component if byteorder != sys.byteorder and self.component > 1 else 0

    def __str__(self) -> str:
        return self.name


F64 = DType("F64", "float64", 8, "float", "DoubleStorage", "<f8", 0)
F32 = DType("F32", "float32", 4, "float", "FloatStorage", "<f4", 1)
F16 = DType("F16", "float16", 2, "float", "HalfStorage", "<f2", 2)
BF16 = DType("BF16", "bfloat16", 2, "float", "BFloat16Storage", "", 3)
F8_E4M3 = DType("F8_E4M3", "float8_e4m3fn", 1, "float", "", "", 4)
F8_E5M2 = DType("F8_E5M2", "float8_e5m2", 1, "float", "", "", 5)
I64 = DType("I64", "int64", 8, "int", "LongStorage", "<i8", 6)
I32 = DType("I32", "int32", 4, "int", "IntStorage", "<i4", 7)
I16 = DType("I16", "int16", 2, "int", "ShortStorage", "<i2", 8)
I8 = DType("I8", "int8", 1, "int", "CharStorage", "|i1", 9)
U8 = DType("U8", "uint8", 1, "int", "ByteStorage", "|u1", 10)
U16 = DType("U16", "uint16", 2, "int", "", "<u2", 11)
U32 = DType("U32", "uint32", 4, "int", "", "<u4", 12)
U64 = DType("U64", "uint64", 8, "int", "", "<u8", 13)
BOOL = DType("BOOL", "bool", 1, "bool", "BoolStorage", "|b1", 14)
C64 = DType("C64", "complex64", 8, "complex", "ComplexFloatStorage", "<c8", 15)
C128 = DType("C128", "complex128", 16, "complex", "ComplexDoubleStorage", "<c16", 16)
F8_E4M3FNUZ = DType("F8_E4M3FNUZ", "float8_e4m3fnuz", 1, "float", "", "", 17)
F8_E5M2FNUZ = DType("F8_E5M2FNUZ", "float8_e5m2fnuz", 1, "float", "", "", 18)
F8_E8M0 = DType("F8_E8M0", "float8_e8m0fnu", 1, "power", "", "", 19)

ALL = (
    *(F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, I16, I8, U8, U16, U32, U64, BOOL, C64, C128),
    *(F8_E4M3FNUZ, F8_E5M2FNUZ, F8_E8M0),
)
BY_NAME = {dtype.name: dtype for dtype in ALL}
BY_TORCH_NAME = {dtype.torch_name: dtype for dtype in ALL}
BY_STORAGE = {dtype.storage: dtype for dtype in ALL if dtype.storage}

# The types that safetensors 0.8.0 can hold.
IN_SAFETENSORS = frozenset(BY_NAME) - {"C128", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}

CAST_TARGETS = (F32, F16, BF16)
"""The types that weights can be cast to. All of kind "float" can be cast to these."""
SHORT_NAMES = {F32: "fp32", F16: "fp16", BF16: "bf16"}
"""Names of the usual dtypes on the command line and in `zckpt.json`."""

_WIDENS = {("F16", "F32"), ("BF16", "F32"), ("F8_E4M3", "F16"), ("F8_E5M2", "F16")}


def can_cast(source: DType, target: DType) -> bool:
    """Whether numbers of `source` can be written as `target`."""
    return source == target or (source.kind == "float" and target in CAST_TARGETS)


def is_lossless(source: DType, target: DType) -> bool:
    """Whether every number of `source` is also a number of `target`."""
    if source == target or (source.kind == "float" and source.itemsize == 1 and target in CAST_TARGETS):
        return True
    return (target == F64 and source.kind == "float") or (source.name, target.name) in _WIDENS
