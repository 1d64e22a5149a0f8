"""Opening a checkpoint: which save, which layout, which tensors; and reading single tensors lazily.

For every job, and for users of `zckpt.open_checkpoint`. Opening reads indexes only, kilobytes per file.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from zckpt import layouts
from zckpt.base.dataclass import public
from zckpt.base.errors import NoTensorError, UnsupportedError, UsageError
from zckpt.base.words import as_html, count, examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.evidence import Evidence
from zckpt.core.fragments import Fragment
from zckpt.core.overlaps import clip
from zckpt.core.plan import Plan
from zckpt.core.stores import FileStore, MemoryStore
from zckpt.jobs.groups import Reading
from zckpt.jobs.opened import Opened as Opened
from zckpt.jobs.opened import WorkingModel, dequantise, opened_as_stored, working_model
from zckpt.layouts.places import Place, find
from zckpt.layouts.save.folder import list_folder
from zckpt.layouts.save.listing import ReadOptions
from zckpt.layouts.save.state_names import WRAPPERS
from zckpt.layouts.search import pointer_in, tags_in
from zckpt.output.manifest import path_for
from zckpt.storage.descriptors import OpenFiles
from zckpt.storage.location import locate

if TYPE_CHECKING:
    import numpy
    import torch

    from zckpt.jobs.declarations import Asked
    from zckpt.jobs.states import NamedStates, OptimizerStates

    Tensor = torch.Tensor | numpy.ndarray[Any, Any]


_SHOWN_TENSORS = 20
_COMPARED_NAMES = 10_000
"""The most names that are compared with a wrong one to find the nearest; it takes a tenth of a second."""


def open_catalog(
    path: str | os.PathLike[str],
    reading: Reading | None = None,
    *,
    as_stored: bool = False,
    keeps_dtypes: bool = False,
) -> Opened:
    """Finds the save, chooses the layout and reads the catalog.

    Args:
        path: a checkpoint in any of the forms `layouts.places` knows, or plain weights.
        reading: which save, and how it is read; None for the usual.
        as_stored: leave quantised tensors and their scales as they are.
        keeps_dtypes: what is made from it keeps the dtypes that it has: quantised tensors become bf16 instead of fp32.

    Raises:
        ZckptError: one of its kinds says what is wrong.
    """
    reading = reading or Reading()
    return open_place(find_save(path, reading), reading, as_stored=as_stored, keeps_dtypes=keeps_dtypes)


def open_asked(path: str | os.PathLike[str], asked: Asked[object]) -> Opened:
    """As `open_catalog`, with the options of a request."""
    return open_catalog(path, asked.reading, keeps_dtypes=asked.casting.dtype is None)


def find_save(path: str | os.PathLike[str], reading: Reading) -> Place:
    """The save that is meant; arguments and errors as for `open_catalog`."""
    named = locate(path)
    also = [locate(root) for root in reading.also]
    place = find(named, reading.tag, also, as_part=reading.as_part, best=reading.best)
    options = place.listing.options if reading.read_options is None else reading.read_options
    return replace(place, named=named, listing=replace(place.listing, options=options))


def read_model(path: str | os.PathLike[str], reading: Reading) -> WorkingModel:
    """A save as a model for the steps of a conversion, with tensors and names as its files have them; errors as for
    `open_catalog`.
    """
    place = find_save(path, reading)
    return working_model(Opened(read_save(place, reading), place))


def open_place(place: Place, reading: Reading, *, as_stored: bool = False, keeps_dtypes: bool = False) -> Opened:
    """As `open_catalog`, for a save that was found."""
    opened = opened_as_stored(read_save(place, reading), place)
    return opened if as_stored else dequantise(opened, keeps_dtypes=keeps_dtypes)


def read_save(place: Place, reading: Reading) -> Catalog:
    """The tensors of a save as its files hold them; errors as for `open_catalog`."""
    catalog = layouts.read(place.listing, allow_unknown=reading.allow_unknown_layout, as_part=reading.as_part)
    part = place.listing.part
    source = replace(catalog.source, notes=place.notes + catalog.source.notes, part=part)
    evidence = Evidence("unknown", f"it is {part}, taken alone", "the others") if part else catalog.evidence
    return replace(catalog, source=source, evidence=evidence)


def strip_wrappers(catalog: Catalog, *, of_trl: bool = True) -> tuple[Catalog, tuple[str, ...]]:
    """The names without the parts of torch's wrappers, and without `module.` or `_forward_module.` where all have it.

    Args:
        catalog: of a save.
        of_trl: take TRL's model with a value head for what it saves: a model, and `v_head`. In memory it has other names.

    Returns:
        The catalog under the model's own names, and sentences that say what was stripped.
    """
    notes: list[str] = []
    wrapped = {found for name in _names(catalog) for found in WRAPPERS.findall(name)}
    if wrapped:
        catalog = catalog.rename(lambda name: WRAPPERS.sub("", name))
        notes.append(f"{examples(sorted(wrapped))} of torch's wrappers was stripped from the names.")
    for prefix in ("_forward_module.", "module.", catalog.source.prefix):
        if prefix and len(catalog) and all(name.startswith(prefix) for name in _names(catalog)):
            catalog = catalog.rename(lambda name, prefix=prefix: name.removeprefix(prefix))  # type: ignore[misc]
            notes.append(f"The leading {prefix!r} was stripped from the names.")
    if (
        of_trl
        and len(catalog)
        and all(name.startswith(_VALUE_HEAD) for name in _names(catalog))
        and len({name[:7] for name in _names(catalog)}) == 2
    ):
        catalog = catalog.rename(lambda name: name.removeprefix(_VALUE_HEAD[0]))
        notes.append(
            f"The leading {_VALUE_HEAD[0]!r} was stripped from the names: TRL saves a model and its v_head so."
        )
    return catalog, tuple(notes)


def _names(catalog: Catalog) -> Iterator[str]:
    return itertools.chain(catalog, catalog.aliases)


_VALUE_HEAD = ("pretrained_model.", "v_head.")
"""The beginnings of names in TRL's model with a value head. Source: TRL 0.29, experimental/ppo/modeling_value_head.py
`state_dict`.
"""


def states_of(opened: Opened, *, allow_unknown: bool = False) -> NamedStates:
    """The optimizer's states of an open checkpoint, under the names that `strip_wrappers` gives the weights. Raises
    UnsupportedError if the checkpoint names no states, or none that zckpt reads; it says why.
    """
    stripped, _ = strip_wrappers(opened.catalog)
    names = dict(zip(opened.catalog.tensors, stripped.tensors, strict=True))
    from zckpt.jobs.states import named_states

    return named_states(opened.place.listing, names, stripped.aliases, allow_unknown=allow_unknown)


_PREFIXES = ("module.", "_forward_module.")
"""The prefixes that DDP, DeepSpeed's engine and Lightning put before every name."""


