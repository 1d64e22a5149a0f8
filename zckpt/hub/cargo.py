"""What a push sends: shards, which are made one at a time when there is room for them, and small files, which exist already.

For `transfer`. `shards_of` takes any plan: its tensors may be in a checkpoint's files or in a live model's memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import partial

from zckpt.base.dataclass import dataclass
from zckpt.core.catalog import Catalog
from zckpt.core.plan import Plan
from zckpt.engine.move import Mode, run
from zckpt.hub import privacy
from zckpt.jobs.casting import dtype_of
from zckpt.jobs.convert import PlannedConversion
from zckpt.jobs.declarations import Asked
from zckpt.jobs.groups import Sharding
from zckpt.layouts.save.companions import is_own, note_of_links
from zckpt.output.order import fingerprint, overflow_error
from zckpt.output.signature import Signing
from zckpt.storage.location import locate

Progress = Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class Shard:
    """One large file of the output.

    Attributes:
        name: its name in the repository.
        nbytes: its size.
        scratch_bytes: scratch room that making it takes; 0 for a file that is sent from where it is.
        header: the bytes it begins with: its tensors' names, dtypes, shapes and offsets.
        identity: equal for two shards only if their bytes are equal; an interrupted push knows its finished shards by it.
        make: `make(directory, progress)` writes the whole file, into `directory` if it takes scratch room, and returns its path
            and the SHA-256 of its bytes in hexadecimal. Raises CastError for numbers that are too large for the dtype.
    """

    name: str
    nbytes: int
    scratch_bytes: int
    header: bytes
    identity: str
    make: Callable[[str, Progress], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file that is sent as it is.

    Attributes:
        name: its name in the repository.
        nbytes: its size.
        content: its bytes, or the path of a file that has them, as huggingface_hub takes them.
        origin: where it comes from, for a person.
    """

    name: str
    nbytes: int
    content: bytes | str
    origin: str

    def read(self) -> bytes:
        """Its bytes."""
        return locate(self.content).read() if isinstance(self.content, str) else self.content

    def sha256(self) -> str:
        """Of its bytes, in hexadecimal."""
        return hashlib.sha256(self.read()).hexdigest()

    def hashes(self) -> frozenset[str]:
        """The hashes that the hub may give the file: SHA-256 as a large file, git's SHA-1 of a blob as a small one."""
        data = self.read()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data)
        return frozenset({hashlib.sha256(data).hexdigest(), git.hexdigest()})


@dataclass(frozen=True, slots=True)
class Cargo:
    """The files that a push sends.

    Attributes:
        shards: the large files, in order.
        small: all other files.
        catalog: the tensors, for the card.
        dtype: of the floating parameters, by torch's name; empty if they have several.
        config: the model's configuration; empty if there is none.
        notes: sentences for the user.
        signing: with which key the page's files are signed; None for none.
    """

    shards: Sequence[Shard]
    small: tuple[SmallFile, ...]
    catalog: Catalog
    dtype: str
    config: dict[str, object]
    notes: tuple[str, ...] = ()
    signing: Signing | None = None

    @property
    def files(self) -> list[Shard | SmallFile]:
        """All files that go to the page."""
        return [*self.shards, *self.small]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


INDEX = "model.safetensors.index.json"
_KEPT_IN_MEMORY = 1 << 20


def shards_of(plan: Plan, asked: Asked[object]) -> list[Shard]:
    """The shards of a plan: its files that hold tensors. The engine writes and hashes each at the same time."""
    shards: list[Shard] = []
    for part in plan.by_file():
        output = part.files[0][0]
        if _holds_tensors(output.path):
            identity = fingerprint(part, (), asked.casting.overflow)
            make = partial(_write_shard, part, asked)
            shards.append(Shard(output.path, output.size, output.size, output.literals[0][1], identity, make))
    return shards


def _holds_tensors(path: str) -> bool:
    return path.endswith(".safetensors")


def _write_shard(plan: Plan, asked: Asked[object], directory: str, progress: Progress) -> tuple[str, str]:
    """`Shard.make` of a plan of one file."""
    name, hashed = plan.files[0][0].path, hashlib.sha256()
    moved = run(
        plan, directory, overflow=asked.casting.overflow, progress=progress, window=asked.pacing.buffer,
        consumers={name: hashed.update}, mode=Mode.PASSING, **asked.pacing.pace,
    )  # fmt: skip
    if moved.overflows and asked.casting.overflow == "error":
        raise overflow_error(moved.overflows, (entry.dtype for _, entry in plan.pairs if entry.name in moved.overflows))
    return os.path.join(directory, name), hashed.hexdigest()


