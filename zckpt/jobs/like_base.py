"""Weights in the dtypes and files of a model that is there already: `--like MODEL` of conversions.

For `convert`. Read are the headers of MODEL's own weights, or only its index, which has names of files and no dtypes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UsageError
from zckpt.base.words import count, examples
from zckpt.core.catalog import Catalog, TensorEntry
from zckpt.core.dtypes import CAST_TARGETS, SHORT_NAMES, DType
from zckpt.jobs.casting import to_dtype
from zckpt.jobs.groups import AnyPath, Reading
from zckpt.jobs.open import open_catalog
from zckpt.layouts.plain.write import WeightsTarget
from zckpt.storage.json_files import read_json
from zckpt.storage.location import Location, locate

_MOST_INDEX = 256 << 20


@dataclass(frozen=True, slots=True)
class LikeBase:
    """What MODEL's own weights are like.

    Attributes:
        dtypes: name -> dtype; empty where only an index is there.
        files: name -> file, each in the order of MODEL's files.
    """

    dtypes: Mapping[str, DType]
    files: Mapping[str, str]

    def dtype_of(self, entry: TensorEntry, usual: DType) -> DType:
        """The dtype that a tensor gets; `usual` where MODEL lacks it, or has it in one that nothing is cast to."""
        own = self.dtypes.get(entry.name)
        return own if entry.dtype.kind == "float" and own in CAST_TARGETS and own is not None else usual

    def target(self, target: WeightsTarget, names: Collection[str]) -> WeightsTarget:
        """The form of the output with MODEL's files; tensors that MODEL lacks are in the last of them."""
        suffix = ".safetensors" if target.format == "safetensors" else ".bin"
        shards = {name: self.files[name] for name in names if name in self.files}
        if target.file or not shards or not all(file.endswith(suffix) for file in shards.values()):
            return target
        last = max(shards.values())
        held: dict[str, list[str]] = {file: [] for file in sorted({*shards.values()})}
        for name in names:
            held[shards.get(name, last)].append(name)
        return replace(target, shards=held)

    def record(
        self, chosen: Mapping[str, DType], usual: Mapping[str, DType], target: WeightsTarget
    ) -> dict[str, object]:
        """What the manifest says: which tensors have another dtype than the usual one, and a digest of the files' names."""
        others: dict[str, list[str]] = {}
        for name, own in sorted(chosen.items()):
            if own != usual[name]:
                others.setdefault(SHORT_NAMES[own], []).append(name)
        text = json.dumps(target.shards, sort_keys=True)
        return {"like": {"dtypes": others, "files": hashlib.sha256(text.encode()).hexdigest()[:16]}}

    def notes(self, catalog: Catalog) -> Iterator[str]:
        """Sentences on tensors that only one of the two has."""
        here = {*catalog, *catalog.aliases}
        if more := [name for name in catalog if name not in self.files]:
            yield f"MODEL of --like lacks {count(len(more), 'tensor that is', 'tensors that are')} written: {examples(more)}."
        if lacking := [name for name in self.files if name not in here]:
            what = count(len(lacking), "tensor that is", "tensors that are")
            yield f"MODEL of --like has {what} not written: {examples(lacking)}."
        floats = [name for name in catalog if catalog[name].dtype.kind == "float" and name in self.dtypes]
        if odd := [name for name in floats if self.dtypes[name] not in CAST_TARGETS]:
            yield f"MODEL of --like has {count(len(odd), 'tensor')} in dtypes that zckpt does not cast to: {examples(odd)}."


def recorded_dtypes(said: object) -> dict[str, DType]:
    """The dtypes that a manifest's entry `like` has, as `LikeBase.record` writes it, by tensor; empty for anything else."""
    match said:
        case {"dtypes": dict(dtypes)}:
            return {str(n): to_dtype(dtype) for dtype, own in dtypes.items() if isinstance(own, list) for n in own}
    return {}


def read_like(model: AnyPath) -> LikeBase:
    """What a model's weights are like, by their headers, or by an index alone.

    Raises:
        UsageError: it is another layout than plain weights. Others as in `open_catalog`.
    """
    place = locate(model)
    if (index := _index_alone(place)) is not None:
        said = read_json(index.path, _MOST_INDEX, "an index")
        files = said.get("weight_map") if isinstance(said, dict) else None
        if isinstance(files, dict) and all(isinstance(f, str) and f == os.path.basename(f) for f in files.values()):
            return LikeBase({}, {str(name): file for name, file in files.items()})
        raise UsageError(
            "is not an index of weights", file=index, expected="a weight_map", remedy="Give --like a model."
        )
    catalog = open_catalog(place, Reading(), as_stored=True).catalog
    if catalog.source.layout != "plain":
        raise UsageError(
            "is not a model's weights", file=place, found=f"the layout {catalog.source.layout}",
            expected="a directory of safetensors or .bin files", remedy="Give --like the model that the run began with.",
        )  # fmt: skip
    files = {
        name: os.path.basename(str(entry.fragments[0].store))
        for name, entry in catalog.tensors.items()
        if entry.fragments
    }
    files |= {name: files[kept] for name, kept in catalog.aliases.items() if kept in files}
    dtypes = {name: catalog[name].dtype for name in (*catalog, *catalog.aliases)}
    return LikeBase(dtypes, files)


def _index_alone(place: Location) -> Location | None:
    """An index without the files that it names; None where there are weights."""
    if place.name.endswith(".index.json"):
        return place
    if place.is_dir():
        names = place.names()
        if not any(name.endswith((".safetensors", ".bin")) for name in names):
            return next((place / name for name in sorted(names) if name.endswith(".index.json")), None)
    return None
