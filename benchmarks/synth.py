"""Writes a GPT-2 shaped ZeRO checkpoint in DeepSpeed's layout, of any size, in little memory.

    python benchmarks/synth.py --stage 3 --layers 48 DEST

1.5B by default (48 layers of 1,600, as GPT-2 XL), world size 8. Masters are random fp32; ZeRO-2's bf16 module weights are their
casts. Moments are left out unless asked for: no converter to plain weights reads them, and they would triple the disk.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import OrderedDict
from pathlib import Path

import torch

BLOCK = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))


def shapes(
    layers: int, width: int = 1600, vocabulary: int = 50257, positions: int = 1024
) -> dict[str, tuple[int, ...]]:
    """GPT-2's parameters by name."""
    found: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width), "wpe.weight": (positions, width)}
    for layer in range(layers):
        for name, shape in {
            "ln_1.weight": (width,), "ln_1.bias": (width,),
            "attn.c_attn.weight": (width, 3 * width), "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,), "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width), "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width), "mlp.c_proj.bias": (width,),
        }.items():  # fmt: skip
            found[f"h.{layer}.{name}"] = shape
    return {**found, "ln_f.weight": (width,), "ln_f.bias": (width,)}


def numbers(start: int, count: int) -> torch.Tensor:
    """`count` numbers of an endless repeated random row, from `start` on."""
    made, filled = torch.empty(count), 0
    while filled < count:
        first = (start + filled) % BLOCK.numel()
        piece = BLOCK[first : first + count - filled]
        made[filled : filled + piece.numel()] = piece
        filled += piece.numel()
    return made


def write(
    dest: Path, stage: int, layers: int, world_size: int = 8, width: int = 1600, *, moments: bool = False
) -> Path:
    """The checkpoint; returns `dest`."""
    save = dest / "global_step100"
    save.mkdir(parents=True)
    (dest / "latest").write_text(save.name)
    wanted = shapes(layers, width)
    numels = {name: math.prod(shape) for name, shape in wanted.items()}
    total = sum(numels.values())
    common = {
        "buffer_names": [], "optimizer": None, "frozen_param_shapes": {}, "frozen_param_fragments": {},
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in wanted.items())], "shared_params": {},
        "dp_world_size": world_size, "mp_world_size": 1, "global_steps": 100, "ds_version": "0.19.8",
        "ds_config": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}},
    }  # fmt: skip
    offsets = dict(zip(wanted, itertools.accumulate(numels.values(), initial=0), strict=False))
    if stage < 3:
        flat = torch.empty(total, dtype=torch.bfloat16)
        for start in range(0, total, BLOCK.numel()):
            flat[start : start + BLOCK.numel()] = numbers(start, min(BLOCK.numel(), total - start))
        module, offset = OrderedDict(), 0
        for name, shape in wanted.items():
            module[name] = flat[offset : offset + numels[name]].view(shape)
            offset += numels[name]
        torch.save({"module": module, **common}, save / "mp_rank_00_model_states.pt")
        del flat, module
        size = math.ceil(total / (2 * world_size)) * 2
    for rank in range(world_size):
        if stage < 3:
            vector = numbers(rank * size, min(size, total - rank * size))
            state: dict[str, object] = {"single_partition_of_fp32_groups": [vector], "partition_count": [world_size]}
            if moments:
                state |= {
                    "base_optimizer_state": _adam(vector),
                    "param_slice_mappings": [_slices(offsets, numels, rank, size)],
                }
        else:
            pieces = [math.ceil(numel / world_size) for numel in numels.values()]
            vector = numbers(rank, sum(pieces))
            state = {"fp32_flat_groups": [vector], "partition_count": world_size}
            if moments:
                state["optimizer_state_dict"] = _adam(vector)
            module = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in wanted)
            torch.save({"module": module, **common}, save / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save(
            {"optimizer_state_dict": {"zero_stage": stage, **state}, "ds_config": {}, "ds_version": "0.19.8"},
            save / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return dest


def _adam(masters: torch.Tensor) -> dict[str, object]:
    """The state of an optimizer after a hundred steps; second moments are not negative."""
    state = {"step": torch.tensor(100.0), "exp_avg": masters * 0.5, "exp_avg_sq": masters.square()}
    return {"state": {0: state}, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "params": [0]}]}


def _slices(offsets: dict[str, int], numels: dict[str, int], rank: int, size: int) -> dict[str, object]:
    """Where each parameter lies in a rank's vector, for DeepSpeed's converter, by its own class."""
    from deepspeed.utils.tensor_fragment import fragment_address

    held = {}
    for name, offset in offsets.items():
        start, stop = max(offset, rank * size), min(offset + numels.get(name, 0), (rank + 1) * size)
        if start < stop:
            held[name] = fragment_address(numel=stop - start, start=start - rank * size)
    return held


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--moments", action="store_true")
    options = parser.parse_args()
    write(options.dest, options.stage, options.layers, options.world_size, options.width, moments=options.moments)
