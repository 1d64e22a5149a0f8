"""The files of one save, in one directory or in several that are laid over each other.

For every layout: a `Listing` knows names and paths, opens each file at most once, and reads no tensor byte.
Facts about DeepSpeed's file names: runtime/engine.py `_get_ckpt_name`, `_get_zero_ckpt_name` (0.3.16 - 0.19.8).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import TypeVar, cast

from zckpt.base.dataclass import dataclass, public
from zckpt.base.errors import InconsistentError, NotACheckpointError, ZckptError
from zckpt.base.patterns import compile_late
from zckpt.containers import Container, TensorRef, is_torch_zip, mapping_at, open_container, torch_zip, value_at
from zckpt.containers.tensor_ref import contiguous_stride
from zckpt.core.dtypes import DType
from zckpt.core.stores import FileStore
from zckpt.storage.location import Location

T = TypeVar("T")

SHARD_NAME = compile_late(
    r"(?P<prefix>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_(?P<kind>model|optim)_states\.pt"
)
MODEL_NAME = compile_late(r"mp_rank_(?P<mp>\d+)_model_states\.pt")
LAYER_NAME = compile_late(r"layer_(?P<layer>\d+)-(?:model_(?P<tp>\d+)-)?model_states\.pt")
EXPERT_NAME = compile_late(r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
EXPERT_OPTIMIZER_NAME = compile_late(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_DEEPSPEED = (SHARD_NAME, MODEL_NAME, LAYER_NAME, EXPERT_NAME, EXPERT_OPTIMIZER_NAME)
RANK_FILE = compile_late(r"zckpt_rank_\d+_states\.pt")
UNIVERSAL = "zero"
"""Directory of a universal checkpoint with the files of each parameter, in directories of the parameters' names."""

SWAPPED = "offloaded_tensors"
"""Directory of a save with copies of the swap files of a run with its optimizer on NVMe, in directories of the
ranks."""

SWAP_NAME = compile_late(rf"{SWAPPED}/rank(?P<rank>\d+)/(?P<file>[^/]+\.tensor\.swp)")
"""A swap file; `rank` is the rank among all, in which tensor-parallel ranks come first."""

UNIVERSAL_POINTER = "latest_universal"
"""The file that names the tag of the newest universal checkpoint, as `latest` does of others."""

_UNKNOWN_SIZE = 1 << 62


def is_deepspeed_file(name: str) -> bool:
    """Whether a file of this name belongs to a DeepSpeed save."""
    return any(pattern.fullmatch(name) for pattern in _DEEPSPEED)


def rank_file(rank: int) -> str:
    """The name of the trainer's file for what one rank alone has, beside the files of a DeepSpeed save."""
    return f"zckpt_rank_{rank}_states.pt"


def is_trainers_file(name: str) -> bool:
    """Whether the trainer may have written a file of this name into a save."""
    return is_deepspeed_file(name) or RANK_FILE.fullmatch(name) is not None


def natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key that orders numbers as numbers: rank 2 before rank 10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part]