def cargo_of(prepared: PlannedConversion) -> Cargo:
    """What a push of a planned conversion sends, with a README that is beside the checkpoint. Raises UnsafeError if a
    small file holds an access token.
    """
    home, named_path = prepared.opened.place.home, prepared.opened.place.named
    source = prepared.catalog.source.path
    ready = _ready_shards(prepared)
    small: list[SmallFile] = []
    notes = list(prepared.notes)

    def add(name: str, data: bytes, origin: str) -> None:
        clean, changes = privacy.clean_file(name, data, source)
        notes.extend(changes)
        small.append(SmallFile(name, len(clean), clean, origin))

    for output, _ in prepared.plan.files:
        if not _holds_tensors(output.path) and not (ready and output.path == INDEX):
            add(output.path, b"".join(data for _, data in output.literals), "written by zckpt")
    wanted = [
        *prepared.order.copies,
        *((locate(home) / name, name) for name in ("README.md", *(INDEX,) * bool(ready))),
    ]
    for file, name in wanted:
        if not file.is_file():
            continue
        if name == "README.md" and not is_own(file, home, named_path):
            notes += note_of_links([name])
            continue
        nbytes = file.size()
        if nbytes > _KEPT_IN_MEMORY and not privacy.is_cleaned(name) and not file.is_remote:
            privacy.check_secrets(name, file.read())
            small.append(SmallFile(name, nbytes, file.path, "copied from beside the checkpoint"))
        else:
            add(name, file.read(), "copied from beside the checkpoint")
    shards = ready or shards_of(prepared.plan, prepared.asked)
    dtype, config = _dtype(prepared), _config(small)
    return Cargo(shards, tuple(small), prepared.catalog, dtype, config, tuple(notes), prepared.signing())


def _ready_shards(prepared: PlannedConversion) -> list[Shard]:
    """The files of a converted directory as they are, if the conversion would not change them; otherwise empty."""
    asked, opened = prepared.asked, prepared.opened
    listing, before = opened.place.listing, opened.catalog
    is_as_usual = asked.sharding.max_shard_size == Sharding().max_shard_size and asked.casting.like is None
    changes = not is_as_usual or any(
        (known := before.tensors.get(name)) is None or dtype_of(known, asked.casting) != known.dtype
        for name in prepared.catalog
    )
    is_plain = before.source.layout == "plain" and not listing.directory.is_remote
    if not is_plain or changes or len(before) != len(prepared.catalog):
        return []
    found = {os.path.basename(store.path): store.path for store in before.stores()}
    containers = [listing.open(name) for name in found]
    if any(c.kind != "safetensors" or c.metadata.get("format") != "pt" for c in containers):
        return []
    if set(found) != {"model.safetensors"} and INDEX not in listing.files:
        return []
    sent = [locate(found[name]) for name in found] + [listing.files[name] for name in (INDEX,) if name in listing.files]
    if not all(is_own(file, opened.place.home, opened.place.named) for file in sent):
        return []  # only tensors are taken from links that lead out of the directory
    return [_ready_shard(name, found[name]) for name in sorted(found)]


def _ready_shard(name: str, path: str) -> Shard:
    """A safetensors file that is sent as it is."""
    header = locate(path).read(8 + int.from_bytes(locate(path).read(8), "little"))
    nbytes = locate(path).size()
    identity = repr(locate(path).store().identity) + str(nbytes) + path
    return Shard(name, nbytes, 0, header, identity, lambda _, progress: _hash(path, progress))


def _hash(path: str, progress: Progress) -> tuple[str, str]:
    """`Shard.make` of a file that is sent as it is."""
    hashed, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while data := file.read(4 << 20):
            hashed.update(data)
            done += len(data)
            if progress is not None:
                progress(done)
    return path, hashed.hexdigest()


def _dtype(prepared: PlannedConversion) -> str:
    """The dtype of all floats that are sent; empty where they have several."""
    kinds = {entry.dtype.torch_name for _, entry in prepared.plan.pairs if entry.dtype.kind == "float"}
    return kinds.pop() if len(kinds) == 1 else ""


def _config(small: Sequence[SmallFile]) -> dict[str, object]:
    value = next((json.loads(file.read()) for file in small if file.name == "config.json"), None)
    return value if isinstance(value, dict) else {}
