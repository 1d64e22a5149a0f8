"""Reads a checkpoint and its output once, side by side: whether they are equal, and whether each of them is intact."""

from __future__ import annotations

from collections.abc import Sequence

from zckpt.base.errors import ZckptError, redact
from zckpt.base.pace import Pace
from zckpt.base.progress import JobWatch
from zckpt.checks.contents import Beside, check_bytes, check_compared
from zckpt.checks.examined import Examined
from zckpt.checks.integrity import CheckedFile, Done, sums_of
from zckpt.core.catalog import Replica, TensorEntry
from zckpt.engine.batches import progress_after
from zckpt.engine.independent import Difference, Unequal, derived_again, differences
from zckpt.engine.tensor_statistics import Statistics
from zckpt.storage.location import Location


def add_output(state: Examined, output: Examined, converted: Location) -> None:
    """Adds to a checkpoint's checks whether its output is intact."""
    problems = [problem for check in output.checks for problem in check.problems]
    state.add("output", f"{redact(converted.path)}: intact", problems)
    state.notes += output.notes


def read_both(
    state: Examined,
    output: Examined,
    pairs: Sequence[tuple[TensorEntry, TensorEntry]],
    held: tuple[list[CheckedFile], int],
    pace: Pace,
    watch: JobWatch | None,
    done: int,
    converted: Location,
    *,
    clamp: bool,
) -> list[Difference]:
    """Derives the output once more, and checks whether the bytes of both sides are intact; returns the differences."""
    progress = progress_after(watch, done)
    files = [output.files, held[0]]
    sums = [sums_of(own) for own in files]
    copies = _copies(state, pairs) if not state.whole else {}
    try:
        found = derived_again(
            pairs, {n: replicas for n, (_, replicas) in copies.items()}, [*sums[0], *sums[1]],
            clamp=clamp, progress=progress, **pace,
        )  # fmt: skip
    except ZckptError:  # each of both by itself, to see which one it is
        check_bytes(output, pace, progress)
        add_output(state, output, converted)
        check_compared(state, held, pace, progress)
        return differences(pairs, clamp=clamp, threads=pace["threads"], bytes_per_s=pace["bytes_per_s"])
    confirmed, first = found.confirmed, len(sums[0])
    read = [
        Done(
            {n - at: parts for n, parts in confirmed.crcs.items() if at <= n < at + len(own)},
            sum(confirmed.bytes_read.get(path, 0) for path in {file.store.path for file in these}),
        )
        for at, own, these in ((0, sums[0], files[0]), (first, sums[1], files[1]))
    ]
    total = found.nbytes
    total += check_bytes(output, pace, progress_after(progress, total), read=read[0])
    add_output(state, output, converted)
    statistics = {
        name: [_statistics(pairs[n][0], confirmed.copies.get((n, copy))) for copy in range(len(replicas))]
        for n, (name, replicas) in copies.items()
        if n in found.copied
    }
    total += check_compared(state, held, pace, progress_after(progress, total), Beside(read[1], statistics))
    if watch is not None:
        watch.expect(done + total)
        watch(done + total)
    return found.differences


def _copies(
    state: Examined, pairs: Sequence[tuple[TensorEntry, TensorEntry]]
) -> dict[int, tuple[str, Sequence[Replica]]]:
    """Number of a pair -> the name of its tensor in the checkpoint, and the tensor's replicas."""
    assert state.catalog is not None
    held = {id(entry.fragments): name for name, entry in state.catalog.tensors.items() if entry.replicas}
    found: dict[int, tuple[str, Sequence[Replica]]] = {}
    for number, (source, _) in enumerate(pairs):
        name = held.get(id(source.fragments))
        if name is not None and source.dtype == state.catalog.tensors[name].dtype:
            del held[id(source.fragments)]
            found[number] = name, state.catalog.tensors[name].replicas
    return found


def _statistics(entry: TensorEntry, found: Unequal | None) -> Statistics:
    return Statistics(entry.numel) if found is None else Statistics(entry.numel, differ=found.count, first=found.first)
