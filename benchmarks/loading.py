"""A checkpoint's weights into a live model: `load_state_dict_from_zero_checkpoint`, ours and DeepSpeed's."""

from __future__ import annotations

import shutil
from pathlib import Path

from limits import limits
from measure import PYTHON, Job, Row, in_turn, optimizer_bytes, write

LOAD = """
import sys, time, torch
sys.path.insert(0, "benchmarks")
from synth import shapes
from {home} import load_state_dict_from_zero_checkpoint as load

class Model(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        for name, shape in shapes(layers).items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))

model = Model(int(sys.argv[2]))
began = time.perf_counter()
load(model, sys.argv[1])
print()
print(time.perf_counter() - began)
"""


def measure(work: Path, layers: int, rounds: int) -> list[Row]:
    """Both stages. The seconds are those of the call itself, without imports and the making of the model."""
    rows = []
    for stage in (2, 3):
        checkpoint = write(work / "ckpt", stage, "--layers", str(layers))
        jobs = {
            home: Job([*PYTHON, "-c", LOAD.replace("{home}", home), str(checkpoint), str(layers)], tells=True)
            for home in ("zckpt", "deepspeed.utils.zero_to_fp32")
        }
        ours, theirs = in_turn(jobs, rounds).values()
        what = f"ZeRO-{stage}, fp32 weights into a model on the CPU"
        least = limits(work).least(cached=2 * optimizer_bytes(checkpoint))
        rows.append(
            Row(what, ours, "DeepSpeed's function of this name", theirs, "memory includes the model", least=least)
        )
        shutil.rmtree(checkpoint)
    return rows
