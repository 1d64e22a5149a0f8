"""Finds where each rank's tensors of a legacy Megatron-LM save belong in the whole model, a second time.

A layer's class says in which dimension tensor ranks cut its weight: embeddings and ColumnParallelLinear in rows (with their
biases), RowParallelLinear in columns; everything else is whole on every rank. The first matrix of a gated MLP is two, and each is
cut for itself. A stage counts its layers from 0, a rank its experts; virtual stages take turns. What is known by no such name is
not looked for. Masters have no names: `verify` compares them with the weights; their moments lie beside them, in vectors or lists
that are cut alike.
Source: Megatron-LM core_v0.12.3, megatron/core/tensor_parallel/layers.py (`partition_dim`), transformer/mlp.py,
transformer/moe/experts.py, transformer/transformer_layer.py `get_transformer_layer_offset`, optimizer/optimizer.py,
optimizer/distrib_optimizer.py; megatron/legacy/model; tools/checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zckpt.base.errors import UnsupportedError
from zckpt.containers import TensorRef
from zckpt.layouts.save.listing import Listing
from zckpt.layouts.save.second import (
    NO_PROOF,
    BesideMaster,
    HeldRun,
    SecondLook,
    as_sequence,
    fields_of,
    hold_box,
    hold_whole,
    rows_of,
    tensors_in,
    view_as,
)

_FILE = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?/model_optim_rng\.pt")
_COLUMN = re.compile(
    r"(?:.*\.)?(?:word_embeddings(?:_for_head)?\.weight|output_layer\.(?:weight|bias)|"
    r"(?:linear_qkv|query_key_value|query|key_value|linear_q|linear_kv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|"
    r"linear_fc1|dense_h_to_4h)\.(?:weight|bias)\d*)"
)
_ROW = re.compile(r"(?:.*\.)?(?:linear_proj|dense|linear_fc2|dense_4h_to_h)\.weight\d*")
_WHOLE = re.compile(
    r"(?:.*\.)?(?:\w*(?:norm|layernorm)\.(?:weight|bias)|layer_norm_(?:weight|bias)|\w*norm\w*\.(?:weight|bias)|"
    r"linear_(?:fc1|qkv)\.layer_norm_(?:weight|bias)|router\.(?:weight|bias|expert_bias)|(?:position|tokentype)_embeddings\.weight|"
    r"(?:linear_proj|dense|linear_fc2|dense_4h_to_h)\.bias\d*|inv_freq|gate_weight|expert_bias|local_tokens_per_expert)"
)
_DOWN = re.compile(r".*\.linear_(q|kv)_down_proj\.weight")
_GATED = re.compile(r".*(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)\d*")
_LAYER = re.compile(r"((?:[^.]+\.)*?layers)\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.(?:local_experts\.|experts\.linear_fc[12]\.(?:weight|bias)))(\d+)(\..+)?")
_GROUPED = re.compile(r".*\.experts\.weight([12])")
_TIED = {
    "output_layer.weight": "embedding.word_embeddings.weight",
    "word_embeddings_for_head.weight": "language_model.embedding.word_embeddings.weight",
}


class _Rank(NamedTuple):
    """A rank: its numbers, its directory, and the state dicts of its virtual stages."""

    tp: int
    pp: int
    ep: int
    directory: str
    chunks: Sequence[Mapping[str, TensorRef]]


class _Run(NamedTuple):
    """Sizes of the run, and how many layers come before a stage's: (stage, virtual stage) -> list of layers -> number."""

    tp: int
    ep: int
    etp: int
    is_gated: bool
    args: Mapping[str, object]
    before: Mapping[tuple[int, int], Mapping[str, int]]


