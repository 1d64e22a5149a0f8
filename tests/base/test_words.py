"""Numbers, sizes and lists in words."""

from __future__ import annotations

import pytest

from zckpt.base.words import count, examples, join_words, ranges, ranks, size


@pytest.mark.parametrize(
    ("number", "nouns", "text"),
    [
        (0, ("tensor",), "0 tensors"),
        (1, ("tensor",), "1 tensor"),
        (1024, ("tensor",), "1,024 tensors"),
        (1, ("copy is", "copies are"), "1 copy is"),
        (2, ("copy is", "copies are"), "2 copies are"),
    ],
)
def test_singular_and_plural(number: int, nouns: tuple[str, ...], text: str) -> None:
    assert count(number, *nouns) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1000, "1 kB"), (1234, "1.23 kB"), (42_500, "42.5 kB"),
        (999_499, "999 kB"), (999_500, "1 MB"), (497_774_400, "498 MB"), (1_200_000_000, "1.2 GB"), (7 * 10**12, "7 TB"),
        (999_999_999_999, "1 TB"), (2.5e15, "2.5 PB"), (5 * 10**21, "5,000 EB"),
    ],
)  # fmt: skip
def test_sizes_have_three_digits_and_a_unit(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_lists() -> None:
    assert [join_words([*"abc"][:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert join_words(["a", "b"], "or") == "a or b"
    assert examples("abcde") == "'a', 'b', 'c' and 2 more" and examples("ab") == "'a', 'b'"
    assert ranges([7, 0, 1, 2, 4, 5]) == "0-2, 4-5, 7" and ranges([]) == ""


def test_ranks() -> None:
    assert ranks([3]) == "rank 3" and ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
