"""Plain weights, written: lays out every consolidated output.

Source: huggingface_hub 0.36-2.4, serialization/_base.py (sharding, index), _torch.py (dropped names in the metadata).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError
from zckpt.base.sizes import file_bytes, to_bytes
from zckpt.base.words import examples
from zckpt.containers import safetensors_file, torch_zip
from zckpt.containers.safetensors_file import Order
from zckpt.containers.skeleton import TensorSpec
from zckpt.core.catalog import Role, TensorEntry
from zckpt.core.dtypes import IN_SAFETENSORS, DType
from zckpt.core.fragments import Fragment
from zckpt.core.plan import OutputFile, literal_file
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
        if target.format == "safetensors":
            skeleton = safetensors_file.skeleton(
                chosen, metadata={"format": target.framework}, aliases=tied, order=target.order
            )
        else:
            skeleton = torch_zip.skeleton(chosen, aliases=tied)
            weight_map.update(dict.fromkeys(tied, shard))
        weight_map.update(dict.fromkeys(names, shard) if has_index else ())
        store = FileStore(shard, skeleton.size)
        files.append((OutputFile(shard, skeleton.size, skeleton.literals, skeleton.checksums), store))
        for spec in sorted(chosen, key=lambda spec: skeleton.offsets[spec.name]):
            fragments = (Fragment(store, skeleton.offsets[spec.name], 0, spec.numel),) if spec.numel else ()
            role = roles.get(spec.name, "parameter")
            entries[spec.name] = TensorEntry(spec.name, spec.shape, spec.dtype, role, fragments)
    if has_index:
        files.append(_index(specs, weight_map, target.pattern))
    return LaidOutFiles(tuple(files), entries)


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


def _index(
    specs: Mapping[str, TensorSpec], weight_map: Mapping[str, str], pattern: str
) -> tuple[OutputFile, FileStore]:
    metadata = {
        "total_parameters": sum(spec.numel for spec in specs.values()),
        "total_size": sum(spec.nbytes for spec in specs.values()),
    }
    text = io.BytesIO()  # of a million names, one by one in a tenth of the time of an encoder that indents
    text.write(json.dumps({"metadata": metadata, "weight_map": {}}, indent=2).removesuffix("}\n}").encode())
    quoted = {shard: json.dumps(shard) for shard in set(weight_map.values())}
    for number, name in enumerate(sorted(weight_map)):
        text.write(f"{',' if number else ''}\n    {json.dumps(name)}: {quoted[weight_map[name]]}".encode())
    text.write(b"\n  }\n}\n" if weight_map else b"}\n}\n")
    return literal_file(pattern.format(suffix="") + ".index.json", text.getvalue())
