"""What `zckpt verify` reports: the answers to its questions, and a verdict that is as strong as its evidence.

For `soundness` and `verify`, which fill it in, and the command line, which prints it. The verdict on deleting the shards says
first what is lost with them. Where nothing proves that the checkpoint is whole, or that its tensors were found where they are,
it is "do not delete".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from zckpt.base.dataclass import dataclass, public
from zckpt.base.words import Printed, count, row, shorten_text, size, wrap_text


@dataclass(frozen=True, slots=True)
class Check:
    """One question, and its answer.

    Attributes:
        name: of the question, one word.
        answer: what was found, if nothing is wrong.
        problems: what is wrong, as sentences; of many, their number and the first few.
        wrong: how many things are wrong, where that is more than there are sentences.
    """

    name: str
    answer: str
    problems: tuple[str, ...] = ()
    wrong: int = 0

    @property
    def number(self) -> int:
        """The number of problems."""
        return max(self.wrong, len(self.problems))

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


@public
@dataclass(frozen=True, slots=True, repr=False)
class Verification(Printed):
    """Everything that `verify` reports.

    Attributes:
        path: what was checked.
        about: what it is, in a few words.
        deep: whether every byte was read.
        checks: the questions and answers.
        numbers: tensor -> (NaNs, infinities), of tensors with any; None if they were not counted.
        deletable: whether the shards may be deleted, and why; None if nothing was compared with them.
        complete: whether the checkpoint is the whole model; None where nothing tells.
        proved_by: what proves each thing: `whole` (that no part is missing), `places` (that tensors are where they were read).
        not_proved: what nothing proves, as sentences.
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
    complete: bool | None = None
    proved_by: Mapping[str, str] = field(default_factory=dict[str, str])
    not_proved: tuple[str, ...] = ()
    loads_as: str | None = None
    like: Mapping[str, object] | None = None
    headers_only: bool = False

    def __repr__(self) -> str:
        bad = [check.name for check in self.checks if not check.ok]
        good = "intact" if self.complete is not None else "intact as far as can be told"
        said = f"NO: {', '.join(bad)}" if bad else good
        return f"<zckpt.Verification {shorten_text(self.path)!r}: {said}>"

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, object]:
        """The fields for programs."""
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
            "complete": self.complete,
            "proved_by": dict(self.proved_by),
            "not_proved": list(self.not_proved),
            "deletable": None if self.deletable is None else {"ok": self.deletable[0], "reason": self.deletable[1]},
            "unread_bytes": self.unread_bytes,
            "like": None if self.like is None else dict(self.like),
            "notes": list(self.notes),
        }

    def lines(self, width: int | None = None) -> Iterator[str]:
        """The verification as lines for a person; `width` as in `words.row`."""
        yield from wrap_text(f"{self.path}: {self.about}", width, "    ")
        for check in self.checks:
            first, *others = [problem.replace(f"{self.path}/", "") for problem in check.problems] or [""]
            yield from row(check.name, check.answer if check.ok else f"NO: {first}", width)
            for problem in others:
                yield from row("", problem, width)
        for name, (nan, inf) in (self.numbers or {}).items():
            yield from row("", f"{name}: {nan:,} NaN, {inf:,} infinite", width)
        for note in self.notes:
            yield from row("note", note, width)
        if self.headers_only:
            wrong = sum(check.number for check in self.checks)
            said = f"yes, as {self.loads_as}" if self.loads_as else f"no: {count(wrong, 'problem')}"
            yield from row("loads", said, width)
            return
        if self.unread_bytes:
            yield from row("not read", f"{size(self.unread_bytes)} of elements; --deep reads every byte", width)
        wrong = sum(check.number for check in self.checks)
        yes = "yes, as far as it was read" if self.unread_bytes else "yes"
        if self.complete is None:
            yes += (
                f"; whether {'more was left out' if 'whole' in self.proved_by else 'parts are missing'} cannot be told"
            )
        yield from row("intact", yes if self.ok else f"no: {count(wrong, 'problem')}", width)
        if self.deletable is not None:
            may, reason = self.deletable
            safe = "Safe to delete" + (" " if reason.startswith("if ") else ": ")
            yield from wrap_text(f"{safe if may else 'Do not delete the shards: '}{reason}.", width)


def summarize(problems: Sequence[str], what: str) -> list[str]:
    """At most three problems, after their number."""
    return [f"{len(problems):,} {what}", *problems[:3]] if len(problems) > 3 else list(problems)
