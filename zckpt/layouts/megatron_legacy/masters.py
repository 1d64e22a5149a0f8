"""The fp32 masters of a rank, which have no names: where each parameter's must be, and the proof that it is there.

[Note: buckets] `distrib_optim.pt` holds vectors, one for each virtual stage and dtype of parameters (and others for the
parameters of experts): the parameters in the reverse order of the model, each beginning at a multiple of 64 elements (before
core 0.8: at any). They are divided into buckets; their padding at the end is not saved. A bucket ends where it has
reached a
size, which the run's arguments give, and before and behind an embedding that two stages share. Which of these ways a version
has is not recorded, so each is tried; the first with the right length, and with ends that are the weights when
rounded is taken.
Source: Megatron-LM core_v0.7.0, core_v0.12.3, core_v0.16.1, megatron/core/distributed/param_and_grad_buffer.py,
megatron/core/optimizer/distrib_optimizer.py `get_parameter_state_dp_zero`; megatron/training/training.py `get_model`.

[Note: groups] Without the distributed optimizer, `fp32_from_fp16_params` has a list of masters for each parameter group: those of
`wd_mult` 0 are biases and vectors, in the order of the model; experts have groups of their own.
Source: megatron/core/optimizer/__init__.py `_get_param_groups`, optimizer.py `Float16OptimizerWithFloat16Params.state_dict`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field

from zckpt.base.dataclass import dataclass
from zckpt.containers import TensorRef, list_at, mapping_at
from zckpt.core.catalog import Padding
from zckpt.core.dtypes import F32, DType
from zckpt.core.fragments import Fragment
from zckpt.engine.elements import ElementReader
from zckpt.engine.replicas import first_difference
from zckpt.layouts.megatron_legacy.stages import RankTensor, TensorsOfRank

_BUCKET = 40_000_000
_PER_RANK = 1_000_000
_ALIGNED = 64
_SHARED = ("embedding.word_embeddings.weight", "output_layer.weight", "word_embeddings_for_head.weight")


@dataclass(frozen=True, slots=True)
class Masters:
    """Masters of some of a rank's parameters.

    Attributes:
        states: index of the parameter in `TensorsOfRank.tensors` -> state (`param` is the master) -> its elements.
        padding: state -> elements between them.
        problems: states that contradict the masters, as clauses; they are not in `states`.
    """

    states: Mapping[int, Mapping[str, tuple[Fragment, ...]]]
    padding: Mapping[str, tuple[Padding, ...]] = field(default_factory=dict[str, tuple[Padding, ...]])
    problems: tuple[str, ...] = ()


_WAYS = ((_ALIGNED, True), (_ALIGNED, False), (1, True), (1, False))
"""The ways in which versions lay parameters into buckets: the multiple at which each begins, and whether one that begins a
bucket because it is shared begins where the padded bucket before it ends.
"""


def masters_of(
    rank: TensorsOfRank, optimizer: object, args: Mapping[str, object], reader: ElementReader
) -> Masters | str:
    """The masters of a rank, proved against its weights.

    Args:
        rank: its tensors.
        optimizer: what its `distrib_optim.pt` holds; None where there is no such file.
        args: Megatron's.
        reader: for the proof.

    Returns:
        No masters where the rank has none. If they cannot be named, what is of different parameters in its file, as clauses;
        none where nothing is.
    """
    if optimizer is None:
        return _of_groups(rank, reader)
    states = optimizer if isinstance(optimizer, list) else [optimizer]
    has_experts = len(states) > 1
    found: dict[int, Mapping[str, tuple[Fragment, ...]]] = {}
    padding: dict[str, tuple[Padding, ...]] = {}
    problems: list[str] = []
    for at, state in enumerate(states):
        if state is None:
            continue
        own = _of_vectors(rank, state, args, reader, bool(at) if has_experts else None)
        if isinstance(own, str):
            return own
        found.update(own.states)
        problems += own.problems
        for name, pads in own.padding.items():
            padding[name] = (*padding.get(name, ()), *pads)
    return Masters(found, padding, tuple(problems))


# ---- vectors --------------------------------------------------------------------------------------------------------


def _of_vectors(
    rank: TensorsOfRank, state: object, args: Mapping[str, object], reader: ElementReader, experts: bool | None
) -> Masters | str:
    """The masters in vectors, see [Note: buckets]; `experts`: whether these are the parameters of experts, or the
    others; None for both. Otherwise as `masters_of`.
    """
    if not isinstance(state, Mapping) or not state.get("buckets_coalesced"):
        return ""
    vectors = [
        vector for _, own in sorted((k, v) for k, v in state.items() if type(k) is int) for vector in _items(own)
    ]
    buffers = list(_buffers(rank, experts))
    if len(vectors) != len(buffers):
        return ""
    found: dict[int, Mapping[str, tuple[Fragment, ...]]] = {}
    padding: dict[str, tuple[Padding, ...]] = {}
    problems: list[str] = []
    for (chunk, dtype, members), (key, vector) in zip(buffers, vectors, strict=True):
        refs = {name: ref for name, ref in vector.items() if isinstance(ref, TensorRef) and ref.shape}
        master = refs.get("param")
        if master is None or dtype not in list_at(key) or not _is_vector(master, master):
            return ""
        odd = [name for name, ref in refs.items() if not _is_vector(ref, master)]
        for name in odd:
            problems.append(_unlike(name, refs.pop(name), master))
        size = _bucket_size(rank, chunk, args)
        laid = (_starts(rank, members, way, size, args) for way in _WAYS)
        proved = next((each for each in laid if _is_proved(rank, each, master, reader)), None)
        if proved is None and odd:  # one of the two is cut, and it may be the masters
            return "; ".join(problems)
        if proved is None:
            return ""
        starts, _ = proved
        for index, start in starts.items():
            numel = rank.tensors[index].ref.numel
            found[index] = {name: _run(ref, start, numel) for name, ref in refs.items()}
        for name, ref in refs.items():
            gaps = tuple(_run(ref, start, numel)[0] for start, numel in _gaps(rank, starts, ref.numel))
            padding[name] = (*padding.get(name, ()), *([Padding(ref.dtype, gaps)] if gaps else []))
    return Masters(found, padding, tuple(problems))


def _unlike(name: str, ref: TensorRef, master: TensorRef) -> str:
    return f"{name!r} has {ref.dtype} {list(ref.shape)}, its masters {master.dtype} {list(master.shape)}"


def _items(own: object) -> Iterator[tuple[object, Mapping[str, object]]]:
    for key, vector in mapping_at(own).items():
        if isinstance(vector, Mapping):
            yield key, vector


def _is_vector(ref: TensorRef, master: TensorRef) -> bool:
    return ref.dtype == F32 and ref.is_contiguous and ref.shape == master.shape


def _run(ref: TensorRef, start: int, numel: int) -> tuple[Fragment, ...]:
    return (Fragment(ref.store, ref.byte_offset + start * ref.dtype.itemsize, 0, numel),) if numel else ()


def _buffers(rank: TensorsOfRank, experts: bool | None) -> Iterator[tuple[int, DType, list[int]]]:
    """(virtual stage, dtype, indexes of parameters), in the order of the vectors."""
    for chunk in range(rank.chunks):
        members: dict[DType, list[int]] = {}
        for index, held in enumerate(rank.tensors):
            if held.chunk == chunk and not held.is_buffer and experts in (None, held.expert):
                members.setdefault(held.ref.dtype, []).append(index)
        yield from ((chunk, dtype, own) for dtype, own in members.items())


def _bucket_size(rank: TensorsOfRank, chunk: int, args: Mapping[str, object]) -> int | None:
    """The number of elements at which a bucket is full; None for one bucket."""
    if (
        not args.get("overlap_grad_reduce")
        or rank.rank.pp
        or chunk
        or args.get("overlap_param_gather_with_optimizer_step")
    ):
        return None
    number, size = args.get("ddp_num_buckets"), args.get("ddp_bucket_size")
    if type(number) is int and number > 0:
        return sum(held.ref.numel for held in rank.tensors if not held.is_buffer) // number
    return size if type(size) is int else max(_BUCKET, _PER_RANK * _data_parallel(args))


def _data_parallel(args: Mapping[str, object]) -> int:
    """The number of ranks that share a vector of the parameters outside experts."""
    numbers = (args.get(key) for key in ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"))
    world, tp, pp = (number if type(number) is int and number > 0 else 1 for number in numbers)
    return max(1, world // (tp * pp))


def _starts(
    rank: TensorsOfRank, members: Sequence[int], way: tuple[int, bool], size: int | None, args: Mapping[str, object]
) -> tuple[dict[int, int], int]:
    """Parameter -> the element of the vector at which it begins, and the vector's length; see [Note: buckets]."""
    (aligned, moves), ranks = way, _data_parallel(args)
    padded = math.lcm(ranks, 128) if not args.get("ddp_pad_buckets_for_high_nccl_busbw") else math.lcm(ranks, 1 << 16)
    shared = _is_shared(args)
    starts: dict[int, int] = {}
    at = bucket = behind = (
        0  # elements of the padded buffer: the next one, the bucket's first; and saved ones before it
    )
    is_empty = True
    for index in reversed(members):
        held, numel = rank.tensors[index], rank.tensors[index].ref.numel
        at += -at % aligned
        alone = shared and held.local.endswith(_SHARED)
        if alone:
            if not moves and at % ranks:
                at += -at % padded
            if not is_empty:
                behind, bucket = behind + at - bucket, at + -at % padded
                at = bucket if moves else at
        starts[index] = behind + at - bucket
        at += numel
        is_empty = False
        if alone or (size is not None and at - bucket >= size):
            behind, bucket = behind + at - bucket, at + -at % padded
            at, is_empty = bucket, True
    return starts, behind + at - bucket


