"""Saves of torch.distributed.checkpoint, to and fro, beside torch's own `format_utils` and accelerate's merge.

Two ranks write a model of GPT-2's shape, sharded as `fully_shard` does, once alone and once with the states of AdamW. What zckpt
writes is durable, the others' is not. Of a save with optimizer states torch's script writes all, and zckpt the weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

from limits import least_time
from measure import PYTHON, ZCKPT, Job, Row, file_bytes, in_turn

TORCH = [*PYTHON, "-m", "torch.distributed.checkpoint.format_utils"]
MERGE = [*PYTHON, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
WIDTH, WORDS = 768, 32_000


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model."""
    made: dict[str, tuple[int, ...]] = {"wte.weight": (WORDS, WIDTH), "wpe.weight": (1024, WIDTH)}
    for n in range(layers):
        made |= {
            f"h.{n}.ln.weight": (WIDTH,),
            f"h.{n}.attn.weight": (WIDTH, 4 * WIDTH),
            f"h.{n}.attn.bias": (4 * WIDTH,),
        }
        made |= {f"h.{n}.up.weight": (WIDTH, 4 * WIDTH), f"h.{n}.down.weight": (4 * WIDTH, WIDTH)}
    return made


def write(work: Path, layers: int) -> None:
    """One of two ranks."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def sharded(shape: tuple[int, ...]) -> DTensor:
        rows = shape[0] // 2
        here = torch.randn(rows, *shape[1:])
        return DTensor.from_local(here, mesh, [Shard(0)], run_check=False)

    model = {name: sharded(shape) for name, shape in shapes(layers).items()}
    dcp.save({"model": model}, checkpoint_id=work / "weights")
    state = {n: {"step": torch.tensor(1.0), "exp_avg": t * 0.1, "exp_avg_sq": t * t} for n, t in model.items()}
    groups = [{"lr": 0.1, "params": list(model)}]
    dcp.save({"model": model, "optim": {"state": state, "param_groups": groups}}, checkpoint_id=work / "run")
    dist.destroy_process_group()


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """To one file, and from one; of a quarter of the layers, since the rivals take long."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*launcher, str(work), str(max(layers // 4, 1))], check=True, env=environment, stderr=subprocess.DEVNULL
    )
    mine, single, other, merged = work / "ours.bin", work / "ours.safetensors", work / "theirs.pt", work / "merged"
    nbytes = file_bytes(work / "weights")  # of a save with optimizer states, no more are needed
    least = least_time(work, read=nbytes, written=nbytes)
    rows = []
    for name, what in (("weights", "weights alone"), ("run", "weights, of a save with AdamW's states")):
        ours = Job([*ZCKPT, "to-fp32", str(work / name), str(mine), "--quiet"], (mine,))
        theirs = Job([*TORCH, "dcp_to_torch", str(work / name), str(other)], (other,), (other,))
        taken = in_turn({"ours": ours, "theirs": theirs}, rounds)
        what += ", to one .bin"
        rows.append(Row(what, taken["ours"], "`dcp_to_torch`", taken["theirs"], "not durable", least=least))
    ours = Job([*ZCKPT, "to-fp32", str(work / "weights"), str(single), "--quiet"], (single,), (single,))
    theirs = Job([*MERGE, str(work / "weights"), str(merged)], (merged,), (merged,))
    taken = in_turn({"ours": ours, "theirs": theirs}, rounds)
    what = "weights alone, to one .safetensors"
    rows.append(Row(what, taken["ours"], "`accelerate merge-weights`", taken["theirs"], "not durable", least=least))
    written = [work / "to", work / "from"]
    ours = Job([*ZCKPT, "to-dcp", str(mine), str(written[0]), "--quiet"], (written[0],), (written[0],))
    theirs = Job([*TORCH, "torch_to_dcp", str(mine), str(written[1])], (written[1],), (written[1],))
    taken = in_turn({"ours": ours, "theirs": theirs}, rounds)
    what = "one .bin to a DCP directory"
    rows.append(Row(what, taken["ours"], "`torch_to_dcp`", taken["theirs"], "not durable", least=least))
    for path in (work / "weights", work / "run"):
        shutil.rmtree(path)
    mine.unlink()
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One rank that writes what is measured.")
    parser.add_argument("work", type=Path)
    parser.add_argument("layers", type=int)
    options = parser.parse_args()
    write(options.work, options.layers)
