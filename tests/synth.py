"""Checkpoints written by torch.save from known tensors: for shapes that no fixture has, and frameworks that are hard to install.

`zero12` and `zero3` write DeepSpeed's layout. `model`, `parts`, `write` and `damage` are for the tests of any other, as
docs/extending.md shows.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import torch


def model(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors that readers get wrong: equal shapes, odd sizes, a scalar, one element, no elements. No two elements are equal."""
    shapes = {
        "head.weight": (3, 5),
        "body.0.weight": (5, 3),
        "body.0.bias": (5,),
        "body.1.weight": (5, 3),
        "body.1.bias": (1,),
        "body.empty": (0, 4),
        "body.scale": (),
        "body.2.weight": (2, 3, 7),
    }
    made, first = {}, 1
    for name, shape in shapes.items():
        made[name] = torch.arange(first, first + math.prod(shape)).reshape(shape).to(dtype)
        first += math.prod(shape)
    return made


def two_groups(scale: int = 1) -> list[dict[str, torch.Tensor]]:
    """Random tensors in two groups; each dimension of a matrix is `scale` times as large."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "a.weight": torch.randn(7 * scale, 5 * scale, generator=generator),
            "b.bias": torch.randn(11, generator=generator),
        },
        {"c.weight": torch.randn(3 * scale, 9 * scale, generator=generator)},
    ]


def parts(vector: torch.Tensor, world_size: int) -> list[tuple[torch.Tensor, int]]:
    """A vector cut over ranks as torch.chunk cuts it: each rank's part, and how many elements at its end are padding (-7)."""
    size = math.ceil(vector.numel() / world_size)
    cut = []
    for rank in range(world_size):
        own = vector[rank * size : (rank + 1) * size]
        cut.append((torch.cat([own, torch.full((size - own.numel(),), -7).to(vector.dtype)]), size - own.numel()))
    return cut


