"""What errors may tell."""

from __future__ import annotations

import pytest

from zckpt.base.errors import IncompleteError, ZckptError, redact


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("hf_abcdefghij is bad", "hf_... is bad"),
        ("Bearer xyz, please", "Bearer ... please"),
        ("GET https://s3.host/a/b?X-Amz-Signature=1&c=2 failed", "GET https://s3.host/a/b?... failed"),
        ("http://me:pw@host/x", "http://host/x"),
        ("ftp://me:secret@host/x?sig=abc&a=1", "ftp://host/x?sig=...&a=1"),
        ("s3://bucket/key, hf://me/model@main/x", "s3://bucket/key, hf://me/model@main/x"),
        ("nothing here, hf_short too", "nothing here, hf_short too"),
    ],
)
def test_redaction(text: str, clean: str) -> None:
    assert redact(text) == clean
    assert redact(f"{text} my own", "", "my own") == f"{clean} ..."


def test_a_short_secret_is_no_part_of_words() -> None:
    assert redact("token a: a bad answer, key=a", "a") == "token ...: ... bad answer, key=..."
    assert redact("xabcdx", "abcd") == "x...x"


def test_fields_lie_below_each_other_and_wrap_at_the_width() -> None:
    error = IncompleteError(
        "2 of 8 rank files are missing", file="out/global_step500", found="optimizer files of ranks 0-5", expected="ranks 0-7",
        remedy="Copy zero_pp_rank_6_* and zero_pp_rank_7_* from the nodes that wrote them.",
    )  # fmt: skip
    assert error.lines(60) == [
        "error: out/global_step500: 2 of 8 rank files are missing",
        "  found     optimizer files of ranks 0-5",
        "  expected  ranks 0-7",
        "  fix       Copy zero_pp_rank_6_* and zero_pp_rank_7_* from",
        "            the nodes that wrote them.",
    ]
    assert len(error.lines()) == 4
    assert str(error).startswith(
        "out/global_step500: 2 of 8 rank files are missing; found optimizer files of ranks 0-5; expected ranks 0-7. Copy "
    )
    assert ZckptError("no room").lines(60) == ["error: no room"]
