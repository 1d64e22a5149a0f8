"""Regular expressions that are compiled when they are first used.

For modules that every command imports: a command uses few of their expressions, and compiling all of them takes a tenth of the
time of `zckpt inspect`.
"""

from __future__ import annotations

import re
from typing import cast


class _Late:
    """A stand-in for a pattern, which it compiles at its first use."""

    def __init__(self, text: str, flags: int) -> None:
        self._text = text
        self._flags = flags

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # asked of any object, such as by `copy`
            raise AttributeError(name)
        found = getattr(re.compile(self._text, self._flags), name)
        setattr(self, name, found)
        return found


def compile_late(text: str, flags: int = 0) -> re.Pattern[str]:
    """As `re.compile`, but the expression is compiled at its first use."""
    return cast("re.Pattern[str]", _Late(text, flags))