def write(path: Path, root: object) -> Path:
    """A file by torch.save, in a directory that is made where it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(root, path)
    return path


def damage(path: Path) -> Iterator[Path]:
    """The file in several states of damage, one after another; it is whole again at the end."""
    whole = path.read_bytes()
    for data in (b"", whole[: len(whole) // 2], whole[:-1], b"\0" * len(whole), whole[: len(whole) // 3] * 3):
        path.write_bytes(data)
        yield path
    path.write_bytes(whole)


def zero12(
    directory: Path,
    groups: list[dict[str, torch.Tensor]],
    world_size: int,
    *,
    stage: int = 2,
    half: torch.dtype = torch.bfloat16,
    alignment: int = 1,
    tag: str = "global_step5",
    buffers: dict[str, torch.Tensor] | None = None,
    frozen: dict[str, torch.Tensor] | None = None,
    shared: dict[str, str] | None = None,
    cut_padding: bool = True,
    step: int = 5,
    **extra: object,
) -> Path:
    """ZeRO-1/2 files of fp32 masters; returns `directory`."""
    buffers, frozen, shared = buffers or {}, frozen or {}, shared or {}
    save = directory / tag
    save.mkdir(parents=True, exist_ok=True)
    (directory / "latest").write_text(tag)
    module = OrderedDict((n, t.to(half)) for group in groups for n, t in group.items())
    module.update(frozen)
    module.update(buffers)
    for dropped, kept in shared.items():
        module[dropped] = module[kept]
    vectors: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
    all_paddings: list[list[int]] = []
    for group in groups:
        parts, paddings, offset = [], [], 0
        for index, tensor in enumerate(group.values()):
            offset += tensor.numel()
            padding = 0 if index == len(group) - 1 else -offset % alignment
            parts += [tensor.reshape(-1), torch.full((padding,), 7.0)]
            paddings.append(padding)
            offset += padding
        flat = torch.cat(parts) if parts else torch.empty(0)
        size = math.ceil(offset / (2 * world_size)) * 2
        padded = torch.cat([flat, torch.full((size * world_size - offset,), 9.0)])
        for rank in range(world_size):
            stop = min((rank + 1) * size, offset) if cut_padding else (rank + 1) * size
            vectors[rank].append(padded[rank * size : max(stop, rank * size)].clone())
        all_paddings.append(paddings)
    model = {
        "module": module,
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((n, t.shape) for n, t in group.items()) for group in groups],
        "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in frozen.items()),
        "frozen_param_fragments": OrderedDict(frozen),
        "shared_params": shared,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "global_steps": step,
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.19.8",
        **extra,
    }
    torch.save(model, save / "mp_rank_00_model_states.pt")
    for rank in range(world_size):
        state = {
            "zero_stage": stage,
            "partition_count": [world_size] * len(groups),
            "single_partition_of_fp32_groups": vectors[rank],
            "base_optimizer_state": {
                "state": {g: {"step": step, "exp_avg": torch.zeros_like(v)} for g, v in enumerate(vectors[rank])},
                "param_groups": [],
            },
        }
        if alignment > 1:
            state["param_alignment_paddings"] = all_paddings
        torch.save(
            {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"},
            save / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return directory


def zero3(
    directory: Path,
    groups: list[dict[str, torch.Tensor]],
    world_size: int,
    *,
    tag: str = "global_step5",
    sub_group: int = 10**9,
    buffers: dict[str, torch.Tensor] | None = None,
    frozen: dict[str, torch.Tensor] | None = None,
    shared: dict[str, str] | None = None,
    step: int = 5,
) -> Path:
    """ZeRO-3 files of fp32 masters; returns `directory`."""
    buffers, frozen, shared = buffers or {}, frozen or {}, shared or {}
    save = directory / tag
    save.mkdir(parents=True, exist_ok=True)
    (directory / "latest").write_text(tag)
    names = [n for group in groups for n in group] + list(frozen) + list(shared)
    for rank in range(world_size):
        runs: list[dict[str, torch.Tensor]] = [{}]  # sub-groups, each of one name or more
        for name, tensor in (item for group in groups for item in group.items()):
            if runs[-1] and sum(p.numel() for p in runs[-1].values()) >= sub_group:
                runs.append({})
            runs[-1][name] = _piece(tensor, world_size, rank)
        shape_of = {name: tensor.shape for group in groups for name, tensor in group.items()}
        module = OrderedDict((name, torch.empty(0)) for name in names)
        module.update(buffers)
        model = {
            "module": module,
            "buffer_names": list(buffers),
            "optimizer": None,
            "param_shapes": [OrderedDict((name, shape_of[name]) for name in run) for run in runs],
            "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in frozen.items()),
            "frozen_param_fragments": OrderedDict((n, _piece(t, world_size, rank)) for n, t in frozen.items()),
            "shared_params": shared,
            "dp_world_size": world_size,
            "mp_world_size": 1,
            "global_steps": step,
            "ds_config": {"zero_optimization": {"stage": 3}},
            "ds_version": "0.19.8",
        }
        torch.save(model, save / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flat = [torch.cat([*run.values()]) if run else torch.empty(0) for run in runs]
        inner = {
            "state": {i: {"step": step, "exp_avg": torch.zeros_like(v)} for i, v in enumerate(flat)},
            "param_groups": [],
        }
        state = {
            "zero_stage": 3,
            "partition_count": world_size,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": flat,
        }
        torch.save(
            {"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.8"},
            save / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return directory


def _piece(tensor: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    size = math.ceil(tensor.numel() / world_size)
    padded = torch.full((size * world_size,), 5.0).to(tensor.dtype)
    padded[: tensor.numel()] = tensor.reshape(-1)
    return padded[rank * size : (rank + 1) * size].clone()


def vectors(path: Path, count: int, numel: int, world_size: int) -> Path:
    """A ZeRO-2 checkpoint of one group of random vectors, each one element longer than the one before."""
    generator = torch.Generator().manual_seed(0)
    return zero12(path, [{f"w{i}": torch.randn(numel + i, generator=generator) for i in range(count)}], world_size)
