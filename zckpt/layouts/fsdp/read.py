"""Reads rank files: the files of all ranks become one save of torch.distributed.checkpoint, with chunks in torch files.

For `layouts`. verl and its kin write `model_world_size_4_rank_0.pt`, with `optim_...` and `extra_state_...` beside it; other
trainers write `rank0.pt` or `model_rank_0.pt`. Every rank's state dict has the same names. A tensor that was cut says which part
the rank has (`save.cut_tensors`); any other tensor is the same on every rank, and the copies are compared by `verify`.

[Note: numbered states] `optimizer.state_dict()` numbers the parameters in the order of its groups. Where it has one group, of
as many parameters as the model has cut tensors, with states of their shapes, that is the order of the model's state dict. Where
only PEFT's tensors are trained, it is their order. In any other case the numbers cannot be named from the files, and the states
are not read. FSDP1 with `use_orig_params` keeps of each state the elements of the flattened parameter that the rank has: those
of all ranks, end to end, are the state.
Source: verl 0.6, utils/checkpoint/fsdp_checkpoint_manager.py; torch 2.13, optim/optimizer.py `state_dict`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from zckpt.base import words
from zckpt.base.errors import OTHER_SAVE, CorruptError, InconsistentError, UnsupportedError, ZckptError
from zckpt.base.words import examples
from zckpt.containers import TensorRef, brief
from zckpt.core.catalog import Catalog, Replica, TensorEntry, Topology
from zckpt.core.evidence import Evidence
from zckpt.core.fragments import Box
from zckpt.layouts.dcp import read as dcp
from zckpt.layouts.dcp.chunks import DcpChunk
from zckpt.layouts.dcp.flat import FLAT
from zckpt.layouts.dcp.metadata import BytesItem, InertValue, Metadata, Path, TensorItem
from zckpt.layouts.dcp.state import join_path
from zckpt.layouts.fsdp import ANY, NONE, VERL, pattern_of
from zckpt.layouts.fsdp.lost import GatheredTensor, lost_ranks, take_lost
from zckpt.layouts.run.training import Training
from zckpt.layouts.run.values import missing_ranks, refuse_odd_values
from zckpt.layouts.save.cut_tensors import CutTensor, KnownFacts, Shape, class_of, cut_tensor
from zckpt.layouts.save.listing import Listing, natural
from zckpt.layouts.save.model_shapes import own_name, read_shapes
from zckpt.layouts.save.module_states import root_of
from zckpt.layouts.save.origins import other_kind

_CUT = ("DTensor", "ShardedTensor")
_WORLD = re.compile(r"world_size_(\d+)")
_MODEL, _OPTIMIZER = "model", "optim"
_ADAPTER = re.compile(r"(?:^|\.)(?:lora_|modules_to_save\.)")
_STATE = "state"
_NOT_READ = "The optimizer's states are not read"
_DEEPEST = 8
"""The depth to which nested mappings are searched."""


def match(listing: Listing) -> str | None:
    """None when this layout reads the files; otherwise why not. Opens one file with a name that does not say it."""
    names = listing.matching(VERL)
    if any(name.startswith(_MODEL) for name in names):
        return None
    if listing.directory in listing.files.values():
        return "one file"
    if not names and any(_holds_cut(listing, name) for name in listing.matching(ANY)[:1]):
        return None
    return NONE


def read(listing: Listing, *, allow_unknown: bool = False) -> Catalog:
    """The catalog of a save of rank files.

    Raises:
        IncompleteError: ranks are missing. InconsistentError: ranks do not agree, or their files are of two saves.
        UnsupportedError: tensors do not say how they were cut.
    """
    del allow_unknown  # nothing here is laid out by unknown rules
    ranks = _ranks(listing)
    catalog = ranks.catalog("fsdp", "torch.distributed", ranks.evidence())
    if len(ranks.mesh) < 2:
        return catalog
    note = f"The ranks were a mesh of {' x '.join(f'{n} {name}' for name, n in ranks.mesh.items())}."
    return replace(catalog, source=replace(catalog.source, notes=(*catalog.source.notes, note)))


def read_training(listing: Listing, *, allow_unknown: bool = False) -> Training:
    """The optimizer's states, if their parameters can be named; arguments and errors as in `read`."""
    del allow_unknown
    return _ranks(listing).training()


def unread_states(listing: Listing) -> str:
    """Why optimizer states of a save are not read, in words; empty if they are read, or there are none."""
    return _ranks(listing).unread_states()


