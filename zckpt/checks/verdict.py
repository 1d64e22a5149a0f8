"""What `zckpt verify` answers: a value first, text second.

For `soundness` and `verify`, which find out, and the command line, which prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One question, and its answer.

    Attributes:
        name: of the question, one word.
        told: what was found, where all is well.
        problems: what is wrong, as sentences; empty where all is well.
    """

    name: str
    told: str
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Verification:
    """Everything `verify` tells.

    Attributes:
        path: what was looked at.
        about: what it is, in a few words.
        deep: whether every byte was read.
        checks: the questions and answers.
        numbers: tensor -> (NaNs, infinities), where there are any; None where they were not counted.
        deletable: whether the shards may be deleted, and why; None where nothing was compared with them.
        notes: sentences a person should see, that make nothing wrong.
        unread_bytes: of the files' elements, that no check has read; 0 with `deep`.
    """

    path: str
    about: str
    deep: bool
    checks: tuple[Check, ...]
    numbers: Mapping[str, tuple[int, int]] | None = None
    deletable: tuple[bool, str] | None = None
    notes: tuple[str, ...] = ()
    unread_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, object]:
        """One object for programs."""
        counted = None if self.numbers is None else {n: {"nan": a, "inf": b} for n, (a, b) in self.numbers.items()}
        return {
            "path": self.path,
            "about": self.about,
            "ok": self.ok,
            "deep": self.deep,
            "checks": [{"name": c.name, "ok": c.ok, "told": c.told, "problems": list(c.problems)} for c in self.checks],
            "numbers": counted,
            "deletable": None if self.deletable is None else {"ok": self.deletable[0], "reason": self.deletable[1]},
            "unread_bytes": self.unread_bytes,
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        """The verification as lines for a person."""
        yield f"{self.path}: {self.about}"
        for check in self.checks:
            yield f"  {check.name:<11} {check.told if check.ok else 'NO: ' + check.problems[0]}"
            yield from (f"  {'':<11} {problem}" for problem in check.problems[1:])
        for name, (nan, inf) in (self.numbers or {}).items():
            yield f"  {'':<11} {name}: {nan:,} NaN, {inf:,} infinite"
        yield from (f"  {'note':<11} {note}" for note in self.notes)
        if self.unread_bytes:
            yield f"  {'not read':<11} {self.unread_bytes:,} bytes of elements; --deep reads every byte"
        wrong = sum(len(check.problems) for check in self.checks)
        yes = "yes, as far as it was read" if self.unread_bytes else "yes"
        yield f"  {'intact':<11} {yes if self.ok else f'no: {wrong:,} problem' + 's' * (wrong > 1)}"
        if self.deletable is not None:
            may, reason = self.deletable
            yield f"{'The shards may be deleted' if may else 'Do not delete the shards'}: {reason}."


def few(problems: list[str], what: str) -> list[str]:
    """At most three, after how many there are."""
    return [f"{len(problems):,} {what}", *problems[:3]] if len(problems) > 3 else problems
