"""Checkpoints of torch.distributed.checkpoint: FSDP, fully_shard, DTensors over any mesh, and plain tensors.

For `layouts`. What a save says of itself is read by `metadata`, which of it is the model and which the optimizer by
`state`, and chunks become tensors in `items`. Here is what that means: roles, ties, and the state of a run.
Source: torch/distributed/checkpoint/state_dict.py (2.13); accelerate 1.15, utils/fsdp_utils.py.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import eq
from typing import TYPE_CHECKING

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CorruptError, IncompleteError, InconsistentError, UnsupportedError, ZckptError
from zckpt.base.words import examples
from zckpt.containers import torch_zip
from zckpt.containers.alike_items import AlikeItems
from zckpt.containers.container import open_input
from zckpt.containers.meanings import global_of
from zckpt.containers.tensor_ref import MAX_DIMS
from zckpt.core.catalog import Catalog, Role, Source, TensorColumns, TensorEntry, TensorForm, Topology
from zckpt.core.dtypes import F32, U8, DType
from zckpt.core.evidence import Evidence
from zckpt.layouts.dcp import DATA, METADATA, flat, rank_of
from zckpt.layouts.dcp.chunks import Chunks, DcpChunk, Shape
from zckpt.layouts.dcp.cut_rows import places_of
from zckpt.layouts.dcp.items import Items, files_of, stored_in
from zckpt.layouts.dcp.metadata import BytesItem, Metadata, Path, TensorItem, read_columns, read_metadata
from zckpt.layouts.dcp.optimizer import States
from zckpt.layouts.dcp.shard_counts import evidence_of_shards
from zckpt.layouts.dcp.state import DcpModel, join_path, model_of, notes_on, optimizers_of, section_of
from zckpt.layouts.dcp.ties import may_be_tied, tied_copies
from zckpt.layouts.run.training import Training
from zckpt.layouts.run.values import step_of
from zckpt.layouts.save.companions import config_near
from zckpt.layouts.save.listing import Listing, list_files, natural
from zckpt.layouts.save.trainers import optimizer_beside
from zckpt.layouts.save.whole import is_short, missing_elements

if TYPE_CHECKING:
    from zckpt._core import Described

DEEPSPEED = "0.19.8"
"""The version of DeepSpeed that is recorded for a run from elsewhere: its files are those that zckpt writes."""


@dataclass(frozen=True, slots=True)
class DcpSave:
    """A save, read.

    Attributes:
        metadata: its metadata.
        model: the weights that were chosen.
        items: opens them.
        optimizers: of the model's parameters.
    """

    metadata: Metadata
    model: DcpModel
    items: Items
    optimizers: tuple[States, ...]


def load(listing: Listing) -> DcpSave:
    """Reads what a save says of itself; errors as in `read`."""
    return load_items(listing, read_metadata(listing))


def load_items(listing: Listing, metadata: Metadata, padded: AbstractSet[Path] = frozenset()) -> DcpSave:
    """Makes a save of these items; `padded`: paths of flat parameters that were plain vectors. Errors as in `read`."""
    optimizers = optimizers_of(metadata)
    model = model_of(metadata, listing.options.key, optimizers)
    items = Items(listing, metadata.file)
    inside = flat.units(model, listing, padded)
    model = flat.split_model(model, inside, items, listing)
    shapes = {name: item.shape for name, item in model.items.items()}
    found = (flat.split_optimizer(optimizer, inside, items) for optimizer in optimizers.values())
    states = [States(optimizer, items, shapes) for optimizer in found]
    if not states and (beside := _beside(listing)):
        other = read_metadata(beside)
        states = [States(o, Items(beside, other.file), shapes) for o in optimizers_of(other).values()]
    return DcpSave(metadata, model, items, tuple(filter(_is_of_model, states)))


def _is_of_model(states: States) -> bool:
    try:
        return states.is_of_model()
    except CorruptError:  # `_find_trained` says so
        return True
    except _errors_to_pass(states.items.listing):  # their names are in such a file
        return False


def _errors_to_pass(listing: Listing) -> tuple[type[ZckptError], ...]:
    """The errors that do not stop a read where files are known to be missing; none in other saves."""
    return (IncompleteError,) if listing.absent else ()


def _beside(listing: Listing) -> Listing | None:
    """The optimizer's own directory, which accelerate creates; None where there is none."""
    optimizer = optimizer_beside(listing.directory)
    return list_files(optimizer, "") if optimizer is not None and (optimizer / ".metadata").is_file() else None


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save.

    Raises:
        IncompleteError, InconsistentError, CorruptError, UnsafeError, UnsupportedError: see those.
        NotACheckpointError: it holds no weights.
        UsageError: there are no weights under the key of the options.
    """
    del allow_unknown  # nothing here is laid out by unknown rules
    if (columns := read_columns(listing)) is not None and (
        catalog := _catalog_of_columns(columns, listing)
    ) is not None:
        listing.once(_UNREAD, lambda: "")
        return catalog
    save = load(listing)
    listing.once(_UNREAD, lambda: unread_in(save))  # the metadata of a large save are not read again to say it
    return catalog_of(save, listing, evidence_of(listing, save.metadata.items))


def evidence_of(listing: Listing, items: Mapping[str, TensorItem | BytesItem]) -> Evidence:
    """What proves that no item and no chunk of a save is missing.

    `.metadata` is written after all ranks have said what they wrote, and lists every chunk. A rank that saved without the others
    lists its own items alone (`__R.metadata`), and shards of safetensors say nothing of other ranks.
    """
    names = listing.matching(METADATA)
    if ".metadata" in names:
        return Evidence("metadata", "'.metadata'")
    if names:
        return Evidence("unknown", "each rank's metadata list its own items, and not how many ranks there were")
    config = config_near(listing.directory)
    tensors = {name: item for name, item in items.items() if isinstance(item, TensorItem)}
    shapes, place = _shapes_beside(listing)
    if names := sorted(shapes.keys() & tensors.keys()):
        short = next((name for name in names if is_short(tensors[name].size, shapes[name])), "")
        lacking = sorted(shapes.keys() - tensors.keys())
        if short or lacking:
            raise missing_elements(listing, short, shapes, lacking, f"the optimizer's save {place!r}")
    found = evidence_of_shards(listing, tensors, config)
    if found.complete or len(names) < len(tensors):
        return found
    return Evidence("shapes", "the optimizer's metadata")


_OPTIMIZERS = ("optim", "../optim", "../optimizer", "../optimizer/optim", "../../optimizer/optim")
"""Where NeMo-RL and Automodel save the optimizer of a model, from the model's directory."""