def beside(listing: Listing) -> list[str]:
    """Names of tensors that are neither the model's nor the optimizer's, without random states."""
    return dcp.beside_in(_ranks(listing).save())


def _ranks(listing: Listing) -> RankFiles:
    return listing.once("rank files", lambda: RankFiles(listing, _files(listing)))


RankFile = tuple[int, str, Iterable[tuple[Path, object]]]
"""One rank's file: the rank, its path for errors, and path -> value of all that it holds; a tensor that was cut may be a
`CutTensor`.
"""


class RankFiles:
    """The files of one save.

    Args:
        listing: of them.
        files: what each holds.
        optimizer: the key that the optimizer's state dict is under.

    Attributes:
        mesh: name -> size of each dimension of the largest mesh that its tensors name.
        world_size: ranks.

    Raises:
        IncompleteError: ranks are missing. InconsistentError: ranks do not agree.
        UnsupportedError: tensors do not say how they were cut.
    """

    def __init__(self, listing: Listing, files: Iterable[RankFile], optimizer: str = _OPTIMIZER) -> None:
        self.listing = listing
        self._optimizer = optimizer
        self.mesh: Mapping[str, int] = {}
        self._runs: dict[Path, dict[int, TensorRef]] = {}
        self._flat: dict[Path, dict[int, TensorRef]] = {}
        self._tensors: dict[Path, GatheredTensor] = {}
        self._values: dict[Path, object] = {}
        self._files: dict[Path, str] = {}
        self._contradiction: ZckptError | None = None
        self._known: KnownFacts = {}
        there: set[int] = set()
        for rank, path, values in files:
            self._gather(rank, path, values)
            there.add(rank)
        there |= take_lost(listing, self._tensors, optimizer)
        self.world_size = max(len(there), math.prod(self.mesh.values()))
        if missing := sorted(set(range(self.world_size)) - set(there)):
            raise missing_ranks(listing, "rank", sorted(there), missing, self.world_size)
        self._check_kinds()
        self._tensors |= {path: _join_runs(runs, None, self.world_size) for path, runs in self._flat.items()}
        self._check_cut()
        with suppress(CorruptError), refuse_odd_values(listing):  # then they stay as they are, without names
            self._name_states()

    def _gather(self, rank: int, file: str, values: Iterable[tuple[Path, object]]) -> None:
        """Adds what one rank's file holds."""
        for path, value in values:
            name = join_path(path[1:])
            cut = value if isinstance(value, CutTensor) else cut_tensor(value, name, file, self._known)
            if cut is None and not isinstance(value, TensorRef):
                if path not in self._values:
                    self._values[path], self._files[path] = value, file
                if path[0] == self._optimizer and self._contradiction is None:
                    self._contradiction = self._find_contradiction(path, value, file)
                continue
            dtype, size = (cut.dtype, cut.size) if cut else (value.dtype, value.shape)  # type: ignore[attr-defined]
            if cut is None and path[:2] == (self._optimizer, "state") and type(path[2]) is int and len(size) == 1:
                self._runs.setdefault(path, {})[rank] = value  # type: ignore[assignment]
                continue
            if cut is None and path[0] == _MODEL and len(size) == 1 and FLAT.search(name):
                self._flat.setdefault(path, {})[rank] = value  # type: ignore[assignment]
                continue
            held = self._tensors.setdefault(path, GatheredTensor(dtype, size, cut is not None))
            if (held.dtype, held.size, held.is_cut) != (dtype, size, cut is not None):
                raise InconsistentError(
                    f"ranks do not agree on {name!r}", file=file, found=f"{dtype} {list(size)}",
                    expected=f"{held.dtype} {list(held.size)}, as rank 0 has it", remedy=OTHER_SAVE,
                )  # fmt: skip
            if cut is not None and len(cut.axes) > len(self.mesh):
                self.mesh = cut.axes
            for offsets, ref in cut.boxes if cut else (((0,) * len(size), value),):
                assert isinstance(ref, TensorRef)
                held.boxes.setdefault(Box(offsets, ref.shape), []).append((rank, ref))

    def _find_contradiction(self, path: Path, value: object, file: str) -> ZckptError | None:
        """The error for a value of an optimizer that contradicts the form of its state dict, or the ranks before; None
        where it does not.
        """
        is_state = path[1:2] == (_STATE,)
        is_odd = isinstance(value, float) and not math.isfinite(value)
        if len(path) < 2 or path[1:] == ("param_groups",) or (is_state and (len(path) < 4 or is_odd)):
            return CorruptError(
                "the optimizer's states are not as torch writes them", file=file, found=f"{join_path(path[1:])}: {brief(value)}",
                expected="for each parameter a dict of tensors and finite numbers, and groups of parameters", remedy=OTHER_SAVE,
            )  # fmt: skip
        first = self._values[path]
        if value is not first and repr(value) != repr(first):
            return InconsistentError(
                "ranks' optimizer files disagree", file=file, found=f"{join_path(path[1:])}: {brief(value)}",
                expected=f"{brief(first)}, as in {self._files[path]!r}", remedy=OTHER_SAVE,
            )  # fmt: skip
        return None

    def training(self) -> Training:
        """The optimizer's states, if their parameters can be named. Raises CorruptError, InconsistentError if a rank's
        states are none, or they are not those of the others.
        """
        if self._contradiction is not None:
            raise self._contradiction
        return dcp.training_of(self.save(), self.listing)

    def unread_states(self) -> str:
        """Why optimizer states are not read, in words; empty if they are read, or there are none."""
        if self._contradiction is not None:
            return f"{_NOT_READ}: {self._contradiction.what}"
        return dcp.unread_in(self.save())

    def catalog(self, layout: str, framework: str, evidence: Evidence) -> Catalog:
        """The catalog of the ranks' save; `evidence`: what proves that all ranks are here. Errors as in `read`."""
        save = self.save()
        catalog = dcp.catalog_of(save, self.listing, evidence)
        notes = catalog.source.notes
        if self._contradiction is not None:
            notes = (*(note for note in notes if not note.startswith(_NOT_READ)), f"{self.unread_states()}.")
        tensors = {name: self._with_copies(entry, save) for name, entry in catalog.tensors.items()}
        source = replace(catalog.source, layout=layout, framework=(framework, ""), notes=notes)
        return replace(catalog, tensors=tensors, topology=Topology(dp=self.world_size), source=source)

    def _check_kinds(self) -> None:
        """Raises InconsistentError where a name of the model is a tensor in one rank's file and something else in another's."""
        files = {
            path: next(iter(held.boxes.values()))[0][1].store.path for path, held in self._tensors.items() if held.boxes
        }
        files |= {path: next(iter(runs.values())).store.path for path, runs in self._flat.items()}
        others = [*self._values.items(), *((path, None) for path in files)]
        for path, value in others:
            if path[0] == self._optimizer:
                if path in self._values and path in files and self._contradiction is None:
                    self._contradiction = other_kind(join_path(path[1:]), self._files[path], value, files[path])
                continue
            if (above := files.get((_MODEL, path[0]))) is not None:  # with a mapping in it, a file looks nested
                raise other_kind(str(path[0]), self._files.get(path) or files[path], value or {}, above)
            if path in self._values and path in files:
                raise other_kind(join_path(path[1:]), self._files[path], value, files[path])
            for length in range(2, len(path)):
                if (above := files.get(path[:length])) is not None:
                    raise other_kind(join_path(path[1:length]), self._files.get(path) or files[path], {}, above)

    def _check_cut(self) -> None:
        """Raises UnsupportedError where several ranks hold tensors that do not say how they were cut."""
        of_model = [held.is_cut for path, held in self._tensors.items() if path[0] != self._optimizer]
        self._are_cut = any(of_model)
        if self.world_size > 1 and of_model and not self._are_cut:
            raise UnsupportedError(
                "its tensors do not say which part of the model a rank has", file=self.listing.directory,
                found=f"plain tensors in the files of {self.world_size} ranks",
                expected="DTensors or ShardedTensors, or the file of 1 rank",
                remedy="If each rank's file is a whole model, convert one of them. Otherwise load them with the program that "
                "wrote them, and save again with StateDictType.SHARDED_STATE_DICT.",
            )  # fmt: skip

    def _trained(self) -> Iterator[list[tuple[str, bool, Shape]]]:
        """The parameters that an optimizer's numbers may mean: (name, whether it is a flat parameter, shape) of each
        trained one.
        """
        cut = [
            (str(path[1]), FLAT.search(str(path[-1])) is not None, held.size)
            for path, held in self._tensors.items()
            if path[0] == _MODEL and held.is_cut
        ]
        yield cut
        yield [one for one in cut if _ADAPTER.search(one[0])]
        if self.listing.options.shapes and any(flat for _, flat, _ in cut):
            whole = {own_name(str(path[1])) for path, held in self._tensors.items() if not held.is_cut}
            said, _ = read_shapes(self.listing.options.shapes)
            yield [(name, False, shape) for name, shape in said.items() if name not in whole]

    def _name_states(self) -> None:
        """Puts the names of parameters in place of numbers; see [Note: numbered states]."""
        state, groups_at = (self._optimizer, "state"), (self._optimizer, "param_groups")
        groups = {path[2] for path in self._values if path[:2] == groups_at and len(path) > 2}
        everything = (*self._tensors, *self._values, *self._runs)
        if any(path[:2] == state and len(path) < 4 for path in everything):
            return  # no state of a parameter
        numbers = {path[2] for path in everything if path[:2] == state}
        trained = next((some for some in self._trained() if numbers == set(range(len(some)))), None)
        if groups != {0} or trained is None:
            return
        states = dict(self._tensors)
        for path, runs in self._runs.items():
            flat, own = trained[int(path[2])][1:]
            states[path] = _join_runs(runs, None if flat else own, self._shards())
            if flat:  # it may end with padding
                states[path].size = own
        for path, held in states.items():
            if path[:2] == state and held.shape not in ((), trained[int(path[2])][2]):
                return
        names = [name for name, _, _ in trained]

        def renamed(path: Path) -> Path:
            return (*state, names[int(path[2])], *path[3:]) if path[:2] == state else path

        self._tensors = {renamed(path): held for path, held in states.items()}
        self._values = {renamed(path): value for path, value in self._values.items()}
        self._values[(*groups_at, 0, "params")] = names

    def _shards(self) -> int:
        """The number of ranks that share one copy of the model: under hybrid sharding, the last dimension of the mesh."""
        return next(reversed(list(self.mesh.values())), self.world_size)

    def evidence(self) -> Evidence:
        """The evidence for the number of ranks."""
        if any(_WORLD.search(name) for name in self.listing.matching(VERL)):
            return Evidence("metadata", "the world size in the names of the files")
        if self.mesh:
            return Evidence("metadata", "the mesh of ranks that the tensors record")
        return Evidence("unknown", "the files do not say how many ranks there were", "the number of ranks of the run")

    # -- what they are together --------------------------------------------------------------------------------------

    def save(self) -> dcp.DcpSave:
        """The ranks' files as a save of torch.distributed.checkpoint; errors as in `read`."""
        items: dict[str, TensorItem | BytesItem] = {}
        for path, held in self._tensors.items():
            name = join_path(path)
            chunks = (DcpChunk(offsets, sizes, refs[0][1]) for (offsets, sizes), refs in held.boxes.items())
            items[name] = TensorItem(name, path, held.dtype, held.size, tuple(chunks), held.view)
        for path, value in self._values.items():
            name = join_path(path)
            items[name] = BytesItem(name, path, InertValue(value))
        metadata = Metadata(self.listing.directory.path, items, True)
        return dcp.load_items(self.listing, metadata, self._flat.keys())

    def _with_copies(self, entry: TensorEntry, save: dcp.DcpSave) -> TensorEntry:
        """The tensor, with what further ranks hold of it as replicas."""
        held = self._tensors.get(save.model.items[entry.name].path)
        if held is None:  # of a flat parameter
            return entry
        replicas: list[Replica] = []
        for number in range(1, min(map(len, held.boxes.values()), default=0)):
            chunks = [DcpChunk(*box, refs[number][1]) for box, refs in held.boxes.items()]
            item = TensorItem(entry.name, (), held.dtype, held.size, tuple(chunks))
            copy = save.items.tensors({entry.name: item}, {entry.name: entry.role})[entry.name]
            whose = words.ranks(sorted(refs[number][0] for refs in held.boxes.values()))
            replicas.append(Replica(held.dtype, copy.fragments, whose, True))
        role = entry.role if held.is_cut or not self._are_cut else "buffer"
        return replace(entry, replicas=tuple(replicas), role=role)


