"""What `zckpt verify` reports.

For `soundness` and `verify`, which fill it in, and the command line, which prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zckpt.base.dataclass import dataclass
from zckpt.base.words import count, row, size, wrapped


@dataclass(frozen=True, slots=True)
class Check:
    """One question, and its answer.

    Attributes:
        name: of the question, one word.
        answer: what was found, if nothing is wrong.
        problems: what is wrong, as sentences.
    """

    name: str
    answer: str
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Verification:
    """Everything that `verify` reports.

    Attributes:
        path: what was checked.
        about: what it is, in a few words.
        deep: whether every byte was read.
        checks: the questions and answers.
        numbers: tensor -> (NaNs, infinities), of tensors with any; None if they were not counted.
        deletable: whether the shards may be deleted, and why; None if nothing was compared with them.
        notes: sentences for a person; none of them is a problem.
        unread_bytes: bytes of elements that no check has read; 0 with `deep`.
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
            "checks": [
                {"name": c.name, "ok": c.ok, "told": c.answer, "problems": list(c.problems)} for c in self.checks
            ],
            "numbers": counted,
            "deletable": None if self.deletable is None else {"ok": self.deletable[0], "reason": self.deletable[1]},
            "unread_bytes": self.unread_bytes,
            "notes": list(self.notes),
        }

    def lines(self, width: int | None = None) -> Iterator[str]:
        """The verification as lines for a person.

        Args:
            width: the most characters in a line, longer words aside; None for one line a sentence.
        """
        yield from wrapped(f"{self.path}: {self.about}", width, "    ")
        for check in self.checks:
            first, *others = [problem.replace(f"{self.path}/", "") for problem in check.problems] or [""]
            yield from row(check.name, check.answer if check.ok else f"NO: {first}", width)
            for problem in others:
                yield from row("", problem, width)
        for name, (nan, inf) in (self.numbers or {}).items():
            yield from row("", f"{name}: {nan:,} NaN, {inf:,} infinite", width)
        for note in self.notes:
            yield from row("note", note, width)
        if self.unread_bytes:
            yield from row("not read", f"{size(self.unread_bytes)} of elements; --deep reads every byte", width)
        wrong = sum(len(check.problems) for check in self.checks)
        yes = "yes, as far as it was read" if self.unread_bytes else "yes"
        yield from row("intact", yes if self.ok else f"no: {count(wrong, 'problem')}", width)
        if self.deletable is not None:
            may, reason = self.deletable
            sentence = f"{'The shards may be deleted' if may else 'Do not delete the shards'}: {reason}."
            yield from wrapped(sentence, width)


def summarized(problems: list[str], what: str) -> list[str]:
    """At most three problems, after their number."""
    return [f"{len(problems):,} {what}", *problems[:3]] if len(problems) > 3 else problems
