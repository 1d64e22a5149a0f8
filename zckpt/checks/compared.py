"""Whether an output equals the checkpoint that it was made from, and whether the shards may be deleted.

For `verify`. Checkpoint and output are read once, side by side: that also says whether each of them is intact. What only some
outputs need is imported for them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from zckpt import layouts
from zckpt.base.errors import UnsupportedError, UsageError, ZckptError, redact
from zckpt.base.pace import Pace
from zckpt.base.progress import JobWatch
from zckpt.base.words import count, examples, join_words
from zckpt.checks.contents import check_bytes, check_compared, held_files
from zckpt.checks.examined import Examined
from zckpt.checks.integrity import CheckedFile, Done, sums_of
from zckpt.checks.quantised import expect_quantised, in_numbers
from zckpt.checks.resumable import Comparison, Pair, compare_renamed, compare_runs, has_renamed_states, own_weights
from zckpt.checks.soundness import examine_checkpoint
from zckpt.checks.verdict import Check, summarize
from zckpt.core.catalog import Catalog, Replica, TensorEntry
from zckpt.core.dtypes import DType, can_cast, is_lossless
from zckpt.core.ledger import names_unread
from zckpt.engine.batches import progress_after
from zckpt.engine.independent import Difference, Unequal, derived_again, differences
from zckpt.engine.tensor_statistics import Statistics
from zckpt.jobs.casting import dtype_of, to_dtype
from zckpt.jobs.groups import Casting, Reading
from zckpt.jobs.like_base import recorded_dtypes
from zckpt.jobs.open import Opened
from zckpt.layouts.places import Place
from zckpt.layouts.save.weight_files import is_weights
from zckpt.output import manifest as manifests
from zckpt.output.manifest import Manifest
from zckpt.quantized.plain import is_fp8
from zckpt.storage.location import Location, location_of

if TYPE_CHECKING:
    from zckpt.jobs.groups import LoraMerge


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
        found, confirmed = derived_again(
            pairs, {n: replicas for n, (_, replicas) in copies.items()}, [*sums[0], *sums[1]],
            clamp=clamp, progress=progress, **pace,
        )  # fmt: skip
    except ZckptError:  # each of both by itself, to see which one it is
        check_bytes(output, pace, progress)
        add_output(state, output, converted)
        check_compared(state, held, pace, progress)
        return differences(pairs, clamp=clamp, threads=pace["threads"], bytes_per_s=pace["bytes_per_s"])
    first = len(sums[0])
    read = [
        Done(
            {n - at: parts for n, parts in confirmed.crcs.items() if at <= n < at + len(own)},
            sum(confirmed.bytes_read.get(path, 0) for path in {file.store.path for file in these}),
        )
        for at, own, these in ((0, sums[0], files[0]), (first, sums[1], files[1]))
    ]
    total = confirmed.nbytes
    total += check_bytes(output, pace, progress_after(progress, total), read=read[0])
    add_output(state, output, converted)
    statistics = {
        name: [_statistics(pairs[n][0], confirmed.copies.get((n, copy))) for copy in range(len(replicas))]
        for n, (name, replicas) in copies.items()
        if n in confirmed.copied
    }
    total += check_compared(state, held, pace, progress_after(progress, total), read[1], statistics)
    if watch is not None:
        watch.expect(done + total)
        watch(done + total)
    return found


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
    return Statistics(entry.numel) if found is None else Statistics(entry.numel, differ=found[0], first=found[1])


def compare(
    state: Examined,
    converted: Location,
    lora: LoraMerge | None,
    pace: Pace,
    watch: JobWatch | None,
    done: int,
    *,
    trust_reader: bool = False,
) -> tuple[bool, str]:
    """Adds checks on the output; returns whether the shards may be deleted, and why.

    Args:
        state: of the checkpoint; gets the checks.
        converted: the output.
        lora: what was merged, where it is not in the checkpoint.
        pace: how hard to work.
        watch: is told of the bytes read.
        done: bytes read before.
        trust_reader: do without a second reader.
    """
    progress = progress_after(watch, done)
    output = examine_checkpoint(
        converted, Reading(), whole=True, later=state.catalog is not None, pace=pace, progress=progress
    )
    if state.catalog is None or output.catalog is None:
        add_output(state, output, converted)
        state.add("equal", "", ["not compared, because one of the two cannot be read"])
        return False, "the checkpoint or the output cannot be read"
    place = manifests.find(converted)
    facts = manifests.read(place) if place is not None and output.ok else None
    other = _other_source(facts, state.catalog)
    chosen = {"form", "states", "include", "exclude", "exclude_frozen", "strip_prefix", "rename", "base"}
    if facts is not None and not facts.dtype and not chosen & facts.options.keys():  # nothing cast, renamed or left out
        facts = None
    catalog = in_numbers(state.catalog, state.place, output.catalog, facts)
    wanted, left_out = _replay_steps(catalog, state.place, facts, lora)
    state.is_completed = state.catalog.evidence.left_out and wanted.evidence.complete is True
    expected, dtypes = expect_quantised(wanted, output.place, facts)
    lost = _find_lost(catalog, wanted, facts, left_out)
    form = facts.options.get("form") if facts is not None else None
    renamed = has_renamed_states(form)
    if has_renamed_states(form):
        problems, pairs, untied = _pairs(expected, dtypes, own_weights(output.catalog), facts)
        run = compare_renamed(state, output, form)
    else:
        problems, pairs, untied = _pairs(expected, dtypes, output.catalog, facts)
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
    if lost:
        tensors = count(len(lost), "tensor of the checkpoint is", "tensors of the checkpoint are")
        problems.append(f"{tensors} not in the output, and nothing left them out: {examples(lost)}")
    if other and (problems or weights):
        problems.insert(0, other)
    elif other:
        state.notes.append(f"{other}; the tensors are equal all the same.")
    wrong = len(problems) + weights
    problems += summarize(others[:weights], "tensors differ from the checkpoint")
    narrower = {str(b.dtype) for a, b in pairs if not is_lossless(a.dtype, b.dtype)}
    rounded = sorted(narrower | {str(one) for one in dtypes.values() if is_fp8(one)} | _coarsest_type(facts))
    answer = f"{count(len(pairs), 'tensor equals', 'tensors equal')} the checkpoint{_exactly(rounded)}"
    state.checks.append(Check("equal", answer, tuple(problems), wrong))
    if run.held or run.problems:
        problems = [*run.problems, *others[weights:]]
        answer = f"{join_words(run.held)} equal the checkpoint, bit for bit"
        state.add("run", answer, problems, "parts of the run differ from the checkpoint")
    if untied:
        state.notes.append(f"{examples(untied)}: not in the output, but tied to a tensor that is.")
    return _deletable(state, output, left_out, rounded, run, trust_reader=trust_reader)


def _find_lost(source: Catalog, wanted: Catalog, facts: Manifest | None, left_out: Sequence[str]) -> list[str]:
    """Tensors of the checkpoint that the output holds nothing of, although its ledger does not name them.

    A manifest without evidence is of a version that kept no ledger: then the options say what was left out.
    """
    if facts is not None and facts.options.get("states") is True:
        return []
    has_ledger = facts is not None and "evidence" in facts.source
    named = {str(fate.get("name")) for fate in facts.left_out} if facts is not None and has_ledger else {*left_out}
    return [name for name in names_unread(source, wanted.tensors) if name not in named]


def _other_source(facts: Manifest | None, catalog: Catalog) -> str:
    """The save that an output was made from, in words, if it is another one than this; empty if it may be this one."""
    if facts is None:
        return ""
    mine = catalog.source.as_json(catalog.topology)
    known = [key for key in ("layout", "tag", "step", "topology") if key in facts.source]
    if all(facts.source[key] == mine[key] for key in known):
        return ""
    made, this = (_describe_save(source) for source in (facts.source, mine))
    return f"the output was made from another save ({made}), this one is {this}"


def _describe_save(source: Mapping[str, object]) -> str:
    """A save as its facts describe it: layout, tag or step, ranks."""
    topology = source.get("topology")
    ranks = (
        [f"{axis} {number}" for axis, number in topology.items() if number != 1]
        if isinstance(topology, Mapping)
        else []
    )
    step = "" if source.get("step") is None else f"step {source['step']}"
    return " ".join(map(str, filter(None, (source.get("layout"), source.get("tag") or step, *ranks))))


def check_order(checkpoint: Location, converted: Location, state: Examined) -> None:
    """Raises UsageError where CKPT is an output that was made from CONVERTED: the two were given the wrong way round."""
    place = manifests.find(checkpoint)
    if place is None or manifests.find(converted) is not None or state.catalog is None:
        return
    source = manifests.read(place).source
    other = examine_checkpoint(converted, Reading(), later=True).catalog
    if other is None or other.source.layout in ("plain", state.catalog.source.layout):
        return
    mine = other.source.as_json(other.topology)
    if all(source.get(key) == mine[key] for key in ("layout", "tag", "step")):
        raise UsageError(
            "the arguments are the wrong way round", file=checkpoint,
            found=f"an output of zckpt that was made from {_describe_save(mine)}, as {converted.path!r} is",
            expected="the checkpoint first, then what was made from it",
            remedy=f"Run zckpt verify {converted.path} {checkpoint.path}.",
        )  # fmt: skip


def _half_precision(pairs: Sequence[tuple[TensorEntry, TensorEntry]]) -> Iterator[Pair]:
    """The model's half-precision weights, where both sides hold them in one dtype, beside the fp32 ones that are compared."""
    for a, b in pairs:
        own, other = a.own_copy, b.own_copy
        if own is not None and other is not None and own.dtype == other.dtype:
            yield f"the model's own weight {b.name!r}", a.as_in(own), b.as_in(other)


