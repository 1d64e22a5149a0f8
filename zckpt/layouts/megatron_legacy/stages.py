"""The tensors of each rank of a legacy save, under the names that they have in an unsharded model.

[Note: numbers of layers and experts] A rank's state dict counts its layers from 0. Their numbers in the model follow from how
many layers come before: those of virtual stage 0 of all stages, then those of virtual stage 1 of all stages, and so on. Each
list of layers (`decoder.layers`, `language_model.encoder.layers`, `mtp.layers`) is counted for itself. Experts are counted from
0 too; each expert rank has the next ones.
Source: Megatron-LM core_v0.12.3, megatron/core/transformer/transformer_layer.py `get_transformer_layer_offset`,
moe/experts.py; megatron/legacy/model/transformer.py `ParallelTransformer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import COPY_AGAIN, OTHER_SAVE, CorruptError, InconsistentError
from zckpt.base.words import count, examples
from zckpt.containers import TensorRef
from zckpt.layouts.megatron_legacy.files import ModelRank, RunSplit
from zckpt.layouts.save.module_states import as_mapping, flatten
from zckpt.layouts.save.origins import other_kind

_CHUNK = re.compile(r"model(?P<number>\d{1,9})")
_LAYER = re.compile(r"(?P<list>(?:[^.]+\.)*?layers)\.(?P<number>\d{1,9})\.(?P<rest>.+)")
_EXPERT = re.compile(
    r"(?P<head>.*\.(?:local_experts\.|experts\.linear_fc[12]\.(?:weight|bias)))(?P<number>\d{1,9})(?P<rest>\..+)?"
)
_OF_EXPERTS = re.compile(r".*\.(?:local_experts\.\d{1,9}\.|experts\.).+")
_GROUPED = re.compile(r".*\.experts\.weight[12]")
_BUFFER = re.compile(r".*(?:\.expert_bias|\.inv_freq|\.local_tokens_per_expert)")
_MTP = "mtp.layers"


class RankTensor(NamedTuple):
    """A tensor of a rank's state dict.

    Attributes:
        name: its name in an unsharded model.
        local: its name on the rank.
        chunk: the virtual stage that has it.
        ref: where it is.
        expert: whether it belongs to some experts, and not to the router or to what all tokens pass.
        grouped: whether it is the weights of all of a rank's experts.
    """

    name: str
    local: str
    chunk: int
    ref: TensorRef
    expert: bool
    grouped: bool

    @property
    def is_buffer(self) -> bool:
        """Whether no optimizer owns the tensor."""
        return self.ref.dtype.kind != "float" or _BUFFER.fullmatch(self.local) is not None


@dataclass(frozen=True, slots=True)
class TensorsOfRank:
    """What one rank has of the model.

    Attributes:
        rank: which.
        file: path of its model file.
        root: all of that file.
        tensors: in the order of the state dict, one virtual stage after another.
        chunks: virtual stages.
    """

    rank: ModelRank
    file: str
    root: Mapping[str, object]
    tensors: tuple[RankTensor, ...]
    chunks: int


def tensors_of(
    roots: Mapping[ModelRank, tuple[str, Mapping[str, object]]],
    split: RunSplit,
    args: Mapping[str, object],
    notes: list[str],
) -> list[TensorsOfRank]:
    """Every rank's tensors under their names in an unsharded model; see [Note: numbers of layers and experts].

    Args:
        roots: rank -> path and content of its model file, of all ranks, by stages.
        split: of the run.
        args: Megatron's, of any rank.
        notes: sentences for the user are added.

    Raises:
        InconsistentError: ranks have other layers than their neighbours, or all of them than `args` say.
        CorruptError: a file has no model.
    """
    others: dict[ModelRank, list[dict[str, object]]] = {rank: [] for rank in roots}
    local = {rank: _chunks(root, file, notes, others[rank]) for rank, (file, root) in roots.items()}
    _check_kinds(roots, local, others)
    _check_alike(roots, {rank: len(chunks) for rank, chunks in local.items()}, "virtual stages")
    counted = {rank: [_layers(chunk, roots[rank][0]) for chunk in chunks] for rank, chunks in local.items()}
    for stage in range(split.pp):
        _check_alike(roots, {rank: str(own) for rank, own in counted.items() if rank.pp == stage}, "layers")
    first = {rank.pp: counted[rank] for rank in reversed(list(roots))}
    offsets = _offsets(first, args, next(iter(roots.values()))[0])
    found: list[TensorsOfRank] = []
    for rank, chunks in local.items():
        file, root = roots[rank]
        held = [
            each
            for number, chunk in enumerate(chunks)
            for each in _tensors_of(chunk, number, offsets[rank.pp, number], rank, file)
        ]
        found.append(TensorsOfRank(rank, file, root, tuple(held), len(chunks)))
    return found


def _check_kinds(
    roots: Mapping[ModelRank, tuple[str, Mapping[str, object]]],
    local: Mapping[ModelRank, Sequence[Mapping[str, TensorRef]]],
    others: Mapping[ModelRank, Sequence[Mapping[str, object]]],
) -> None:
    """Raises InconsistentError where a name is a tensor on one rank of a stage and something else on another."""
    files: dict[tuple[int, int, str], str] = {}
    for rank, chunks in local.items():
        files.update({(rank.pp, chunk, name): roots[rank][0] for chunk, held in enumerate(chunks) for name in held})
    for rank, own in others.items():
        for chunk, values in enumerate(own):
            for name, value in values.items():
                if (file := files.get((rank.pp, chunk, name))) is not None:
                    raise other_kind(name, roots[rank][0], value, file)


def _chunks(
    root: Mapping[str, object], file: str, notes: list[str], kept: list[dict[str, object]]
) -> list[dict[str, TensorRef]]:
    """The state dicts of a rank's virtual stages, flattened, without what Transformer Engine keeps beside the weights.

    `kept` gets, for each of them, what is not a tensor.
    """
    keys = ["model"] if "model" in root else sorted((k for k in root if _CHUNK.fullmatch(k)), key=lambda k: int(k[5:]))
    if not keys or (keys != ["model"] and keys != [f"model{number}" for number in range(len(keys))]):
        raise CorruptError(
            "has no model", file=file, found=f"entries {examples(root)}", expected="'model', or 'model0', 'model1' and so on",
            remedy=COPY_AGAIN,
        )  # fmt: skip
    chunks: list[dict[str, TensorRef]] = []
    for key in keys:
        others: list[str] = []
        kept.append({})
        tensors = flatten(as_mapping(root[key], repr(key), file), others, others=kept[-1])
        chunks.append({name: ref for name, ref in tensors.items() if not name.endswith("_extra_state")})
        notes += (note for note in others if "_extra_state'" not in note and note not in notes)
    return chunks


def _layers(chunk: Mapping[str, TensorRef], file: str) -> dict[str, int]:
    """List of layers -> how many of its layers a virtual stage has."""
    numbers: dict[str, set[int]] = {}
    for name in chunk:
        if match := _LAYER.fullmatch(name):
            numbers.setdefault(match["list"], set()).add(int(match["number"]))
    for path, own in numbers.items():
        if own != set(range(len(own))):
            raise InconsistentError(
                f"lacks some of its layers, in {path!r}", file=file, found=f"layers {sorted(own)[:8]}",
                expected="layers that are counted from 0", remedy=COPY_AGAIN,
            )  # fmt: skip
    return {path: len(own) for path, own in numbers.items()}


def _offsets(
    counted: Mapping[int, Sequence[Mapping[str, int]]], args: Mapping[str, object], file: str
) -> dict[tuple[int, int], dict[str, int]]:
    """(stage, virtual stage) -> list of layers -> how many of its layers come before."""
    before: dict[str, int] = {}
    found: dict[tuple[int, int], dict[str, int]] = {}
    for chunk in range(len(counted[0])):
        for stage in sorted(counted):
            found[stage, chunk] = dict(before)
            for path, number in counted[stage][chunk].items():
                before[path] = before.get(path, 0) + number
    totals = [number for path, number in before.items() if path != _MTP]
    wanted = args.get("num_layers")
    if len(totals) == 1 and type(wanted) is int and wanted != totals[0]:
        raise InconsistentError(
            "does not have as many layers as its run had", file=file, found=count(totals[0], "layer"),
            expected=f"num_layers {wanted:,}, as its args say", remedy=OTHER_SAVE,
        )  # fmt: skip
    return found


def _tensors_of(
    chunk: Mapping[str, TensorRef], number: int, offsets: Mapping[str, int], rank: ModelRank, file: str
) -> Iterator[RankTensor]:
    experts: dict[str, set[int]] = {}
    for name in chunk:
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match["head"], set()).add(int(match["number"]))
    if any(own != set(range(len(own))) for own in experts.values()):
        raise InconsistentError(
            "lacks some of its experts", file=file, found=f"those of {examples(experts)}",
            expected="experts that are counted from 0", remedy=COPY_AGAIN,
        )  # fmt: skip
    for local, ref in chunk.items():
        name = local
        if match := _EXPERT.fullmatch(name):
            name = f"{match['head']}{int(match['number']) + rank.ep * len(experts[match['head']])}{match['rest'] or ''}"
        if match := _LAYER.fullmatch(name):
            layer = int(match["number"]) + offsets.get(match["list"], 0)
            name = f"{match['list']}.{layer}.{match['rest']}"
        expert, grouped = _OF_EXPERTS.fullmatch(local) is not None, _GROUPED.fullmatch(local) is not None
        yield RankTensor(name, local, number, ref, expert, grouped)


def _check_alike(
    roots: Mapping[ModelRank, tuple[str, Mapping[str, object]]], said: Mapping[ModelRank, object], what: str
) -> None:
    first = next(iter(said))
    for rank, value in said.items():
        if value != said[first]:
            raise InconsistentError(
                f"has other {what} than another rank", file=roots[rank][0], found=f"{value}",
                expected=f"{said[first]}, as in {roots[first][0]!r}", remedy=OTHER_SAVE,
            )  # fmt: skip
