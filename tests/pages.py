"""Reads the fenced blocks of a page and runs them as they are printed, in the order of the page, in one directory.

A comment on the line before a block says what is special about it:
    <!-- not run: REASON -->   its commands are only parsed, by the command line's own parser
    <!-- file: NAME -->        the block is the contents of a file that later commands use
    <!-- given: NAMES -->      Python that runs before the block: entries of `given`, by name
A `console` block has commands after `$ `, and below each what it prints, where `...` stands for anything.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from hangs import HANG_S
from standby import programs

from zckpt.cli import app

ROOT = Path(__file__).parent.parent

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- (not run|file|given): ([^\n]*) -->\n\Z")
_LAUNCHERS = ("torchrun", "srun", "env")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        place: "docs/push.md:12", for messages.
        language: after the fence.
        text: between the fences.
        mark: what the comment before it is about: "not run", "file", "given" or nothing.
        about: the rest of that comment.
    """

    place: str
    language: str
    text: str
    mark: str
    about: str


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = []
    for match in _FENCE.finditer(text):
        comment = _COMMENT.search(text[: match.start()])
        mark, about = comment.groups() if comment else ("", "")
        found.append(Block(f"{page}:{text.count(chr(10), 0, match.start()) + 1}", match[1], match[2], mark, about))
    return found


def indented_code(page: str) -> list[str]:
    """Lines that a renderer shows as code though they are in no fence: nothing of this kind may escape the tests."""
    text = _FENCE.sub("", (ROOT / page).read_text())
    return re.findall(r"(?<=\n\n)    \S.*", text)


def commands_in(text: str) -> Iterator[list[str]]:
    """The command lines of a script, as words."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def check_options(block: Block) -> None:
    """Lets the command line parse what is printed: every command and option exists, and takes such a value."""
    known: Any = typer.main.get_command(app)
    for words in commands_in(block.text):
        if words[0] == "make":
            rules = (ROOT / "Makefile").read_text()
            assert all(re.search(rf"^{re.escape(target)}:", rules, re.MULTILINE) for target in words[1:]), block.place
        if words[0] in _LAUNCHERS and "zckpt" in words:
            words = words[words.index("zckpt") :]
        if words[0] == "zckpt":
            with known.get_command(None, words[1]).make_context(words[1], words[2:]):
                pass


def _unwrapped(text: str) -> str:
    """Text in one line: pages and terminals have lines of different widths."""
    return " ".join(text.split())


class Reader:
    """Somebody who follows a page. Use as a context manager.

    Args:
        directory: where everything is run.
        environment: of everything that is run.
        given: name -> Python, for blocks that need names that the page does not define.
    """

    def __init__(self, directory: Path, environment: Mapping[str, str], given: Mapping[str, str]) -> None:
        self._directory, self._environment, self._given = directory, dict(environment), given
        self._python: subprocess.Popen[str] | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._python is not None:
            self._python.communicate(timeout=HANG_S)

    def follow(self, block: Block) -> None:
        """Does what a block says; an AssertionError tells what went wrong there."""
        if block.mark == "not run":
            check_options(block)
        elif block.mark == "file":
            (self._directory / block.about).write_text(block.text)
        elif block.language == "sh":
            done = self._shell(f"set -eux\n{block.text}")
            assert done.returncode == 0, f"{block.place}\n{done.stdout}\n{done.stderr}"
        elif block.language == "console":
            self._console(block)
        elif block.language == "python":
            for name in block.about.split(", ") if block.mark == "given" else ():
                self._execute(self._given[name], name)
            self._execute(block.text, block.place)
        else:
            assert block.language in ("text", "json"), f"{block.place}: what language is this?"

    def _shell(self, script: str, *, together: bool = False) -> subprocess.CompletedProcess[str]:
        errors = subprocess.STDOUT if together else subprocess.PIPE
        return subprocess.run(
            ["bash", "-c", script], cwd=self._directory, env=self._environment, text=True, stdout=subprocess.PIPE,
            stderr=errors, timeout=HANG_S,
        )  # fmt: skip

    def _console(self, block: Block) -> None:
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, expected = re.match(r"((?:[^\n]*\\\n)*[^\n]*\n)(.*)", part, re.DOTALL).groups()  # type: ignore[union-attr]
            printed = self._shell(command, together=True).stdout
            pattern = re.escape(_unwrapped(expected)).replace(re.escape("..."), ".*?")
            shown = f"{block.place}: {command}\nprints:\n{printed}\nthe page has:\n{expected}"
            assert re.fullmatch(pattern, _unwrapped(printed)), shown

    def _execute(self, code: str, name: str) -> None:
        if self._python is None:
            command = [f"{programs()}/python", str(ROOT / "tests" / "snippets.py")]
            self._python = subprocess.Popen(
                command,
                cwd=self._directory,
                env=self._environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._python.stdin is not None and self._python.stdout is not None
        self._python.stdin.write(json.dumps([code, name]) + "\n")
        self._python.stdin.flush()
        answer = self._python.stdout.readline()
        assert answer, f"{name}: Python ended"
        assert not (told := json.loads(answer)), f"{name}\n{told}"
