"""Reads Megatron-Core's distributed checkpoints: a save of torch.distributed.checkpoint with names that say what its items are.

For `layouts`. Shapes and places in the metadata are those of the whole model, whatever the tensor, pipeline and expert parallel
sizes were. What an item is, `contents` says; what the run was, `run_state`; which weights a bucket holds, `placing`.
An optimizer's fp32 weights are taken, and the model's own weights are their replicas, which `verify` compares.
[Note: flattened parts] Saved as `fully_sharded_model_space`, a tensor-parallel rank's part of a tensor is a box; each
data-parallel rank has some elements of the box, which is laid out flat. Such a tensor is saved in another shape: how many boxes
there are along each axis, and the elements of a box. A (2, 48, 16) tensor with rows cut in four is (2, 4, 1, 192): box (1, 2, 0)
has its rows 24 to 35 of the second layer (megatron-core 0.12.3, strategies/resharding.py).
[Note: groups of parameters] Those of the first rank are in the common state, without names of parameters. Megatron-Core makes
them by rule, and each parameter's group follows from it: experts have an optimizer of their own, embeddings and the head may have
their own learning rate, and biases and vectors have `wd_mult` 0. Layers and experts that are stacked add dimensions, which do
not count. Where the rule leaves a choice, as with groups that a script made, the states are not given.
Source: megatron-core 0.9 - 0.16.1, optimizer/__init__.py `_get_param_groups`; optimizer/optimizer.py; dist_checkpointing;
Megatron-LM, megatron/training/checkpointing.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import (
    COPY_AGAIN,
    CorruptError,
    InconsistentError,
    NotACheckpointError,
    UnsupportedError,
    ZckptError,
)
from zckpt.base.words import count, examples, join_words
from zckpt.containers import is_torch_zip, list_at, mapping_at, torch_zip
from zckpt.containers.tensor_ref import MAX_FRAGMENTS
from zckpt.core.catalog import Catalog, Replica, Role, Source, TensorEntry
from zckpt.core.dtypes import F32
from zckpt.core.fragments import Block, Fragment, fragment_of
from zckpt.core.overlaps import embed_box, shift
from zckpt.layouts.dcp import METADATA, rank_of
from zckpt.layouts.dcp import read as dcp
from zckpt.layouts.dcp.items import Items
from zckpt.layouts.dcp.metadata import BytesItem, Metadata, TensorItem, read_metadata
from zckpt.layouts.megatron_core import COMMON, CONFIG, NONE
from zckpt.layouts.megatron_core.buckets import settings_of, vectors_of
from zckpt.layouts.megatron_core.contents import MegatronItems, has_names, plain_name, shape_before, sorted_items
from zckpt.layouts.megatron_core.placing import PlacedStates, parts_of, place
from zckpt.layouts.megatron_core.run_state import MegatronRun, backend, run_state
from zckpt.layouts.run.training import ParameterGroup, Training, kept_settings
from zckpt.layouts.save.family import Record
from zckpt.layouts.save.listing import Listing

_LAYERS = re.compile(r"\blayers\.(?!\d)")
_EXPERTS = re.compile(r"\bexperts\.experts\.(?!\d)")
_EXPERT = re.compile(r"\bexperts\b")
_SETTINGS = ("optimizer", "param_to_group_meta")
_ENDS_OF_MODEL = ("embedding.word_embeddings.weight", "output_layer.weight")


_Settings = Mapping[str, object]
"""What a group says of itself."""


def _takes(group: _Settings, name: str, is_vector: bool, experts_apart: bool) -> bool:
    """Whether a parameter is in the group, by Megatron-Core's rule; `experts_apart`: whether there are groups of experts."""
    of_experts = experts_apart and bool(_EXPERT.search(name))
    if "is_expert_parallel" in group and bool(group["is_expert_parallel"]) != of_experts:
        return False
    if group.get("is_decoupled_lr") and not name.endswith(_ENDS_OF_MODEL):
        return False
    decays = group.get("wd_mult")
    return not isinstance(decays, int | float) or (decays == 0) == is_vector


