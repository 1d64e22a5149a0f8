"""Plain weights, written: lays out every consolidated output.

Source: huggingface_hub 0.36-2.4, serialization/_base.py (sharding, index), _torch.py (dropped names in the metadata).
"""

from __future__ import annotations

import io
import itertools
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.base.sizes import file_bytes, to_bytes
from zckpt.base.words import examples
from zckpt.containers import safetensors_file, torch_zip
from zckpt.containers.safetensors_file import Order
from zckpt.containers.skeleton import Skeleton, TensorSpec
from zckpt.core.catalog import Role, TensorColumns, TensorEntry
from zckpt.core.dtypes import IN_SAFETENSORS, DType
from zckpt.core.fragments import Fragment
from zckpt.core.plan import OutputFile, PackedLiteral, literal_file
from zckpt.core.stores import FileStore
from zckpt.layouts.plain import PATTERNS

Format = Literal["safetensors", "bin"]


@dataclass(frozen=True, slots=True)
class WeightsTarget:
    """The form in which plain weights are written.

    Attributes:
        format: the container.
        file: name of the only file; empty for a directory of shards and an index.
        max_shard_size: for a directory, e.g. "5GB" or a number of bytes.
        stem: of the files' names in a directory; empty for those of weights.
        order: in files of safetensors, of the tensors: as in `containers.safetensors_file.skeleton`.
        framework: what the metadata of these files says.
        shards: file -> names of the tensors in it, in a directory; None where their sizes decide.
    """

    format: Format
    file: str = ""
    max_shard_size: int | str = "5GB"
    stem: str = ""
    order: Order = "wide first"
    framework: str = "pt"
    shards: Mapping[str, Sequence[str]] | None = None

    @property
    def pattern(self) -> str:
        """The name of a file in a directory, with a place for which of several it is."""
        return self.stem + "{suffix}.safetensors" if self.stem else PATTERNS[self.format]

    def __post_init__(self) -> None:
        """Checks the size; raises UsageError for a size that no file can have."""
        file_bytes(self.max_shard_size, "max_shard_size")


@dataclass(frozen=True, slots=True)
class LaidOutFiles:
    """Files to be written, and the place in them of each tensor."""

    files: tuple[tuple[OutputFile, FileStore], ...]
    entries: Mapping[str, TensorEntry]


def lay_out(
    wanted: Sequence[tuple[TensorEntry, DType]], aliases: Mapping[str, str], target: WeightsTarget
) -> LaidOutFiles:
    """Lays out the files, and the place of each tensor in them.

    Args:
        wanted: the tensors, each with its new dtype.
        aliases: dropped name -> kept name.
        target: the form of the output.

    Raises:
        UnsupportedError: safetensors cannot hold a dtype.
    """
    strange = [f"{entry.name} ({dtype})" for entry, dtype in wanted if dtype.name not in IN_SAFETENSORS]
    if target.format == "safetensors" and strange:
        raise UnsupportedError(
            "safetensors cannot hold these dtypes",
            found=examples(strange),
            remedy="Use --format bin, or an OUT ending in .bin.",
        )
    specs = {entry.name: TensorSpec(entry.name, dtype, entry.shape) for entry, dtype in wanted}
    roles: dict[str, Role] = {entry.name: entry.role for entry, _ in wanted if entry.role != "parameter"}
    shards = {target.file: list(specs)} if target.file else target.shards or _assign_shards(specs.values(), target)
    files: list[tuple[OutputFile, FileStore]] = []
    entries: dict[str, TensorEntry] = {}
    weight_map: dict[str, str] = {}
    has_index = len(shards) > 1 or (target.shards and target.pattern.format(suffix="") not in shards)
    for shard, names in shards.items():
        here = set(names)
        tied = {dropped: kept for dropped, kept in aliases.items() if kept in here}
        chosen = [specs[name] for name in names]
        skeleton = _SKELETONS[target.format](chosen, tied, target)
        weight_map.update(dict.fromkeys(tied, shard) if target.format == "bin" else ())
        weight_map.update(dict.fromkeys(names, shard) if has_index else ())
        store = FileStore(shard, skeleton.size)
        files.append((OutputFile(shard, skeleton.size, skeleton.literals, skeleton.checksums), store))
        for spec in sorted(chosen, key=lambda spec: skeleton.offsets[spec.name]):
            fragments = (Fragment(store, skeleton.offsets[spec.name], 0, spec.numel),) if spec.numel else ()
            role = roles.get(spec.name, "parameter")
            entries[spec.name] = TensorEntry(spec.name, spec.shape, spec.dtype, role, fragments)
    if has_index:
        metadata = {
            "total_parameters": sum(spec.numel for spec in specs.values()),
            "total_size": sum(spec.nbytes for spec in specs.values()),
        }
        text = io.BytesIO()
        text.writelines(_index(metadata, ((name, weight_map[name]) for name in sorted(weight_map))))
        files.append(literal_file(_name_index(target.pattern), text.getvalue()))
    return LaidOutFiles(tuple(files), entries)


def _in_safetensors(specs: Sequence[TensorSpec], tied: Mapping[str, str], target: WeightsTarget) -> Skeleton:
    metadata = {"format": target.framework}
    return safetensors_file.skeleton(specs, metadata=metadata, aliases=tied, order=target.order)


def _in_torch_zip(specs: Sequence[TensorSpec], tied: Mapping[str, str], target: WeightsTarget) -> Skeleton:
    return torch_zip.skeleton(specs, aliases=tied)