def _replay_steps(
    catalog: Catalog, place: Place, facts: Manifest | None, lora: LoraMerge | None
) -> tuple[Catalog, list[str]]:
    """The tensors that an output with the manifest's options holds, and the names of those that it leaves out."""
    if facts is None or not facts.options:
        return catalog, []
    if "average" in facts.options:
        raise UnsupportedError(
            "is made from several checkpoints, and not compared with one of them", file=manifests.NAME,
            remedy="Leave out the checkpoint: `zckpt verify OUT` checks that every byte is as it was written.",
        )  # fmt: skip
    from zckpt.jobs.opened import working_model
    from zckpt.jobs.steps import steps_again

    model = working_model(Opened(catalog, place))
    try:
        for step in steps_again(facts.options, lora):
            model = step(model)
    except ZckptError:  # which are ValueErrors, some of them
        raise
    except (TypeError, ValueError) as error:
        raise UnsupportedError(
            "records options that this version of zckpt does not know",
            file=manifests.NAME,
            found=str(error)[:200],
            remedy="Verify with the version of zckpt that made the output.",
        ) from error
    return model.catalog, sorted({*model.left_out})


def _pairs(
    wanted: Catalog, dtypes: Mapping[str, DType], output: Catalog, facts: Manifest | None
) -> tuple[list[str], list[tuple[TensorEntry, TensorEntry]], list[str]]:
    """Problems found without reading an element; the pairs to compare; tied names that the output lacks. `dtypes`: of
    tensors for which they do not follow from what was asked for.
    """
    names, there = {*wanted, *wanted.aliases}, {*output, *output.aliases}
    dtype = to_dtype(facts.dtype) if facts is not None and facts.dtype else None
    options = {} if facts is None else facts.options
    kept = options.get("keep_dtype")
    casting = Casting(dtype=dtype, keep_dtype=tuple(map(str, kept)) if isinstance(kept, list) else ())
    given = recorded_dtypes(options.get("like"))
    form = options.get("form")
    is_merged = isinstance(form, Mapping) and "lora" in form
    problems: list[str] = []
    untied = sorted(name for name in wanted.aliases if name not in there and wanted.aliases[name] in there)
    missing = sorted(names - there - set(untied))
    if missing:
        problems.append(
            f"{count(len(missing), 'tensor is', 'tensors are')} missing in the output: {examples(missing, 100)}"
        )
    if more := sorted(there - names):
        problems.append(
            f"{count(len(more), 'tensor of the output is', 'tensors of the output are')} not in the checkpoint: {examples(more)}"
        )
    pairs: dict[tuple[int, int], tuple[TensorEntry, TensorEntry]] = {}
    for name in (name for name in (*wanted, *wanted.aliases) if name in there):
        a, b = wanted[name], output[name]
        castable = can_cast(a.dtype, b.dtype)
        if a.shape != b.shape:
            problems.append(f"{name!r} has shape {list(b.shape)} in the output, {list(a.shape)} in the checkpoint")
        elif not castable or (
            dtype is not None
            and b.dtype != given.get(a.name, dtypes.get(a.name, dtype_of(a, casting, is_merged=is_merged)))
        ):
            problems.append(f"{name!r} is {b.dtype} in the output, {a.dtype} in the checkpoint")
        else:
            pairs[id(a), id(b)] = a, b
    return problems, list(pairs.values()), untied