def find_again(listing: Listing) -> SecondLook:
    """The model's tensors, and the states beside its masters."""
    if listing.options.tp_rules:
        raise UnsupportedError("joins its slices by --tp-rules", file=listing.directory, remedy=NO_PROOF)
    ranks, run = _look(listing)
    names: dict[str, None] = {}
    held: list[HeldRun] = []
    unknown: list[str] = []
    tied = run.args.get("untie_embeddings_and_output_weights") is False
    for rank in ranks:
        for number, chunk in enumerate(rank.chunks):
            for local, ref in chunk.items():
                name = _name(local, chunk, rank, run, run.before[rank.pp, number])
                kept = _TIED.get(name, "")
                if kept in names and (tied or name.startswith("word_embeddings_for_head")):
                    name = kept
                names[name] = None
                parts = list(_parts(name, local, ref, rank, run))
                held += parts
                unknown += [name] * (not parts and ref.numel > 0)
    why = f"no rule of Megatron's says how {unknown[0]!r} is cut" if unknown else ""
    beside = [pair for rank in ranks for pair in _beside(listing, rank)]
    return SecondLook(dict.fromkeys(names), held, beside=beside, by_copy=True, unproved=why)


def _look(listing: Listing) -> tuple[list[_Rank], _Run]:
    files = [match for match in map(_FILE.fullmatch, listing.files) if match]
    args: Mapping[str, object] = fields_of(listing.entry(files[0][0], "args"))
    tp = listing.options.tp or _size(args, "tensor_model_parallel_size") or _size(args, "model_parallel_size")
    pp = listing.options.pp or _size(args, "pipeline_model_parallel_size")
    tp = tp or 1 + max(int(match[1]) for match in files)
    pp = pp or 1 + max(int(match[2] or 0) for match in files)
    ep = _size(args, "expert_model_parallel_size") or 1
    ranks: list[_Rank] = []
    for match in files:
        numbers = [int(number) for number in match.groups()[1:] if number is not None]
        stage = numbers.pop(0) if pp > 1 and numbers else 0
        expert = numbers.pop(0) if ep > 1 and numbers else 0
        if numbers:
            raise ValueError(f"{match[0]!r} has another number")
        root = fields_of(listing.open(match[0]).root)
        keys = ["model"] if "model" in root else sorted((k for k in root if re.fullmatch(r"model\d+", k)), key=_number)
        chunks = [_tensors(root[key]) for key in keys]
        ranks.append(_Rank(int(match[1]), stage, expert, match[0].partition("/")[0], chunks))
    ranks.sort(key=lambda rank: (rank.pp, rank.ep, rank.tp))
    etp = _size(args, "expert_tensor_parallel_size") if args.get("num_experts") else None
    before = _before(ranks)
    gated = args.get("swiglu") if "swiglu" in args else _is_gated(ranks[0].chunks[0])
    return ranks, _Run(tp, ep, etp or tp, bool(gated or args.get("gated_linear_unit")), args, before)


def _size(args: Mapping[str, object], name: str) -> int:
    value = args.get(name)
    return value if type(value) is int and value > 0 else 0


def _number(key: str) -> int:
    return int(key[5:])


def _tensors(root: object) -> dict[str, TensorRef]:
    return {name: ref for name, ref in tensors_in(root).items() if not name.endswith("_extra_state")}


def _is_gated(chunk: Mapping[str, TensorRef]) -> bool:
    """Whether the first matrix of an MLP has two rows for each column of the second one."""
    for name, ref in chunk.items():
        second = chunk.get(name.replace("linear_fc1", "linear_fc2").replace("dense_h_to_4h", "dense_4h_to_h"))
        if _GATED.fullmatch(name) and len(ref.shape) == 2 and second is not None and second is not ref:
            return ref.shape[0] == 2 * second.shape[1]
    return False


def _before(ranks: Sequence[_Rank]) -> dict[tuple[int, int], dict[str, int]]:
    first = {rank.pp: rank for rank in reversed(ranks)}
    totals: dict[str, int] = {}
    found: dict[tuple[int, int], dict[str, int]] = {}
    for number in range(len(ranks[0].chunks)):
        for stage in sorted(first):
            found[stage, number] = dict(totals)
            own = {(m[1], m[2]) for m in map(_LAYER.fullmatch, first[stage].chunks[number]) if m}
            for layers, _ in own:
                totals[layers] = totals.get(layers, 0) + 1
    return found


def _name(local: str, chunk: Mapping[str, TensorRef], rank: _Rank, run: _Run, before: Mapping[str, int]) -> str:
    name = local
    if (match := _EXPERT.fullmatch(name)) and run.ep > 1:
        here = {m[2] for m in map(_EXPERT.fullmatch, chunk) if m and m[1] == match[1]}
        name = f"{match[1]}{int(match[2]) + rank.ep * len(here)}{match[3] or ''}"
    if match := _LAYER.fullmatch(name):
        name = f"{match[1]}.{int(match[2]) + before.get(match[1], 0)}.{match[3]}"
    return name


