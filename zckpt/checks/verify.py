"""Whether an output equals the checkpoint that it was made of, and whether the shards may be deleted.

For `zckpt verify`. `soundness` finds out whether each of the two is intact.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zckpt import layouts
from zckpt.base.errors import UnsupportedError, redact
from zckpt.base.pace import DEFAULT_PACE, Pace
from zckpt.base.progress import JobWatch, Progress, reported
from zckpt.base.words import count, examples, joined
from zckpt.checks.contents import held_files
from zckpt.checks.deltas import verify_delta
from zckpt.checks.examined import Examined
from zckpt.checks.quantised import Expected, in_numbers, quantised
from zckpt.checks.renamed_states import compare_renamed, has_renamed_states, own_weights
from zckpt.checks.resumable import Comparison, Pair, compare_runs
from zckpt.checks.side_by_side import add_output, read_both
from zckpt.checks.soundness import examined
from zckpt.checks.verdict import Verification, summarized
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import CAST_TARGETS, is_lossless
from zckpt.deltas.read import is_delta_directory
from zckpt.engine.batches import progress_after
from zckpt.jobs.convert import select
from zckpt.jobs.merged import merged_again
from zckpt.jobs.open import Opened, states_of
from zckpt.jobs.options import LoraMerge, OpenOptions, Options, output_dtype, to_dtype
from zckpt.jobs.to_fp8 import RECORDED
from zckpt.layouts.places import Place
from zckpt.layouts.save.listing import ReadOptions
from zckpt.naming.adapter_names import found_in
from zckpt.naming.transform import formed_again
from zckpt.output import manifest as manifests
from zckpt.output.manifest import Manifest
from zckpt.storage.location import Location, locate, location_of


def verify(
    checkpoint: str | os.PathLike[str],
    converted: str | os.PathLike[str] | None = None,
    *,
    deep: bool = False,
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    read_options: ReadOptions | None = None,
    lora: LoraMerge | None = None,
    pace: Pace = DEFAULT_PACE,
    progress: Progress = None,
) -> Verification:
    """Checks whether a checkpoint, or an output with its `zckpt.json`, is complete and intact.

    Args:
        checkpoint: a checkpoint, plain weights, or a delta; here or behind an address.
        converted: an output (or a delta) made from it: every tensor is derived from the shards once more and compared; if it is a
            checkpoint, so is the optimizer's state.
        deep: read every byte of the checkpoint: checksums, copies of weights, NaN and infinity.
            Without it, and with `converted`, the bytes are read that the output was made of. What has a `zckpt.json` is
            always read whole, and so is `converted`.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        read_options: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.
        lora: the base and the adapters that were merged into `converted`, where they are not in the checkpoint.
        pace: threads, bytes per second, and whether the page cache keeps what is read; None for each default.
        progress: a function that is called with the bytes read so far, and with the total if it takes a second argument (it
            grows when it is found that there is more to read); None shows a bar in a terminal or notebook, False shows none.

    Returns:
        The answers. Its `ok` says whether nothing is wrong, `deletable` whether the shards may be deleted; `lines()` and
        `as_json()` say why.

    Raises:
        NotACheckpointError: there is nothing to look at. UnsupportedError: zckpt cannot read it.

    Example:
        assert zckpt.verify("out/checkpoint-500", "weights/").ok
    """
    with reported(progress, None, "verify") as watch:
        options = OpenOptions(tag=tag, also=also, read_options=read_options)
        path, delta = locate(checkpoint), locate(checkpoint if converted is None else converted)
        if is_delta_directory(delta):
            more = (lambda nbytes: None) if watch is None else watch.expect
            return verify_delta(delta, None if converted is None else path, options, pace, watch, more)
        later = (
            0 if watch is None or converted is None else 2 * _file_bytes(locate(converted))
        )  # with as many bytes of the checkpoint

        def expect(nbytes: int) -> None:
            if watch is not None:
                watch.expect(nbytes + later)

        state = examined(locate(checkpoint), options, deep=deep, pace=pace, progress=watch, expect=expect)
        deletable = None
        if converted is not None:
            read = sum(file.store.size for file in state.files) if state.whole else 0
            expect(read)
            deletable = _compare(state, locate(converted), lora, pace, watch, read)
    return Verification(
        path=redact(state.place.listing.directory.path),
        about=_about(state.catalog),
        deep=deep,
        checks=tuple(state.checks),
        numbers=state.numbers,
        deletable=deletable,
        notes=tuple(state.notes),
        unread_bytes=state.unread_bytes,
    )


def _about(catalog: Catalog | None) -> str:
    if catalog is None:
        return "cannot be read whole"
    source, topology = catalog.source, catalog.topology
    words = [source.layout]
    if source.framework[0]:
        words.append(f"written by {' '.join(source.framework).strip()}")
    if source.global_steps is not None:
        words.append(f"step {source.global_steps:,}")
    if source.zero_stage is not None:
        words.append(f"world size {topology.dp}")
    return ", ".join(words)


def _file_bytes(path: Location) -> int:
    """Bytes of a file, or of those in a directory; 0 if they cannot be listed, which is reported later."""
    try:
        return path.size() if path.is_file() else sum((path / name).size() for name in path.file_names(path.names()))
    except OSError:
        return 0


def _compare(
    state: Examined,
    converted: Location,
    lora: LoraMerge | None,
    pace: Pace,
    watch: JobWatch | None,
    done: int,
) -> tuple[bool, str]:
    """Adds checks on the output; returns whether the shards may be deleted, and why. `done`: bytes read before."""
    progress = progress_after(watch, done)
    output = examined(
        converted, OpenOptions(), whole=True, later=state.catalog is not None, pace=pace, progress=progress
    )
    if state.catalog is None or output.catalog is None:
        add_output(state, output, converted)
        state.add("equal", "", ["not compared, because one of the two cannot be read"])
        return False, "the checkpoint or the output cannot be read"
    place = manifests.find(converted)
    facts = manifests.read(place) if place is not None and output.ok else None
    chosen = {"form", "states", "include", "exclude", "exclude_frozen", "strip_prefix", "rename"}
    if facts is not None and not facts.dtype and not chosen & facts.options.keys():  # nothing cast, renamed or left out
        facts = None
    catalog = in_numbers(state.catalog, state.place, output.catalog, facts)
    wanted, left_out = _wanted(catalog, state.place, facts, lora)
    expected = quantised(wanted, output.place, facts)
    form = facts.options.get("form") if facts is not None else None
    renamed = has_renamed_states(form)
    if has_renamed_states(form):
        problems, pairs, untied = _pairs(expected, own_weights(output.catalog), facts)
        run = compare_renamed(state, output, form)
    else:
        problems, pairs, untied = _pairs(expected, output.catalog, facts)
        run = compare_runs(state, output)
    held = held_files(state, [entry for _, entry, _ in run.pairs])
    if run.held and not renamed:  # the model's own weights are to be there too, or to be the rounded masters
        run.pairs += _half_precision(pairs)
    both = [*pairs, *((a, b) for _, a, b in run.pairs)]
    if watch is not None:
        watch.expect(done + sum(a.nbytes + b.nbytes for a, b in both))
    clamp = facts is not None and facts.options.get("overflow") == "clamp"
    bad = read_both(state, output, both, held, pace, watch, done, converted, clamp=clamp)
    names = [*(repr(b.name) for _, b in pairs), *(what for what, _, _ in run.pairs)]
    others = [
        f"{names[d.number]}: {count(d.count, 'element differs', 'elements differ')}, the first is number {d.first:,} "
        f"(in {d.file!r})"
        for d in bad
    ]
    weights = sum(d.number < len(pairs) for d in bad)
    problems += summarized(others[:weights], "tensors differ from the checkpoint")
    rounded = sorted(
        {str(b.dtype) for a, b in pairs if not is_lossless(a.dtype, b.dtype)} | expected.rounded | _quantised(facts)
    )
    state.add(
        "equal", f"{count(len(pairs), 'tensor equals', 'tensors equal')} the checkpoint{_exactly(rounded)}", problems
    )
    if run.held or run.problems:
        problems = summarized([*run.problems, *others[weights:]], "parts of the run differ from the checkpoint")
        state.add("run", f"{joined(run.held)} equal the checkpoint, bit for bit", problems)
    if untied:
        state.notes.append(f"{examples(untied)}: not in the output, but tied to a tensor that is.")
    return _deletable(state, output, left_out, rounded, run)


def _half_precision(pairs: Sequence[tuple[TensorEntry, TensorEntry]]) -> Iterator[Pair]:
    """The model's half-precision weights, where both sides hold them in one dtype, beside the fp32 ones that are compared."""
    for a, b in pairs:
        own, other = a.own_copy, b.own_copy
        if own is not None and other is not None and own.dtype == other.dtype:
            of, to = (
                replace(entry, dtype=copy.dtype, fragments=copy.fragments, replicas=())
                for entry, copy in ((a, own), (b, other))
            )
            yield f"the model's own weight {b.name!r}", of, to


