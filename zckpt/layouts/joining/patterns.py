r"""Whether a name matches a regular expression that a checkpoint carries, found in bounded time.

For `rules`. Python's `re` tries all ways in which a pattern may fit, and a hostile one has more of them than anybody can wait
for: `(a+)+b`, or twenty times `a?`. Here the ways are counted first, by the name's length; a pattern with too many is refused.
DeepSpeed's own patterns (0.19.8: `^layers\.0\.weight$`, `.*\.experts\.w[123]$`; Megatron's `\d+.word_embeddings.weight`) have
a few hundred.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from zckpt.base.errors import CorruptError, UnsafeError

MOST_CHARACTERS = 4096
"""The most characters of a pattern."""

MOST_WAYS = 10_000_000
"""The most ways in which a pattern may fit one name: they take a second or less."""

MOST_WAYS_TOGETHER = 20_000_000_000
"""The most ways for all names and patterns of a checkpoint."""

_REMEDY = "Say yourself how the slices are joined: --tp-rules megatron, neox, or a JSON file."
_PARSER: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_ONE_CHARACTER = {"LITERAL", "NOT_LITERAL", "ANY", "IN", "RANGE", "CATEGORY"}


class Patterns:
    """The regular expressions of one checkpoint.

    Args:
        file: where they are from, for errors.
        remedy: what a person can do about one that is refused.
    """

    def __init__(self, file: str, remedy: str = _REMEDY) -> None:
        self._file = file
        self._remedy = remedy
        self._known: dict[str, tuple[re.Pattern[str], Any]] = {}
        self._ways: dict[tuple[str, int], int] = {}
        self._left = MOST_WAYS_TOGETHER

    def match(self, pattern: object, name: str) -> bool:
        """Whether a name matches as `re.match` has it. Raises CorruptError if it is not a regular expression,
        UnsafeError if it might take hours.
        """
        text = str(pattern)
        if text not in self._known:
            self._known[text] = self._parsed(text)
        compiled, tree = self._known[text]
        key = (text, len(name))
        if key not in self._ways:
            self._ways[key] = _ways(tree, len(name))
        self._left -= self._ways[key]
        if self._ways[key] > MOST_WAYS or self._left < 0:
            raise self._refused(text)
        return compiled.match(name) is not None

    def _parsed(self, text: str) -> tuple[re.Pattern[str], Any]:
        if len(text) > MOST_CHARACTERS:
            raise self._refused(text)
        try:
            tree = _PARSER.parse(text)
            if _ways(tree, 1) > MOST_WAYS:  # compiling may take as long
                raise self._refused(text)
            return re.compile(text), tree
        except RecursionError:
            raise self._refused(text) from None
        except (re.error, OverflowError) as error:
            raise CorruptError(
                "the checkpoint has a regular expression that Python cannot read",
                file=self._file, found=f"{text!r:.100}: {error}",
            ) from error  # fmt: skip

    def _refused(self, text: str) -> UnsafeError:
        return UnsafeError(
            "the checkpoint has a regular expression that might take hours to match", file=self._file,
            found=f"{text!r:.100}", expected="repetitions of single characters, and few of them",
            remedy=self._remedy,
        )  # fmt: skip


def _ways(tree: Any, length: int) -> int:
    """The most ways in which a parsed pattern may be tried on a name of this length, counted up to just above
    `MOST_WAYS`.
    """
    ways = 1
    for kind, value in tree:
        ways *= _ways_of(str(kind), value, length)
        if ways > MOST_WAYS:
            return MOST_WAYS + 1
    return ways


def _ways_of(kind: str, value: Any, length: int) -> int:
    match kind:
        case "SUBPATTERN":
            return _ways(value[3], length)
        case "BRANCH":
            return sum(_ways(branch, length) for branch in value[1])
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, body = int(value[0]), min(int(value[1]), length), value[2]
            if len(body) == 1 and str(body[0][0]) in _ONE_CHARACTER:
                return max(1, most - least + 1)
            return 1 + _ways(body, length) if int(value[1]) <= 1 else MOST_WAYS + 1
        case "AT" | "GROUPREF":
            return 1
        case _:
            return 1 if kind in _ONE_CHARACTER else MOST_WAYS + 1