def as_named_by(names: Iterable[str], catalog: Catalog) -> tuple[Catalog, dict[str, str]]:
    """The catalog under a model's own names, whatever wraps the model now and whatever wrapped it when it was saved.

    Both sides' names are compared as they are, without what torch's wrappers put in, and without prefixes that all names
    of a side have. The comparison that finds most of the model's names counts, and of equals the one that strips least. So
    a model with a child that is really called `module` is found under its own names.

    Args:
        names: of the model's tensors, the tied ones too.
        catalog: the checkpoint.

    Returns:
        The catalog, and for each name of the checkpoint what it is called now.
    """
    ours, theirs = list(names), [*catalog, *catalog.aliases]
    if ours and {*ours}.issubset(theirs):  # nothing finds more, and nothing strips less
        return catalog, dict(zip(theirs, theirs))
    pairs = product(_forms(ours), _forms(theirs, catalog.source.prefix))
    mine, stripped = max(pairs, key=lambda pair: len({*pair[0]} & {*pair[1]}))
    own = dict(zip(mine, ours, strict=True))
    called = {before: own.get(name, name) for before, name in zip(theirs, stripped, strict=True)}
    return catalog.rename(called.__getitem__), called


def _forms(names: list[str], own: str = "") -> list[list[str]]:
    """Names with less and less of what wrappers may have put into them, `own` among these; two names never become one."""
    bare = [WRAPPERS.sub("", name) for name in names]
    forms = [names, bare]
    known = (*_PREFIXES, own) if own else _PREFIXES
    while prefix := next((p for p in known if bare and all(name.startswith(p) for name in bare)), ""):
        bare = [name.removeprefix(prefix) for name in bare]
        forms.append(bare)
    return [form for form in forms if len({*form}) == len(names)]


