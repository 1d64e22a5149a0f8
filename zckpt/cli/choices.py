"""The words that some options take.

For `options`.
"""

from __future__ import annotations

from enum import Enum


class Format(str, Enum):
    """Containers that can be written."""

    safetensors = "safetensors"
    bin = "bin"


class Dtype(str, Enum):
    """Dtypes that weights can be given."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class OverflowChoice(str, Enum):
    """What to do with numbers too large for the dtype."""

    error = "error"
    inf = "inf"
    clamp = "clamp"


class ProgressForm(str, Enum):
    """How progress is shown."""

    bar = "bar"
    json = "json"
