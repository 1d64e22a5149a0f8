"""How many words a model has when its embedding may end in rows of padding.

For `decompose`. Megatron and GPT-NeoX pad the vocabulary to a multiple of `make_vocab_size_divisible_by` times the number of
tensor-parallel ranks. How many of the rows are words is said by `--vocab-size`, by transformers' config, by the run's own
`vocab_size`, or by a tokenizer beside the save, in this order. What a run or a tokenizer says counts only if padding
makes of it the rows that are there: a `vocab_size` may be meant "before EOD or padding", and models may have more rows than
their tokenizers have words.
Source: Megatron-LM (core 0.14 - 0.16.1), megatron/training/tokenizer/tokenizer.py `_vocab_size_with_padding`, `_NullTokenizer`;
Megatron Bridge 0.3.1, models/gpt_provider.py; tokenizers, `tokenizer.json`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from zckpt.base.errors import COPY_AGAIN, CorruptError, UsageError
from zckpt.base.words import count
from zckpt.naming.facts import Facts
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location, locate

OPTION = "--vocab-size"

_MOST_BYTES = 64 << 20
"""The most bytes of a tokenizer.json; one of 250,000 words has some twenty million."""

_PLACES = ("tokenizer.json", "tokenizer/tokenizer.json", "huggingface/tokenizer.json")


def with_vocabulary(facts: Facts, rows: int, *, padded: bool) -> tuple[Facts, tuple[str, ...]]:
    """The facts with the vocabulary and what says it, and notes.

    Args:
        facts: those of `facts_of`; `homes` are the directories in which a tokenizer may be.
        rows: of the embedding.
        padded: whether the program that named the tensors pads.

    Raises:
        UsageError: more words are asked for than there are rows.
        CorruptError, UnsupportedError: a tokenizer that is needed cannot be read.
    """
    known = facts.whole("vocabulary")
    if known is not None:
        if known > rows and facts.get("vocabulary_from") == OPTION:
            raise UsageError(
                "the vocabulary has fewer rows than words are asked for", file=facts.path, found=f"{OPTION} {known}",
                expected=f"at most {rows:,}, the rows of the embedding", remedy=f"Change {OPTION}.",
            )  # fmt: skip
        return facts, ()
    if not padded or _is_unpadded(facts.arguments, rows):
        return facts, ()
    multiple = _multiple(facts.arguments)
    for words, where in _vocabulary_sources(facts):
        if 0 < words <= rows and _explains(words, rows, multiple, facts.arguments):
            return facts.having(vocabulary=words, vocabulary_from=where), ()
    if multiple is None and facts.arguments.get("padded_vocab_size") is None:
        return facts, ()
    up_to = f" up to a multiple of {multiple:,}" if multiple else ""
    rows_there = count(rows, "row")
    return facts, (
        f"The vocabulary has {rows_there}, and the last may be padding{up_to}: nothing says how many words there are, so "
        f"all rows are kept. Pass {OPTION} N to keep N.",
    )


def check_vocabulary(words: int | None) -> None:
    """Raises UsageError for a number of words that no vocabulary has."""
    if words is not None and words < 1:
        raise UsageError(
            "the vocabulary is impossible", found=f"{OPTION} {words}", expected="1 or more", remedy=f"Change {OPTION}."
        )


def recorded_vocabulary(facts: Facts) -> dict[str, object]:
    """The manifest's record of the vocabulary, with which it is found again without the tokenizer or the option."""
    words, said = facts.whole("vocabulary"), facts.get("vocabulary_from")
    return {} if words is None or said in (None, "the config") else {"vocab_size": words}


def _multiple(arguments: Mapping[str, object]) -> int | None:
    """The number that the padded vocabulary is a multiple of; None if the run does not record it."""
    each = arguments.get("make_vocab_size_divisible_by")
    ranks = arguments.get("tensor_model_parallel_size", arguments.get("model_parallel_size"))
    if type(each) is not int or each < 1:
        return None
    return each * ranks if type(ranks) is int and ranks > 0 else each


def _is_unpadded(arguments: Mapping[str, object], rows: int) -> bool:
    """Whether a run of Megatron Bridge records that it does not pad, and its vocabulary has as many rows as there are."""
    return arguments.get("should_pad_vocab") is False and arguments.get("vocab_size") == rows


def _explains(words: int, rows: int, multiple: int | None, arguments: Mapping[str, object]) -> bool:
    """Whether padding this number of words gives the rows that there are."""
    if multiple is not None:
        return math.ceil(words / multiple) * multiple == rows
    return arguments.get("padded_vocab_size") == rows


def _vocabulary_sources(facts: Facts) -> Iterator[tuple[int, str]]:
    """(words, source) by the run and by tokenizers; a tokenizer is read when its turn comes."""
    said = facts.arguments.get("vocab_size")
    if type(said) is int:
        of_null = facts.arguments.get("tokenizer_type") == "NullTokenizer"
        yield said + of_null, "the run's vocab_size" + " and the word at the end of a document" * of_null
    homes = facts.get("homes")
    for home in homes if isinstance(homes, tuple) else ():
        for name in _PLACES:
            path = locate(home) / name
            if path.is_file():
                yield words_of(path), f"{PurePosixPath(name)!s} in {home!r}"


def words_of(path: Location) -> int:
    """The size of a `tokenizer.json`: its largest number plus one.

    Raises:
        CorruptError: it is not a tokenizer. UnsupportedError: it is too large.
    """
    found = read_json(path.path, _MOST_BYTES, "a tokenizer.json")
    model, added = (found.get(key) for key in ("model", "added_tokens")) if isinstance(found, dict) else (None, None)
    words = model.get("vocab") if isinstance(model, dict) else None
    numbers = (
        list(words.values()) if isinstance(words, dict) else list(range(len(words))) if isinstance(words, list) else []
    )
    numbers += [one.get("id") for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    if not numbers or not all(type(number) is int and 0 <= number < 1 << 32 for number in numbers):
        raise CorruptError(
            "is not a tokenizer", file=path, expected="words with their numbers", remedy=f"{COPY_AGAIN} Or remove it."
        )
    return max(numbers) + 1
