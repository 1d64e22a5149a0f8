"""Which files of a directory are the weights of one model: a file, the shards that an index names, or files "1 of 3" to "3 of 3".

For `places` and `plain`. Names alone say it, and the index.
Source: huggingface_hub 0.36-2.4, serialization/_base.py; transformers 4.57-5.23, modeling_utils.py; torchtune 0.6,
training/checkpointing/_utils.py `SHARD_FNAME`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from zckpt.base import limits
from zckpt.base.errors import ZckptError
from zckpt.base.patterns import compile_late
from zckpt.layouts.save.folder import Folder
from zckpt.storage.location import Location

_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".nemo")
INDEX = compile_late(r".+\.(?:safetensors|bin|pt|pth)\.index\.json")
NO_WEIGHTS = (
    r"(?i:optim|sched|rng|random|scaler|sampler|loader|args|trainer|recipe|tokenizer|vocab|dataset|metrics|imatrix)"
)
"""The pattern of files that trainers write beside weights."""

_COUNTED = r"(?i)(?P<head>.*?)(?P<number>\d+)(?P<of>[-_.]of[-_.])(?P<count>\d+)(?P<tail>\D*|[-_.].*)"
_MOMENT = r"(?i)(?:epoch|step|iter(?:ation)?)s?[-_. ]?$"
"""The pattern of what precedes a moment's number: "epoch 3 of 10" is a whole file."""

_MOST_BYTES = 64 << 20


class WeightFiles(NamedTuple):
    """The files of one model.

    Attributes:
        files: those that are there, in order.
        missing: names of those that are not.
        named_by: the file that names them; empty where their own names do.
    """

    files: tuple[str, ...]
    missing: tuple[str, ...] = ()
    named_by: str = ""

    @property
    def words(self) -> str:
        """The kind of part that each file is, in words."""
        total = len(self.files) + len(self.missing)
        return f"one of {total:,} files" + (f" that {self.named_by!r} names" if self.named_by else "")


def files_counted_with(name: str, names: Iterable[str]) -> WeightFiles | None:
    """The files that a name belongs to, by its number and theirs; None where it says nothing, or is "1 of 1"."""
    match = re.fullmatch(_COUNTED, name)
    if match is None or re.search(_MOMENT, match["head"]):
        return None
    total, number, width = int(match["count"]), int(match["number"]), len(match["number"])
    if not 1 < total <= limits.RANKS or number > total:
        return None
    there: dict[int, str] = {}
    for other in (name, *names):
        found = re.fullmatch(_COUNTED, other)
        if found and (found["head"], int(found["count"]), found["tail"]) == (match["head"], total, match["tail"]):
            there[int(found["number"])] = other
    first = 0 if 0 in there else 1
    missing = [
        f"{match['head']}{n:0{width}d}{match['of']}{match['count']}{match['tail']}"
        for n in range(first, first + total)
        if n not in there
    ]
    return WeightFiles(tuple(there[n] for n in sorted(there) if n < first + total), tuple(missing))


def files_of_index(name: str, folder: Folder) -> WeightFiles | None:
    """The files of an index beside a file that names it with others; None where there is none. An index names its own."""
    for index in [name] if INDEX.fullmatch(name) else [n for n in folder.names if INDEX.fullmatch(n)]:
        shards = _named_in(folder.path / index)
        if name == index or (name in shards and len(shards) > 1):
            there = tuple(shard for shard in shards if shard in folder.names)
            return WeightFiles(there, tuple(shard for shard in shards if shard not in there), index)
    return None


def _named_in(index: Location) -> list[str]:
    """The files that an index names; empty if it cannot be read, which its reader reports."""
    try:
        if index.size() > _MOST_BYTES:
            return []
        named = json.loads(index.read())["weight_map"].values()
        return sorted({name for name in named if isinstance(name, str)})
    except (OSError, ZckptError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def models_in(folder: Folder) -> list[WeightFiles]:
    """The models in a directory, under any names of files."""
    files = [name for name in folder.names if is_weights(name) and folder.has_file(name)]
    models = list(_by_index(folder))
    files = [name for name in files if not any(name in model.files for model in models)]
    while files:
        model = files_counted_with(files[0], files) or WeightFiles((files[0],))
        models.append(model)
        files = [name for name in files if name not in model.files]
    return models


def _by_index(folder: Folder) -> Iterator[WeightFiles]:
    for name in folder.names:
        if INDEX.fullmatch(name) and not re.search(NO_WEIGHTS, name) and (model := files_of_index(name, folder)):
            yield model


def is_weights(name: str) -> bool:
    """Whether a file of this name may hold a model's weights."""
    return name.endswith(_WEIGHTS) and not name.startswith(".") and re.search(NO_WEIGHTS, name) is None