@public
@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Facts of a save that its files do not record, as the user gives them.

    Attributes:
        tp_rules: name or path of rules by which tensor-parallel slices are joined.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        key: which state dict is read, where a save holds several.
        shapes: a file that says the names and shapes of the model's parameters, in order, where flat ones are saved; or a config
            that says how many heads a fused parameter's states have.
    """

    tp_rules: str | None = None
    tp: int | None = None
    pp: int | None = None
    key: str = ""
    shapes: str = ""

    def as_json(self) -> dict[str, object]:
        """Returns the options that were given, by name."""
        said = {"tp_rules": self.tp_rules, "tp": self.tp, "pp": self.pp, "key": self.key or None}
        return {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one save.

    Attributes:
        directory: the tag directory, or the single file.
        tag: the tag; empty for files that have none.
        files: file name -> where it is, in natural order; those of a universal checkpoint's parameters below `zero/`.
        options: facts that the files do not record.
        absent: files that are missing, or of no use, with tensors that are listed all the same, as far as other files say
            where they lie: for pictures. Name -> where it would be. A save that is converted has none.
        is_one_model: whether all files are weights of one model, of whichever names, and an index if there is one.
        part: what it is a part of, where one part is wanted knowingly: "one of 2 files"; empty for a whole save.
    """

    directory: Location
    tag: str
    files: Mapping[str, Location]
    options: ReadOptions = ReadOptions()
    absent: Mapping[str, Location] = field(default_factory=dict[str, Location])
    is_one_model: bool = False
    part: str = ""
    _opened: dict[str, Container] = field(default_factory=dict[str, Container], repr=False)
    _ranks: dict[tuple[str, int], list[tuple[int, str]]] = field(
        default_factory=dict[tuple[str, int], "list[tuple[int, str]]"], repr=False
    )
    _made: dict[str, object] = field(default_factory=dict[str, object], repr=False)

    def once(self, what: str, make: Callable[[], T]) -> T:
        """What `make` returns; it is called once for this listing, and errors are raised each time."""
        if what not in self._made:
            self._made[what] = make()
        return cast("T", self._made[what])

    def where(self, name: str) -> Location:
        """The place of a file, present or missing."""
        return self.files.get(name) or self.absent.get(name) or self.directory / name

    def absent_tensor(self, name: str, byte_offset: int, dtype: DType, shape: tuple[int, ...]) -> TensorRef:
        """A dense tensor of unknown size in a file that is missing; all of one file have one store."""
        store = self.once(f"absent: {name}", lambda: FileStore(self.where(name).path, _UNKNOWN_SIZE))
        nbytes = math.prod(shape) * dtype.itemsize
        return TensorRef(store, byte_offset, dtype, shape, contiguous_stride(shape), "", 0, nbytes, byte_offset)

    def open(self, name: str) -> Container:
        """The container of one file; opened once."""
        if name not in self._opened:
            self._opened[name] = open_container(self._begun(name))
        return self._opened[name]

    def open_alike(self, names: Sequence[str]) -> None:
        """Opens files with pickles that may be nearly the same, such as those of several ranks; errors as in `open`.

        Two files of 840 tensors are left to `open`: together they would take nine tenths of the time, three take two thirds.
        """
        rest = [name for name in names if name not in self._opened]
        if len(rest) > 2:
            from zckpt.containers.alike import AlikePickles

            alike = AlikePickles(
                lambda: (torch_zip.pickle_of(self._begun(name, later=True)) for name in {rest[1], rest[-1]})
            )
            for name in rest:
                self._opened[name] = open_container(self._begun(name), alike)

    def _begun(self, name: str, *, later: bool = False) -> Location:
        """The place of a file that is about to be opened, or that is read now and opened later."""
        location = self.files[name]
        if not location.is_remote:
            return location
        from zckpt.storage.ahead import OpenAhead

        ahead = self.once("opened ahead", lambda: OpenAhead(self.files))
        return ahead.beforehand(name) if later else ahead.where(name)

    def entry(self, name: str, key: str) -> object:
        """The value of a key in a file; None if the file lacks the key, or is not a mapping. Errors as in `open`."""
        return value_at(self.open(name).root, key)

    def opened(self) -> Iterator[tuple[str, Container]]:
        """The files that are open already, by name."""
        return iter(self._opened.items())

    def find_misnamed(self, *, of_parts: bool) -> list[tuple[str, str]]:
        """Open files that bear the name of another part of the model, each with the name that it was written under.

        `torch.save(value, "x_rank_0.pt")` names the records of its archive `x_rank_0/...`, and whoever renames the file leaves
        them as they are. A writer that gives it an open file has `archive/...` there: then nothing is known.
        Source: torch 2.13, torch/serialization.py `_open_zipfile_writer_file`, caffe2/serialize/inline_container.cc.

        Args:
            of_parts: whether every number in a name says which part it is, and not only those after words of places.
        """
        found: list[tuple[str, str]] = []
        for name, container in self._opened.items():
            stem, suffix = os.path.splitext(name.rpartition("/")[2])
            written = container.metadata.get("prefix", "") if container.kind == "torch_zip" else ""
            if written not in (stem, "", "archive"):
                from zckpt.layouts.save.series import are_other_places

                if are_other_places(stem, written, of_parts=of_parts):
                    found.append((name, written + suffix))
        return found

    def numbers(self, name: str, *keys: str) -> dict[str, int]:
        """Key -> whole number in a file, such as its step; keys that the file lacks are left out."""
        if name not in self._opened and is_torch_zip(self.files[name]):
            return torch_zip.peek(self.files[name], keys)
        root = mapping_at(self.open(name).root)
        return {key: root[key] for key in keys if type(root.get(key)) is int}

    def shards(self, kind: str, mp_rank: int = 0) -> dict[int, str]:
        """Data-parallel rank -> name of its `model` or `optim` file, by number. Raises InconsistentError if two files
        claim the same rank (a `bf16_` and a plain one).
        """
        by_rank: dict[int, str] = {}
        for rank, name in self._shards_by_rank().get((kind, mp_rank), ()):
            if rank in by_rank:
                raise InconsistentError(
                    f"has two files of rank {rank}",
                    file=self.directory,
                    found=f"{by_rank[rank]!r} and {name!r}",
                    expected="one of them: the other is of another save",
                    remedy="Move the other away.",
                )
            by_rank[rank] = name
        return dict(sorted(by_rank.items()))

    def _shards_by_rank(self) -> Mapping[tuple[str, int], list[tuple[int, str]]]:
        """(kind, model-parallel rank) -> data-parallel ranks and names of files."""
        if not self._ranks:
            for name in self.files:
                if match := SHARD_NAME.fullmatch(name):
                    self._ranks.setdefault((match["kind"], int(match["mp"])), []).append((int(match["dp"]), name))
        return self._ranks

    def swap_file(self, dp_rank: int, mp_rank: int, label: str) -> str:
        """The name of a swap file of a rank; `label` is the `ds_id` of the vector in it."""
        parts = {mp for _, mp in self._shards_by_rank()}
        return f"{SWAPPED}/rank{dp_rank * len(parts) + mp_rank:02d}/{label}.tensor.swp"

    def model_parallel_ranks(self) -> list[int]:
        """The numbers in `mp_rank_XX` of all files, sorted."""
        found: set[int] = set()
        for name in self.files:
            if match := SHARD_NAME.fullmatch(name) or MODEL_NAME.fullmatch(name):
                found.add(int(match["mp"]))
        return sorted(found)

    def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """Names that match a pattern."""
        return [name for name in self.files if pattern.fullmatch(name)]


