"""What small files say about the machine they come from, taken out before they leave it.

For `cargo`. Only files of known names go up at all; in those, two kinds of things are looked for: paths of this machine, with
the names of its users in them, and access tokens. A path is absolute, with two components or more, or it is the checkpoint's
own, or the home directory. A JSON setting whose whole value is such a path is left out, and so is one whose name says that it
is a path and whose value is absolute or of a home; elsewhere a path is cut down to its last component. A token stops the push.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

from zckpt.base.errors import UnsafeError

_COMPONENT = r"[\w.@%+=~#$-]*\w[\w.@%+=~#$-]*"
_PATH = re.compile(
    # what is before: no address, relative path, closing tag or interpreter line (#!)
    rf"(?<![\w/.~<)\]}}!-])(?:file://)?(?:/{_COMPONENT}(?:/+{_COMPONENT})+/*|[A-Za-z]:\\+Users\b[^\s\"'`<>|,;:()\[\]{{}}]*)"
)
_ADDRESS_OR_PATH = re.compile(rf"(?!file:)\b[A-Za-z][\w+.-]{{0,20}}://[^\s\"'`<>|,;()\[\]{{}}]+|{_PATH.pattern}")
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
    shorten = _shortener(source)
    dropped: list[str] = []
    short = shorten(text)
    if name.endswith(".json"):
        try:
            value = json.loads(text)
        except ValueError:
            pass
        else:
            clean = _clean(value, shorten, dropped, keys=not name.endswith(".index.json"))
            short = text if clean == value else json.dumps(clean, indent=2, ensure_ascii=False) + "\n"
    notes = []
    if dropped:
        notes.append(f"{name}: {', '.join(sorted(set(dropped)))} named a path of this machine, and was left out.")
    if short != text:
        notes.append(f"{name}: paths of this machine were cut down to their last part.")
    return short.encode() if short != text else data, notes


def _shortener(source: str) -> Callable[[str], str]:
    """What cuts paths in a text: the checkpoint's own and the home directory as whole components, then all others."""
    home = os.path.expanduser("~")
    instead = {home.rstrip("/"): "~"}
    instead |= {path.rstrip("/"): os.path.basename(path.rstrip("/")) for path in _spellings(source)}
    own = sorted((path for path in instead if os.path.isabs(path)), key=len, reverse=True)
    either = "|".join(map(re.escape, own)) or r"(?!)"
    pattern = re.compile(rf"(?<![\w/.~<-])(?:file://)?({either})(?![\w@%+=~#$-]|\.\w)")

    def shorten(text: str) -> str:
        text = pattern.sub(lambda match: instead[match[1]], text)
        return _ADDRESS_OR_PATH.sub(lambda found: _last(found[0]) if _PATH.fullmatch(found[0]) else found[0], text)

    return shorten


def _spellings(path: str) -> set[str]:
    return {path, os.path.abspath(path), os.path.realpath(path)}


def _clean(value: object, shorten: Callable[[str], str], dropped: list[str], *, keys: bool) -> object:
    """A JSON value without settings that are paths, and with all other paths in it shortened; in keys if `keys` is set."""
    if isinstance(value, str):
        return shorten(value)
    if isinstance(value, list):
        return [_clean(inner, shorten, dropped, keys=keys) for inner in value]
    if not isinstance(value, dict):
        return value
    kept: dict[str, object] = {}
    for key, inner in value.items():
        if isinstance(inner, str) and (_PATH.fullmatch(inner) or (_SETTING.fullmatch(key) and _ABSOLUTE.match(inner))):
            dropped.append(key)
        else:
            kept[shorten(key) if keys else key] = _clean(inner, shorten, dropped, keys=keys)
    return kept


def _last(path: str) -> str:
    return re.split(r"[\\/]+", path.rstrip("\\/"))[-1]


def _line(text: str, pattern: re.Pattern[str]) -> int:
    found = pattern.search(text)
    return text.count("\n", 0, found.start()) + 1 if found else 0
