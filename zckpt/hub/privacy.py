"""What small files say about the machine they come from, taken out before they leave it.

For `cargo`. Only files of known names go up at all; in those, two kinds of things are looked for: paths of this machine, with
the names of its users in them, and access tokens. A path in a JSON setting whose name says that it is one is dropped; in any
other text a path into somebody's home is cut down to its last part. A token stops the push: it belongs in no file.
"""

from __future__ import annotations

import json
import os
import re

from zckpt.errors import UnsafeError

_HOMES = re.compile(
    r"(?<![\w/.:~-])(?:file://)?(?:/(?:home|Users|root|mnt|data|scratch|workspace)\b|[A-Za-z]:\\+Users\b)"
    r"[^\s\"'`<>|,;:()\[\]{}]*"
)
_ABSOLUTE = re.compile(r"(?:/|~/|~$|[A-Za-z]:[\\/]|file://|\\\\)")
_SETTING = re.compile(r".*(?:path|file|dir|directory|name_or_path|checkpoint|folder)")
_TOKENS = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{30,}\b"),
    "an AWS key": re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    "an OpenAI key": re.compile(r"\bsk-(?:proj-)?[A-Za-z0-9_-]{32,}\b"),
    "a GitHub token": re.compile(r"\bgh[pousr]_[A-Za-z0-9]{36,}\b"),
    "a private key": re.compile(r"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----"),
}
_TEXTS = (".json", ".md", ".py", ".jinja", ".txt", ".yaml", ".yml")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")


def is_cleaned(name: str) -> bool:
    """Whether paths are looked for in a file of this name; in a vocabulary nothing may change."""
    return name.endswith(_TEXTS) and name not in _VOCABULARIES


def cleaned(name: str, data: bytes, source: str) -> tuple[bytes, list[str]]:
    """A small file as it may leave this machine, and sentences on what was changed.

    Args:
        name: of the file; says what kind it is.
        data: its bytes.
        source: the path of the checkpoint, which must not be in it.

    Raises:
        UnsafeError: it holds something that looks like an access token.
    """
    if not name.endswith(_TEXTS):
        return data, []
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data, []
    for what, pattern in _TOKENS.items():
        if pattern.search(text):
            raise UnsafeError(
                f"{what} in a file that would be published", file=name, found=f"line {_line(text, pattern)}",
                remedy="Nothing was sent. Take it out of the file, and have it revoked.",
            )  # fmt: skip
    if not is_cleaned(name):
        return data, []
    dropped: list[str] = []
    if name.endswith(".json"):
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        clean = _without_paths(value, dropped)
        if dropped:
            text = json.dumps(clean, indent=2, ensure_ascii=False) + "\n"
    shortened = text
    own = {source, os.path.abspath(source), os.path.realpath(source), os.path.expanduser("~")}
    for place in sorted((place.rstrip("/") for place in own), key=len, reverse=True):
        if os.path.isabs(place):
            shortened = shortened.replace(place, os.path.basename(place) if place in source else "~")
    shortened = _HOMES.sub(lambda match: _last(match[0]), shortened)
    notes = (
        [f"{name}: {', '.join(sorted(set(dropped)))} named a path of this machine, and was left out."]
        if dropped
        else []
    )
    if shortened != text:
        notes.append(f"{name}: paths of this machine were cut down to their last part.")
    return shortened.encode() if notes else data, notes


def _without_paths(value: object, dropped: list[str]) -> object:
    """Without settings that are said to be paths and are absolute ones."""
    if isinstance(value, dict):
        kept = {}
        for key, inner in value.items():
            if isinstance(inner, str) and _SETTING.fullmatch(str(key)) and _ABSOLUTE.match(inner):
                dropped.append(str(key))
            else:
                kept[key] = _without_paths(inner, dropped)
        return kept
    return [_without_paths(inner, dropped) for inner in value] if isinstance(value, list) else value


def _last(path: str) -> str:
    return re.split(r"[\\/]+", path.rstrip("\\/"))[-1] if re.search(r"[\\/]", path.rstrip("\\/")[1:]) else path


def _line(text: str, pattern: re.Pattern[str]) -> int:
    found = pattern.search(text)
    return text.count("\n", 0, found.start()) + 1 if found else 0
