"""The part of a live model that this process has: names, shapes, and the elements of each tensor in its memory.

For `export`. A plain module, one under `fully_shard` (DTensors of any mesh, cut along any dimensions), one that zckpt's trainer
sharded, and one that DeepSpeed trains at stage 1, 2 or 3: its fp32 masters, not the half-precision copies it computes with.

[Note: offers] Every rank offers what it has of each tensor; several ranks may offer the same elements. `assignment`
chooses one: replicas that sharding keeps equal are spread so that all ranks write about as much, and copies that nothing keeps
equal (buffers, plain parameters) come from the lowest rank.
Source: torch 2.13, distributed/tensor/_utils.py; DeepSpeed 0.19.8, utils/tensor_fragment.py (`_hp_mapping`: stages 1 and 2,
and the bf16 optimizer) and runtime/zero/stage3.py (`ds_tensor`, `get_local_fp32_param`); checked by tests/interop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zckpt.base.dataclass import dataclass
from zckpt.base.errors import UnsupportedError, UsageError
from zckpt.base.words import examples
from zckpt.core.catalog import Role, TensorPart
from zckpt.core.dtypes import BY_TORCH_NAME, DType
from zckpt.core.fragments import Fragment
from zckpt.core.stores import MemoryStore
from zckpt.layouts.save.state_names import WRAPPERS
from zckpt.live.loading import is_plain, tensors_of
from zckpt.live.slices import copies_of, local_part, master_of, reshard_modules, whole_copy_of


@dataclass(frozen=True, slots=True)
class Offer:
    """Elements of a tensor that a rank has; travels from rank to rank.

    Attributes:
        part: which elements, and where in the rank's own dense memory of them; the store stands for that memory.
        role: parameter, frozen or buffer.
        equal: every rank that offers the same elements is known to have the same numbers.
    """

    part: TensorPart
    role: Role
    equal: bool


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model as this process holds it.

    Attributes:
        offers: in the model's order, tied weights once.
        read: name -> gives the elements offered, in memory of any device.
        aliases: dropped name -> kept name.
        copies: name -> the trainer's `ShardedParameter`, of those with a whole copy, which scripts may have written to.
    """

    offers: tuple[Offer, ...]
    read: dict[str, Callable[[], torch.Tensor]]
    aliases: dict[str, str]
    copies: dict[str, Any]
    _rounded: dict[str, torch.Tensor | None] = field(default_factory=dict[str, "torch.Tensor | None"])

    def elements(self, name: str, dtype: DType) -> torch.Tensor:
        """The elements of a tensor that this process offers; in `dtype` if a whole copy has them so, bit for bit.

        A copy is taken up only here: its elements are in the processor's cache then, when they are written.
        """
        if name in self.copies and name not in self._rounded:
            self._rounded[name] = self.copies[name].take_up()
        rounded = self._rounded.get(name)
        found = self.read[name]() if rounded is None or _dtype(name, rounded.dtype) != dtype else rounded
        return found.detach()


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside engines, DDP and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            children = dict(model.named_children())
            own = any(t is not None for t in (*model._parameters.values(), *model._buffers.values()))
            if own or list(children) != ["module"]:
                return model
            inner = children["module"]
        model = inner


def local_model(model: nn.Module) -> LocalModel:
    """The part of a model that this process has, between two steps. Copies nothing, and calls no other rank. Raises
    UnsupportedError if zckpt does not know how a tensor is cut, UsageError if the model is on the meta device.
    """
    _refuse_parallel(model)
    engine, model = model, unwrap(model)
    if (shown := copies_of(model)) is not None:
        shown.give_back()
    places = _flat_places(engine, model)
    for module in model.modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                "the model is under FullyShardedDataParallel (FSDP1), and zckpt does not read its parts",
                remedy="Shard it with torch.distributed.fsdp.fully_shard, or save it with torch.distributed.checkpoint.",
            )
    if all(whole_copy_of(parameter) is None for parameter in model.parameters()):
        reshard_modules(model)
    offers: list[Offer] = []
    read: dict[str, Callable[[], torch.Tensor]] = {}
    aliases: dict[str, str] = {}
    copies: dict[str, Any] = {}
    for names, registered in tensors_of(model):
        kept, *dropped = (WRAPPERS.sub("", name) for name in names)
        tensor, copy = registered, whole_copy_of(registered)
        if copy is not None:
            tensor, copies[kept] = copy.weight, copy
        aliases.update((name, kept) for name in dropped if name != kept)
        role: Role = "buffer"
        if isinstance(tensor, nn.Parameter):
            role = "parameter" if tensor.requires_grad else "frozen"
        shape, dtype, fragments, equal, read[kept] = _elements(kept, tensor, places)
        offers.append(Offer(TensorPart(kept, shape, _dtype(kept, dtype), fragments), role, equal))
    return LocalModel(tuple(offers), read, aliases, copies)


Found = tuple[tuple[int, ...], torch.dtype, tuple[Fragment, ...], bool, Callable[[], torch.Tensor]]


