"""Deletes the saves of a run that no rule keeps, once those that stay are verified.

For `zckpt prune`. Without `delete` it only says what would go. Nothing outside the run's directory is touched, no symbolic
link is followed, and what is not a save stays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import NotACheckpointError, UnsupportedError, ZckptError
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.base.progress import JobWatch, Progress, watch_progress
from zckpt.base.words import count, examples, size, wrap_text
from zckpt.checks.soundness import examine_checkpoint
from zckpt.engine.batches import progress_after
from zckpt.jobs.groups import Reading
from zckpt.layouts.run_saves import RunSave, named_by_pointers, saves_of, tags_in
from zckpt.storage.location import LocalPath, Location, locate
from zckpt.upkeep.keep_rules import KeepRules, best_by_trainer, reasons_to_stay, values_of
from zckpt.upkeep.links import RunLinks
from zckpt.upkeep.removal import bytes_below, is_left, left_bytes, remove

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveFate:
    """The fate of a save.

    Attributes:
        save: which.
        nbytes: that deleting it frees.
        why: the reasons for which it stays; none if it goes.
        problem: what is wrong with it; empty if it is complete.
        metrics: its values of the metrics that rules are about.
    """

    save: RunSave
    nbytes: int
    why: tuple[str, ...]
    problem: str
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Pruning:
    """What `zckpt prune` reports.

    Attributes:
        run: the directory.
        deleted: whether saves were deleted, or only would be.
        fates: of all saves, by step.
        left_bytes: what a killed prune had left, which goes too.
        notes: sentences a person should see.
    """

    run: str
    deleted: bool
    fates: tuple[SaveFate, ...]
    left_bytes: int
    notes: tuple[str, ...]

    @property
    def going(self) -> list[SaveFate]:
        """The saves that go."""
        return [fate for fate in self.fates if not fate.why]

    @property
    def freed_bytes(self) -> int:
        """Bytes that are freed, or would be."""
        return self.left_bytes + sum(fate.nbytes for fate in self.going)

    def as_json(self) -> dict[str, object]:
        """What `zckpt prune --json` prints, as a dict."""
        saves = [
            {
                "name": fate.save.name, "step": fate.save.step, "bytes": fate.nbytes, "stays": bool(fate.why),
                "why": list(fate.why), "complete": not fate.problem, "problem": fate.problem or None,
                "metrics": dict(fate.metrics),
            }
            for fate in self.fates
        ]  # fmt: skip
        return {
            "run": self.run,
            "deleted": self.deleted,
            "saves": saves,
            "left_bytes": self.left_bytes,
            "freed_bytes": self.freed_bytes,
            "notes": list(self.notes),
        }

    def lines(self, width: int | None = None) -> Iterator[str]:
        """What `zckpt prune` prints; lines have at most `width` characters, longer words aside."""
        stay = len(self.fates) - len(self.going)
        goes = "went" if self.deleted else "would go"
        text = f"{self.run}: {count(stay, 'save stays', 'saves stay')}, {len(self.going):,} {goes} ({size(self.freed_bytes)})"
        yield from wrap_text(text, width, "    ")
        names = max((len(fate.save.name) for fate in self.fates), default=0)
        for fate in self.fates:
            word = "stays" if fate.why else "gone" if self.deleted else "goes"
            line = f"  {word:<5}  {size(fate.nbytes):>8}  {fate.save.name:<{names}}"
            yield from wrap_text(f"{line}  {'; '.join(fate.why)}".rstrip(), width, " " * 19)
        if self.left_bytes:
            yield f"  {'gone' if self.deleted else 'goes':<5}  {size(self.left_bytes):>8}  what an interrupted prune left"
        if not self.deleted and (self.going or self.left_bytes):
            yield "Nothing was deleted. Run the same command with --yes to delete what goes."


def prune(
    run: str | os.PathLike[str],
    rules: KeepRules,
    *,
    delete: bool = False,
    deep: bool = False,
    pace: Pace = DEFAULT_PACE,
    progress: Progress = None,
) -> Pruning:
    """Deletes the saves of a run that no rule keeps.

    Args:
        run: the directory that holds the saves.
        rules: which saves stay.
        delete: whether to delete; otherwise only what would go is found out.
        deep: read every byte of the saves that stay, before any goes.
        pace: how hard to read with `deep`.
        progress: a function that is called with the bytes read and freed so far; None shows a bar in a terminal, False none.

    Returns:
        Which saves stay, which go, and why.

    Raises:
        NotACheckpointError: `run` holds no saves, or is one itself.
        IncompleteError: no save is complete.
        UsageError: there is no such metric.
        OutputError: a save cannot be deleted; saves that still have their names are whole.
    """
    home = locate(run).refreshed()
    if home.is_remote:
        raise UnsupportedError(
            "prune deletes only saves on this machine", file=home, expected="a directory",
            remedy="Run it where the saves are mounted.",
        )  # fmt: skip
    home = LocalPath(os.path.realpath(home))  # the run itself may be a link
    saves, links = saves_of(home)
    if not saves:
        raise NotACheckpointError(
            "holds no saves of a run", file=home,
            expected="tag directories such as global_step500, checkpoint-N folders, or steps such as step-100",
            remedy="Give the directory that the trainer saved to.",
        )  # fmt: skip
    with watch_progress(progress, None, "prune") as watch:
        return _prune_saves(home, saves, links, rules, delete, deep, pace, watch)


def _prune_saves(
    home: Location,
    saves: list[RunSave],
    links: list[str],
    rules: KeepRules,
    delete: bool,
    deep: bool,
    pace: Pace,
    watch: JobWatch | None,
) -> Pruning:
    values = {metric: values_of(saves, metric) for metric, _ in rules.metrics}
    alone: dict[str, frozenset[tuple[str, Shape]]] = {}
    problems = {save.name: found for save in saves if (found := _problem(save, deep=False, pace=pace, alone=alone))}
    for name in _whole_beside_others(alone):
        problems.pop(name)
    needed, notes = _find_needed(home, saves)
    led = RunLinks(home.path, saves)
    read = 0
    sure: set[str] = set()
    while True:
        why = reasons_to_stay(saves, problems, rules, values, needed)
        while more := _led_into(led, why):
            why |= more
        unsure = [save for save in saves if save.name in why and save.name not in {*problems, *sure}] if deep else []
        if not unsure:
            break
        if watch is not None:
            watch.expect(read + sum(bytes_below(save.path.path) for save in unsure))
        for save in unsure:  # what is found to be damaged keeps no other save from staying
            if found := _problem(save, deep=True, pace=pace, alone=alone, progress=progress_after(watch, read)):
                problems[save.name] = found
            sure.add(save.name)
            read += bytes_below(save.path.path)
    nbytes = {save.name: bytes_below(save.path.path) for save in saves}
    left = left_bytes(home.path)
    stayed: list[str] = []
    if delete:
        freed = progress_after(watch, read)
        if watch is not None:
            watch.expect(read + sum(nbytes[save.name] for save in saves if save.name not in why))
        gone = [0]

        def done(name: str) -> None:
            gone[0] += nbytes[name]
            if freed is not None:
                freed(gone[0])

        def needed_now(going: Collection[str]) -> set[str]:
            led = RunLinks(home.path, saves, going)
            staying = {save.name for save in saves}.difference(going)
            return {*_find_needed(home, saves)[0], *led.reasons(staying), *led.mounted}

        going = [save for save in saves if save.name not in why]
        stayed = remove(home.path, going, needed_now, done) if going or is_left(home.path) else []
    why |= {name: ["something names it or leads into it now"] for name in stayed}
    notes += led.notes
    notes += [f"{save.name!r} is not complete: {problems[save.name]}" for save in saves if save.name in problems]
    if links:
        notes.append(f"{examples(links)}: symbolic links are left alone.")
    fates = tuple(
        SaveFate(
            save, nbytes[save.name], tuple(why.get(save.name, ())), problems.get(save.name, ""),
            {metric: known[save.name] for metric, known in values.items() if save.name in known},
        )
        for save in saves
    )  # fmt: skip
    return Pruning(home.path, delete, fates, left, tuple(notes))


def _find_needed(home: Location, saves: list[RunSave]) -> tuple[dict[str, list[str]], list[str]]:
    """Name of a save -> what names it, whatever the rules are; and notes on files that name no save."""
    pointed, notes = named_by_pointers(home, {save.name for save in saves})
    needed: dict[str, list[str]] = {}
    for reasons in (pointed, best_by_trainer(saves)):
        for name, reason in reasons.items():
            needed.setdefault(name, []).append(reason)
    return needed, notes


def _led_into(led: RunLinks, why: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Further saves that stay for the sake of others, with the reasons."""
    found = led.mounted | led.reasons(why)
    return {name: [reason] for name, reason in found.items() if name not in why}


