"""Which of the two engines works: the native one (C++), or the slow one in Python that the native one must equal.

For `move` and `scan`.
"""

from __future__ import annotations

import warnings
from typing import Literal

from zckpt.base.errors import UnsupportedError


def choose(engine: Literal["auto", "native", "reference"], *, built: bool) -> Literal["native", "reference"]:
    """The engine that works; "auto" is the native one where it was built, otherwise the slow one, with a warning.

    Raises:
        UnsupportedError: "native" is wanted and was not built.
    """
    if engine == "native" and not built:
        raise UnsupportedError(
            "the C++ engine was not built", found="zckpt._core cannot be imported",
            remedy="Install zckpt with a C++ compiler, or leave out the choice of an engine.",
        )  # fmt: skip
    if engine == "auto" and not built:
        warnings.warn("zckpt's C++ engine was not built: the slow Python one is used.", RuntimeWarning, stacklevel=4)
    return "native" if built and engine != "reference" else "reference"