def list_files(
    directory: Location,
    tag: str,
    also: Iterable[Location] = (),
    belongs: Callable[[str], bool] = is_deepspeed_file,
    below: Sequence[str] = (UNIVERSAL,),
) -> Listing:
    """The save in `directory`, with the files of further directories laid over it.

    Args:
        directory: its files count first.
        tag: of the save; empty where it has none.
        also: the further directories.
        belongs: whether a file of a name is part of a save, so that there cannot be two different ones. Of any other name,
            the first is taken.
        below: directories in these with files that are listed too, as `below/...`.

    Raises:
        InconsistentError: the same file of the save is in two directories with different contents.
        NotACheckpointError: a directory cannot be listed.
    """
    return lay_over(
        directory,
        tag,
        [(root, list_names(root, lambda root: root.file_names(below))) for root in (directory, *also)],
        belongs,
    )


def lay_over(
    directory: Location, tag: str, roots: Iterable[tuple[Location, Iterable[str]]], belongs: Callable[[str], bool]
) -> Listing:
    """The save in `directory`, of directories that were listed: `roots` are these and their files' names, the first
    first. Raises InconsistentError as `list_files`.
    """
    files: dict[str, Location] = {}
    for root, names in roots:
        for name in names:
            if name not in files:
                files[name] = root / name
            elif belongs(name) and not files[name].has_bytes_of(root / name):
                raise InconsistentError(
                    f"there are two different files called {name!r}",
                    found=f"{files[name]!r} and {root / name!r} differ",
                    remedy="Leave out the directory that is of another save, or remove the file there.",
                )
    return Listing(directory, tag, {name: files[name] for name in sorted(files, key=natural)})


def list_names(directory: Location, names: Callable[[Location], list[str]] = lambda root: root.names()) -> list[str]:
    """What is in a directory, in natural order; `names`: which of it. Raises NotACheckpointError if it cannot be
    listed.
    """
    with as_listed(directory):
        return sorted(names(directory), key=natural)


@contextmanager
def as_listed(directory: Location) -> Iterator[None]:
    """Turns an error of the system in listing a directory into NotACheckpointError."""
    try:
        yield
    except ZckptError:
        raise
    except OSError as error:
        raise NotACheckpointError(
            "cannot be listed",
            file=directory,
            found=error.strerror or str(error),
            remedy="Give yourself permission to read the directory, or choose another.",
        ) from error