def parameter_groups(
    held: MegatronItems,
    states: Mapping[str, Mapping[str, object]],
    run: MegatronRun,
    file: str,
    beside: Iterable[Mapping[str, object]] = (),
) -> list[ParameterGroup]:
    """The groups that own a save's parameters, with their settings and the step; `beside`: settings of groups that are
    not in the common state. Raises UnsupportedError if they do not say which group a parameter is in.
    """
    groups = [*_groups(run), *beside]
    members: list[list[str]] = [[] for _ in groups]
    apart = any(group.get("is_expert_parallel") for group in groups)  # not where one rank has all experts
    for name in held.weights:
        if name not in states:
            continue
        is_vector = name.endswith(".bias") or len(held.weights[name].shape) - _count_stacked(name) <= 1
        taking = [number for number, group in enumerate(groups) if _takes(group, name, is_vector, apart)]
        decoupled = [number for number in taking if groups[number].get("is_decoupled_lr")]
        if len(taking := decoupled or taking) != 1:
            raise UnsupportedError(
                f"does not say which parameter group {name!r} is in", file=file,
                found=f"{count(len(groups), 'group')}, {len(taking)} of them may have it",
                expected="the groups that Megatron-Core makes by itself", remedy="Convert the weights alone (to-fp32).",
            )  # fmt: skip
        members[taking[0]].append(name)
    pairs = zip(groups, members, strict=True)
    return [_make_group(states, own, names, own.get("step", _common_step(run))) for own, names in pairs if names]


def named_groups(held: MegatronItems, metadata: Metadata, items: Items) -> list[ParameterGroup]:
    """The groups of `fsdp_dtensor`, which has settings for each parameter: those with equal settings form a group.
    Empty for others.
    """
    own: dict[str, dict[str, BytesItem | TensorItem]] = {}
    for item in metadata.items.values():
        if item.path[:2] == _SETTINGS and len(item.path) > 3:
            own.setdefault(plain_name(str(item.path[2])), {})[str(item.path[3])] = item
    items.open_all(item for settings in own.values() for item in settings.values())
    items.open_all(held.steps.values())
    groups: dict[str, tuple[_Settings, object, list[str]]] = {}
    for name, settings in own.items():
        if name in held.states:
            group = {key: items.value(item) for key, item in settings.items()}
            step = items.value(held.steps[name]) if name in held.steps else group.get("step", 0)
            groups.setdefault(repr(sorted(group.items())), (group, step, []))[2].append(name)
    return [_make_group(held.states, group, names, step) for group, step, names in groups.values()]


def _make_group(
    states: Mapping[str, Mapping[str, object]], group: _Settings, names: list[str], step: object
) -> ParameterGroup:
    kinds = dict.fromkeys(state for name in names for state in states[name] if state != "param")
    return ParameterGroup(tuple(names), kept_settings(group), {"step": step}, tuple(kinds))


def _groups(run: MegatronRun) -> Iterator[_Settings]:
    """The groups of all optimizers of the common state."""
    for own in run.optimizers():
        listed = list_at(own.get("optimizer", own), "param_groups")
        yield from (group for group in listed if isinstance(group, Mapping))


def _common_step(run: MegatronRun) -> object:
    """The step that all parameters share; the iteration where no optimizer says it."""
    for own in run.optimizers():
        state = mapping_at(own, "optimizer", "state")
        if "common_step" in state:
            return state["common_step"]
    return run.step or 0


def _count_stacked(name: str) -> int:
    """The number of dimensions of a tensor that count layers and experts."""
    return len(_LAYERS.findall(name)) + len(_EXPERTS.findall(name))


_BACKEND = "torch_dist"
_BUFFERS = ("expert_bias", "local_tokens_per_expert", "inv_freq", "max_logits")
"""Ends of names of floating buffers."""


_NAMES = "whether items have names of Megatron-Core"


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not. Reads the metadata's bytes if there is no metadata.json."""
    if backend(listing):
        return None
    files = [listing.files[name] for name in listing.matching(METADATA)]
    if listing.once(_NAMES, lambda: any(map(has_names, files))):
        return None
    return NONE


