"""Importance matrices: how much each column of a matrix matters, as llama.cpp's `llama-imatrix` writes it.

For `blocks`. A file is GGUF: `NAME.in_sum2` has sums of squares, a row for each expert, and `NAME.counts` how many were summed;
or of an older form: a number of entries, and for each its name, calls and sums. Numbers are read when they are wanted.
Source: llama.cpp, common/imatrix-loader.cpp, tools/quantize/quantize.cpp (of 2026).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import CastError, InconsistentError, NotACheckpointError
from zckpt.containers import mapping_at
from zckpt.containers.container import Container, Input, open_input
from zckpt.containers.gguf_file import MAGIC, GgufValue, read_input
from zckpt.containers.tensor_ref import StorageRef, TensorRef, contiguous_stride
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import F32
from zckpt.layouts.save.module_states import whole

if TYPE_CHECKING:
    from zckpt.core.folds import Floats, Tools

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST_ENTRIES, _MOST_NAME, _MOST_TEXT = 1 << 20, 1 << 10, 127
REMEDY = "Give --imatrix a file that llama.cpp's llama-imatrix wrote of this model."


@dataclass(frozen=True, slots=True)
class Weighting:
    """How much each column of a tensor matters.

    Attributes:
        sums: of squares, one row for each expert.
        counts: how many were summed, for each expert; None where `calls` says it.
        calls: what all sums are divided by; 0 for what they are.
    """

    sums: TensorEntry
    counts: TensorEntry | None = None
    calls: int = 0

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors that are read for it."""
        return (self.sums,) if self.counts is None else (self.sums, self.counts)

    def of_expert(self, expert: int, columns: int, tools: Tools) -> Floats:
        """How much the columns of one expert's matrix matter; all do the same where it was never used. Raises CastError
        if a number is NaN or infinite.
        """
        import numpy as np

        found: Floats = tools.read_floats(self.sums, expert * columns, (expert + 1) * columns)
        count = np.float32(self.calls)
        if self.counts is not None:
            shared = self.counts.numel == 1
            count = np.round(tools.read_floats(self.counts, 0 if shared else expert, 1 if shared else expert + 1))[0]
            found = found / count if count > 0 else np.ones_like(found)
        elif count > 0:
            found = found / count
        if not np.isfinite(found).all():
            raise CastError(
                "the importance matrix holds NaN or infinity", found=f"in the entry for {self.sums.name!r}",
                expected="finite numbers", remedy="Make it again with llama.cpp's llama-imatrix.",
            )  # fmt: skip
        return found


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """An importance matrix of a model.

    Attributes:
        path: of its file.
        entries: the weighting of each tensor, by its name.
        facts: the metadata that llama.cpp's quantiser writes of it.
    """

    path: str
    entries: Mapping[str, Weighting]
    facts: Mapping[str, GgufValue] = field(default_factory=dict[str, GgufValue])

    def of(self, name: str, shape: tuple[int, ...]) -> Weighting | None:
        """The weighting of a tensor; None if it has none. Raises InconsistentError if it has other columns or experts."""
        found = self.entries.get(name)
        experts = shape[0] if len(shape) > 2 else 1
        if found is None or found.sums.numel == shape[-1] * experts:
            return found
        if name == "token_embd.weight":  # it always has, in llama.cpp's own files
            return None
        raise InconsistentError(
            f"the importance matrix is of another model: tensor {name!r}", file=self.path,
            found=f"{found.sums.numel:,} numbers", expected=f"{shape[-1]:,} for each of {experts:,} matrices", remedy=REMEDY,
        )  # fmt: skip


