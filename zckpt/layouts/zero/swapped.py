"""Masters and optimizer states that were on NVMe when ZeRO-3 saved: their elements are in swap files beside the optimizer files.

For `zero3`. [Note: swap files] With `offload_optimizer.device: nvme`, each rank keeps the masters and states of large sub-groups
(from 1 MiB on) in files below `nvme_path`, and every save copies these to `<tag>/offloaded_tensors/rankDD/`. The attribute
`ds_id` of the vector in the optimizer file names the file: `0_65` (the ids of the first and the last parameter) for
`0_65.tensor.swp`, and `exp_avg-0_65` for that of a state; only states of such sub-groups have one. The file is the vector's
elements, raw and little-endian, and behind them padding up to a multiple of what one request writes.
In the optimizer file such a vector is empty. With `pipeline_read` or `pipeline_write` it is not: it is a view of a buffer which
has been used for other sub-groups since, so that its elements are theirs; zero_to_fp32.py takes them. Only the file is right.
Nobody looks at `nvme_path`: there, the run goes on. The directory may hold further files, and files may be longer than what is
written to them now, for DeepSpeed never removes what an earlier run left in `nvme_path`, and copies all of it.
Source: DeepSpeed 0.19.8, runtime/engine.py `save_checkpoint`; runtime/zero/stage3.py `_create_fp32_partitions`;
runtime/swap_tensor/optimizer_utils.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from zckpt.base.errors import (
    COPY_AGAIN,
    OTHER_SAVE,
    IncompleteError,
    InconsistentError,
    UnsafeError,
    UnsupportedError,
    ZckptError,
)
from zckpt.base.patterns import compile_late
from zckpt.base.words import count
from zckpt.containers import TensorRef, brief, list_at, value_at
from zckpt.core.catalog import Padding
from zckpt.core.dtypes import BF16, F16, F32, DType
from zckpt.core.fragments import Fragment
from zckpt.layouts.save.companions import is_own
from zckpt.layouts.save.listing import SWAP_NAME, SWAPPED, Listing
from zckpt.layouts.save.module_states import ModelStates, label_of
from zckpt.layouts.zero.optimizer_states import OptimizerShard
from zckpt.layouts.zero.partition import partition_numel

_SUFFIX = ".tensor.swp"
_LABEL = compile_late(r"[\w-]{1,200}")
_LEAST_BYTES = 1 << 20
_HALF_MASTERS = (("bf16", "bf16_master_weights_and_grads", BF16), ("fp16", "fp16_master_weights_and_grads", F16))


def with_swapped(
    listing: Listing, shard: OptimizerShard, model: ModelStates, mp_rank: int, world_size: int
) -> OptimizerShard:
    """The rank's file, with the vectors of swap files in place of those that stand for them.

    Args:
        listing: all files.
        shard: the rank's optimizer file.
        model: a model file of the same model-parallel rank.
        mp_rank: the model-parallel rank.
        world_size: data-parallel ranks.

    Raises:
        IncompleteError: a swap file of masters is missing, or too short; of states, `state_vector` raises it.
        InconsistentError: there are not as many sub-groups as the model file says.
        UnsafeError: a swap file, which has nothing that says what it is, is a link out of the checkpoint.
        UnsupportedError: the optimizer file does not name the swap file.
    """
    swapped = [number for number in range(len(shard.vectors)) if _is_swapped(number, shard, model)]
    if not swapped:
        return shard
    if len(model.param_shapes) != len(shard.vectors):
        if not any(label_of(shard.vectors[number]) or shard.vectors[number].numel for number in swapped):
            return shard  # no vectors, of no elements
        raise InconsistentError(
            "does not hold the sub-groups that the model file has", file=shard.file,
            found=count(len(shard.vectors), "sub-group"), expected=count(len(model.param_shapes), "sub-group"),
            remedy=OTHER_SAVE,
        )  # fmt: skip
    vectors, states = list(shard.vectors), list(shard.states)
    absent: dict[str, ZckptError] = {}
    for number in swapped:
        numel = sum(
            partition_numel(math.prod(shape), _ranks_of(number, shard, model, world_size))
            for shape in model.param_shapes[number].values()
        )
        if not numel:
            continue
        read = partial(_vector, listing, shard, mp_rank, number, numel)
        vectors[number] = read(vectors[number], "", _dtype_of_masters(model))
        own = dict(states[number])
        for name, value in own.items():
            if isinstance(value, TensorRef) and (label := label_of(value)).startswith(f"{name}-"):
                try:
                    own[name] = read(value, name, value.dtype)
                except IncompleteError as error:  # the weights are there all the same
                    own[name], absent[label] = replace(value, shape=(0,), stride=(1,)), error
        states[number] = own
    return replace(shard, vectors=tuple(vectors), states=tuple(states), absent=absent)


def _is_swapped(number: int, shard: OptimizerShard, model: ModelStates) -> bool:
    """Whether the elements of a sub-group are in swap files, whatever the optimizer file has; see [Note: swap files]."""
    vector = shard.vectors[number]
    states = shard.states[number].items()
    if not vector.numel or any(isinstance(v, TensorRef) and label_of(v).startswith(f"{n}-") for n, v in states):
        return True
    block = value_at(model.config, "aio", "block_size")
    least = max(_LEAST_BYTES, block if isinstance(block, int) else 0)
    return value_at(model.zero_config, "offload_optimizer", "device") == "nvme" and vector.nbytes >= least


def _ranks_of(number: int, shard: OptimizerShard, model: ModelStates, world_size: int) -> int:
    """The number of ranks that share a sub-group: all, or fewer for experts and under MiCS."""
    for entry in list_at(shard.root, "ds_zero_partition_groups"):
        if value_at(entry, "sub_group") == number:
            ranks = entry.get("partition_count")
            return ranks if isinstance(ranks, int) and ranks > 0 else world_size
    mics = model.zero_config.get("mics_shard_size")
    return mics if isinstance(mics, int) and 0 < mics < world_size else world_size


def _dtype_of_masters(model: ModelStates) -> DType:
    """The dtype of masters by the config: DeepSpeed records none for vectors without elements."""
    for name, key, dtype in _HALF_MASTERS:
        section = model.config.get(name)
        if isinstance(section, Mapping) and section.get(key) is True:
            return dtype
    return F32


def _vector(
    listing: Listing, shard: OptimizerShard, mp_rank: int, number: int, numel: int,
    stands_for: TensorRef, state: str, dtype: DType,
) -> TensorRef:  # fmt: skip
    """The elements of the masters of a sub-group, or of a state, that a tensor of the optimizer file stands for. Raises
    IncompleteError, UnsafeError, UnsupportedError as in `with_swapped`.
    """
    label = label_of(stands_for)
    if not _LABEL.fullmatch(label):
        raise UnsupportedError(
            f"does not say which swap file holds sub-group {number}", file=shard.file,
            found=f"a tensor with ds_id {brief(label[:100])}" if label else "an empty tensor without ds_id",
            expected="the attribute ds_id, as DeepSpeed writes it",
            remedy="Copy the optimizer files as DeepSpeed wrote them.",
        )  # fmt: skip
    name = listing.swap_file(shard.rank, mp_rank, label)
    place, nbytes = listing.where(name), numel * dtype.itemsize
    what = f"the {f'optimizer state {state!r}' if state else 'master weights'} of sub-group {number}"
    expected = f"{nbytes:,} bytes, which are {count(numel, 'element')} of {dtype}"
    if name not in listing.files:
        found = f"no directory {SWAPPED!r}: the run kept its optimizer on NVMe"
        if listing.matching(SWAP_NAME):
            directory = os.path.dirname(name)
            found = (
                f"{count(sum(os.path.dirname(other) == directory for other in listing.files), 'file')} in {directory!r}"
            )
        raise IncompleteError(
            f"is missing, which holds {what}", file=place, found=found, expected=f"a file of at least {expected}",
            remedy=f"Copy the directory {SWAPPED!r} of rank {shard.rank} from the node that wrote it (--also DIR lays "
            "another directory over this one), or choose another tag.",
        )  # fmt: skip
    if not is_own(place, place.parent, listing.directory.absolute().parent):
        raise UnsafeError(
            "is a link that leads out of the checkpoint, and any bytes would be taken for numbers", file=place,
            found=f"a link to {os.path.realpath(place)!r}", expected=what,
            remedy="Put the file itself there. Nothing was read from there.",
        )  # fmt: skip
    store = place.store()
    if store.size < nbytes:
        raise IncompleteError(
            f"is too short for {what}", file=place, found=f"{store.size:,} bytes", expected=f"at least {expected}",
            remedy=COPY_AGAIN,
        )  # fmt: skip
    return TensorRef(store, 0, dtype, (numel,), (1,), name, 0, store.size, 0, stands_for.attributes)


def tail_of(vector: TensorRef) -> Iterator[Padding]:
    """The elements behind the end of a vector in a swap file; nothing for any other vector."""
    rest = (vector.storage_nbytes - vector.nbytes) // vector.dtype.itemsize
    if vector.storage_key.endswith(_SUFFIX) and rest:
        fragment = Fragment(vector.store, vector.byte_stop, 0, rest)
        yield Padding(vector.dtype, (fragment,), "the end of a swap file", zero=False)