def _wanted(
    catalog: Catalog, place: Place, facts: Manifest | None, lora: LoraMerge | None
) -> tuple[Catalog, list[str]]:
    """The tensors that an output with the manifest's options holds, and the names of those that it leaves out."""
    if facts is None or not facts.options:
        return catalog, []
    if facts.options.get("states") is True:
        asked: dict[str, Any] = {name: facts.options.get(name, ()) for name in ("include", "exclude")}
        states = states_of(Opened(layouts.read(place.listing), place)).catalog(catalog)
        return select(states, Options(**asked)), sorted(catalog.tensors)
    if "average" in facts.options:
        raise UnsupportedError(
            "is made of several checkpoints, and not compared with one of them", file=manifests.NAME,
            remedy="Leave out the checkpoint: `zckpt verify OUT` checks that every byte is as it was written.",
        )  # fmt: skip
    options: dict[str, Any] = {
        name: value for name, value in facts.options.items() if name not in ("overflow", "wishes", "form", RECORDED)
    }
    form = facts.options.get("form")
    if "rename" in options:
        options["rename"] = [tuple(pair) for pair in options["rename"]]
    left_out: tuple[str, ...] = ()
    if isinstance(form, Mapping) and isinstance(merge := form.get("lora"), Mapping):
        again = merged_again(Opened(catalog, place), merge, lora)
        left_out = tuple(name for name in catalog if found_in(name))
        catalog, place = again.catalog, again.place
        form = {key: value for key, value in form.items() if key != "lora"} or None
    try:
        chosen = Options(**options)
        if isinstance(form, Mapping) and "names" in form:  # here options mean the checkpoint's names
            kept = select(catalog, replace(chosen, rename=(), strip_prefix=""))
            dropped = catalog.tensors.keys() - kept.tensors.keys() - kept.aliases.keys()
            return formed_again(select(catalog, chosen), place, form).catalog, sorted(dropped)
        if isinstance(form, Mapping):
            formed = formed_again(catalog, place, form, chosen.exclude)
            catalog, left_out = formed.catalog, (*left_out, *formed.left_out)
        kept = select(catalog, replace(chosen, rename=(), strip_prefix=""))
        dropped = catalog.tensors.keys() - kept.tensors.keys() - kept.aliases.keys()
        return select(catalog, chosen), sorted({*left_out, *dropped})
    except (TypeError, ValueError) as error:
        raise UnsupportedError(
            "records options that this version of zckpt does not know",
            file=manifests.NAME,
            found=str(error)[:200],
            remedy="Verify with the version of zckpt that made the output.",
        ) from error