def read_importance(path: str) -> ImportanceMatrix:
    """Reads what a file says of its entries; their numbers are read when they are wanted. Raises NotACheckpointError if
    there is no such file, or it is not an importance matrix; CorruptError if it ends too early.
    """
    with open_input(path) as file:
        own = file.path
        entries, datasets, chunks = _of_gguf(file) if file.peek(0, 4) == MAGIC else _of_older(file)
    facts = {"file": GgufValue("string", _shorten(own))}
    if datasets:
        facts["dataset"] = GgufValue("string", _shorten(datasets))
    facts["entries_count"] = GgufValue("u32", len(entries))
    if chunks > 0:
        facts["chunks_count"] = GgufValue("u32", chunks)
    return ImportanceMatrix(own, entries, {f"quantize.imatrix.{key}": value for key, value in facts.items()})


def _of_gguf(file: Input) -> tuple[dict[str, Weighting], str, int]:
    container = read_input(file)
    said = {key: value.value for key, value in container.values.items() if isinstance(value, GgufValue)}
    root = _refs(container)
    names = [name.removesuffix(_SUMS) for name in root if name.endswith(_SUMS)]
    lone = [name for name in root if name.removesuffix(_COUNTS) + _SUMS not in root and name.endswith(_COUNTS)]
    lone += [name + _SUMS for name in names if name + _COUNTS not in root]
    missing = [key for key in ("datasets", "chunk_count", "chunk_size") if f"imatrix.{key}" not in said]
    wrong = [name for name in root if root[name].dtype != F32 or root[name].attributes]
    if not names or lone or missing or wrong:
        raise _no_matrix(file, lone or wrong or missing or ["no tensor with .in_sum2"])
    entries = {name: Weighting(_entry(root, name + _SUMS), _entry(root, name + _COUNTS)) for name in sorted(names)}
    listed, chunks = said["imatrix.datasets"], said["imatrix.chunk_count"]
    first = str(listed[0]) if isinstance(listed, list) and listed else ""
    return entries, first, chunks if isinstance(chunks, int) else 0


def _refs(container: Container) -> dict[str, TensorRef]:
    return {name: ref for name, ref in mapping_at(container.root).items() if isinstance(ref, TensorRef)}


def _entry(root: Mapping[str, TensorRef], name: str) -> TensorEntry:
    return whole(name.removesuffix(_SUMS), root[name], "buffer")


def _of_older(file: Input) -> tuple[dict[str, Weighting], str, int]:
    at, store = 4, file.store()

    def number(what: str) -> int:
        nonlocal at
        at += 4
        value: int = struct.unpack("<i", file.read(at - 4, 4, what))[0]
        return value

    total: int = struct.unpack("<i", file.read(0, 4, "the number of entries"))[0]
    if not 0 < total <= _MOST_ENTRIES:
        raise _no_matrix(file, [f"{total:,} entries"])
    entries: dict[str, Weighting] = {}
    for _ in range(total):
        length = number("the length of a name")
        if not 0 < length <= _MOST_NAME:
            raise _no_matrix(file, [f"a name of {length:,} bytes"])
        name = file.read(at, length, "a name").decode(errors="replace")
        at += length
        calls, count = number(f"the calls of {name!r:.80}"), number(f"the size of {name!r:.80}")
        if count < 1 or at + 4 * count > file.size:
            raise _no_matrix(file, [f"{count:,} numbers for {name!r:.80}"])
        ref = StorageRef(name, F32, count, store, at).view(0, (count,), contiguous_stride((count,)))
        entries[name] = Weighting(whole(name, ref, "buffer"), calls=calls)
        at += 4 * count
    chunks = number("the number of chunks") if at + 4 <= file.size else 0
    length = number("the length of a data set's name") if at + 4 <= file.size else 0
    dataset = file.peek(at, length).decode(errors="replace") if 0 < length <= file.size - at else ""
    return entries, dataset, chunks


def _shorten(text: str) -> str:
    return text.encode()[:_MOST_TEXT].decode(errors="ignore")


def _no_matrix(file: Input, found: list[Any]) -> NotACheckpointError:
    return NotACheckpointError(
        "is not an importance matrix", file=file.path, found=", ".join(map(str, found[:3])),
        expected="sums and counts of tensors, as llama-imatrix writes them", remedy=REMEDY,
    )  # fmt: skip