def _coarsest_type(facts: Manifest | None) -> set[str]:
    """The type of an output's matrices, if it is coarser than any dtype."""
    form = None if facts is None else facts.options.get("form")
    return {"Q8_0"} if isinstance(form, Mapping) and form.get("type") == "q8_0" else set()


def _deletable(
    state: Examined, output: Examined, left_out: list[str], rounded: list[str], run: Comparison, *, trust_reader: bool
) -> tuple[bool, str]:
    """Whether the output holds all weights, and why; the other parts of the run that it holds, and those that only the
    shards hold.
    """
    shards = state.place.listing.directory
    is_file = shards.is_file()
    homes = {shards} if is_file else {location_of(f.store).parent for f in state.files}
    places = {f.name: location_of(f.store).resolved() for f in output.files}
    places = {name: place if is_file else place.parent for name, place in places.items()}
    deleted = {place for place in {*places.values()} if any(place.is_within(home) for home in homes)}
    inside = [name for name, place in places.items() if place in deleted]
    wrong = sum(check.number for check in state.checks)
    if wrong:
        return False, count(wrong, "problem was found", "problems were found")
    if part := state.place.listing.part:
        return False, f"only a part was compared, {part}"
    if inside:
        return False, f"the output's {examples(inside)} would be deleted with them"
    if left_out:
        return (
            False,
            f"{count(len(left_out), 'tensor was', 'tensors were')} left out of the output: {examples(left_out)}",
        )
    if unproved := state.unproved(trust_reader=trust_reader):
        return False, unproved[0]
    if output.places.by == "none" and not trust_reader:
        why = output.places.why
        return False, f"the output's tensors were not found a second time ({why}); --trust-reader does without that"
    only = ["the numbers in full precision"] * bool(rounded) + run.only
    all_else = "" if only else "everything else that a run needs to resume: "
    held = f"; it also holds {all_else}{join_words(run.held)}" if run.held else ""
    lost = f"; only in the shards: {join_words(only)}" if only else ""
    lost += f"; {state.doubt}" if state.doubt else ""
    beside = _other_weights(state, with_run=bool(run.held))
    unless = ["resume training from it"] * bool(run.only) + ["need full precision"] * bool(rounded)
    unless += [f"need {examples(beside)}, where nothing was compared"] * bool(beside)
    unless += ["need fp32 weights, which may be among the optimizer states"] * _may_lack_masters(state)
    if run.held and only:  # a run can resume from the output, without these
        condition = f"if you do not need {join_words(only, 'or')}: "
    else:
        condition = f"if you will not {join_words(unless, 'or')}: " if unless else ""
    return True, f"{condition}every weight is in the output{_exactly(rounded)}{held}{lost}"


def _other_weights(state: Examined, *, with_run: bool) -> list[str]:
    """What lies beside the model that was read: in other files, and in state dicts of its files; `with_run`: the output holds
    what `read_training` gives, too.
    """
    listing = state.place.listing
    if state.catalog is None:
        return []
    family = layouts.family_of(listing)
    others = family.left_out(listing) if with_run else family.beside(listing)
    if state.catalog.source.layout != "plain" or not listing.directory.is_dir():
        return others
    read = {file.name for file in state.files}
    return others + [name for name in listing.directory.names() if is_weights(name) and name not in read]


def _may_lack_masters(state: Examined) -> bool:
    """Whether weights in half precision were read, and not the optimizer's states, which may have them in fp32."""
    listing = state.place.listing
    if state.catalog is None or not layouts.family_of(listing).unread_states(listing):
        return False
    return any(entry.role == "parameter" and entry.dtype.itemsize == 2 for entry in state.catalog.tensors.values())


def _exactly(rounded: list[str]) -> str:
    return f", rounded to {' and '.join(rounded)}" if rounded else ", bit for bit"
