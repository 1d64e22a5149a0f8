"""Shards on the disks of two nodes: read together where they lie, and what is said when one of the disks is gone.

python lost_node.py
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import zckpt

command = [
    sys.executable,
    "-m",
    "zckpt",
    "train",
    "ds_config.json",
    "--data",
    "text.txt",
    "--out",
    "run",
    "--steps",
    "2",
]
Path("text.txt").write_text("It was the best of times, it was the worst of times.\n" * 200)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
Path("ds_config.json").write_text(json.dumps(config))
subprocess.run([*command, "--nproc", "2"], check=True)

# Two nodes, each of which saved to its own disk: rank 1's files lie elsewhere.
for file in [file for file in Path("run").rglob("*rank_1_*") if file.is_file()]:
    there = Path("node1") / file
    there.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(file, there)

try:
    zckpt.convert("run", "weights", progress=False)
except zckpt.IncompleteError as error:
    print(f"without node 1: {error}")

report = zckpt.convert("run", "weights", also=["node1/run"], progress=False)
print(f"with node 1: {report.tensors} tensors")