@public
class Checkpoint(Mapping[str, "Tensor"]):
    """A checkpoint as a lazy mapping from names to tensors; tied names give equal tensors.

    `open_checkpoint` makes it. Use it as a context manager or not: no file stays open between reads, and `close` only
    frees what is known of the tensors.

    Attributes:
        catalog: names, shapes, dtypes and places of all tensors.
    """

    catalog: Catalog

    def __init__(self, opened: Opened, framework: Literal["pt", "np"] = "pt") -> None:
        if framework not in ("pt", "np"):
            raise UsageError(
                "the framework is unknown", found=repr(framework), expected="'pt' or 'np'", remedy="Use one of these."
            )
        if framework == "pt" and find_spec("torch") is None:
            raise UnsupportedError(
                "tensors of torch need torch, which is not installed", file=opened.catalog.source.path,
                remedy="Pass framework='np' for numpy arrays, or run: pip install 'zckpt[torch]'.",
            )  # fmt: skip
        self._framework = framework
        self.catalog, _ = strip_wrappers(opened.catalog, of_trl=False)
        self._opened: Opened | None = opened
        self._named: NamedStates | None = None
        self._closed = False

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forgets the tensors; reading one afterwards is a UsageError. A second call does nothing."""
        self._closed = True
        self._opened = self._named = None
        self.catalog = Catalog({}, self.catalog.source, self.catalog.evidence)

    def __repr__(self) -> str:
        source = self.catalog.source
        facts = f"{source.path!r}, layout {source.layout}" + (f", tag {source.tag}" if source.tag else "")
        numel = sum(entry.numel for entry in self.catalog.tensors.values() if entry.role != "buffer")
        held = f"{count(len(self.catalog.tensors), 'tensor')}, {count(numel, 'parameter')}"
        return f"<zckpt.Checkpoint {facts}: {'closed' if self._closed else held}>"

    def _repr_html_(self) -> str:
        """A table for a notebook: the layout, and the first tensors with their dtypes and shapes."""
        entries = list(itertools.islice(self.catalog.tensors.values(), _SHOWN_TENSORS))
        lines = [repr(self)[1:-1], *(f"  {one.dtype.name:<8} {list(one.shape)!s:<18} {one.name}" for one in entries)]
        more = len(self) - len(entries)
        return as_html([*lines, *([f"  and {count(more, 'more tensor')}"] if more else [])])

    def __iter__(self) -> Iterator[str]:
        yield from self.catalog.tensors
        yield from self.catalog.aliases

    def __len__(self) -> int:
        return len(self.catalog.tensors) + len(self.catalog.aliases)

    def __contains__(self, name: object) -> bool:
        return name in self.catalog.tensors or name in self.catalog.aliases

    def __getitem__(self, name: str) -> Tensor:
        return read_tensor(self._entry(name), self._framework)

    def _entry(self, name: str) -> TensorEntry:
        """A tensor by its name.

        Raises:
            NoTensorError: there is none, which is a KeyError too.
        """
        if name in self:
            return self.catalog[name]
        if self._closed:
            raise UsageError(
                "the checkpoint is closed", file=self.catalog.source.path, found=f"a read of {name!r}",
                remedy="Read tensors before close(), or inside the with statement.",
            )  # fmt: skip
        near = difflib.get_close_matches(str(name), list(itertools.islice(self, _COMPARED_NAMES)), 3)
        raise NoTensorError(
            f"there is no tensor {name!r}",
            file=self.catalog.source.path,
            found=f"{len(self):,} other names",
            expected=f"names such as {examples(near or itertools.islice(self, 3))}" if len(self) else "",
        )

    @property
    def states(self) -> OptimizerStates:
        """The optimizer's states: `states["exp_avg"][name]` is a tensor in the parameter's shape, read when it is asked for.

        States of quantised optimizers are there as they were saved, with their scales and tables in shapes of their own.

        Raises:
            UnsupportedError: the checkpoint names no states, or none that zckpt reads; it says why.
        """
        from zckpt.jobs.states import OptimizerStates

        framework = self._framework
        return OptimizerStates(self._states(), lambda entry: read_tensor(entry, framework))

    @property
    def steps(self) -> dict[str, int]:
        """Parameter -> steps that the optimizer has taken with it, of those that count them; raises as `states`."""
        return dict(self._states().steps)

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """The optimizer's parameter groups as torch has them, with names under `params`; raises as `states`.

        Values that are not numbers, texts or lists are texts. What is one value for a group, but the step, is under `states`.
        """
        return [dict(group) for group in self._states().groups]

    def _states(self) -> NamedStates:
        if self._opened is None:
            raise UsageError(
                "the checkpoint is closed", file=self.catalog.source.path, found="a read of optimizer states",
                remedy="Read them before close(), or inside the with statement.",
            )  # fmt: skip
        if self._named is None:
            self._named = states_of(self._opened)
        return self._named

    def get_tensor(self, name: str) -> Tensor:
        """The same as `checkpoint[name]`, under the name safetensors gives it."""
        return self[name]

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor that is read only in the rows asked for, as in safetensors' `safe_open`."""
        return TensorSlice(self._entry(name), self._framework)

    def metadata(self) -> dict[str, str]:
        """Where the checkpoint comes from."""
        source = self.catalog.source
        return {"layout": source.layout, "tag": source.tag, "framework": " ".join(source.framework).strip()}