def _kinds(listing: Listing) -> dict[str, dict[int, str]]:
    """Kind of file -> rank -> its name: the model's first. Raises IncompleteError, InconsistentError as in `read`."""
    found: dict[str, dict[int, str]] = {}
    worlds: dict[int, str] = {}
    pattern = pattern_of(listing)
    for name in listing.files:
        if (match := pattern.fullmatch(name)) and match["kind"] != "extra_state":
            found.setdefault(match["kind"], {})[int(match["dp"])] = name
            worlds |= {int(size): name for size in _WORLD.findall(name)}
    if len(worlds) > 1:
        raise InconsistentError(
            "holds rank files of several world sizes", file=listing.directory,
            found=examples([worlds[size] for size in sorted(worlds)]), expected="files of one save", remedy=OTHER_SAVE,
        )  # fmt: skip
    if pattern is ANY and len(found) > 1:
        found = {kind: names for kind, names in found.items() if _holds_cut(listing, next(iter(names.values())))}
    world_size = max(next(iter(worlds), 0), *(max(names) + 1 for names in found.values()))
    for kind, names in found.items():
        if missing := sorted(set(range(world_size)) - {*names, *lost_ranks(listing, pattern, kind)}):
            raise missing_ranks(listing, kind.strip("._-") or "rank", sorted(names), missing, world_size)
    return dict(sorted(found.items(), key=lambda item: (item[0] != _MODEL, natural(item[0]))))