@dataclass(frozen=True, slots=True)
class MegatronSave:
    """A save, read.

    Attributes:
        metadata: its metadata.
        items: opens them.
        held: what they are.
        run: what the save says of its run.
    """

    metadata: Metadata
    items: Items
    held: MegatronItems
    run: MegatronRun
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    placed: PlacedStates = field(default_factory=PlacedStates)

    @property
    def states(self) -> Mapping[str, Mapping[str, object]]:
        """Name of a parameter -> state -> what holds it; the fp32 weights are `param`."""
        return self.held.states or self.placed.states

    def shape(self, item: TensorItem) -> tuple[int, ...]:
        """The shape of the tensor that an item holds, flattened or not."""
        return shape_before(self.metadata.beside, item) or item.shape

    def entries(self, items: dict[str, TensorItem], roles: dict[str, Role]) -> dict[str, TensorEntry]:
        """The tensors, put together from their chunks, by name and in the shapes that they have in the model."""
        found = self.items.tensors(items, roles)
        for name, item in items.items():
            if (shape := shape_before(self.metadata.beside, item)) is not None:
                found[name] = unflatten(found[name], shape)
        return found


def load(listing: Listing) -> MegatronSave:
    """Reads what a save says of itself; errors as in `read`."""
    if (written := backend(listing)) not in ("", _BACKEND):
        raise UnsupportedError(
            f"is in Megatron-Core's format {written!r}", file=listing.directory, found=f"{CONFIG} with {written!r}",
            expected=_BACKEND, remedy="Load it with the Megatron-Core that wrote it, and save again with --dist-ckpt-format "
            "torch_dist.",
        )  # fmt: skip
    metadata = read_metadata(listing)
    items = Items(listing, metadata.file)
    held = sorted_items(metadata)
    kept, aliases = dcp.ties(held.weights)  # a save by `write` has further spellings of some names
    states = {name: own for name, own in held.states.items() if name not in aliases}
    held = replace(held, weights=kept, states=states)
    run = run_state(listing, metadata, items)
    if not held.weights:
        raise NotACheckpointError(
            "holds no weights", file=metadata.file, found=f"{count(len(metadata.items), 'item')}, none of a model",
            expected="the tensors of a model", remedy="Give the directory that has them.",
        )  # fmt: skip
    placed = PlacedStates()
    if held.buckets and not held.states:
        problems: list[str] = []
        vectors = vectors_of(held.buckets, metadata, items, problems)
        shapes = {name: item.shape for name, item in held.weights.items()}
        placed = place(vectors, parts_of(held.weights, items) if vectors else (), shapes, problems)
    return MegatronSave(metadata, items, held, run, aliases, placed)


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save.

    Raises:
        IncompleteError, InconsistentError, CorruptError, UnsafeError, UnsupportedError: see those.
        NotACheckpointError: it holds no weights.
    """
    del allow_unknown  # nothing here is laid out by unknown rules
    save = load(listing)
    held, run = save.held, save.run
    roles = {name: _role(name, item, save) for name, item in held.weights.items()}
    tensors = save.entries(held.weights, roles)
    masters = {name: states["param"] for name, states in held.states.items() if "param" in states}
    _check_masters(save, masters)
    for name, entry in save.entries(masters, dict.fromkeys(masters, "parameter")).items():
        own = tensors[name]
        tensors[name] = replace(entry, replicas=(Replica(own.dtype, own.fragments),))
    for name, placed in save.placed.states.items():
        weight = Replica(tensors[name].dtype, tensors[name].fragments, whole=True)
        tensors[name] = replace(placed["param"], replicas=(weight, *save.placed.copies.get(name, ())))
    strange = dcp.unnamed_in(save.metadata, listing)
    writers = {rank for rank in map(rank_of, listing.files.keys() - {*strange}) if rank is not None}
    states = dict.fromkeys(state for own in save.states.values() for state in own if state != "param")
    return Catalog(
        tensors,
        Source(
            layout="megatron-core",
            path=listing.directory.path,
            tag=listing.tag,
            framework=("Megatron-Core", ""),
            global_steps=run.step,
            optimizer_states=tuple(states),
            notes=(*_notes(save), *dcp.note_on_unnamed(strange)),
            details=run.details(),
        ),
        dcp.evidence_of(listing, save.metadata.items),
        aliases=save.aliases,
        topology=run.topology(len(writers)),
        extras=run.extras(),
    )


def _check_masters(save: MegatronSave, masters: dict[str, TensorItem]) -> None:
    """Raises InconsistentError where fp32 weights are not those of the model."""
    for name, item in masters.items():
        weight = save.held.weights.get(name)
        if weight is None or save.shape(item) != save.shape(weight):
            raise InconsistentError(
                "the optimizer is of another model", file=save.metadata.file,
                found=f"fp32 weights of {name!r}, {list(save.shape(item))}",
                expected=f"{list(save.shape(weight))}, as the model has" if weight else f"one of {examples(save.held.weights)}",
            )  # fmt: skip


def _role(name: str, item: TensorItem, save: MegatronSave) -> Role:
    """The role of a tensor: a parameter that the optimizer owns, another parameter, or a buffer."""
    if item.dtype.kind not in ("float", "complex") or name.endswith(_BUFFERS):
        return "buffer"
    return "parameter" if name in save.states or not save.states else "frozen"


def _notes(save: MegatronSave) -> Iterator[str]:
    held = save.held
    if reason := _why_unnamed(save):
        halves = sorted({item.dtype.torch_name for item in held.weights.values() if item.dtype != F32})
        yield f"{reason}: the weights are the model's own{f', in {join_words(halves)}' if halves else ''}."
    elif save.placed.states:
        yield (
            "The optimizer's states have no names: each was placed by its fp32 weights, which are the model's when rounded. "
            "Megatron-Core loads them at the same tensor and pipeline parallel sizes alone."
        )
    if held.others:
        yield f"Left out: {count(len(held.others), 'tensor')} of the optimizer, such as {held.others[0]!r}."


def _why_unnamed(save: MegatronSave) -> str:
    """Why an optimizer's states are not read, in words; empty where they are read, or there are none."""
    if save.states or not (save.held.buckets or save.run.sharding):
        return ""
    why = f"the optimizer's states do not name parameters ({save.run.sharding or 'flat buckets'})"
    problems = save.placed.problems
    placed = f", and what they hold does not place them ({'; '.join(problems[:2])})" if problems else ""
    return f"{why[0].upper()}{why[1:]}{placed}, and are not read"


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What the run needs beside its weights, as far as the save has it; arguments and errors as in `read`. Raises
    UnsupportedError if there is no optimizer, or its states do not name parameters.
    """
    del allow_unknown
    save = load(listing)
    held, run = save.held, save.run
    if not save.states:
        reason = _why_unnamed(save)
        raise UnsupportedError(
            "holds no optimizer states of known parameters" if reason else "holds no optimizer states",
            file=listing.directory, found="; ".join(save.placed.problems[:3]) or run.sharding or "weights only",
            expected="optimizer states by name (fully_reshardable), or such as can be placed by what they hold",
            remedy="Load it with Megatron-Core, and save again with --dist-ckpt-optim-fully-reshardable; or convert the weights "
            "alone (to-bf16)." if reason else "Convert the weights alone (to-fp32, to-bf16).",
        )  # fmt: skip
    beside = settings_of(held.buckets, save.metadata, save.items) if save.placed.states else ()
    groups = named_groups(held, save.metadata, save.items) or parameter_groups(
        held, save.states, run, save.metadata.file, beside
    )
    entries = {name: {s: e for s, e in own.items() if s != "param"} for name, own in save.placed.states.items()}
    for state in dict.fromkeys(state for group in groups for state in group.states):
        items = {name: own[state] for name, own in held.states.items() if state in own and name in held.weights}
        for name, entry in save.entries(items, dict.fromkeys(items, "parameter")).items():
            if entry.shape != save.shape(held.weights[name]):
                raise UnsupportedError(
                    f"optimizer state {state!r} has another shape than its parameter {name!r}", file=save.metadata.file,
                    found=f"{list(entry.shape)}", expected=f"{list(save.shape(held.weights[name]))}",
                    remedy="Convert the weights alone (to-fp32).",
                )  # fmt: skip
            entries.setdefault(name, {})[state] = entry
    precisions = Counter(held.weights[name].dtype for name in entries)
    return Training(groups=tuple(groups), states=entries, scaler={}, model=_rest(run),
                    precision=precisions.most_common(1)[0][0] if precisions else F32)  # fmt: skip


_KEPT = ("args", "checkpoint_version", "opt_param_scheduler", "num_floating_point_operations_so_far")


def _rest(run: MegatronRun) -> dict[str, object]:
    """The counters and arguments of the run. DeepSpeed's loader needs its own counters in every save; they are added."""
    kept = {key: run.common[key] for key in _KEPT if key in run.common}
    return {
        **kept,
        "iteration": run.step,
        "global_steps": run.step or 0,
        "skipped_steps": 0,
        "ds_version": dcp.DEEPSPEED,
    }


