"""A smaller save of the same layout: without what a user no longer needs, and without bytes that no tensor uses.

For `zckpt slim`. Torch files are written again, each tensor dense in a storage of its own, and tied tensors once; so storages
larger than their tensors shrink by themselves. Files in which nothing changes are copied. What may be left out besides:
  - optimizer: the states of elements (moments). Masters stay: they are the fp32 weights.
  - module-weights: half-precision weights of the module that masters give back, which is proved for every element.
  - frozen: parameters that no optimizer owns, as DeepSpeed's `exclude_frozen_parameters` does.
[Note: copies of frozen parameters] On a GPU, DeepSpeed's stage 2 writes each frozen parameter twice: in `module`, and as
`frozen_param_fragments`. The two become one storage, after it is proved that they are equal.
[Note: torch.distributed.checkpoint] Such a save loses the items of the optimizer, and any number of ranks loads what is left;
accelerate's directory of the optimizer is left out. Megatron-Core's keep the fp32 weights, which are items of its optimizer, and
every file beside the data files; Megatron-Core loads them with --no-load-optim.
Source: DeepSpeed 0.19.8, runtime/engine.py `_save_checkpoint`, `load_checkpoint`.

[Note: swap files] Of saves with an optimizer that was on NVMe, the masters stay in their swap files, and the optimizer files say
which these are by the attribute `ds_id` of a vector without elements. Where DeepSpeed left a buffer's old elements in its place
(`pipeline_read`), it is written without them: only the swap file is right.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import InconsistentError, UnsafeError, UnsupportedError, UsageError, ZckptError
from zckpt.base.progress import JobWatch, Progress, watch_progress
from zckpt.base.words import count, examples, join_words, size
from zckpt.containers import Container, TensorRef, TensorSpec
from zckpt.containers.tensor_ref import placeholders_in, tensors_in, waste_of
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.plan import Plan, literal_file
from zckpt.engine.batches import progress_after
from zckpt.engine.independent import differences
from zckpt.jobs.declarations import SLIM, Asked
from zckpt.jobs.open import Opened, open_asked
from zckpt.jobs.own_groups import Slim
from zckpt.jobs.planned import Planned, Report, protected_places
from zckpt.jobs.planned import execute as written
from zckpt.layouts import dcp, family_of, is_of_save, megatron_core, universal
from zckpt.layouts.dcp.metadata import read_metadata
from zckpt.layouts.dcp.write import nbytes_of, of_optimizers, without
from zckpt.layouts.megatron_core.contents import moments_of, sorted_items
from zckpt.layouts.places import Place
from zckpt.layouts.run.steps import OF_MEGATRON, TRACKER, read_tracker
from zckpt.layouts.save.companions import is_own, note_of_links
from zckpt.layouts.save.listing import EXPERT_NAME, SHARD_NAME, SWAP_NAME, UNIVERSAL_POINTER, Listing, list_files
from zckpt.layouts.save.module_states import whole
from zckpt.layouts.save.trainers import optimizer_beside
from zckpt.layouts.universal import is_state
from zckpt.layouts.zero.torch_files import TorchFile, plan_copy
from zckpt.output.checks import check_path
from zckpt.output.order import Order
from zckpt.storage.location import locate

_MOST_DEPTH = 40
_LABEL = "ds_id"

BytePlace = tuple[str, int, int]
"""File, byte offset of the first element, byte offset behind the last."""


@dataclass(slots=True)
class Cut:
    """What is left out of the files, and what was.

    Attributes:
        optimizer: whether the optimizer's states are.
        frozen: whether frozen parameters are.
        places: what is left out -> places of its tensors.
        same: place of a tensor -> the tensor that is equal to it.
        bytes: what was left out -> bytes.
    """

    optimizer: bool
    frozen: bool
    places: dict[str, set[BytePlace]] = field(default_factory=dict[str, "set[BytePlace]"])
    same: dict[BytePlace, TensorRef] = field(default_factory=dict["BytePlace", TensorRef])
    bytes: dict[str, int] = field(default_factory=dict[str, int])

    def what(self, ref: TensorRef) -> str:
        """The reason why a tensor is left out; empty if it stays."""
        place = place_of(ref)
        return next((what for what, places in self.places.items() if place in places), "")

    def count(self, what: str, nbytes: int) -> None:
        """Adds bytes that were left out."""
        self.bytes[what] = self.bytes.get(what, 0) + nbytes


def place_of(ref: TensorRef) -> BytePlace:
    """Returns where a tensor's elements lie in its file."""
    return ref.store.path, ref.byte_offset, ref.byte_stop