def _elements(name: str, tensor: torch.Tensor, places: Places) -> Found:
    """The shape, dtype and fragments of a tensor, whether they are equal on all ranks, and the function that reads
    them.
    """
    master = master_of(tensor)
    if isinstance(tensor, DTensor):
        return _of_dtensor(name, tensor)
    if hasattr(tensor, "ds_process_group"):  # zckpt's trainer has others of DeepSpeed's attributes too
        return _of_stage_3(name, tensor)
    if hasattr(tensor, "_hp_mapping"):
        return _of_stage_1_and_2(tensor, places)
    whole = tensor.data if master is None else master
    if not is_plain(whole):
        raise UnsupportedError(
            f"tensor {name!r} is not plain memory",
            found=f"a {type(whole).__name__}, {whole.layout}",
            remedy="Save it before it is quantized, or save the state dict with torch.save.",
        )
    if whole.is_meta:
        raise UsageError(
            "the model has no weights yet",
            found=f"{name!r} is on the meta device",
            remedy="Call model.to_empty(device='cpu') and load weights first.",
        )
    return tuple(whole.shape), whole.dtype, _dense(whole, 0, whole.numel()), False, lambda: whole


def _of_dtensor(name: str, tensor: DTensor) -> Found:
    local, fragments = local_part(name, tensor)
    return tuple(tensor.shape), local.dtype, fragments, True, lambda: local


def _of_stage_3(name: str, parameter: Any) -> Found:
    """The offer at DeepSpeed's stage 3: the flat parameter is in as many parts as ranks share it, the last ones padded."""
    shape, numel = tuple(parameter.ds_shape), int(parameter.ds_numel)
    engine = getattr(parameter, "_z3_optimizer", None)
    step = int(parameter.ds_tensor.ds_numel)
    start = dist.get_rank(parameter.ds_process_group) * step
    count = max(0, min(step, numel - start))

    def read() -> torch.Tensor:
        if parameter.requires_grad and engine is not None:
            part = engine.get_local_fp32_param(parameter)
        else:
            part = parameter.ds_tensor
        if part is None or part.numel() < count:
            raise UnsupportedError(
                f"this rank's part of tensor {name!r} is not in memory, but on NVMe",
                remedy="Call engine.save_checkpoint, and convert the checkpoint: zckpt to-bf16.",
            )
        held: torch.Tensor = part.detach().reshape(-1)[:count]
        return held

    dtype = parameter.ds_tensor.dtype
    if parameter.requires_grad and engine is not None:
        dtype = getattr(engine, "master_weights_and_grads_dtype", torch.float32)
    store = MemoryStore(0, count * dtype.itemsize)
    return shape, dtype, (Fragment(store, 0, start, count),) if count else (), True, read


def _of_stage_1_and_2(parameter: Any, places: Places) -> Found:
    """The offer at DeepSpeed's stages 1 and 2: the run of elements in this rank's partition of the flat group."""
    shape, mapping = tuple(parameter.shape), parameter._hp_mapping
    start, part = 0, parameter.detach().view(-1)[:0]
    if id(parameter) in places:
        start, part = places[id(parameter)]
    elif mapping is not None:
        start, part = int(mapping.lp_fragment_address.start), mapping.hp_fragment.detach()
    return shape, part.dtype, _dense(part, start, part.numel()), True, lambda: part


Places = dict[int, tuple[int, torch.Tensor]]


def _flat_places(engine: Any, model: nn.Module) -> Places:
    """Id of a parameter -> its first element in this rank's partition, and these elements; of stages 1 and 2.

    `_hp_mapping` says the same, but is wrong under `round_robin_gradients`: it takes the group's order for the flat one.
    """
    several: list[Any] = [
        getattr(engine, "optimizer", None),
        *(getattr(p, "_zero_optimizer", None) for p in model.parameters()),
    ]
    places: Places = {}
    for optimizer in {id(one): one for one in several if hasattr(one, "round_robin_bit16_groups")}.values():
        for number, group in enumerate(optimizer.round_robin_bit16_groups):
            part = optimizer.single_partition_of_fp32_groups[number].detach()
            low = dist.get_rank(optimizer.real_dp_process_group[number]) * part.numel()
            steps = accumulate((p.numel() for p in group), initial=0)
            offsets = getattr(optimizer, "round_robin_bit16_offsets", None)
            for parameter, offset in zip(group, steps if offsets is None else offsets[number]):
                first, last = max(low, offset), min(low + part.numel(), offset + parameter.numel())
                places[id(parameter)] = (max(0, first - offset), part[first - low : max(first, last) - low])
    return places


def _dense(local: torch.Tensor, start: int, count: int) -> tuple[Fragment, ...]:
    return (Fragment(MemoryStore(0, count * local.element_size()), 0, start, count),) if count else ()


def _dtype(name: str, dtype: torch.dtype) -> DType:
    known = BY_TORCH_NAME.get(str(dtype).removeprefix("torch."))
    if known is None:
        raise UnsupportedError(
            f"tensor {name!r} has a dtype that zckpt does not know",
            found=str(dtype),
            remedy="Convert the tensor first.",
        )
    return known


def _refuse_parallel(engine: Any) -> None:
    """Refuses DeepSpeed's tensor, pipeline and expert parallelism: ranks hold different tensors under the same names."""
    stage = getattr(engine, "zero_optimization_stage", None)
    if stage is None or not type(engine).__module__.startswith("deepspeed"):
        return
    what = ""
    if getattr(engine, "mp_world_size", 1) > 1 or type(engine).__name__ == "PipelineEngine":
        what = "tensor or pipeline parallelism"
    experts = [name for name, p in engine.module.named_parameters() if getattr(p, "allreduce", True) is False]
    if experts:
        what = f"experts that ranks share ({examples(experts)})"
    if what:
        raise UnsupportedError(
            f"the DeepSpeed engine has {what}; zckpt does not take its weights from memory",
            remedy="Call engine.save_checkpoint, and convert the checkpoint: zckpt to-bf16.",
        )
