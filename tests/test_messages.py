"""The form of every error that zckpt raises, read from its source: a clause after the file, then found, expected and fix.

`found` and `expected` are noun phrases without a full stop. The fix is whole sentences; errors that a user can cause have one.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from sources import ROOT, TOGETHER, parsed

from zckpt.base import errors

pytestmark = TOGETHER

BASES = {
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.ZckptError)
}
NEED_FIX = {"UsageError", "NotACheckpointError", "IncompleteError", "OutputError", "UnsupportedError", "AccessError"}
_CLAUSE = re.compile(
    r"an? (?:(?!that |which |whose |without )[\w'\0-]+ )+?(?:can|cannot|completed|gets|has|is|may|must|needs|would) "
)
"""A subject with "a", and its verb."""

_NAME = "\0"
"""Stands for a value that is put into a message."""


class Message(NamedTuple):
    place: str
    kind: str
    fields: dict[str, list[str]]
    """Field -> the texts that it may have."""


def texts_of(node: ast.expr) -> list[str]:
    """The texts that an expression may have, as far as its source says; a value in one is `_NAME`."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(p.value if isinstance(p, ast.Constant) else _NAME for p in parts)]
        case ast.IfExp(body=one, orelse=other):
            return [*texts_of(one), *texts_of(other)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in texts_of(left) for b in texts_of(right)]
    return [_NAME]


@functools.cache
def messages() -> list[Message]:
    """Every error of zckpt's kinds that is made in the package."""
    found = []
    for path, nodes in parsed().items():
        local = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        kinds = BASES | {name for name in local if name.endswith("Error")}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds and node.args:
                fields = {"what": texts_of(node.args[0])}
                fields |= {word.arg: texts_of(word.value) for word in node.keywords if word.arg}
                found.append(Message(f"{path.relative_to(ROOT.parent)}:{node.lineno}", node.func.id, fields))
    return found


def faults(message: Message) -> Iterator[str]:
    """What is wrong with a message's form."""
    for text in message.fields["what"]:
        if re.match(r"(?:an?|no such [^\0]* that) ", text) and not _CLAUSE.match(text):
            yield f"a noun phrase, not a clause: {text!r}"
        if re.match(r"[A-Z][a-z]* ", text) and not text.startswith(("DeepSpeed", "AutoEP")):
            yield f"begins with a capital: {text!r}"
    for field in ("what", "found", "expected"):
        for text in message.fields.get(field, ()):
            if text.endswith("."):
                yield f"`{field}` ends in a full stop: {text!r}"
    for text in message.fields.get("expected", ()):
        if re.search(r" (?:is|are) (?:known|needed|read|wanted)$", text):
            yield f"`expected` is a sentence: {text!r}"
    for text in message.fields.get("remedy", ()):
        if text and text != _NAME and not (re.match(r"[A-Z\0]", text) and re.search(r"[.\0]$", text)):
            yield f"the fix is not a sentence: {text!r}"
    if message.kind in NEED_FIX and "remedy" not in message.fields:
        yield "a user can cause it, and it has no fix"


def test_every_message_has_the_form() -> None:
    found = [f"{message.place}: {fault}" for message in messages() for fault in faults(message)]
    assert found == []


def test_the_form_is_checked() -> None:
    bad = Message("x.py:1", "UsageError", {"what": ["a thing that is none"], "found": ["it."], "remedy": ["do it"]})
    assert len(list(faults(bad))) == 3
    assert len(messages()) > 400
