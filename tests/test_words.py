"""Plain English, by a list of words: none of them stands in a message, a help text, a page or a docstring.

`WORDS` says for each why not, and what to write.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import TOGETHER, parsed

pytestmark = TOGETHER

ROOT = Path(__file__).parent.parent

WORDS = {
    r"models? of transformers\b(?! 5)": "it sounds as if transformers were a model's parts: a Hugging Face model",
    r"class(?:es)? of transformers": "a transformers class",
    r"famil(?:y|ies) of transformers": "a Hugging Face family",
    r"whole weights": "the field says consolidated weights",
    r"anew": "nobody says it: again, from the start",
    r"made of": "made from, where something was made; consists of, where it is so",
    r"(?:that|which) (?:is|are) none\b(?! of)": "say what it is not: that is not a page",
    r"(?:is|are) to be": "who does it: a file that zckpt writes",
    r"of which": "two sentences, or a subject: three files, and two of them are missing",
    r"whose": "with, or a second sentence: a file with a wrong checksum",
}
"""Pattern -> why it is not written, and what is instead."""

KEPT = {"zckpt/cli/push.py": "made of the checkpoint", "zckpt/containers/opcodes.py": "whose"}
"""File -> a word in a string that programs read, and that stays as it is: a value of --json, words of Python's own."""

PAGES = [
    *(path for path in sorted(ROOT.glob("*.md")) if path.name != "CHANGELOG.md"),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("examples/*.md")),
]
"""Every page but the history, which stays as it was."""


def strings(*, told: bool) -> Iterator[tuple[str, str]]:
    """(Place, text) of the package's texts: what it tells (messages, help), or what it says of itself (docstrings)."""
    for path, nodes in parsed().items():
        name = str(path.relative_to(ROOT))
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and (id(node) not in alone) == told:
                kept = KEPT.get(name)
                yield f"{name}:{node.lineno}", node.value.replace(kept, "") if kept else node.value


def found_in(pattern: str, texts: Iterator[tuple[str, str]]) -> list[str]:
    known = re.compile(rf"\b{pattern}\b", re.IGNORECASE)
    return [f"{place}: {found[0]}" for place, text in texts for found in known.finditer(" ".join(text.split()))]


def pages() -> Iterator[tuple[str, str]]:
    yield from ((str(path.relative_to(ROOT)), path.read_text()) for path in PAGES)


@pytest.fixture(scope="module")
def texts() -> dict[str, list[tuple[str, str]]]:
    return {"told": [*strings(told=True)], "docstrings": [*strings(told=False)], "pages": [*pages()]}


@pytest.mark.parametrize("pattern", WORDS)
def test_a_word_that_is_not_plain_stands_nowhere(pattern: str, texts: dict[str, list[tuple[str, str]]]) -> None:
    assert [hit for where in texts.values() for hit in found_in(pattern, iter(where))] == [], WORDS[pattern]
