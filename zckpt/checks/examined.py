"""What has been found out about a checkpoint or output, check by check.

For `soundness` and those who add to its answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.checks.integrity import CheckedFile
from zckpt.checks.second import Places
from zckpt.checks.verdict import Check, summarize
from zckpt.core.catalog import Catalog
from zckpt.layouts.places import Place
from zckpt.layouts.save.origins import FileOrigin
from zckpt.output.manifest import Manifest


@dataclass(slots=True)
class Examined:
    """What has been found out about a checkpoint or output, check by check.

    Attributes:
        place: where it is.
        places: whether a second reader finds the tensors, and the optimizer's states as far as they are looked at, where the
            first one reads them.
        catalog: its tensors, under the model's own names; None when they cannot be read.
        files: those of the save that can be opened.
        origins: what they record of their save.
        checks: the questions and answers so far.
        notes: sentences a person should see.
        numbers: tensor -> (NaNs, infinities), where there are any; None where they were not counted.
        names: of tensors, as the files have them -> the model's own.
        whole: whether every byte was read.
        unread_bytes: of elements that no check has read.
        facts: the manifest; None where there is none, or none that can be read.
        is_completed: whether what the run left out on purpose is in the output, from the model that it began with.
    """

    place: Place
    places: Places
    catalog: Catalog | None = None
    files: list[CheckedFile] = field(default_factory=list[CheckedFile])
    origins: list[FileOrigin] = field(default_factory=list[FileOrigin])
    checks: list[Check] = field(default_factory=list[Check])
    notes: list[str] = field(default_factory=list[str])
    numbers: dict[str, tuple[int, int]] | None = None
    names: dict[str, str] = field(default_factory=dict[str, str])
    whole: bool = False
    unread_bytes: int = 0
    facts: Manifest | None = None
    is_completed: bool = False

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong so far."""
        return all(check.ok for check in self.checks)

    def unproved(self, *, trust_reader: bool = False) -> list[str]:
        """What nothing proves, as clauses: that the checkpoint is whole, and that its tensors lie where they were read.
        `trust_reader`: the user does without the second.
        """
        is_whole = self.catalog is None or self.catalog.evidence.is_counted or self.is_completed
        found = [] if self.catalog is None or is_whole else [str(self.catalog.evidence)]
        if self.catalog is not None and self.places.by == "none" and not trust_reader:
            found.append(
                f"its tensors were not found a second time ({self.places.why}), so a mistake of zckpt's own reader would not be "
                "noticed; --trust-reader takes that risk"
            )
        return found

    @property
    def doubt(self) -> str:
        """The doubt about what the run may have left out of the save without a trace, as a clause; empty for none."""
        said = "" if self.catalog is None or self.is_completed else self.catalog.evidence.doubt
        return f"nothing shows whether {said}" if said else ""

    def proofs(self) -> dict[str, str]:
        """The proofs that no part is missing (`whole`), and that tensors lie where they were read (`places`)."""
        known = self.catalog is not None and self.catalog.evidence.is_counted
        whole = {"whole": self.catalog.evidence.by} if self.catalog is not None and known else {}
        return whole if self.places.by == "none" else {**whole, "places": self.places.by}

    def add(self, name: str, answer: str, problems: Sequence[str] = (), what: str = "") -> None:
        """Adds a check. Of many problems, the first are kept, after their number and `what` they are, such as "files differ"."""
        kept = summarize(problems, what) if what else problems
        self.checks.append(Check(name, answer, tuple(kept), len(problems)))