def unread_states(listing: Listing) -> str:
    """Why optimizer states of a save are not read, in words; empty if they are read, or there are none."""
    return _why_unnamed(load(listing))


def left_out(listing: Listing) -> list[str]:
    """Names of tensors that are neither the model's nor the optimizer's."""
    return load(listing).held.others


def records(listing: Listing) -> Iterator[tuple[str, list[Record] | ZckptError]]:
    """As `dcp.records`, with the file of the common state."""
    yield from dcp.records(listing)
    if COMMON in listing.files and is_torch_zip(listing.files[COMMON]):
        path = listing.files[COMMON].path
        try:
            yield path, torch_zip.records(path)
        except ZckptError as error:
            yield path, error


def unflatten(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """The tensor of this shape with the boxes that an entry has, one after the other. Raises CorruptError if the shapes
    do not fit each other, UnsupportedError if it is in too many pieces.
    """
    *boxes, numel = entry.shape
    fits = len(boxes) == len(shape) and all(n and extent % n == 0 for n, extent in zip(boxes, shape, strict=True))
    extents = [extent // n for n, extent in zip(boxes, shape, strict=True)] if fits else []
    if not fits or math.prod(extents) != numel:
        raise CorruptError(
            f"the shape of {entry.name!r} does not fit its parts", found=f"parts {list(entry.shape)} of {list(shape)}",
            expected="equal parts along each axis", remedy=COPY_AGAIN,
        )  # fmt: skip
    itemsize = entry.dtype.itemsize
    held: dict[int, list[Fragment]] = {}
    for fragment in entry.fragments:
        for piece in _by_box(fragment, numel, itemsize):
            held.setdefault(piece.start // numel, []).append(piece)
    fragments: list[Fragment] = []
    for number, own in held.items():
        fragments += _place_boxes(own, number, boxes, extents, shape, itemsize)
        if len(fragments) > MAX_FRAGMENTS:
            raise UnsupportedError(
                f"{entry.name!r} is scattered over too many pieces", found=count(len(fragments), "piece"),
                expected=f"at most {MAX_FRAGMENTS:,}", remedy="Convert the weights alone: zckpt to-bf16.",
            )  # fmt: skip
    return TensorEntry(entry.name, shape, entry.dtype, entry.role, tuple(fragments))


def _by_box(fragment: Fragment, numel: int, itemsize: int) -> list[Fragment]:
    """The parts of a fragment in each box."""
    if fragment.rows == 1 and fragment.start // numel == (fragment.stop - 1) // numel:
        return [fragment]
    pieces: list[Fragment] = []
    for run in fragment.runs(itemsize):
        start, left, at = run.start, run.count, run.byte_offset
        while left:
            taken = min(left, numel - start % numel)
            pieces.append(fragment_of(run.store, at, Block(start, taken, 1, 0, 0, run.store_step)))
            start, left, at = start + taken, left - taken, at + taken * run.store_step * itemsize
    return pieces


def _place_boxes(
    own: Sequence[Fragment],
    number: int,
    boxes: Sequence[int],
    extents: Sequence[int],
    shape: Sequence[int],
    itemsize: int,
) -> Sequence[Fragment]:
    """The elements of one box as fragments of the whole tensor."""
    numel = math.prod(extents)
    local: Sequence[Fragment] = shift(own, -number * numel)
    offsets: list[int] = []
    for n, extent in zip(reversed(boxes), reversed(extents), strict=True):
        number, index = divmod(number, n)
        offsets.insert(0, index * extent)
    return embed_box(local, extents, offsets, shape, itemsize)
