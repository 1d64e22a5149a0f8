"""What proves that a catalog is the whole model: a value that goes with it to every verdict.

For `layouts`, which say it of every save, and for `jobs`, `checks` and the command line, which may say no more than it does.

    metadata   the save itself lists every part and its place: an index, `.metadata`, `param_shapes` with its ranks
    shapes     parts are found by name, and something else says what the whole is: a config.json, the optimizer's metadata
    unknown    nothing says it: the parts that are here fit each other, and more of them may be missing
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Level = Literal["metadata", "shapes", "unknown"]
_STRENGTH: tuple[Level, ...] = ("unknown", "shapes", "metadata")


class Evidence(NamedTuple):
    """What proves that a catalog is the whole model.

    Attributes:
        level: how strong the proof is: see the module.
        by: what says so, as a noun for a sentence; of `unknown`, why nothing does.
        missing: what would raise the level, as a noun for a sentence; empty where nothing can.
        lacks: tensors of the model that are known not to be here, as far as they are known.
        doubt: what the run may have left out without a trace in the save, as a sentence without its subject; empty for nothing.
    """

    level: Level
    by: str
    missing: str = ""
    lacks: tuple[str, ...] = ()
    doubt: str = ""

    @property
    def complete(self) -> bool | None:
        """True where something proves that nothing is missing, False where something is; None where it cannot be told."""
        if self.lacks:
            return False
        return None if self.level == "unknown" or self.doubt else True

    @property
    def is_counted(self) -> bool:
        """Whether something proves that everything that was saved is here."""
        return not self.lacks and self.level != "unknown"

    @property
    def left_out(self) -> bool:
        """Whether the run left parameters out on purpose: they are in the model that it began with."""
        return self.by == LEFT_OUT

    def __str__(self) -> str:
        """A clause for a person: what proves the whole, or that nothing does, and what would."""
        if self.lacks:
            names = ", ".join(repr(name) for name in self.lacks[:3]) + (", ..." if len(self.lacks) > 3 else "")
            return f"not the whole model, which has also {names}: {self.by}"
        if self.level != "unknown":
            return f"nothing is missing, by {self.by}" + (f", unless {self.doubt}" if self.doubt else "")
        remedy = f"; {self.missing} would tell" if self.missing else ""
        return f"it cannot be told whether this is the whole model: {self.by}{remedy}"

    def as_json(self) -> dict[str, object]:
        """The facts under the names that `--json` and `zckpt.json` have."""
        facts: dict[str, object] = {"level": self.level, "by": self.by}
        facts |= {"missing": self.missing} if self.missing else {}
        facts |= {"lacks": list(self.lacks)} if self.lacks else {}
        return facts | ({"doubt": self.doubt} if self.doubt else {})


def weakest(evidence: Iterable[Evidence]) -> Evidence:
    """The weakest of several proofs, which is what all of them together prove; the first of equal ones."""
    return min(evidence, key=lambda one: (not one.lacks, _STRENGTH.index(one.level), not one.doubt))


LEFT_OUT = "the run saved without its frozen parameters"
"""DeepSpeed's `exclude_frozen_parameters`."""
NO_LIST_OF_FROZEN = "the run saved without its frozen parameters, which a save below ZeRO stage 2 does not record"
"""The doubt about a save of ZeRO stage 0 or 1, or without ZeRO: it does not record its frozen parameters."""
BY_MANIFEST = "zckpt.json, which says what they were made from"
"""The proof of weights that zckpt wrote from a complete save."""
OWN_INDEX = Evidence("metadata", "the file's own index")
"""The proof of a file that is one part of a save, when something else counts the parts."""
LIVE = Evidence("metadata", "the model in memory")
