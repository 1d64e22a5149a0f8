"""Names that differ in their numbers alone: which of these numbers are moments of a run, and which are places in it.

For `places`, and whoever asks which files or directories belong together. `step_100` and `step_200` are two saves; `rank_0` and
`rank_1` are two parts of one. Of any other word (`model_0`, `fold_1`) nothing is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from zckpt.base.patterns import compile_late

Meaning = Literal["moment", "place", "unknown"]

_MOMENTS = (
    r".*(?:step|iter|epoch|checkpoint)|steps|iters|iterations?|checkpoints|ckpt|chkpt|epochs|updates?|batch|ba|snapshot"
)
_PLACES = (
    r"(?:local|global|world|dp|tp|pp|ep|mp|cp|sub)?(?:rank|node|shard)s?|part|partition|piece|slice|split|stage|expert|worker"
    r"|host|machine|process|proc|gpu|npu|device|cuda|pod|task|mp|tp|pp|dp|sdp|tensor|pipeline|consolidated"
)
_SURE = ("rank", "shard", "consolidated")
"""Words that count places and nothing else: where there is a 1, there was a 0."""

_NUMBER = compile_late(r"(?P<word>[A-Za-z]*)(?P<gap>[_\-.=: ]*)(?P<number>\d+)")
_COMPOSER = r"ep\d+-ba\d+"
_COUNTED = r"\d+[_\-. ]?of[_\-. ]?\d+"
"""The pattern of `1_of_2`."""
_ADAPTER = r"(?i:lora|loha|lokr|hada|adapter)"
"""The pattern of adapters' names, in which a rank is that of the adapter's matrices."""


class NumberedWord(NamedTuple):
    """A number in a name.

    Attributes:
        meaning: what it counts, by the word before it.
        number: the number.
        start: where its digits begin.
        stop: where they end.
        is_sure: whether the word is used for nothing else.
    """

    meaning: Meaning
    number: int
    start: int
    stop: int
    is_sure: bool = False


def numbers_in(name: str) -> list[NumberedWord]:
    """The numbers in a name, with what they count. A number without a word counts what the one before it does, or is a step."""
    found: list[NumberedWord] = []
    meaning: Meaning = "moment"
    if not (matches := list(_NUMBER.finditer(name))):
        return found
    if re.fullmatch(_COUNTED, name):
        return [
            NumberedWord("place", int(match["number"]), match.start("number"), match.end("number")) for match in matches
        ]
    of_composer, of_adapter = re.search(_COMPOSER, name), re.search(_ADAPTER, name)
    for match in matches:
        word = match["word"].lower()
        if word:
            meaning = _meaning_of(word)
        if meaning == "place" and of_adapter:
            meaning = "unknown"
        if of_composer and of_composer.start() <= match.start() < of_composer.end():
            meaning = "moment"
        sure = meaning == "place" and word.endswith(_SURE)
        found.append(NumberedWord(meaning, int(match["number"]), match.start("number"), match.end("number"), sure))
    return found


def _meaning_of(word: str) -> Meaning:
    return "moment" if re.fullmatch(_MOMENTS, word) else "place" if re.fullmatch(_PLACES, word) else "unknown"


def meaning_of(names: Iterable[str]) -> Meaning:
    """What the numbers count that differ among names; unknown if the names differ in more than numbers, or there is one
    name.
    """
    every = list(names)
    if len({re.sub(r"\d+", "#", name) for name in every}) != 1:
        return "unknown"
    columns = list(zip(*map(numbers_in, every), strict=True))
    meanings = {words[0].meaning for words in columns if len({word.number for word in words}) > 1}
    if meanings == {"moment"}:
        return "moment"
    return "place" if "place" in meanings else "unknown"


def are_other_places(name: str, other: str, *, of_parts: bool) -> bool:
    """Whether two names differ in their numbers alone, and so that they are of other places.

    Args:
        name: a name.
        other: another one.
        of_parts: whether both are of parts of one model: then a number of unknown meaning says which part.
    """
    if name == other or re.sub(r"\d+", "#", name) != re.sub(r"\d+", "#", other):
        return False
    pairs = zip(numbers_in(name), numbers_in(other), strict=True)
    return any(
        a.number != b.number and (a.meaning == "place" or (of_parts and a.meaning == "unknown")) for a, b in pairs
    )


def series_of(name: str, meaning: Meaning = "place") -> str:
    """The name with `#` for its numbers of this meaning; empty where it has none."""
    words = [word for word in numbers_in(name) if word.meaning == meaning]
    for word in reversed(words):
        name = f"{name[: word.start]}#{name[word.stop :]}"
    return name if words else ""


_AXES = r"(?:tp|pp|dp|mp|ep|cp|sp|etp|sdp|zero|fsdp|gpu|global|local|model|data|tensor|pipeline|expert)"
_RANKS = rf"(?:(?:{_AXES}[_-])*(?:rank|node|shard|host|worker)[_\-.=]?\d+[_\-.]?)+"
_ONE_WORD = r"[a-z]+[_\-.=]?\d+"


def is_rank(name: str) -> bool:
    """Whether a name says nothing but a rank or node: `rank_0`, `tp_rank_00_pp_rank_001`, but not `stage2`."""
    return re.fullmatch(_RANKS, name, re.IGNORECASE) is not None


def is_one_word(name: str) -> bool:
    """Whether a name is a rank, or one word with a number: `stage_0`, but not `sweep_of_rank8`, which is a name of a run."""
    return is_rank(name) or re.fullmatch(_ONE_WORD, name, re.IGNORECASE) is not None


def is_not_first(name: str) -> bool:
    """Whether the name says that there are others before it: `rank_1`, but not `rank_0` and not `node17`."""
    return any(word.is_sure and word.number > 0 for word in numbers_in(name))