def _shapes_beside(listing: Listing) -> tuple[dict[str, Shape], str]:
    """Shapes of parameters by the metadata of the optimizer's save beside this one, and where that save is; empty where
    there is none.
    """
    home = listing.directory.absolute()
    for place in _OPTIMIZERS:
        at = home
        for part in place.split("/"):
            at = at.parent if part == ".." else at / part
        if not (at / ".metadata").is_file():
            continue
        items = read_metadata(list_files(at, "")).items.values()
        states = [item for item in items if isinstance(item, TensorItem) and item.size and "state" in item.path[:-2]]
        found = {str(item.path[-2]): item.size for item in states}
        return found, at.path
    return {}, ""


def catalog_of(save: DcpSave, listing: Listing, evidence: Evidence) -> Catalog:
    """The catalog of a save's items, with its evidence; errors as in `read`."""
    trained, notes = _find_trained(save)
    roles = _roles(save.model.items, trained)
    kept, aliases = ties(save.model.items)
    tensors, copies = tied_copies(save.items.tensors(kept, roles), trained, _steps(save), listing)
    aliases = {name: copies.get(first, first) for name, first in aliases.items()} | copies
    return _catalog(
        tensors,
        listing,
        save.metadata.version,
        evidence,
        unnamed_in(save.metadata, listing),
        save.model.notes + notes,
        aliases=aliases,
        steps=_steps(save),
        states=tuple(dict.fromkeys(s for o in save.optimizers for n in o.tensors.values() for s in n)),
        prefix=_prefix(save),
    )