def label_of(ref: TensorRef) -> str:
    """The name of a tensor's swap file; empty where it has none."""
    label = (ref.attributes or {}).get(_LABEL)
    return label if isinstance(label, str) else ""


def swapped_states(listing: Listing, containers: Mapping[str, Container]) -> set[str]:
    """The swap files of a save that hold moments: their labels are those of masters behind the name of a state."""
    found: set[str] = set()
    for name, container in containers.items():
        if match := SHARD_NAME.fullmatch(name):
            labels = {label_of(ref) for _, ref in tensors_in(container.root)}
            moments = (label for label in labels if label.partition("-")[2] in labels - {""})
            found.update(listing.swap_file(int(match["dp"]), int(match["mp"]), label) for label in moments)
    return found & listing.files.keys()


def swapped_in(listing: Listing, name: str) -> Callable[[str], bool]:
    """Whether a label of the optimizer file `name` is that of a swap file."""
    match = SHARD_NAME.fullmatch(name)
    if match is None:
        return lambda label: False
    return lambda label: listing.swap_file(int(match["dp"]), int(match["mp"]), label) in listing.files


def is_copied(place: Place, name: str) -> bool:
    """Whether a file of a save is copied as it is: not if it is a link out of it to something that is not a container.
    Raises UnsafeError if the save would be none without it.
    """
    file = place.listing.files[name]
    if is_own(file, place.home, place.named) or is_own(file, file.parent):
        return True
    try:
        place.listing.open(name)
    except ZckptError as error:
        if is_of_save(name) or "/" in name or name.endswith(".distcp"):
            raise UnsafeError(
                "is a link that leads out of the checkpoint, and would be copied byte for byte", file=file,
                found=f"a link to {os.path.realpath(file)!r}",
                remedy="Put the file itself there. Nothing was written.",
            ) from error  # fmt: skip
        return False
    return True


def slim_file(path: str, container: Container, cut: Cut, swapped: Callable[[str], bool]) -> Plan | None:
    """A file of the output without what is left out, which is counted in `cut`, and without waste; None if it has neither.
    `swapped`: whether a label is that of a swap file.
    """
    refs = [ref for _, ref in tensors_in(container.root)]
    counted = dict(cut.bytes)
    root = _without(container.root, cut, 0)
    if counted == cut.bytes and not waste_of(refs) and not any(place_of(ref) in cut.same for ref in refs):
        return None
    file = TorchFile(path)
    made: dict[object, TensorSpec] = {}

    def take(ref: TensorRef) -> TensorSpec:
        """Adds a tensor; one that has several names, or an equal copy, is one storage."""
        label = label_of(ref)
        ref = cut.same.get(place_of(ref), ref)
        key = (ref.place, label)
        if key not in made:
            if label and swapped(label):
                ref = replace(ref, shape=(0,), stride=(1,))  # see [Note: swap files]
            spec = file.tensor(whole("", ref, "buffer"))
            made[key] = replace(spec, attributes={_LABEL: label}) if label else spec
        return made[key]

    return file.finish(file.adopt(root, take))


def _without(value: object, cut: Cut, depth: int) -> object:
    """An inert value without what is left out."""
    if depth > _MOST_DEPTH:
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_without(item, cut, depth + 1) for item in value)
    if not isinstance(value, Mapping):
        return value
    kept: dict[object, object] = {}
    for key, item in value.items():
        if isinstance(item, TensorRef) and (what := cut.what(item)):
            cut.count(what, item.nbytes)
        elif cut.frozen and key in ("frozen_param_shapes", "frozen_param_fragments"):
            _count_all(item, cut, "frozen")
            kept[key] = None  # as DeepSpeed writes it: its loader must not find an empty collection
        elif cut.optimizer and key == "state" and "param_groups" in value:
            _count_all(item, cut, "optimizer")
            kept[key] = {}
        elif cut.optimizer and key == "base_optimizer_state" and isinstance(item, list):
            _count_all(item, cut, "optimizer")
            kept[key] = [{} for _ in item]
        else:
            kept[key] = _without(item, cut, depth + 1)
    return kept