class TensorSlice:
    """Part of a tensor, read when it is indexed. Indexes of the first dimension limit what is read from disk."""

    def __init__(self, entry: TensorEntry, framework: Literal["pt", "np"]) -> None:
        self._entry = entry
        self._framework = framework

    def __repr__(self) -> str:
        return f"<zckpt.TensorSlice of {self._entry.name!r}: {self._entry.dtype.name} {list(self._entry.shape)}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self._entry.shape

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """The tensor's dtype, by its safetensors name."""
        return self._entry.dtype.name

    def __getitem__(self, index: Any) -> Tensor:
        indexes = index if isinstance(index, tuple) else (index,)
        shape = self._entry.shape
        first = indexes[0] if indexes else Ellipsis
        if not shape or first is Ellipsis or not isinstance(first, int | slice):
            return read_tensor(self._entry, self._framework)[index]
        if isinstance(first, int):
            if not -shape[0] <= first < shape[0]:
                raise IndexError(f"index {first} of a dimension of {shape[0]}")
            rows = range(first % shape[0], first % shape[0] + 1)
        else:
            rows = range(shape[0])[first]
        low, high = (min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1) if len(rows) else (0, 0)
        part = self._rows(low, high)
        if isinstance(first, int):
            return part[(0, *indexes[1:])]
        if not rows or first.step in (None, 1):
            return part[(slice(None), *indexes[1:])]
        return part[(slice(rows[0] - low, None, rows.step), *indexes[1:])]

    def _rows(self, low: int, high: int) -> Tensor:
        entry = self._entry
        width = entry.numel // entry.shape[0] if entry.shape[0] else 0
        fragments = clip(entry.fragments, low * width, high * width, entry.dtype.itemsize)
        shape = (high - low, *entry.shape[1:])
        return read_tensor(TensorEntry(entry.name, shape, entry.dtype, entry.role, fragments), self._framework)


def read_tensor(entry: TensorEntry, framework: Literal["pt", "np"]) -> Tensor:
    """One tensor, whole, in its own dtype. Raises UsageError if numpy lacks the dtype (bf16, fp8)."""
    if framework == "np":
        import numpy

        if not entry.dtype.numpy:
            raise UsageError(
                f"numpy has no dtype for tensor {entry.name!r}",
                found=str(entry.dtype),
                remedy="Use framework='pt'.",
            )
        array = numpy.empty(entry.shape, dtype=entry.dtype.numpy)
        read_into(entry, array.ctypes.data, array)
        return array
    import torch

    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.torch_name))
    read_into(entry, tensor.data_ptr(), tensor)
    return tensor