def _catalog(
    tensors: Mapping[str, TensorEntry],
    listing: Listing,
    version: str,
    evidence: Evidence,
    strange: list[str],
    notes: tuple[str, ...],
    *,
    aliases: Mapping[str, str] | None = None,
    steps: int | None = None,
    states: tuple[str, ...] = (),
    prefix: str = "",
) -> Catalog:
    """A catalog of tensors; `strange`: data files that are of another save."""
    ranks = {rank for rank in map(rank_of, listing.files.keys() - {*strange}) if rank is not None}
    source = Source(
        layout="dcp",
        path=listing.directory.path,
        tag=listing.tag,
        framework=("torch.distributed.checkpoint", version),
        global_steps=steps,
        optimizer_states=states,
        notes=notes + note_on_unnamed(strange),
        prefix=prefix,
    )
    return Catalog(tensors, source, evidence, aliases or {}, Topology(dp=max(len(ranks), 1)))


def _catalog_of_columns(columns: Described, listing: Listing) -> Catalog | None:
    """The catalog of a save that is one state dict of weights and nothing else; None for any other."""
    prefixes = [tuple(prefix.splitlines()) for prefix in columns.prefixes()]
    has_more = any(map(columns.mentions, _NO_WEIGHTS)) or any(columns.find(name) >= 0 for name in _STEPS)
    if len(prefixes) != 1 or has_more or _beside(listing) is not None:
        return None
    section = section_of(prefixes[0])
    forms: list[TensorForm] = []
    for name, shape in columns.forms():
        dtype = global_of("torch", name)
        if not isinstance(dtype, DType) or len(shape) > MAX_DIMS:
            return None
        forms.append(TensorForm(shape, dtype, "buffer" if dtype.kind not in ("float", "complex") else "parameter"))
    if section == ("state", "model") or may_be_tied([form.shape for form in forms], listing):
        return None
    form = array("i", columns.take("form"))
    if (placed := places_of(columns, forms, form, listing, AlikeItems())) is None:
        return None
    key = join_path(section)
    tensors = TensorColumns(columns, key and key + ".", (forms, form), *placed)
    strange = unnamed_among({*columns.files()}, listing)
    return _catalog(
        tensors, listing, columns.version(), Evidence("metadata", "'.metadata'"), strange, tuple(notes_on(section))
    )


_NO_WEIGHTS = ("param_groups", "flat_param")
"""In names of an optimizer's items, and of flat parameters."""
_STEPS = ("step", "global_step", "train_state.step", "global_steps")
"""Names of items that count the optimizer's steps."""


_COMPOSER = ("state", "integrations", "huggingface")


def _prefix(save: DcpSave) -> str:
    """The prefix that Composer's wrapper of a transformers model puts before all names; empty for others."""
    is_composers = save.model.key == "state.model"
    return "model." if is_composers and any(i.path[:3] == _COMPOSER for i in save.metadata.items.values()) else ""


def _find_trained(save: DcpSave) -> tuple[set[str], tuple[str, ...]]:
    """The parameters that optimizers own, or the reason why these are not known."""
    trained: set[str] = set()
    try:
        trained = {name for states in save.optimizers for name in states.parameters()}
        for states in save.optimizers:
            states.check_fused()
    except (UnsupportedError, InconsistentError, CorruptError) + _errors_to_pass(save.items.listing) as error:
        return trained, (f"The optimizer's states are not read: {error.what}.",)
    return trained, ()


_UNREAD = "why states of the optimizer are not read"


def unread_states(listing: Listing) -> str:
    """Why optimizer states of a save are not read, in words; empty if they are read, or there are none."""
    return listing.once(_UNREAD, lambda: unread_in(load(listing)))


def unread_in(save: DcpSave) -> str:
    """Why optimizer states among a save's items are not read, in words; empty if they are read, or there are none."""
    _, notes = _find_trained(save)
    return notes[0].rstrip(".") if notes else ""


