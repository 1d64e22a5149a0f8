"""Checks a checkpoint's bytes: checksums, copies, padding, NaN and infinity.

For `soundness`, which reads a checkpoint by itself, and `verify`, which reads it beside its output.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from zckpt.base.errors import ZckptError
from zckpt.base.pace import Pace
from zckpt.base.words import count, examples, join_words, size
from zckpt.checks.examined import Examined
from zckpt.checks.integrity import CheckedFile, Done, Findings, examine, holding, non_finite, numel_of
from zckpt.checks.verdict import Check, summarize
from zckpt.core.catalog import Catalog, Replica, TensorEntry
from zckpt.engine.early import EarlyReads
from zckpt.engine.tensor_statistics import Statistics

_COPIES = {
    "masters": ("fp32 weights of the optimizer", "the model's half-precision weights"),
    "copies": ("tensors", "the copies of other ranks"),
}


def add_copies(state: Examined, catalog: Catalog, bad: Sequence[tuple[Replica, str]], where: str) -> None:
    """Checks whether masters equal the model's own weights, and whether ranks agree on what several of them hold."""
    for name, (what, copies) in _COPIES.items():
        of_ranks = name == "copies"
        held = sum(any(bool(r.rank) == of_ranks for r in entry.replicas) for entry in catalog.tensors.values())
        if held:
            problems = [answer for replica, answer in bad if bool(replica.rank) == of_ranks]
            answer = f"{held:,} {what} agree with {copies}, {where}"
            state.add(name, answer, problems, f"{what} disagree with {copies}")
    frozen = [entry.name for entry in catalog.tensors.values() if entry.role == "frozen" and not entry.replicas]
    if frozen and not any(check.name == "frozen" for check in state.checks):
        names = [*frozen, *(dropped for dropped, kept in catalog.aliases.items() if kept in frozen)]
        state.add(
            "frozen", f"{count(len(frozen), 'tensor')} not trained, so without a copy to compare: {examples(names)}"
        )


def _add_whole_copies(state: Examined, catalog: Catalog, findings: Findings) -> None:
    bad = [
        (
            replica,
            f"{name!r}: {statistics.differ:,} of {count(statistics.count, 'element')}, the first is number {statistics.first:,}",
        )
        for name, replica, statistics in findings.copies
        if statistics.differ
    ]
    add_copies(state, catalog, bad, "in every element")


def held_files(state: Examined, further: Sequence[TensorEntry]) -> tuple[list[CheckedFile], int]:
    """The files and records that hold what an output is compared with, as `integrity.holding` gives them.

    These are the elements of the catalog and of `further` tensors. None if every byte was read already.
    """
    if state.whole or state.catalog is None:
        return [], 0
    return holding(state.files, [*state.catalog.tensors.values(), *further])


def check_compared(
    state: Examined,
    held: tuple[list[CheckedFile], int],
    pace: Pace,
    progress: Callable[[int], None] | None = None,
    read: Done | None = None,
    known: Mapping[str, Sequence[Statistics]] = {},
) -> int:
    """Checks the bytes that an output was compared with, if only ends of fragments were read so far; returns the bytes read
    here.

    Each record that holds some of them must match its checksum, and every element must equal its copies. `held` is from
    `held_files`; `read` is what was read of these files beside the output, and `known` what the replicas of a tensor showed
    then.
    """
    if state.whole or state.catalog is None:
        return 0
    files, without = held
    copied = replace(state.catalog.select(lambda entry: bool(entry.replicas)), padding=())
    unknown = replace(copied, tensors={name: e for name, e in copied.tensors.items() if name not in known}, aliases={})
    state.checks = [check for check in state.checks if check.name not in _COPIES]
    try:
        findings = examine(unknown, files, pace, progress, read)
    except ZckptError as error:
        state.add("bytes", "", [str(error)])
        return 0
    more = tuple(
        (name, replica, statistics)
        for name, found in known.items()
        for replica, statistics in zip(copied.tensors[name].replicas, found, strict=True)
    )
    findings = replace(findings, copies=(*findings.copies, *more))
    _add_sums(state, findings, "that the output was compared with")
    _add_whole_copies(state, copied, findings)
    state.unread_bytes = max(0, state.unread_bytes - without - sum(file.large_bytes for file in files))
    return findings.bytes_read - (0 if read is None else read.nbytes)