def _whole_beside_others(alone: Mapping[str, frozenset[tuple[str, Shape]]]) -> list[str]:
    """The saves of weights without a proof that hold every tensor that any of them has."""
    most = frozenset[tuple[str, Shape]]().union(*alone.values())
    return [name for name, own in alone.items() if own == most] if len(alone) > 1 else []


def _problem(
    save: RunSave, *, deep: bool, pace: Pace, alone: dict[str, frozenset[tuple[str, Shape]]],
    progress: Callable[[int], None] | None = None,
) -> str:  # fmt: skip
    """The problem of a save; empty if it is complete, and intact as far as it was read: every byte, if `deep`. `alone`: names and
    shapes of the tensors of saves that are weights without a proof; gets this one's, or has them.
    """
    try:
        for tag in tags_in(save):
            found = examine_checkpoint(save.path, Reading(tag=tag), deep=deep, pace=pace, progress=progress)
            if not found.ok:
                return next(problem for check in found.checks for problem in check.problems)
            evidence = None if found.catalog is None else found.catalog.evidence
            if evidence is None or evidence.is_counted or (evidence.left_out and evidence.lacks) or save.name in alone:
                continue
            if found.catalog is not None and found.catalog.source.layout == "plain" and not evidence.lacks:
                alone[save.name] = frozenset((entry.name, entry.shape) for entry in found.catalog.tensors.values())
            return str(evidence)
    except ZckptError as error:
        return str(error)
    return ""