def read_into(entry: TensorEntry, address: int, owner: object) -> None:
    """Moves a tensor's elements into dense memory of its own dtype and size."""
    if entry.numel:
        if entry.nbytes <= _SMALL_BYTES and _read_small(entry, address):
            return
        from zckpt.engine.move import run

        store = MemoryStore(address, entry.nbytes, owner)
        run(Plan((), [(entry, replace(entry, fragments=(Fragment(store, 0, 0, entry.numel),), replicas=()))]), "")


_SMALL_BYTES = 1 << 14


def _read_small(entry: TensorEntry, address: int) -> bool:
    """As `read_into`, without threads: whether it has read the bytes, which lie in one file as they are."""
    place, store = entry.fragments[0], entry.fragments[0].store
    if place.numel != entry.numel or place.rows > 1 or not isinstance(store, FileStore) or store.is_remote:
        return False
    import ctypes

    with OpenFiles() as files:
        data = os.pread(files.of(store)[0], entry.nbytes, place.byte_offset)
    if len(data) != entry.nbytes or entry.dtype.swap(store.byteorder):
        return False
    ctypes.memmove(address, data, len(data))
    return True


def open_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    *,
    framework: Literal["pt", "np"] = "pt",
    also: Sequence[str | os.PathLike[str]] = (),
    read_options: ReadOptions | None = None,
) -> Checkpoint:
    """Opens a checkpoint as a lazy mapping from names to tensors; reads indexes only, kilobytes per file.

    Trained parameters are fp32, as the optimizer held them; everything else has the dtype it was saved in, and weights of fp8
    have their scales beside them. A tensor is read from the files each time it is asked for.

    Args:
        path: a checkpoint directory, tag directory, trainer's output directory, weights file, or an address (`s3://...`).
        tag: which save, where there are several; by default the one that `latest` names.
        framework: "pt" for torch tensors, "np" for numpy arrays (which have no bf16).
        also: directories that hold other parts of the same checkpoint, such as other nodes' disks.
        read_options: how tensor- and pipeline-parallel files are joined, where they do not say it themselves.

    Returns:
        A mapping. `checkpoint[name]` is a tensor, `checkpoint.get_slice(name)[:16]` reads these rows only,
        `checkpoint.metadata()` says where it comes from, `checkpoint.close()` frees it.

    Raises:
        NotACheckpointError: there is no checkpoint at `path`.
        IncompleteError: files are missing, or `latest` is missing and there are several tags.
        UnsupportedError: torch is not installed, and `framework` is not "np".
        ZckptError: another kind says what is wrong.

    Example:
        >>> checkpoint = zckpt.open_checkpoint("run", framework="np")
        >>> checkpoint["lm_head.weight"].dtype, checkpoint.get_slice("lm_head.weight")[:2].shape
        (dtype('float32'), (2, 8))
    """
    reading = Reading(tag=tag, also=also, read_options=read_options)
    return Checkpoint(open_catalog(path, reading, as_stored=True), framework)


def check_order(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Refuses arguments that seem to be swapped.

    Args:
        checkpoint: what is read.
        out: where the output is to go; it exists.

    Raises:
        UsageError: `out` holds saves of a training run, and `checkpoint` is missing, or an output of zckpt.
    """
    source, place = locate(checkpoint), locate(out)
    if source.is_remote or place.is_remote or not place.is_dir():
        return
    folder = list_folder(place)
    if not pointer_in(folder.names) and not tags_in(folder):
        return
    is_output = source.is_dir() and os.path.lexists(path_for(source.path, single=False))
    if source.is_dir() or source.is_file():
        if not is_output and not (source.is_file() and os.path.lexists(path_for(source.path, single=True))):
            return
        found = "an output of zckpt"
    else:
        found = "nothing"
    raise UsageError(
        "the arguments seem to be swapped", file=source, found=f"{found}; and {place.path!r} holds a checkpoint",
        expected="the checkpoint first", remedy=f"Type them the other way round: {place.path} {source.path}",
    )  # fmt: skip