def _roles(items: Mapping[str, TensorItem], trained: set[str]) -> dict[str, Role]:
    """The roles of the tensors that no optimizer owns, where one owns others: frozen parameters, and buffers.

    A save does not record buffers. Tensors that are not floating are taken for buffers, and so are floating ones without an
    optimizer that are whole while the trained ones are cut: FSDP cuts parameters, frozen or not, and no buffers.
    """
    cut = [name for name in trained if name in items and len(items[name].chunks) > 1]
    whole = [name for name in trained if name in items and len(items[name].chunks) == 1 and items[name].size[:1] > (1,)]
    roles: dict[str, Role] = {}
    for name, item in items.items():
        if item.dtype.kind not in ("float", "complex"):
            roles[name] = "buffer"
        elif trained and name not in trained:
            roles[name] = "buffer" if cut and not whole and len(item.chunks) == 1 else "frozen"
    return roles


def ties(items: dict[str, TensorItem]) -> tuple[dict[str, TensorItem], dict[str, str]]:
    """Tensors by the first of their names, and the other names of those that share their places."""
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, item in items.items():
        begins = _first_place(item.chunks)  # all chunks as a key would take a gigabyte
        key = hash((item.size, item.dtype.name, begins))  # and the place itself two hundred bytes
        number = 0
        while begins is not None and (other := first.setdefault(key if number == 0 else (key, number), name)) != name:
            if _is_tied(items[other], item):
                aliases[name] = other
                break
            number += 1
    return {name: item for name, item in items.items() if name not in aliases} if aliases else items, aliases


def _first_place(chunks: Sequence[DcpChunk]) -> object:
    """The place of the first chunk with elements; None if there is none."""
    if isinstance(chunks, Chunks):
        return chunks.first()
    return next((chunk.place for chunk in chunks if chunk.numel), None)


def _is_tied(one: TensorItem, other: TensorItem) -> bool:
    """Whether two tensors are alike and have the same places."""
    if (one.size, one.dtype.name, len(one.chunks)) != (other.size, other.dtype.name, len(other.chunks)):
        return False
    return all(map(eq, one.chunks, other.chunks))


def _steps(save: DcpSave) -> int | None:
    """The number of optimizer steps, by the first parameter that counts them, or by an item with such a name; None if
    unknown.
    """
    for states in save.optimizers:
        for singles in states.singles.values():
            if "step" in singles and save.items.has(singles["step"]):
                return step_of(states.value(singles["step"]))
    for name in _STEPS:
        if (item := save.metadata.items.get(name)) is not None and save.items.has(item):
            return step_of(save.items.value(item))
    return None


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """What the run needs beside its weights, as far as the save has it; arguments and errors as in `read`. Raises
    UnsupportedError if there is no optimizer, or it has numbers instead of names.
    """
    del allow_unknown
    return training_of(load(listing), listing)


def training_of(save: DcpSave, listing: Listing) -> Training:
    """What a run needs beside the weights, of a save's items; errors as in `read_training`."""
    if not save.optimizers:
        raise UnsupportedError(
            "holds no optimizer states", file=listing.directory, found="weights only",
            expected="an item 'param_groups'", remedy="Convert the weights alone (to-fp32).",
        )  # fmt: skip
    groups = tuple(group for states in save.optimizers for group in states.groups())
    entries = {name: states for o in save.optimizers for name, states in o.entries().items()}
    precisions = Counter(save.model.items[name].dtype for name in entries)
    return Training(
        groups,
        entries,
        {},
        _rest(save),
        precisions.most_common(1)[0][0] if precisions else F32,
        other_shapes={name: states for o in save.optimizers for name, states in o.other_shapes().items()},
    )


def named_data(listing: Listing) -> dict[str, list[str]]:
    """The data files that the metadata name, in their order; errors as in `read_metadata`."""
    found = stored_in(read_metadata(listing)) if listing.matching(METADATA) else ()
    return {name: [] for name in sorted(found, key=natural)}


