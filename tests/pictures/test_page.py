"""A page holds what strangers named as text, whatever it looks like, and says that nothing else may run."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from pathlib import Path

import pytest
from html_pages import HOSTILE, Reader, policy_of

from zckpt.base.errors import OutputError
from zckpt.pictures import page as pages


def test_what_is_hostile_stays_text() -> None:
    body = "".join(f"<p title='{pages.text(name)}'>{pages.text(name)}</p>" for name in HOSTILE)
    made = pages.page(HOSTILE[0], body, {"names": HOSTILE, HOSTILE[0]: HOSTILE[1]})
    found = Reader(made)
    assert [tag for tag, _ in found.elements if tag in ("script", "img", "title", "style")] == [
        "title",
        "style",
        "script",
        "script",
    ]
    assert [set(own) for tag, own in found.elements if tag == "p"] == [{"title"}] * len(HOSTILE)
    data = next(text for tag, text in found.texts if tag == "script")
    assert data.isascii() and not set("<>&") & set(data)
    assert json.loads(data) == {"names": list(HOSTILE), HOSTILE[0]: HOSTILE[1]}
    made.encode()  # lone surrogates are written as escapes
    assert policy_of(found)


def test_the_policy_names_what_is_there_and_nothing_else() -> None:
    found = Reader(pages.page("a", "<p>b</p>", {}))
    policy = policy_of(found)
    said = dict(part.strip().partition(" ")[::2] for part in policy.split(";"))
    assert said["default-src"] == said["base-uri"] == said["form-action"] == "'none'" and "unsafe" not in policy
    for tag in ("style", "script"):
        content = [text for kind, text in found.texts if kind == tag and text.strip()][-1]
        assert said[f"{tag}-src"] == f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    urls = re.findall(r"(?:https?:)?//[\w.-]+\.\w+|url\(|@import", pages.page("a", "", {}))
    assert urls == []


def test_only_a_page_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "a.html"
    pages.write_page(str(file), pages.page("a", "", {}))
    pages.write_page(str(file), pages.page("b", "", {}))
    assert "<title>b</title>" in file.read_text() and len(list(tmp_path.iterdir())) == 1
    other = tmp_path / "latest"
    other.write_text("global_step2")
    with pytest.raises(OutputError, match="not an HTML page"):
        pages.write_page(str(other), pages.page("a", "", {}))
    assert other.read_text() == "global_step2"