def _count_all(value: object, cut: Cut, what: str) -> None:
    """Counts the bytes of all tensors in a value, each once."""
    refs = {ref.place: ref.nbytes for _, ref in tensors_in(value)}
    if refs:
        cut.count(what, sum(refs.values()))


@dataclass(frozen=True, slots=True)
class PlannedSlim(Planned):
    """A smaller save that is planned but not begun; further attributes as in `Planned`.

    Attributes:
        dropped: what is left out -> bytes.
        saved_bytes: of the files of the save, less those of the new ones.
        equal: what is left out because something else gives it back: (what gives it, what is left out).
    """

    dropped: Mapping[str, int]
    saved_bytes: int
    equal: tuple[tuple[TensorEntry, TensorEntry], ...]


def slim(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    drop: Sequence[str] = (),
    tag: str | None = None,
    also: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    progress: Progress = None,
) -> Report:
    """Writes a smaller save of the same layout, which its framework still loads.

    Args:
        checkpoint: of DeepSpeed, torch.distributed.checkpoint, rank files of FSDP, or torch files of weights.
        out: the directory for the new one.
        drop: what to leave out: "optimizer" (moments; the fp32 weights stay), "module-weights" (half-precision weights that fp32
            weights give back), "frozen". Bytes that no tensor uses are always left out.
        tag: which save, where there are several; by default the one that `latest` names.
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        overwrite: replace an existing output: the files that its `zckpt.json` lists.
        progress: as for `zckpt.convert`, with the bytes written so far.

    Returns:
        What was written: files, tensors, bytes, seconds, and notes for a person.

    Raises:
        UnsupportedError: the layout cannot be made smaller.
        UsageError: the checkpoint does not hold what you want to leave out, or there is nothing to leave out.
        OutputError: `out` exists, cannot be written, or the disk is full.
        ZckptError: another kind says what is wrong. Whatever is raised, `out` is as it was before.

    Example:
        >>> zckpt.slim("run", "small", drop=["optimizer"], progress=False).out
        'small'
    """
    began = time.perf_counter()
    planned = prepare(checkpoint, out, SLIM.ask(drop=drop, tag=tag, also=also, overwrite=overwrite))
    with watch_progress(progress, planned.plan.bytes_written, "slim") as watch:
        return replace(execute(planned, watch), seconds=time.perf_counter() - began)


def prepare(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], asked: Asked[Slim]) -> PlannedSlim:
    """Plans a smaller save; arguments and errors as for `slim`. Writes nothing."""
    source, place = locate(checkpoint), locate(out)
    opened = open_asked(source, asked)
    check_path(place, single=False, overwrite=asked.publishing.overwrite, protected=protected_places(opened, source))
    listing, family = opened.place.listing, family_of(opened.place.listing)
    cut = Cut("optimizer" in asked.own.drop, "frozen" in asked.own.drop)
    prefix = f"{listing.tag}/" if listing.tag and family.tagged else ""
    plan = Plan((), ())
    equal: list[tuple[TensorEntry, TensorEntry]] = []
    left_out: set[str] = set()
    others: list[str] = []
    before = sum(file.size() for file in listing.files.values())
    if (fewer := fewer_items(opened, asked)) is not None:
        plan, dropped, before, others = fewer
        if dropped:
            cut.bytes["optimizer"] = dropped
    else:
        containers = _containers(opened, asked)
        equal = _choose_tensors(opened.catalog, listing, containers, cut, asked)
        left_out = _optimizer_files(listing, containers) if cut.optimizer else set()
        parts: list[Plan] = []
        for name, file in listing.files.items():
            if name in left_out:
                cut.count("optimizer", file.size())
                continue
            made = None
            if name in containers:
                made = slim_file(prefix + name, containers[name], cut, swapped_in(listing, name))
            if made is None and not is_copied(opened.place, name):
                others.append(prefix + name)
                continue
            parts.append(made or plan_copy(prefix + name, file.store()))
        plan = Plan.of(parts)
    _check_dropped(opened, asked, cut, left_out)
    saved = before - sum(file.size for file, _ in plan.files)
    if saved <= 0 and not cut.bytes:
        raise UsageError(
            "there is nothing to leave out", file=source, found="no storage that is larger than its tensors",
            remedy="Say what to leave out: --drop optimizer, module-weights or frozen.",
        )  # fmt: skip
    if prefix:
        pointer = UNIVERSAL_POINTER if family is universal.FAMILY else "latest"
        plan = plan.with_files(literal_file(pointer, listing.tag.encode()))
    copies, not_copied = opened.companions()
    home = opened.place.home
    if (config := home / "config.json").is_file() and is_own(config, home, opened.place.named):
        copies.append((config, "config.json"))
    there = {file.path for file, _ in plan.files}
    order = Order(
        plan=plan, out=place, catalog=opened.catalog, options={"drop": sorted(asked.own.drop)},
        copies=tuple((file, name) for file, name in copies if name not in there), overwrite=asked.publishing.overwrite,
        buffer=asked.pacing.buffer, pace=asked.pacing.pace, signing=asked.signing_key.signing(),
    )  # fmt: skip
    notes = (*opened.catalog.source.notes, *_notes(cut), *not_copied, *note_of_links(others))
    return PlannedSlim(opened, order, notes, cut.bytes, saved, tuple(equal))


