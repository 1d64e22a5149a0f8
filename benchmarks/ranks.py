"""Rank files of FSDP, beside `cp` of the bytes written and verl's own `model_merger`.

    python benchmarks/ranks.py DEST [--layers 48]      # writes the save that is measured

A GPT-2 shape of 8 ranks, as verl saves it: fp32 DTensors, each rank's rows of every tensor. verl's merger loads all ranks at
once, casts to bf16 and does not sync; so `to-bf16` is what stands beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path

from limits import least_time
from measure import PYTHON, ROOT, ZCKPT, Job, Row, copying, file_bytes, in_turn, remove

WORLD = 8
MERGER = [*PYTHON, str(ROOT / "tests" / "verl_merger.py")]


def write(dest: Path, layers: int) -> None:
    """The save, rank by rank in this process, with torch's process group that sends nothing."""
    import torch
    import torch.distributed as dist
    from synth import numbers, shapes
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    (dest / "huggingface").mkdir(parents=True)
    model = {
        "model_type": "gpt2",
        "architectures": ["GPT2ForCausalLM"],
        "n_layer": layers,
        "n_embd": 1600,
        "n_head": 25,
    }
    (dest / "huggingface" / "config.json").write_text(json.dumps(model))
    (dest / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))
    for rank in range(WORLD):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
        state = {}
        for name, shape in shapes(layers).items():
            rows = -(-shape[0] // WORLD)
            held = max(0, min(rows, shape[0] - rank * rows))
            local = numbers(rank, held * (shape[1] if len(shape) > 1 else 1)).view(held, *shape[1:])
            stride = torch.empty(shape, device="meta").stride()
            state[f"transformer.{name}"] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
            )
        torch.save(state, dest / f"model_world_size_{WORLD}_rank_{rank}.pt")
        dist.destroy_process_group()


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """To fp32 and bf16, and what is quick."""
    checkpoint = work / "actor"
    subprocess.run([*PYTHON, __file__, str(checkpoint), "--layers", str(layers)], check=True)
    rows: list[Row] = []
    for command in ("to-fp32", "to-bf16"):
        out, theirs = work / command, work / "theirs"
        jobs = {
            "ours": Job([*ZCKPT, command, str(checkpoint), str(out), "--quiet"], clears=(out,)),
            "cp": copying(out, work / "copy"),
        }
        if command == "to-bf16":
            jobs["verl"] = Job([*MERGER, str(checkpoint), str(theirs)], clears=(theirs,), drops=(theirs,))
        taken = in_turn(jobs, rounds)
        what = f"{command}, safetensors directory"
        least = least_time(work, read=file_bytes(checkpoint, "model_*"), written=file_bytes(out))
        rows.append(Row(what, taken["ours"], "`cp` and `sync` of the same bytes", taken["cp"], least=least))
        if "verl" in taken:
            rows.append(Row(what, taken["ours"], "`verl.model_merger`", taken["verl"], "not durable", least=least))
        remove(out)
    taken = in_turn({"inspect": Job([*ZCKPT, "inspect", str(checkpoint)])}, max(rounds, 5))
    rows.append(Row("`zckpt inspect`", taken["inspect"]))
    remove(checkpoint)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))
    write(options.dest, options.layers)
