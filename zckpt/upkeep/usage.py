"""What lies where in the saves of a run: weights, masters, moments, other, waste. Reads indexes only.

For `zckpt du`. [Note: the classes] Elements that a layout reads as tensors are `masters` where they are in the optimizer's files
or beside half-precision weights, otherwise `weights`, as are the module's own copies of masters. Optimizer states are `moments`.
Of tensors that no layout reads, their names in the file decide. `waste` is storages' bytes that no tensor of the file uses:
`torch.save` writes a view with its whole storage. `other` is everything else: pickles, zip directories,
padding, random states, config and tokenizer files. The five add up to the files' sizes.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field

from zckpt import layouts
from zckpt.base.dataclass import dataclass, public
from zckpt.base.errors import ZckptError
from zckpt.base.words import Printed, count, shorten_text, size, wrap_text
from zckpt.containers import open_container
from zckpt.containers.tensor_ref import tensors_in, waste_of
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import DType
from zckpt.core.fragments import Fragment
from zckpt.core.recipes import DerivedStore
from zckpt.core.stores import FileStore
from zckpt.jobs.groups import Reading
from zckpt.jobs.open import open_catalog
from zckpt.layouts.places import find
from zckpt.layouts.run_saves import saves_of
from zckpt.layouts.save.family import Family
from zckpt.storage.location import Location, locate

CLASSES = ("weights", "masters", "moments", "other", "waste")
_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_MOMENTS = re.compile(r"(?:exp_avg|momentum|moment|max_exp_avg|exp_inf|square_avg|acc_delta|state1|state2|sum)\w*")
_MASTERS = re.compile(r"(?:fp32|master|single_partition_of_fp32)\w*")
_WEIGHTS = re.compile(r"module|model|state_dict|weights|params|frozen_param_fragments")
_OPTIMIZER_DATA = re.compile(r"(?:.*/)?optimizer(?:_\d+)?/[^/]+\.distcp")
"""Data files of an optimizer that has a directory of its own; their indexes are counted with them."""


@dataclass(frozen=True, slots=True)
class SaveUsage:
    """The bytes of one save.

    Attributes:
        name: of its directory, or of the file.
        step: in its name; None if there is none.
        nbytes: of all its files.
        classes: class -> bytes; they add up to `nbytes`.
        wasteful: file -> its waste, of files with any, the greatest first.
        note: why it could not be read as a whole; empty if it could.
    """

    name: str
    step: int | None
    nbytes: int
    classes: Mapping[str, int]
    wasteful: Mapping[str, int]
    note: str = ""

    def as_json(self) -> dict[str, object]:
        """The fields for programs."""
        return {
            "name": self.name, "step": self.step, "bytes": self.nbytes, **self.classes,
            "wasteful": [{"path": path, "bytes": nbytes} for path, nbytes in self.wasteful.items()],
            "note": self.note or None,
        }  # fmt: skip


@public
@dataclass(frozen=True, slots=True, repr=False)
class RunUsage(Printed):
    """The bytes of all saves of a run, or of one checkpoint.

    Attributes:
        path: what was measured.
        saves: by step.
        beside_bytes: of files in the run's directory that belong to no save.
    """

    path: str
    saves: tuple[SaveUsage, ...]
    beside_bytes: int

    def __repr__(self) -> str:
        return f"<zckpt.RunUsage {shorten_text(self.path)!r}: {count(len(self.saves), 'save')}, {size(self.nbytes)}>"

    @property
    def classes(self) -> dict[str, int]:
        """Class -> bytes in all saves."""
        return {name: sum(save.classes[name] for save in self.saves) for name in CLASSES}

    @property
    def nbytes(self) -> int:
        """Bytes of all saves."""
        return sum(save.nbytes for save in self.saves)

    def as_json(self) -> dict[str, object]:
        """What `zckpt du --json` prints, as a dict."""
        return {
            "path": self.path,
            "saves": [save.as_json() for save in self.saves],
            "total": {"bytes": self.nbytes, **self.classes},
            "beside_bytes": self.beside_bytes,
        }

    def lines(self, width: int | None = None) -> Iterator[str]:
        """What `zckpt du` prints; sentences have at most `width` characters a line, longer words aside."""
        rows = [(save.name, save.nbytes, save.classes) for save in self.saves]
        rows += [("total", self.nbytes, self.classes)] if len(rows) > 1 else []
        wide = max(len(name) for name, _, _ in rows)
        yield f"{'':<{wide}} {'bytes':>10}" + "".join(f" {name:>10}" for name in CLASSES)
        for name, nbytes, classes in rows:
            yield f"{name:<{wide}} {size(nbytes):>10}" + "".join(
                f" {size(classes[each]) if classes[each] else '-':>10}" for each in CLASSES
            )
        if self.beside_bytes:
            yield from wrap_text(f"beside the saves: {size(self.beside_bytes)} in other files", width, "    ")
        for save in self.saves:
            if save.wasteful:
                path, nbytes = next(iter(save.wasteful.items()))
                others = f", and {count(len(save.wasteful) - 1, 'more file')}" if len(save.wasteful) > 1 else ""
                text = f"{save.name}: {size(nbytes)} of {path!r} are unused{others}; zckpt slim leaves them out"
                yield from wrap_text(text, width, "    ")
            if save.note:
                yield from wrap_text(f"{save.name}: {save.note}", width, "    ")


def du(path: str | os.PathLike[str]) -> RunUsage:
    """Measures what the saves of a run, or one checkpoint or weights file, take. Reads indexes only, kilobytes per file.

    Args:
        path: the directory of a run, a checkpoint, or a weights file.

    Returns:
        The saves, each with its bytes by class: weights, masters, moments, other, waste. `print` shows what `zckpt du` prints.

    Raises:
        NotACheckpointError: there is neither.

    Example:
        >>> [save.name for save in zckpt.du("run").saves]
        ['global_step2']
    """
    home = locate(path).refreshed()
    if home.is_dir() and not layouts.is_save(home.names()):
        saves, _ = saves_of(home)
        if saves:
            inside = {save.name for save in saves}
            beside = {name: nbytes for name, nbytes in _sizes(home).items() if name.partition("/")[0] not in inside}
            found = tuple(_measure_save(save.path, save.name, save.step) for save in saves)
            return RunUsage(home.path, found, sum(beside.values()))
    find(home)  # raises where there is nothing
    return RunUsage(home.path, (_measure_save(home, home.name, None),), 0)


def _sizes(path: Location) -> dict[str, int]:
    """Every file below a directory -> its bytes; for a file, the file itself."""
    if not path.is_dir():
        return {path.name: path.size()}
    found: dict[str, int] = {}
    for name in path.file_names([name for name in path.names() if not os.path.islink(path / name)]):
        try:
            found[name] = (path / name).size()
        except OSError:  # a link to nothing, or it is gone meanwhile
            continue
    return found


@dataclass(slots=True)
class _Count:
    """The bytes found so far: file -> class -> bytes, and the ranges of the file that they are in."""

    bytes_of: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict[str, "list[tuple[int, int]]"])
    unpacked: dict[int, DerivedStore] = field(default_factory=dict[int, DerivedStore])

    def add(self, file: str, name: str, nbytes: int) -> None:
        own = self.bytes_of.setdefault(file, {})
        own[name] = own.get(name, 0) + nbytes

    def add_fragments(self, dtype: DType, fragments: Iterable[Fragment], name: str) -> None:
        for fragment in fragments:
            if isinstance(fragment.store, DerivedStore) and id(fragment.store) not in self.unpacked:
                self.unpacked[id(fragment.store)] = fragment.store
                for entry in fragment.store.recipe.inputs:
                    self.add_fragments(entry.dtype, entry.fragments, name)
            elif isinstance(fragment.store, FileStore):
                self.add(fragment.store.path, name, fragment.numel * dtype.itemsize)
                span = (fragment.byte_offset, fragment.nbytes_end(dtype.itemsize))
                self.ranges.setdefault(fragment.store.path, []).append(span)


def _measure_save(path: Location, name: str, step: int | None) -> SaveUsage:
    sizes = _sizes(path)
    home = path if path.is_dir() else path.parent
    counted = _Count()
    note = ""
    try:
        _count_tensors(path, counted)
    except ZckptError as error:
        note = f"classes are judged by names alone, because it cannot be read: {error}"
    for spans in counted.ranges.values():
        spans.sort()
    wasteful = {file: waste for file in sizes if file.endswith(_FILES) and (waste := _count_rest(home / file, counted))}
    for file, nbytes in sizes.items():
        if _OPTIMIZER_DATA.fullmatch(file) and (home / file).path not in counted.bytes_of:
            counted.add((home / file).path, "moments", nbytes)
    places = {(home / file).path: nbytes for file, nbytes in sizes.items()}
    total = sum(sizes.values())
    classes = dict.fromkeys(CLASSES, 0)
    for file, found in counted.bytes_of.items():
        for each, nbytes in found.items() if file in places else ():
            classes[each] += nbytes
    classes["other"] += max(0, total - sum(classes.values()))
    ordered = dict(sorted(wasteful.items(), key=lambda item: -item[1]))
    return SaveUsage(name, step, total, classes, ordered, note)


def _count_tensors(path: Location, counted: _Count) -> None:
    """Counts the tensors that the layout reads: weights, masters, moments."""
    place = find(path)
    inside = len(place.tags) > 1 and place.home.is_within(path) and place.listing.tag != path.name
    for tag in place.tags if inside else (None,):
        opened = open_catalog(path, Reading(tag=tag), as_stored=True)
        listing = opened.place.listing
        family = layouts.family_by_names(listing)
        optim = _optimizer_files(family, listing.files)
        for entry in opened.catalog.tensors.values():
            _count_entry(entry, optim, counted)
        for file, nbytes in family.state_bytes(listing) if family.state_bytes is not None else ():
            counted.add(file, "moments", nbytes)
        if family.read_training is None:
            continue
        try:
            training = layouts.read_training(listing)
        except ZckptError:  # there are none, or none that zckpt reads: names decide
            continue
        for states in training.states.values():
            for state in states.values():
                counted.add_fragments(state.dtype, state.fragments, "moments")


def _optimizer_files(family: Family, files: Mapping[str, Location]) -> set[str]:
    """Paths of a save's files that are the optimizer's."""
    named = family.named_files(files)
    found = {files[file.name].path for file in named if "optim" in file.kind}
    return found | {place.path for name, place in files.items() if name.startswith(f"{family.directory or '?'}/")}


def _count_entry(entry: TensorEntry, optimizer: set[str], counted: _Count) -> None:
    own = entry.own_copy
    for fragment in entry.fragments:
        is_optimizers = isinstance(fragment.store, FileStore) and fragment.store.path in optimizer
        is_master = entry.role == "parameter" and (own is not None or is_optimizers)
        counted.add_fragments(entry.dtype, (fragment,), "masters" if is_master else "weights")
    for replica in entry.replicas:
        counted.add_fragments(replica.dtype, replica.fragments, "weights")


def _count_rest(path: Location, counted: _Count) -> int:
    """Counts the tensors of a file that no layout reads, and its waste; returns the waste."""
    try:
        found = {ref.place: (names, ref) for names, ref in tensors_in(open_container(path).root) if ref.numel}
    except ZckptError:
        return 0
    known = counted.ranges.get(path.path, [])
    for names, ref in found.values():
        at = bisect_left(known, (ref.byte_stop, 0)) - 1  # the last range that begins before the tensor ends
        if at < 0 or known[at][1] <= ref.byte_offset:
            counted.add(path.path, _class_of(names, path.name), ref.byte_stop - ref.byte_offset)
    waste = waste_of(ref for _, ref in found.values())
    if waste:
        counted.add(path.path, "waste", waste)
    return waste


def _class_of(names: tuple[str, ...], file: str) -> str:
    """The class of a tensor by its names in the file, the innermost first."""
    for name in reversed(names):
        if _MOMENTS.fullmatch(name):
            return "moments"
        if _MASTERS.fullmatch(name):
            return "masters"
    if "optim" in file:
        return "other"
    names = tuple(filter(None, names))
    is_weight = len(names) < 2 or any(_WEIGHTS.fullmatch(name) for name in names)
    return "weights" if is_weight and not file.startswith(("rng_state", "scheduler", "random_states")) else "other"
