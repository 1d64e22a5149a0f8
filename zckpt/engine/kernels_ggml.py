"""Blocks of ggml's types as numbers, in numpy: the reference that `csrc/ggml.cpp` must equal.

For `kernels`. Products and differences are rounded to fp32 in ggml's order; nothing is fused.
Source: ggml, src/ggml-common.h and ggml-quants.c (`dequantize_row_*`); gguf-py 0.19.0, quants.py, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zckpt.core.folds import Bytes, Floats

_AT_ONCE = 1 << 17
"""Numbers that are computed at once: what is made on the way is several times as large."""
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of E2M1."""


def of_ggml(kind: str, blocks: Bytes, numbers: Floats) -> None:
    import numpy as np

    check(kind, blocks, numbers)
    nbytes, width, decode = TYPES[kind]
    rows, found = blocks.reshape(-1, nbytes), numbers.reshape(-1, width)
    step = max(1, _AT_ONCE // width)
    with np.errstate(all="ignore"):
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            found[first : first + step] = decode(part).reshape(len(part), width)


def check(kind: str, blocks: Bytes, numbers: Floats) -> tuple[int, int]:
    """The number that `csrc/blocks.h` has for a type, and how many blocks there are; ValueError if they are not those numbers."""
    nbytes, width, _ = TYPES[kind]
    if len(blocks) % nbytes or len(blocks) // nbytes * width != len(numbers):
        raise ValueError(f"{len(blocks)} bytes of {kind} for {len(numbers)} numbers")
    return [*TYPES].index(kind), len(blocks) // nbytes


def _half(rows: Any, at: int) -> Any:
    """The fp16 at byte `at` of each block."""
    import numpy as np

    return np.ascontiguousarray(rows[:, at : at + 2]).view("<f2").astype(np.float32)


def _bits(rows: Any, first: int, last: int, width: int, together: int) -> Any:
    """Codes of `width` bits: each stretch of `together` bytes holds the lowest bits of all codes, then the next ones,
    and so on.
    """
    import numpy as np

    packed = rows[:, first:last].reshape(len(rows), -1, 1, together)
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(1, 1, -1, 1)
    return (packed >> shifts & np.uint8((1 << width) - 1)).reshape(len(rows), -1)


def _floats(codes: Any, less: int = 0, table: tuple[int, ...] = ()) -> Any:
    import numpy as np

    return (np.array(table)[codes] if table else codes).astype(np.float32) - np.float32(less)


def _fifth(rows: Any, at: int) -> Any:
    """The fifth bits of blocks of 32, from the word at byte `at`."""
    import numpy as np

    words = np.ascontiguousarray(rows[:, at : at + 4]).view("<u4")
    return (words >> np.arange(32, dtype=np.uint32) & np.uint32(1)).astype(np.uint8) << np.uint8(4)


def _q4_0(rows: Any) -> Any:
    return _half(rows, 0) * _floats(_bits(rows, 2, 18, 4, 16), 8)


def _q4_1(rows: Any) -> Any:
    return _half(rows, 0) * _floats(_bits(rows, 4, 20, 4, 16)) + _half(rows, 2)


def _q5_0(rows: Any) -> Any:
    return _half(rows, 0) * _floats(_bits(rows, 6, 22, 4, 16) | _fifth(rows, 2), 16)


def _q5_1(rows: Any) -> Any:
    return _half(rows, 0) * _floats(_bits(rows, 8, 24, 4, 16) | _fifth(rows, 4)) + _half(rows, 2)


def _iq4_nl(rows: Any) -> Any:
    return _half(rows, 0) * _floats(_bits(rows, 2, 18, 4, 16), table=_IQ4_NL)


def _mxfp4(rows: Any) -> Any:
    import numpy as np

    powers = rows[:, :1].astype(np.uint32)
    halves = np.where(powers < 2, np.uint32(0x00200000) << powers, (powers - np.uint32(1)) << np.uint32(23))
    return halves.astype(np.uint32).view(np.float32) * _floats(_bits(rows, 1, 17, 4, 16), table=_MXFP4)


def _q2_k(rows: Any) -> Any:
    scales = rows[:, :16]
    step, least = (_half(rows, at) * _floats(own) for at, own in ((80, scales & 15), (82, scales >> 4)))
    return step[:, :, None] * _floats(_bits(rows, 16, 80, 2, 32)).reshape(-1, 16, 16) - least[:, :, None]


def _q3_k(rows: Any) -> Any:
    scales = _bits(rows, 96, 104, 4, 8) | _bits(rows, 104, 108, 2, 4) << 4
    codes = _floats(_bits(rows, 32, 96, 2, 32) | _bits(rows, 0, 32, 1, 32) << 2, 4)
    return (_half(rows, 108) * _floats(scales, 32))[:, :, None] * codes.reshape(-1, 16, 16)


def _pairs_of_6(rows: Any) -> tuple[Any, Any]:
    """The steps and the least numbers of eight parts of a block of 256, of 6 bits each."""
    import numpy as np

    a, b, c = (rows[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([a & 63, c & 15 | a >> 2 & 48], axis=1)
    least = np.concatenate([b & 63, c >> 4 | b >> 2 & 48], axis=1)
    return (_half(rows, 0) * _floats(scales))[:, :, None], (_half(rows, 2) * _floats(least))[:, :, None]


def _q4_k(rows: Any) -> Any:
    step, least = _pairs_of_6(rows)
    return step * _floats(_bits(rows, 16, 144, 4, 32)).reshape(-1, 8, 32) - least


def _q5_k(rows: Any) -> Any:
    step, least = _pairs_of_6(rows)
    codes = _bits(rows, 48, 176, 4, 32) | _bits(rows, 16, 48, 1, 32) << 4
    return step * _floats(codes).reshape(-1, 8, 32) - least


def _q6_k(rows: Any) -> Any:
    import numpy as np

    step = _half(rows, 208) * _floats(np.ascontiguousarray(rows[:, 192:208]).view(np.int8))
    codes = _bits(rows, 0, 128, 4, 64) | _bits(rows, 128, 192, 2, 32) << 4
    return step[:, :, None] * _floats(codes, 32).reshape(-1, 16, 16)


TYPES: dict[str, tuple[int, int, Callable[[Any], Any]]] = {
    "Q4_0": (18, 32, _q4_0), "Q4_1": (20, 32, _q4_1), "Q5_0": (22, 32, _q5_0), "Q5_1": (24, 32, _q5_1),
    "IQ4_NL": (18, 32, _iq4_nl), "MXFP4": (17, 32, _mxfp4), "Q2_K": (84, 256, _q2_k), "Q3_K": (110, 256, _q3_k),
    "Q4_K": (144, 256, _q4_k), "Q5_K": (176, 256, _q5_k), "Q6_K": (210, 256, _q6_k),
}  # fmt: skip
"""Name -> bytes and numbers of a block, and what decodes blocks."""
