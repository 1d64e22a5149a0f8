"""Writes a delta directory: the tensors in groups, one file for each group that has changes.

For `jobs.delta` and `live.delta`. A group is tensors of a bounded size before compression, so that a file is one too. Beside
its file each group leaves facts (`GroupFacts`) while the delta is made; an interrupted run is resumed by them. In the end they
become the index and the checksums of the tensors that did not change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CorruptError
from zckpt.base.version import __version__
from zckpt.containers.safetensors_file import ALIGNMENT
from zckpt.core.plan import WrittenFile
from zckpt.deltas.encode import TensorChange
from zckpt.deltas.form import INDEX, UNCHANGED, DeltaForm, index_of
from zckpt.output.files import finish_file, write_small
from zckpt.output.manifest import Manifest

_BLOCK = 1 << 20
_MOST = 10**18
"""A number of bytes above any difference's; the header has room for numbers with as many digits."""


@dataclass(frozen=True, slots=True)
class DeltaCounts:
    """What a delta, or a group of it, holds.

    Attributes:
        tensors: of the weights.
        changed_tensors: how many of them changed.
        numel: elements of the weights.
        changed: how many of them changed.
        nbytes: of the weights.
    """

    tensors: int
    changed_tensors: int
    numel: int
    changed: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What is known of a group when its file is made.

    Attributes:
        file: the file's size and CRC-32; (0, 0) if nothing changed, and there is no file.
        changed: tensors with differences in the file, in its order.
        unchanged: tensor -> checksum.
        counts: of the group, in the order of `DeltaCounts`.
    """

    file: tuple[int, int]
    changed: tuple[str, ...]
    unchanged: dict[str, str]
    counts: tuple[int, int, int, int, int]


def facts_name(number: int) -> str:
    """The name of the file with a group's facts while the delta is made; groups count from 1."""
    return f"group-{number:05d}.json"


def data_name(number: int, of: int) -> str:
    """The name of file number `number` (from 1) with differences."""
    return f"model-{number:05d}-of-{of:05d}.safetensors"


def write_group(
    directory: str,
    number: int,
    of: int,
    form: DeltaForm,
    names: Sequence[str],
    differences: Iterable[tuple[TensorChange, int]],
) -> Iterator[WrittenFile]:
    """Writes the file of group `number` (from 1) in `of`, then its facts, into the directory that they are staged in. `names` are
    of all its tensors; `differences` are of each of them in this order, with its bytes before compression. Raises OSError if
    they cannot be written, ZckptError as the differences raise it.
    """
    longest = _header(dict.fromkeys(names, (_MOST, 2 * _MOST, "f" * 64)))
    start = -(-(8 + len(longest)) // ALIGNMENT) * ALIGNMENT
    path = data_name(number, of)
    placed: dict[str, tuple[int, int, str]] = {}
    unchanged: dict[str, str] = {}
    numel = changed = nbytes = 0
    with open(os.path.join(directory, path), "wb") as file:
        file.seek(start)
        end = 0
        for difference, size in differences:
            numel, nbytes, changed = numel + difference.numel, nbytes + size, changed + difference.changed
            if difference.data is None:
                unchanged[difference.name] = difference.digest
                continue
            with difference.data as data:
                while block := data.read(_BLOCK):
                    file.write(block)
            placed[difference.name] = (end, end + difference.nbytes, difference.digest)
            end += difference.nbytes
        header = _header(placed).ljust(start - 8)
        file.seek(0)
        file.write(len(header).to_bytes(8, "little") + header)
    made = (0, 0)
    if placed:
        data_file = finish_file(directory, path)
        made = (data_file.nbytes, data_file.crc32)
        yield data_file
    else:
        os.unlink(os.path.join(directory, path))
    facts = GroupFacts(made, tuple(placed), unchanged, (len(names), len(placed), numel, changed, nbytes))
    yield write_small(directory, facts_name(number), json.dumps(asdict(facts)).encode())


def _header(placed: dict[str, tuple[int, int, str]]) -> bytes:
    entries = {
        name: {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
        for name, (start, stop, _) in placed.items()
    }
    metadata = {name: digest for name, (_, _, digest) in placed.items()}
    return json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()


def group_facts(directory: str, number: int) -> GroupFacts:
    """The facts of a group that was written. Raises CorruptError if they cannot be read."""
    path = os.path.join(directory, facts_name(number))
    try:
        with open(path, "rb") as file:
            facts = json.load(file)
        return GroupFacts(**{**facts, "file": tuple(facts["file"]), "changed": tuple(facts["changed"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CorruptError(
            "the facts of a finished file cannot be read", file=path, found=str(error)[:200],
            remedy="Remove this work directory, and run the same command again.",
        ) from error  # fmt: skip


def needed_by(directory: str, name: str, of: int) -> list[str]:
    """The file that belongs to the facts of a group; empty if nothing changed in it."""
    number = int(name.removeprefix("group-").removesuffix(".json"))
    return [data_name(number, of)] if group_facts(directory, number).changed else []


def end_delta(
    directory: str, of: int, form: DeltaForm, source: dict[str, object], *, renames: bool = True
) -> tuple[Manifest, DeltaCounts]:
    """Gives the files of `of` groups their last names, and writes the index and the checksums of what did not change. `source`:
    what the delta was made from, for the manifest; `renames`: whether files are numbered again if some groups have none. Raises
    OSError if a file cannot be written.
    """
    facts = [group_facts(directory, number) for number in range(1, of + 1)]
    total = sum(bool(group.changed) for group in facts)
    files: list[WrittenFile] = []
    weight_map: dict[str, str] = {}
    unchanged: dict[str, str] = {}
    for number, group in enumerate(facts, 1):
        unchanged.update(group.unchanged)
        if group.changed:
            name = data_name(number, of)
            if renames:
                name = data_name(len(files) + 1, total)
                os.rename(os.path.join(directory, data_name(number, of)), os.path.join(directory, name))
            weight_map.update(dict.fromkeys(group.changed, name))
            files.append(WrittenFile(name, *group.file))
    for number in range(1, of + 1):
        os.unlink(os.path.join(directory, facts_name(number)))
    said = {"checksum_format": form.checksum, "tensors": unchanged}
    files.append(write_small(directory, UNCHANGED, (json.dumps(said, indent=1) + "\n").encode()))
    files.append(write_small(directory, INDEX, index_of(form, weight_map)))
    counts = DeltaCounts(*(sum(several) for several in zip(*(group.counts for group in facts), strict=True)))
    manifest = Manifest(
        version=__version__, source=source, dtype="", options={"delta": {**form.metadata, **asdict(counts)}},
        tensors=counts.tensors, numel=counts.numel, files=tuple(files),
    )  # fmt: skip
    return manifest, counts