def _files(listing: Listing) -> Iterator[RankFile]:
    """The files of a save, and what they hold; errors as in `read`."""
    kinds = _kinds(listing)
    for names in kinds.values():
        listing.open_alike(list(names.values()))
    views = {key for name in kinds.get(_MODEL, {}).values() for key in _views_of_flat(listing.open(name).root)}
    for kind in kinds:
        for rank, name in kinds[kind].items():
            root = root_of(listing, name)
            root = {key: value for key, value in root.items() if kind != _MODEL or key not in views}
            yield rank, listing.files[name].path, _walk_values(kind, root, len(kinds))


def _join_runs(runs: Mapping[int, TensorRef], shape: Shape | None, ranks: int) -> GatheredTensor:
    """The elements of a flattened tensor: each of `ranks` ranks has the next ones; others have copies.

    `shape` is the tensor's own; None for a vector when that is not known.
    """
    first = next(iter(runs.values()))
    whole = GatheredTensor(first.dtype, (), True, view=shape)
    at = 0
    for rank, ref in sorted(runs.items()):
        if rank < ranks and ref.numel:
            whole.boxes[Box((at,), ref.shape)] = [(rank, ref)]
            at += ref.numel
    whole.size = (at,)
    if shape is None or at != math.prod(shape):
        whole.view = None
    return whole