_SKELETONS = {"safetensors": _in_safetensors, "bin": _in_torch_zip}
"""Format -> everything of a file but its elements; `tied`: dropped name -> kept name, of those in the file."""


def _assign_shards(specs: Iterable[TensorSpec], target: WeightsTarget) -> dict[str, list[str]]:
    """Shard file -> tensor names, by the hub's own rule: in order, as many as fit, behind larger ones that are alone."""
    most = to_bytes(target.max_shard_size)
    shards: list[list[str]] = []
    last: list[str] = []
    nbytes = 0
    for spec in specs:
        if spec.nbytes > most:
            shards.append([spec.name])
            continue
        if nbytes + spec.nbytes > most:
            shards.append(last)
            last, nbytes = [], 0
        last.append(spec.name)
        nbytes += spec.nbytes
    shards += [last] if last else []
    named = (f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else "" for number in range(1, len(shards) + 1))
    return {target.pattern.format(suffix=suffix): names for suffix, names in zip(named, shards, strict=True)}


def is_for_columns(tensors: TensorColumns, dtypes: Sequence[DType], target: WeightsTarget) -> bool:
    """Whether `lay_out_columns` lays these out: tensors of one width, in several files of safetensors; arguments as there."""
    is_usual = target.format == "safetensors" and target.order == "wide first" and not target.file
    is_held = len({one.itemsize for one in dtypes}) == 1 and all(one.name in IN_SAFETENSORS for one in dtypes)
    if not is_usual or target.shards is not None or not is_held or "__metadata__" in tensors:
        return False
    return max(_nbytes_of(tensors, dtypes)) <= to_bytes(target.max_shard_size)


def _nbytes_of(tensors: TensorColumns, dtypes: Sequence[DType]) -> list[int]:
    """The bytes of a tensor of each form."""
    return [math.prod(form.shape) * dtype.itemsize for form, dtype in zip(tensors.forms, dtypes, strict=True)]


def lay_out_columns(tensors: TensorColumns, dtypes: Sequence[DType], target: WeightsTarget) -> LaidOutFiles:
    """As `lay_out`, of a million small tensors, which nobody ties.

    Args:
        tensors: in the order in which they are written.
        dtypes: their new ones, one for each form.
        target: the form of the output; one for which `is_for_columns`.
    """
    most, nbytes = to_bytes(target.max_shard_size), _nbytes_of(tensors, dtypes)
    stops: list[int] = []
    filled = 0
    for number, form in enumerate(tensors.form):
        if filled + nbytes[form] > most:
            stops.append(number)
            filled = 0
        filled += nbytes[form]
    stops.append(len(tensors))
    files: list[tuple[OutputFile, FileStore]] = []
    shard_of, places = array("H" if len(stops) <= _MOST_SHORT else "I"), array("q")
    for number, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        suffix = f"-{number + 1:05d}-of-{len(stops):05d}" if len(stops) > 1 else ""
        specs = (
            TensorSpec(name, dtypes[form], tensors.forms[form].shape)
            for at in range(start, stop, _BATCH)
            for name, form in zip(
                tensors.named(at, min(at + _BATCH, stop)), tensors.form[at : at + _BATCH], strict=False
            )
        )
        header = PackedLiteral(safetensors_file.header_pieces(specs, {"format": target.framework}))
        begin = safetensors_file.data_start(header.nbytes)
        header.head, header.tail = (begin - 8).to_bytes(8, "little"), b" " * (begin - 8 - header.nbytes)
        places.extend(itertools.accumulate((nbytes[form] for form in tensors.form[start:stop]), initial=begin))
        store = FileStore(target.pattern.format(suffix=suffix), places.pop())
        files.append((OutputFile(store.path, store.size, header), store))
        shard_of.extend(itertools.repeat(number, stop - start))
    stores = [store for _, store in files]
    entries = tensors.moved(dtypes, (stores, shard_of), places)
    if len(stops) > 1:
        numels = [math.prod(form.shape) for form in tensors.forms]
        counts = Counter(tensors.form)
        metadata = {
            "total_parameters": sum(numels[form] * count for form, count in counts.items()),
            "total_size": sum(nbytes[form] * count for form, count in counts.items()),
        }
        in_order = (
            (tensors.named(number, number + 1)[0], stores[shard_of[number]].path) for number in tensors.in_order()
        )
        index = PackedLiteral(_index(metadata, in_order))
        store = FileStore(_name_index(target.pattern), index.nbytes)
        files.append((OutputFile(store.path, store.size, index), store))
    return LaidOutFiles(tuple(files), entries)


_MOST_SHORT, _BATCH = 1 << 16, 1 << 12


def _index(metadata: Mapping[str, int], weight_map: Iterable[tuple[str, str]]) -> Iterator[bytes]:
    """The bytes of the index; `weight_map`: names in their order, each with its shard."""
    # of a million names, one by one in a tenth of the time of an encoder that indents
    yield json.dumps({"metadata": metadata, "weight_map": {}}, indent=2).removesuffix("}\n}").encode()
    quoted: dict[str, str] = {}
    between = "\n    "
    for name, shard in weight_map:
        known = quoted.get(shard) or quoted.setdefault(shard, json.dumps(shard))
        yield f"{between}{json.dumps(name)}: {known}".encode()
        between = ",\n    "
    yield b"\n  }\n}\n" if quoted else b"}\n}\n"


def _name_index(pattern: str) -> str:
    return pattern.format(suffix="") + ".index.json"