def _parts(name: str, local: str, ref: TensorRef, rank: _Rank, run: _Run) -> Iterator[HeldRun]:
    """The place of a rank's elements in the whole tensor; nothing for an unknown name."""
    is_expert = ".experts." in local or ".local_experts." in local
    ranks = run.etp if is_expert else run.tp
    at = rank.tp if ranks > 1 else 0
    gates = 2 if run.is_gated else 1
    if grouped := _GROUPED.fullmatch(local):
        own = _size(run.args, "num_experts") // run.ep
        first = grouped[1] == "1"
        rows, columns = ref.shape if first else (ref.shape[0] // own, ref.shape[1])
        part = view_as(ref, (own, rows, columns // own) if first else (own, rows, columns))
        yield from _cut_slices(name, part, 2 if first else 1, at, ranks, gates if first else 1, (rank.ep, run.ep))
        return
    rows = ref.shape[0] if ref.shape else 1
    if (match := _DOWN.fullmatch(local)) and ranks > 1:
        sizes = ["q_lora_rank"] if match[1] == "q" else ["kv_lora_rank", "qk_pos_emb_head_dim"]
        if rows * ranks == sum(_size(run.args, size) for size in sizes):
            yield from _cut_slices(name, ref, 0, at, ranks, 1)
        elif rows == sum(_size(run.args, size) for size in sizes):
            yield from hold_whole(name, "", ref)
    elif ranks == 1 or _WHOLE.fullmatch(local) or ref.dtype.kind != "float":
        yield from hold_whole(name, "", ref)
    elif _COLUMN.fullmatch(local):
        yield from _cut_slices(name, ref, 0, at, ranks, gates if _GATED.fullmatch(local) else 1)
    elif _ROW.fullmatch(local):
        yield from _cut_slices(name, ref, 1, at, ranks, 1)


def _cut_slices(
    name: str, ref: TensorRef, dim: int, rank: int, ranks: int, pieces: int, expert: tuple[int, int] = (0, 1)
) -> Iterator[HeldRun]:
    """A rank's slice of a tensor of `pieces` parts, each cut by itself; `expert`: the index in the first dimension."""
    own = ref.shape[dim] // pieces
    shape = [extent * (ranks if at == dim else 1) for at, extent in enumerate(ref.shape)]
    offsets = [0] * len(shape)
    if expert[1] > 1:
        offsets[0], shape[0] = expert[0] * ref.shape[0], shape[0] * expert[1]
    for piece in range(pieces):
        offsets[dim] = piece * own * ranks + rank * own
        yield from hold_box(name, "", rows_of(ref, dim, piece * own, own), offsets, shape)


def _beside(listing: Listing, rank: _Rank) -> Iterator[BesideMaster]:
    """The rank's masters, each with what lies beside it."""
    file = f"{rank.directory}/distrib_optim.pt"
    for _, value in _mappings(listing.open(file).root) if file in listing.files else ():
        master = value.get("param")
        for state, held in value.items():
            if isinstance(master, TensorRef) and isinstance(held, TensorRef) and held.shape == master.shape:
                yield BesideMaster(master, str(state), held)
    saved = listing.entry(f"{rank.directory}/model_optim_rng.pt", "optimizer")
    for optimizer in map(fields_of, as_sequence(saved) or [saved]):  # a list where experts have one of their own
        groups = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
        masters = [ref for group in as_sequence(groups) for ref in as_sequence(group)]
        inner = fields_of(optimizer.get("optimizer"))
        for master, own in zip(masters, map(fields_of, fields_of(inner.get("state")).values())):
            for state, held in own.items():
                if isinstance(master, TensorRef) and isinstance(held, TensorRef) and held.shape == master.shape:
                    yield BesideMaster(master, state, held)


def _mappings(value: object, depth: int = 0) -> Iterator[tuple[int, Mapping[object, object]]]:
    """All mappings in mappings and lists."""
    if isinstance(value, Mapping):
        yield depth, value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for one in inner if depth < 8 else ():
        yield from _mappings(one, depth + 1)
