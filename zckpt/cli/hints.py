"""Finds the line that a person meant who typed an unknown command or option.

For `commands` and `desk`, which import it only when something is wrong. Words of the field, of other tools
and of `zero_to_fp32.py` lead to the line to type; a word that is close to a command's name leads to that command.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from importlib.resources import files

from zckpt.base.errors import UsageError
from zckpt.base.words import join_words

_FOUND: dict[str, dict[str, str]] = json.loads(files("zckpt.cli").joinpath("hints.json").read_text())


def _by_word(what: str) -> dict[str, str]:
    """A table of the file by word: each of its lines has what is meant, and the words for it."""
    return {word: meant for meant, words in _FOUND[what].items() for word in words.split()}


_WORDS = {word: commands.split() for word, commands in _by_word("commands").items()}
"""A word that is not a command -> the commands for it, the most likely first."""
_OPTIONS = _by_word("options")
"""An option of other tools, without dashes -> the option of zckpt."""
_LAUNCHER = _by_word("launchers")
"""An option of `deepspeed` or `torchrun` that `zckpt run` does not have -> what to use."""
_MORE = {
    "to-hf": "--to hf",
    "to-transformers": "--to hf",
    "merge-lora": "--merge-lora",
    "merge-and-unload": "--merge-lora",
}
"""A word -> the options that its command needs for it."""

_OUT_OPTIONS = ("output", "out", "o", "output-dir", "output-file", "outdir", "out-dir", "save-path", "dest")


def check_command(words: Sequence[str], known: Iterable[str]) -> None:
    """Refuses the first word of a command line that names no command.

    Args:
        words: the command line, without `zckpt`.
        known: the commands.

    Raises:
        UsageError: it says which command does what the word says.
    """
    word, rest = words[0], list(words[1:])
    plain = word.lower().replace("_", "-").removesuffix(".py")
    remedy = "Run 'zckpt --help' for the commands."
    if plain in _WORDS:
        more = [_MORE[plain]] if plain in _MORE else []
        lines = [" ".join(["zckpt", name, *map(shlex.quote, rest), *more]) for name in _WORDS[plain]]
        remedy = f"Use {join_words([repr(line) for line in lines], 'or')}."
    elif os.path.exists(word) or "/" in word or "://" in word:
        command = "to-bf16" if rest and not rest[0].startswith("-") else "inspect"
        line = " ".join(["zckpt", command, *map(shlex.quote, words)])
        raise UsageError(f"{word!r} is a path, and no command", remedy=f"A command comes first: {line!r}.")
    elif close := difflib.get_close_matches(plain, [*known], n=3, cutoff=0.72):
        remedy = f"Did you mean {join_words([repr(name) for name in close], 'or')}? {remedy}"
    raise UsageError(f"no such command: {word!r}", remedy=remedy)


def value_meant(what: str) -> str:
    """A sentence about a value that an option does not take, from typer's message; empty if there is none."""
    if re.search(r"'--type': '(i?q|tq)\d\w*' is", what, re.IGNORECASE):
        return "llama.cpp's llama-quantize makes other types of a file that has f16 or bf16."
    return ""


def option_meant(option: str, command: str, known: Sequence[str]) -> str:
    """A sentence about an option that a command does not have; empty if nothing is close.

    Args:
        option: as it was typed, such as `--output`.
        command: the command line's beginning, such as `zckpt to-bf16`.
        known: the options that the command has.
    """
    plain = option.lstrip("-").replace("_", "-").partition("=")[0]
    name = command.rpartition(" ")[2]
    takes_out = name.startswith("to-") or name in ("convert", "reshard", "slim", "average", "delta", "apply")
    if name == "run" and plain in _LAUNCHER:
        return _LAUNCHER[plain]
    if plain in _OUT_OPTIONS and takes_out:
        return f"OUT is the last argument, without an option: '{command} {'A B' if name == 'average' else 'CKPT'} OUT'."
    if plain == "dtype" and re.fullmatch("to-(fp32|fp16|bf16)", name):
        return "The command's name says the dtype: to-fp32, to-fp16 or to-bf16; 'zckpt convert' takes --dtype."
    if plain in ("verbose", "v", "debug"):
        return "There is no such option: ZCKPT_DEBUG=1 in the environment shows where an error comes from."
    if (here := _OPTIONS.get(plain)) is not None and here.partition(" ")[0] in known:
        return f"Did you mean {here}?"
    close = difflib.get_close_matches(f"--{plain}", known, n=2, cutoff=0.75)
    return f"Did you mean {join_words(close, 'or')}?" if close else ""
