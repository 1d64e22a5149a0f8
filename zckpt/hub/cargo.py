"""What goes up: shards, made one at a time when there is room for them, and small files, which are here already.

For `transfer`, and for whoever has something to push: `shards_of` takes any plan, so its tensors may lie in a checkpoint's
files or in a live model's memory; anything else that can make a file and say its hash is a `Shard` too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from zckpt.core.catalog import Catalog
from zckpt.core.plan import Plan
from zckpt.engine.move import run
from zckpt.hub import privacy
from zckpt.jobs.convert import PlannedConversion, output_dtype
from zckpt.jobs.options import Options
from zckpt.output.delivery import fingerprint, named, overflows_of
from zckpt.storage import paths

Progress = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class Made:
    """A shard that lies on this machine.

    Attributes:
        path: where.
        sha256: of its bytes, in hexadecimal.
        scratch: whether it was made for the push, and goes when it is sent.
    """

    path: str
    sha256: str
    scratch: bool


class Shard(Protocol):
    """One large file of the output."""

    @property
    def name(self) -> str:
        """Its name in the repository."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def scratch_bytes(self) -> int:
        """Room that making it takes."""

    @property
    def header(self) -> bytes:
        """The bytes it begins with: its tensors' names, dtypes, shapes and places."""

    @property
    def identity(self) -> str:
        """Is the same only for the same bytes: what an interrupted push knows its finished shards by."""

    def make(self, directory: str, progress: Progress) -> Made:
        """Makes the file in `directory`, whole."""


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A shard that the mover makes, and hashes while it is written.

    Attributes:
        plan: of this one file.
        options: of the conversion.
    """

    plan: Plan
    options: Options

    @property
    def name(self) -> str:
        """Its name in the repository."""
        return self.plan.files[0][0].path

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.plan.files[0][0].size

    @property
    def scratch_bytes(self) -> int:
        """Room that making it takes."""
        return self.nbytes

    @property
    def header(self) -> bytes:
        """The safetensors header."""
        return self.plan.files[0][0].literals[0][1]

    @property
    def identity(self) -> str:
        """From the plan, the state of its sources, and what is done to numbers that are too large."""
        return fingerprint(self.plan, (), self.options.overflow)

    def make(self, directory: str, progress: Progress) -> Made:
        """Makes the file in `directory`.

        Raises:
            CastError: numbers were too large for the dtype.
        """
        hashed = hashlib.sha256()
        names = [entry.name for _, entry in self.plan.pairs]
        moved = run(
            self.plan, directory, overflow=self.options.overflow, progress=progress, window=self.options.buffer,
            sinks={self.name: hashed.update}, passing=True, **self.options.pace,
        )  # fmt: skip
        overflows_of([named(moved.overflows, names)], self.plan, self.options.overflow)
        return Made(os.path.join(directory, self.name), hashed.hexdigest(), scratch=True)


@dataclass(frozen=True, slots=True)
class ReadyShard:
    """A safetensors file that goes up as it is.

    Attributes:
        path: where it lies.
        name: its name in the repository.
    """

    path: str
    name: str
    nbytes: int
    header: bytes

    @property
    def scratch_bytes(self) -> int:
        """Room that making it takes."""
        return 0

    @property
    def identity(self) -> str:
        """From the file's place and time."""
        return repr(paths.file_store(self.path).identity) + str(self.nbytes) + self.path

    def make(self, directory: str, progress: Progress) -> Made:
        """Hashes it."""
        hashed, done = hashlib.sha256(), 0
        with open(self.path, "rb") as file:
            while data := file.read(4 << 20):
                hashed.update(data)
                done += len(data)
                if progress is not None:
                    progress(done)
        return Made(self.path, hashed.hexdigest(), scratch=False)


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file that needs no making.

    Attributes:
        name: in the repository.
        data: its bytes; or None where `path` has them.
        path: a file that goes up as it lies.
        origin: where it comes from, for a person.
    """

    name: str
    nbytes: int
    data: bytes | None
    path: str
    origin: str

    def content(self) -> bytes | str:
        """What huggingface_hub takes: bytes, or a path."""
        return self.path if self.data is None else self.data

    def read(self) -> bytes:
        """Its bytes."""
        return paths.read(self.path) if self.data is None else self.data

    def sha256(self) -> str:
        """The hash of its bytes."""
        return hashlib.sha256(self.read()).hexdigest()


@dataclass(frozen=True, slots=True)
class Cargo:
    """Everything that goes up.

    Attributes:
        shards: large files, in order.
        small: all others but the card.
        catalog: the tensors, for the card.
        dtype: of the floating parameters, by torch's name; empty for several.
        config: the model's configuration; empty where there is none.
        notes: sentences a person should see.
    """

    shards: Sequence[Shard]
    small: tuple[SmallFile, ...]
    catalog: Catalog
    dtype: str
    config: dict[str, object]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(s.nbytes for s in self.shards) + sum(s.nbytes for s in self.small)


def shards_of(plan: Plan, options: Options) -> list[PlannedShard]:
    """The shards of a plan: its files that hold tensors."""
    return [PlannedShard(part, options) for part in plan.by_file() if part.files[0][0].path.endswith(".safetensors")]


INDEX = "model.safetensors.index.json"
_KEPT_IN_MEMORY = 1 << 20


def cargo_of(prepared: PlannedConversion) -> Cargo:
    """What a planned conversion sends up, and a README that lies beside the checkpoint.

    Raises:
        UnsafeError: a small file holds an access token.
    """
    home, source = prepared.opened.place.home, prepared.catalog.source.path
    ready = _ready(prepared)
    shards: Sequence[Shard] = ready or shards_of(prepared.plan, prepared.options)
    made = {s.name for s in shards_of(prepared.plan, prepared.options)}
    small: list[SmallFile] = []
    notes = list(prepared.notes)

    def add(name: str, data: bytes, origin: str) -> None:
        clean, said = privacy.cleaned(name, data, source)
        notes.extend(said)
        small.append(SmallFile(name, len(clean), clean, "", origin))

    for output, _ in prepared.plan.files:
        if output.path in made or (ready and output.path == INDEX):
            continue
        add(output.path, b"".join(data for _, data in output.literals), "written by zckpt")
    wanted = [
        *prepared.order.copies,
        *((os.path.join(home, name), name) for name in ("README.md", *(INDEX,) * bool(ready))),
    ]
    for path, name in wanted:
        if not paths.is_file(path):
            continue
        nbytes = paths.size(path)
        if nbytes > _KEPT_IN_MEMORY and not privacy.is_cleaned(name) and not paths.is_remote(path):
            small.append(SmallFile(name, nbytes, None, path, "lies beside the checkpoint"))
        else:
            add(name, paths.read(path), "lies beside the checkpoint")
    return Cargo(shards, tuple(small), prepared.catalog, _dtype(prepared), _config(small), tuple(notes))


def _ready(prepared: PlannedConversion) -> list[ReadyShard]:
    """The files of a converted directory, if there is nothing to be done to them."""
    options, opened = prepared.options, prepared.opened
    listing, before = opened.place.listing, opened.catalog
    changes = options.max_shard_size != Options().max_shard_size or any(
        (known := before.tensors.get(name)) is None or output_dtype(known, options.dtype) != known.dtype
        for name in prepared.catalog
    )
    if (
        before.source.layout != "plain"
        or paths.is_remote(listing.directory)
        or changes
        or len(before) != len(prepared.catalog)
    ):
        return []
    found = {os.path.basename(store.path): store.path for store in before.stores()}
    containers = [listing.open(name) for name in found]
    if any(c.kind != "safetensors" or c.metadata.get("format") != "pt" for c in containers):
        return []
    if set(found) != {"model.safetensors"} and INDEX not in listing.files:
        return []
    return [ReadyShard(found[name], name, paths.size(found[name]), _header(found[name])) for name in sorted(found)]


def _header(path: str) -> bytes:
    start = paths.read(path, 8)
    return paths.read(path, 8 + int.from_bytes(start, "little"))


def _dtype(prepared: PlannedConversion) -> str:
    if prepared.options.dtype is not None:
        return prepared.options.dtype.torch_name
    kinds = {entry.dtype.torch_name for entry in prepared.catalog.tensors.values() if entry.dtype.kind == "float"}
    return kinds.pop() if len(kinds) == 1 else ""


def _config(small: Sequence[SmallFile]) -> dict[str, object]:
    for file in small:
        if file.name == "config.json":
            value = json.loads(file.read())
            return value if isinstance(value, dict) else {}
    return {}