def execute(
    planned: PlannedSlim,
    progress: Callable[[int], None] | None = None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Report:
    """Checks that nothing is lost, and writes the save; arguments as of `jobs.planned.execute`.

    Raises:
        InconsistentError: what is left out is not given back by what stays; nothing was written.
    """
    pace = planned.order.pace
    read = sum(a.nbytes + b.nbytes for a, b in planned.equal)
    if isinstance(progress, JobWatch):
        progress.expect(read + planned.plan.bytes_written)
    bad = differences(planned.equal, threads=pace["threads"], bytes_per_s=pace["bytes_per_s"], progress=progress)
    if bad:
        raise InconsistentError(
            "weights cannot be left out, because what is left would not give them back", file=planned.catalog.source.path,
            found=f"{count(len(bad), 'tensor')} such as {examples([planned.equal[d.number][1].name for d in bad])}",
            expected="each equal to its fp32 weight, rounded, or to its other copy",
            remedy="Leave --drop module-weights out. If that does not help, run zckpt verify --deep on the checkpoint.",
        )  # fmt: skip
    return written(planned, progress_after(progress, read), on_note)


def _notes(cut: Cut) -> Iterator[str]:
    if cut.optimizer:
        yield "A run that resumes from it begins with new optimizer states."
    if cut.frozen:
        yield "Frozen parameters are in the base model only: load it into a model that has them."


def _containers(opened: Opened, asked: Asked[Slim]) -> dict[str, Container]:
    """The torch files of the save by name. Raises UnsupportedError if the layout keeps its elements elsewhere."""
    listing = opened.place.listing
    family = family_of(listing)
    if family is universal.FAMILY:
        if {*asked.own.drop} - {"optimizer"}:
            raise UnsupportedError(
                "DeepSpeed loads a universal checkpoint by the model files in it, so that these stay whole",
                file=listing.directory, found=f"--drop {' '.join(asked.own.drop)}", expected="--drop optimizer",
                remedy="Run zckpt slim on the save that it was made from.",
            )  # fmt: skip
        if opened.catalog.source.zero_stage == 3:
            raise UnsupportedError(
                "DeepSpeed's stage 3 loads no universal checkpoint without the optimizer's states", file=listing.directory,
                found="a universal checkpoint of stage 3", expected="one of stage 1 or 2",
                remedy="Run zckpt slim on the save that it was made from.",
            )  # fmt: skip
        return {}
    if family.records is not None or family.directory or family.directories is not None:
        raise UnsupportedError(
            "slim cannot write this layout", file=listing.directory, found=family.name,
            expected="a save of DeepSpeed, of torch.distributed.checkpoint, rank files, or torch files of weights",
            remedy="Leave these weights as they are, or write others: zckpt to-bf16.",
        )  # fmt: skip
    stage = opened.catalog.source.zero_stage
    if stage is None and {*asked.own.drop} - {"optimizer"}:
        raise UnsupportedError(
            "only saves of DeepSpeed have module weights beside masters, or say which parameters are frozen",
            file=listing.directory, found=f"{family.name}, --drop {' '.join(asked.own.drop)}",
            remedy="Leave --drop module-weights and --drop frozen out.",
        )  # fmt: skip
    topology = opened.catalog.topology
    is_split = max(topology.tp, topology.pp, topology.ep) > 1 or any(map(EXPERT_NAME.fullmatch, listing.files))
    if is_split and {*asked.own.drop} - {"optimizer"}:
        raise UnsupportedError(
            "a rank of a split model needs all of its own weights", file=listing.directory,
            found="a model that is split over ranks, or has experts in files of their own",
            expected="data parallelism alone for --drop module-weights and --drop frozen", remedy="Leave these out.",
        )  # fmt: skip
    found: dict[str, Container] = {}
    for name in listing.files:
        try:
            container = listing.open(name)
        except ZckptError:
            if name in family.containers(listing):
                raise
            continue  # a small file of another kind
        if container.kind != "safetensors" and not _has_objects(container.root):
            found[name] = container
    return found


def _has_objects(root: object) -> bool:
    """Whether tensors are inside objects of classes, such as DTensors, which stay as they are."""
    return any(True for inner in placeholders_in(root) for _ in tensors_in(inner))


def _optimizer_files(listing: Listing, containers: Mapping[str, Container]) -> set[str]:
    """Files that hold nothing but an optimizer's states; the optimizer files of DeepSpeed hold masters too."""
    family = family_of(listing)
    if family is universal.FAMILY:
        return {name for name in listing.files if is_state(name)}
    if listing.matching(SWAP_NAME):
        return swapped_states(listing, containers)
    if family.tagged:
        return set()
    return {file.name for file in family.named_files(listing.files) if file.kind in ("optim", "optimizer")}


def _choose_tensors(
    catalog: Catalog, listing: Listing, containers: Mapping[str, Container], cut: Cut, asked: Asked[Slim]
) -> list[tuple[TensorEntry, TensorEntry]]:
    """Marks the tensors that are left out; returns what must be equal for that."""
    equal: list[tuple[TensorEntry, TensorEntry]] = []
    roots = [container.root for container in containers.values() if isinstance(container.root, Mapping)]
    if "module-weights" in asked.own.drop:
        equal += _module_weights(catalog, listing, roots, cut)
    frozen = {name for name, entry in catalog.tensors.items() if entry.role == "frozen"}
    frozen |= {dropped for dropped, kept in catalog.aliases.items() if kept in frozen}
    for root in roots:
        module, fragments = (root.get(key) for key in ("module", "frozen_param_fragments"))
        module = module if isinstance(module, Mapping) else {}
        fragments = fragments if isinstance(fragments, Mapping) else {}
        if cut.frozen:
            refs = [ref for held in (module, fragments) for name, ref in held.items() if name in frozen]
            places = {place_of(ref) for ref in refs if isinstance(ref, TensorRef)}
            cut.places.setdefault("frozen", set()).update(places)
            continue
        for name, ref in fragments.items():
            own = module.get(name)
            if isinstance(ref, TensorRef) and isinstance(own, TensorRef) and _are_copies(ref, own):
                cut.same[place_of(ref)] = own
                equal.append((whole(str(name), own, "frozen"), whole(str(name), ref, "frozen")))
    return equal


def _are_copies(a: TensorRef, b: TensorRef) -> bool:
    """Whether two tensors in different places may be copies."""
    return a.numel > 0 and a.shape == b.shape and a.dtype == b.dtype and a.place != b.place


def _module_weights(
    catalog: Catalog, listing: Listing, roots: Sequence[Mapping[object, object]], cut: Cut
) -> Iterator[tuple[TensorEntry, TensorEntry]]:
    """Marks the module's own weights that masters give back. Raises UnsupportedError if the masters' names, or what is
    tied, would be lost with them.
    """
    if catalog.source.zero_stage not in (1, 2):
        raise UnsupportedError(
            "only ZeRO stages 1 and 2 have module weights, and say which masters give them back",
            file=listing.directory, found=catalog.source.layout,
            expected="zero1 or zero2" if catalog.source.zero_stage != 3 else "module weights; at stage 3 there are none",
            remedy="Leave --drop module-weights out.",
        )  # fmt: skip
    tied = {name for root in roots if isinstance(shared := root.get("shared_params"), Mapping) for name in shared}
    unknown = {kept for dropped, kept in catalog.aliases.items() if dropped not in tied}
    cut.places["module-weights"] = set()
    for name, entry in catalog.tensors.items():
        own = entry.own_copy
        if own is None or name in unknown or entry.dtype == own.dtype:
            continue
        copy = TensorEntry(name, entry.shape, own.dtype, entry.role, own.fragments)
        for fragment in own.fragments:
            begin, end = fragment.byte_offset, fragment.nbytes_end(own.dtype.itemsize)
            cut.places["module-weights"].add((str(fragment.store), begin, end))
        yield entry, copy


def _check_dropped(opened: Opened, asked: Asked[Slim], cut: Cut, left_out: set[str]) -> None:
    """Raises UsageError for a part to leave out that does not exist."""
    for what in asked.own.drop:
        if not cut.bytes.get(what) and not (what == "optimizer" and left_out):
            raise UsageError(
                f"holds no {what.replace('-', ' ')}" + (" states" if what == "optimizer" else ""),
                file=opened.place.listing.directory, found=f"--drop {what}", remedy=f"Leave --drop {what} out.",
            )  # fmt: skip
    if cut.frozen and all(entry.role != "parameter" for entry in opened.catalog.tensors.values()):
        raise UsageError(
            "nothing would be left", file=opened.place.listing.directory, found="frozen parameters only",
            remedy="Leave --drop frozen out.",
        )  # fmt: skip


def describe_plan(planned: PlannedSlim) -> str:
    """The text of a command on the new save."""
    without = join_words([f"{what.replace('-', ' ')} ({size(nbytes)})" for what, nbytes in planned.dropped.items()])
    return f"a save that is {size(planned.saved_bytes)} smaller" + (f", without {without}" if without else "")


def fewer_items(opened: Opened, asked: Asked[Slim]) -> tuple[Plan, int, int, list[str]] | None:
    """The files without what `options` leave out, bytes of what is left out, and of the save with the optimizer beside it, and
    files that are links out of the save, and not copied; None for a save of another kind.

    Raises:
        UnsupportedError: the options leave out something else than the optimizer, or the save is of several
        `.metadata` files.
    """
    listing, family = opened.place.listing, family_of(opened.place.listing)
    if family not in (dcp.FAMILY, megatron_core.FAMILY):
        return None
    if {*asked.own.drop} - {"optimizer"} or ".metadata" not in listing.files:
        raise UnsupportedError(
            "slim leaves the optimizer out of such saves, and nothing else", file=listing.directory,
            found=f"{family.name}, --drop {' '.join(asked.own.drop)}" if ".metadata" in listing.files else "no .metadata",
            expected="--drop optimizer, of a save with one .metadata: there are no module weights beside masters, and no "
            "record of what is frozen", remedy="Write the weights alone: zckpt to-dcp, with --exclude-frozen or --exclude.",
        )  # fmt: skip
    metadata = read_metadata(listing)
    nbytes = sum(file.size() for file in listing.files.values())
    is_megatron = family is megatron_core.FAMILY
    owned = frozenset[str]()
    if "optimizer" in asked.own.drop:
        if is_megatron and (buckets := sorted_items(metadata).buckets):
            raise UnsupportedError(
                "the fp32 weights would be lost with the optimizer, because its items do not name parameters",
                file=listing.directory, found=f"{count(len(buckets), 'item')} such as {examples(buckets)}",
                expected="states by name, as --dist-ckpt-optim-fully-reshardable writes them",
                remedy="Keep the save whole, or write the model's own weights alone: zckpt to-dcp.",
            )  # fmt: skip
        owned = moments_of(metadata) if is_megatron else of_optimizers(metadata)
    dropped = nbytes_of(metadata, owned)
    home, beside = "", optimizer_beside(listing.directory)
    if beside is not None and opened.place.home != listing.directory:
        home = f"{listing.directory.name}/"
        if "optimizer" in asked.own.drop and beside.is_dir():
            dropped += (more := sum(file.size() for file in list_files(beside, "").files.values()))
            nbytes += more
    if is_megatron and OF_MEGATRON.fullmatch(listing.directory.absolute().name):
        home = f"{listing.directory.absolute().name}/"
    left_out = [name for name in listing.files if not is_copied(opened.place, name)]
    plan = without(listing, metadata, owned, home)
    if is_megatron:
        written = {file.path for file, _ in plan.files}
        named = (n for n in listing.files if not n.endswith(".distcp") and n != ".metadata" and home + n not in written)
        copies = (plan_copy(home + n, listing.files[n].store()) for n in named if n not in left_out)
        plan = Plan.of([plan, *copies])
    if home and is_megatron:
        plan = plan.with_files(literal_file(TRACKER, read_tracker(listing.directory.absolute().name).encode()))
    return plan, dropped, nbytes, left_out