def _is_shared(args: Mapping[str, object]) -> bool:
    """Whether two pipeline stages share the embedding."""
    stages = args.get("pipeline_model_parallel_size")
    return type(stages) is int and stages > 1 and not args.get("untie_embeddings_and_output_weights")


def _gaps(rank: TensorsOfRank, starts: Mapping[int, int], numel: int) -> Iterator[tuple[int, int]]:
    done = 0
    for index, start in sorted(starts.items(), key=lambda item: item[1]):
        if start > done:
            yield done, start - done
        done = start + rank.tensors[index].ref.numel
    if numel > done:
        yield done, numel - done


def _is_proved(rank: TensorsOfRank, laid: tuple[dict[int, int], int], master: TensorRef, reader: ElementReader) -> bool:
    """Whether a vector has the right length, and its masters, rounded, are the weights."""
    starts, numel = laid
    held = sum(rank.tensors[index].ref.numel for index in starts)
    if numel != master.numel or held + sum(gap for _, gap in _gaps(rank, starts, numel)) != numel:
        return False
    own = ((rank.tensors[index], start) for index, start in starts.items())
    return all(_agree(each, _run(master, start, each.ref.numel), reader) for each, start in own)


def _agree(held: RankTensor, fragments: tuple[Fragment, ...], reader: ElementReader) -> bool:
    return first_difference(reader, (fragments, F32), (held.ref.fragments(), held.ref.dtype)) is None


