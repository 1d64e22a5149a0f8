"""Removes paths of this machine from small files before they are published, and refuses files with access tokens.

For `cargo`. Only files of known names are published at all. In every small one, access tokens and keys are searched, whatever its
kind; one stops the push. In texts, paths of this machine are searched too, which have the names of its users in them. A path is
absolute and has at least two components, or it is the checkpoint's own, or the home directory. A JSON setting that
is such a
path as a whole is left out, and so is one with a name that says that it is a path, and with a value that is absolute
or begins with `~`;
elsewhere a path is cut down to its last component.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

from zckpt.base.errors import UnsafeError

_COMPONENT = r"[\w.@%+=~#$-]*\w[\w.@%+=~#$-]*"
_PATH = re.compile(
    # not after the characters of an address, relative path, closing tag or interpreter line (#!)
    rf"(?<![\w/.~<)\]}}!-])(?:file://)?(?:/{_COMPONENT}(?:/+{_COMPONENT})+/*|[A-Za-z]:\\+Users\b[^\s\"'`<>|,;:()\[\]{{}}]*)"
)
_ADDRESS_OR_PATH = re.compile(rf"(?!file:)\b[A-Za-z][\w+.-]{{0,20}}://[^\s\"'`<>|,;()\[\]{{}}]+|{_PATH.pattern}")
_ABSOLUTE = re.compile(r"(?:/|~/|~$|[A-Za-z]:[\\/]|file://|\\\\)")
_SETTING = re.compile(r".*(?:path|file|dir|directory|name_or_path|checkpoint|folder)")
_SECRETS = {
    "a Hugging Face token": rb"\b(?:hf|api_org)_[A-Za-z0-9]{30,}\b",
    "an AWS key": rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a secret AWS key": rb"(?i:aws_?secret_?(?:access_?)?key)\W{1,10}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
    "an Anthropic key": rb"\bsk-ant-[A-Za-z0-9_-]{32,}",
    "an OpenAI key": rb"\bsk-(?:proj-)?[A-Za-z0-9_-]{32,}\b",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})\b",
    "a GitLab token": rb"\bglpat-[A-Za-z0-9_-]{20,}",
    "a Slack token": rb"\bxox[abeoprs]-[A-Za-z0-9-]{20,}",
    "a Google API key": rb"\bAIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])",
    "a PyPI token": rb"\bpypi-AgEIcHlwaS5vcmc[A-Za-z0-9_-]{20,}",
    "a Weights & Biases key": rb"\bwandb_v1_\w{30,}|(?i:wandb[\w.-]{0,20}(?:key|token)|wandb login)\W{1,10}[0-9a-f]{40}\b",
    "a password of a .netrc": rb"\bmachine\s+\S+\s+login\s+\S+\s+password\s+\S+",
    "a private key": rb"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----",
}
"""Kinds of secrets that stop a push -> their patterns; for plain hexadecimal numbers, the words before them count."""

_TEXTS = (".json", ".md", ".py", ".jinja", ".txt", ".yaml", ".yml")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")


def is_cleaned(name: str) -> bool:
    """Whether paths are searched in a file of this name; a vocabulary is never changed."""
    return name.endswith(_TEXTS) and name not in _VOCABULARIES


def check_secrets(name: str, data: bytes) -> None:
    """Makes sure that a small file, of whatever kind, may be published. Raises UnsafeError if it holds something that
    looks like an access token or a key.
    """
    data = data.replace(b"\0", b"")  # of UTF-16, every second byte
    for what, pattern in _SECRETS.items():
        if found := re.search(pattern, data):
            line = data.count(b"\n", 0, found.start()) + 1
            raise UnsafeError(
                f"holds {what} and would be published", file=name, found=f"line {line:,}",
                remedy="Take it out of the file, and revoke it. Nothing was sent.",
            )  # fmt: skip


def clean_file(name: str, data: bytes, source: str) -> tuple[bytes, list[str]]:
    """A small file as it may be published, and sentences on what was changed in it: the ending of its name is its kind, and
    `source`, the path of the checkpoint, is removed. Raises UnsafeError if it holds something that looks like an access token.
    """
    check_secrets(name, data)
    if not is_cleaned(name):
        return data, []
    try:
        text = data.decode()
    except UnicodeDecodeError:
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
        settings = sorted(set(dropped))
        was = (
            "was left out, because it holds a path" if len(settings) == 1 else "were left out, because they hold paths"
        )
        notes.append(f"{name}: {', '.join(settings)} {was} of this machine.")
    if short != text:
        notes.append(f"{name}: paths of this machine were cut down to their last part.")
    return short.encode() if short != text else data, notes


def _shortener(source: str) -> Callable[[str], str]:
    """A function that cuts paths in a text: the checkpoint's own and the home directory as whole components, then all others."""
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
    """A JSON value without the settings that are paths, with all other paths shortened; in keys too if `keys` is set."""
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