def add_padding(state: Examined, catalog: Catalog, found: Sequence[Statistics]) -> None:
    """Checks whether padding is zero where it should be."""
    problems = [
        f"{one.nonzero:,} of {count(one.count, 'element')} in {os.path.basename(str(pad.fragments[0].store))!r} are not zero"
        for pad, one in zip(catalog.zeros, found, strict=True)
        if one.nonzero
    ]
    state.add(
        "padding",
        f"{count(numel_of(catalog.zeros), 'element')}, all zero",
        problems,
        "vectors with padding that is not zero",
    )


def _add_sums(state: Examined, findings: Findings, what: str, further: Sequence[str] = ()) -> None:
    """Checks whether bytes match their checksums. `what`: the bytes that were read, `further`: what else has checksums, in
    words.
    """
    problems = [f"record {r!r} of {f!r} does not match its checksum" for f, r in findings.wrong_records]
    wrong = len(problems) + len(findings.wrong_files)
    problems = summarize(problems, "records do not match their checksums")
    problems += [f"{name!r} does not match its checksum in the manifest" for name in findings.wrong_files]
    sums = [*[count(findings.records, "record")] * bool(findings.records), *further]
    answer = f"the checksums of {join_words(sums)} match" if sums else "there are no checksums"
    state.checks.append(Check("bytes", f"{size(findings.bytes_read)} {what}; {answer}", tuple(problems), wrong))
    if without := [f.name for f in state.files if not f.records and f.crc32 is None]:
        holds = "holds" if len(without) == 1 else "hold"
        state.notes.append(f"{examples(without)} {holds} no checksums, so changed bytes cannot be found there.")


def check_bytes(
    state: Examined,
    pace: Pace,
    progress: Callable[[int], None] | None = None,
    *,
    deep: bool = False,
    read: Done | None = None,
    early: EarlyReads | None = None,
) -> int:
    """Reads everything once that was not read before, with `deep` counting NaN and infinity; returns the bytes read here."""
    try:
        return _check_bytes(state, pace, progress, deep, read, early) - (0 if read is None else read.nbytes)
    except ZckptError as error:  # a disk that does not give back what it was given
        state.add("bytes", "", [str(error)])
        return 0


def _check_bytes(
    state: Examined,
    pace: Pace,
    progress: Callable[[int], None] | None,
    deep: bool,
    read: Done | None,
    early: EarlyReads | None,
) -> int:
    catalog = state.catalog
    looked_at = catalog
    if catalog is not None and not deep:  # what is in tensors interests where it must equal something
        looked_at = catalog.select(lambda entry: bool(entry.replicas))
    findings = examine(looked_at, state.files, pace, progress, read, early)
    state.whole = True
    listed = sum(file.crc32 is not None for file in state.files)  # what `examine` compared
    _add_sums(state, findings, "read", [f"{count(listed, 'file')} of the manifest"] * bool(listed))
    if catalog is None:
        return findings.bytes_read
    _add_whole_copies(state, catalog, findings)
    if catalog.zeros:
        add_padding(state, catalog, findings.padding)
    if deep:
        state.numbers = non_finite(findings.tensors)
        trained = [name for name in state.numbers if catalog.tensors[name].role != "buffer"]
        nan, inf = (sum(state.numbers[name][i] for name in trained) for i in (0, 1))
        answer = "no parameter holds NaN or infinity"
        problems = [f"{nan:,} NaN and {inf:,} infinite in {count(len(trained), 'parameter')}"] if trained else []
        state.add("numbers", answer, problems)
    return findings.bytes_read