def records(listing: Listing) -> Iterator[tuple[str, list[tuple[str, int, int, int]] | ZckptError]]:
    """(path of a data file, its torch files' records with their checksums, or its error), for a whole save.

    A record is (name, byte offset, bytes, stored CRC-32). There are none if the metadata cannot be read:
    `read` raises the reason. Files of `SAFETENSORS` are containers.
    """
    if not listing.matching(METADATA):
        return
    try:
        stored = stored_in(read_metadata(listing))
    except ZckptError:
        return
    for name, places in stored.items():
        path = listing.where(name).path
        found: list[tuple[str, int, int, int]] = []
        try:
            with open_input(path) as file:
                for place, item in places.items():
                    part = file.part(place.offset, place.length, f"item {item!r}")
                    found += [(f"{item}: {record[0]}", *record[1:]) for record in torch_zip.records_in(part)]
        except ZckptError as error:
            yield path, error
            continue
        yield path, found


_SMALL_BYTES = 1 << 16


def _others(save: DcpSave) -> dict[str, TensorItem | BytesItem]:
    owned = {item.name for o in optimizers_of(save.metadata).values() for _, item in (*o.states, *o.settings)}
    owned |= {item.name for item in save.model.items.values()}
    return {n: item for n, item in save.metadata.items.items() if n not in owned and not flat.FLAT.search(n)}


def _rest(save: DcpSave) -> dict[str, object]:
    """All items that are neither weights nor optimizer (counters, schedules, a trainer's state), nested as in the state dict.

    DeepSpeed's loader needs its own counters, and a version, in every save; they are added.
    """
    steps = _steps(save)
    rest: dict[str, object] = {}
    for item in _others(save).values():
        if isinstance(item, TensorItem) and _is_large(item):
            continue
        inner = rest
        for key in item.path[:-1]:
            below = inner.setdefault(str(key), {})
            inner = below if isinstance(below, dict) else {}
        inner[str(item.path[-1])] = save.items.value(item)
    counters = {"global_steps": steps or 0, "skipped_steps": 0, "ds_version": DEEPSPEED}
    return {**rest, **counters}


def unnamed_in(metadata: Metadata, listing: Listing) -> list[str]:
    """The data files that a save's metadata do not name: those of another save in the same directory."""
    return unnamed_among(files_of(metadata), listing) if listing.matching(METADATA) else []


def unnamed_among(named: set[str], listing: Listing) -> list[str]:
    """The data files of a save that are not among these. Empty ones are of a writer that had more threads than tensors."""
    names = {*listing.matching(DATA)} - named
    return sorted((name for name in names if listing.files[name].size()), key=natural)


def note_on_unnamed(names: Sequence[str]) -> tuple[str, ...]:
    """A sentence on the data files that metadata do not name; none where there are none."""
    if not names:
        return ()
    them, they = ("it", "it is") if len(names) == 1 else ("them", "they are")
    return (f"Not read: {examples(names)}; {they} of another save, since the metadata of this one do not name {them}.",)


def unnamed_files(listing: Listing) -> list[str]:
    """As `unnamed_in`, of the files."""
    return unnamed_in(read_metadata(listing), listing)


def beside(listing: Listing) -> list[str]:
    """Names of tensors that are neither the model's nor the optimizer's, without random states; and the files of `unnamed_in`."""
    save = load(listing)
    return [*beside_in(save), *unnamed_in(save.metadata, listing)]


def beside_in(save: DcpSave) -> list[str]:
    """Names of tensors that are neither the model's nor the optimizer's, without random states, which are vectors of bytes."""
    found = ((name, item) for name, item in _others(save).items() if isinstance(item, TensorItem))
    return [name for name, item in found if not (item.dtype == U8 and len(item.size) == 1)]


def left_out(listing: Listing) -> list[str]:
    """Names of tensors that are neither the model's nor the optimizer's, and too large to be a part of `read_training`."""
    save = load(listing)
    return [name for name, item in _others(save).items() if isinstance(item, TensorItem) and _is_large(item)]


def _is_large(item: TensorItem) -> bool:
    """Whether a tensor is so large that it belongs to another model, such as an average or a teacher."""
    return len(item.chunks) != 1 or math.prod(item.size) * item.dtype.itemsize > _SMALL_BYTES