def _walk_values(kind: str, root: Mapping[str, object], kinds: int) -> Iterator[tuple[Path, object]]:
    """The values in a file, under paths that begin with `model` or `optim`."""
    head = kind if kind in (_MODEL, _OPTIMIZER) else _MODEL if kinds == 1 else kind
    nested = any(isinstance(value, Mapping) and any(leaves(value)) for value in root.values())
    if head == _MODEL and not nested:
        yield from (((_MODEL, str(key)), value) for key, value in root.items())
    else:
        yield from (((head, *path) if head == _OPTIMIZER else path, value) for path, value in leaves(root))


def _views_of_flat(root: object) -> Iterator[str]:
    """Names of the views that FSDP1 with `use_orig_params` saves beside the flat parameter that holds their elements."""
    tensors = root if isinstance(root, Mapping) else {}
    flat = {
        ref.storage_key
        for name, value in tensors.items()
        if FLAT.search(str(name)) and (cut := cut_tensor(value, str(name), "")) is not None
        for _, ref in cut.boxes
    }
    for name, value in tensors.items():
        if flat and isinstance(value, TensorRef) and value.storage_key in flat:
            yield str(name)


def _holds_cut(listing: Listing, name: str) -> bool:
    root = listing.open(name).root
    return isinstance(root, Mapping) and any(
        class_of(value) in _CUT or (isinstance(value, TensorRef) and path and FLAT.search(str(path[-1])))
        for path, value in leaves(root)
    )


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """All values in mappings and in lists of mappings, under their paths."""
    inner: Iterator[tuple[object, object]] | None = None
    if len(path) < _DEEPEST and isinstance(value, Mapping):
        inner = iter(value.items())
    elif len(path) < _DEEPEST and isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        inner = iter(enumerate(value))
    if inner is None:
        yield path, value
        return
    for key, below in inner:
        yield from leaves(below, (*path, key if type(key) is int else str(key)))