def _pairs(
    expected: Expected, output: Catalog, facts: Manifest | None
) -> tuple[list[str], list[tuple[TensorEntry, TensorEntry]], list[str]]:
    """Problems found without reading an element; the pairs to compare; tied names that the output lacks."""
    wanted = expected.catalog
    names, there = {*wanted, *wanted.aliases}, {*output, *output.aliases}
    dtype = to_dtype(facts.dtype) if facts is not None and facts.dtype else None
    problems: list[str] = []
    untied = sorted(name for name in wanted.aliases if name not in there and wanted.aliases[name] in there)
    missing = sorted(names - there - set(untied))
    if missing:
        problems.append(f"{count(len(missing), 'tensor is', 'tensors are')} missing in the output: {examples(missing)}")
    if more := sorted(there - names):
        problems.append(
            f"{count(len(more), 'tensor of the output is', 'tensors of the output are')} not in the checkpoint: {examples(more)}"
        )
    pairs: dict[tuple[int, int], tuple[TensorEntry, TensorEntry]] = {}
    for name in (name for name in (*wanted, *wanted.aliases) if name in there):
        a, b = wanted[name], output[name]
        castable = a.dtype == b.dtype or (a.dtype.kind == "float" and b.dtype in CAST_TARGETS)
        if a.shape != b.shape:
            problems.append(f"{name!r} has shape {list(b.shape)} in the output, {list(a.shape)} in the checkpoint")
        elif not castable or (dtype is not None and b.dtype != expected.dtypes.get(a.name, output_dtype(a, dtype))):
            problems.append(f"{name!r} is {b.dtype} in the output, {a.dtype} in the checkpoint")
        else:
            pairs[id(a), id(b)] = a, b
    return problems, list(pairs.values()), untied


def _quantised(facts: Manifest | None) -> set[str]:
    """The type in which an output's matrices are, if it is coarser than any dtype."""
    form = None if facts is None else facts.options.get("form")
    return {"Q8_0"} if isinstance(form, Mapping) and form.get("type") == "q8_0" else set()


def _deletable(
    state: Examined, output: Examined, left_out: list[str], rounded: list[str], run: Comparison
) -> tuple[bool, str]:
    """Whether the output holds all weights, and why; which other parts of the run it holds, and which only the shards."""
    shards = state.place.listing.directory
    homes = [shards] if shards.is_file() else {location_of(f.store).parent for f in state.files}
    inside = [f.name for f in output.files if any(location_of(f.store).is_within(home) for home in homes)]
    wrong = sum(len(check.problems) for check in state.checks)
    if wrong:
        return False, count(wrong, "problem was found", "problems were found")
    if inside:
        return False, f"the output's {examples(inside)} would be deleted with them"
    if left_out:
        return (
            False,
            f"{count(len(left_out), 'tensor was', 'tensors were')} left out of the output: {examples(left_out)}",
        )
    only = ["the numbers in full precision"] * bool(rounded) + run.only
    all_else = "" if only else "everything else that a run needs to resume: "
    held = f"; it also holds {all_else}{joined(run.held)}" if run.held else ""
    lost = f"; only in the shards: {joined(only)}" if only else ""
    return True, f"every weight is in the output{_exactly(rounded)}{held}{lost}"


def _exactly(rounded: list[str]) -> str:
    return f", rounded to {' and '.join(rounded)}" if rounded else ", bit for bit"
