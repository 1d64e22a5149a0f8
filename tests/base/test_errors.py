"""What errors may tell."""

from __future__ import annotations

import pytest

from zckpt.base.errors import redact


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