# ---- groups ---------------------------------------------------------------------------------------------------------


def _of_groups(rank: TensorsOfRank, reader: ElementReader) -> Masters | str:
    """The masters in lists, see [Note: groups]; otherwise as `masters_of`."""
    states = optimizers_in(rank.root)
    found: dict[int, Mapping[str, tuple[Fragment, ...]]] = {}
    problems: list[str] = []
    lists = [(state, list_at(_masters_in(state))) for state in states]
    apart = apart_in(group for state in states for group in group_facts(state))
    for state, groups in lists:
        facts = group_facts(state)
        if groups and len(facts) != len(groups):
            return ""
        for own, refs in zip(facts, groups):
            members = [
                index
                for index, held in enumerate(rank.tensors)
                if not held.is_buffer
                and held.ref.dtype.itemsize == 2
                and takes(own, apart, held.local, held.ref.shape, is_expert=held.expert)
            ]
            refs_here = [ref for ref in list_at(refs) if isinstance(ref, TensorRef)]
            if [ref.shape for ref in refs_here] != [rank.tensors[index].ref.shape for index in members]:
                return ""
            moments = _moments(state, own, refs_here, problems)
            for index, ref, beside in zip(members, refs_here, moments, strict=True):
                found[index] = {"param": ref.fragments(), **beside}
    if any(not _agree(rank.tensors[index], own["param"], reader) for index, own in found.items()):
        return ""
    return Masters(found, problems=tuple(problems))


def _masters_in(state: Mapping[str, object]) -> object:
    return next((state[key] for key in ("fp32_from_fp16_params", "fp32_from_fp16") if key in state), None)


def _moments(
    state: Mapping[str, object], group: Mapping[str, object], masters: Sequence[TensorRef], problems: list[str]
) -> list[dict[str, tuple[Fragment, ...]]]:
    """The further states of a group's masters; none if the group has other parameters too, since the numbers are then
    not theirs.
    """
    held = mapping_at(state, "optimizer", "state")
    numbers = list_at(group, "params")
    found: list[dict[str, tuple[Fragment, ...]]] = [{} for _ in masters]
    for own, number, master in zip(found, numbers if len(numbers) == len(masters) else (), masters, strict=False):
        for name, ref in mapping_at(held, number).items() if type(number) is int else ():
            if isinstance(ref, TensorRef) and ref.shape == master.shape and ref.dtype == F32 and ref.shape:
                own[str(name)] = ref.fragments()
            elif isinstance(ref, TensorRef) and ref.shape and ref.numel > 1:
                problems.append(_unlike(f"{name} of number {number}", ref, master))
    return found


def group_facts(state: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The parameter groups of an optimizer's state."""
    return [group for group in list_at(state, "optimizer", "param_groups") if isinstance(group, Mapping)]


def optimizers_in(root: Mapping[str, object]) -> list[Mapping[str, object]]:
    """The states of a rank's optimizers: of one, or of several in a list."""
    kept = root.get("optimizer")
    return [state for state in (kept if isinstance(kept, list) else [kept]) if isinstance(state, Mapping)]


def apart_in(groups: Iterable[Mapping[str, object]]) -> set[str]:
    """What sets groups apart beside weight decay."""
    return {key for group in groups for key in ("is_expert_parallel", "is_decoupled_lr") if group.get(key)}


def takes(group: Mapping[str, object], apart: set[str], name: str, shape: tuple[int, ...], *, is_expert: bool) -> bool:
    """Whether Megatron puts a parameter in a group."""
    own = {
        "wd_mult": not (name.endswith(".bias") or len(shape) == 1),
        "is_expert_parallel": is_expert and "is_expert_parallel" in apart,
        "is_decoupled_lr": name.endswith(_SHARED) and "is_decoupled_lr" in apart,
    }
    return all(bool(group.get(key, key == "wd_mult")) == value for key, value in own.items())
