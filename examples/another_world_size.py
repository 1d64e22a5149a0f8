"""A run of two ranks that goes on with one: the trainer loads any world size, and `reshard` makes what DeepSpeed itself resumes.

python another_world_size.py
"""

import json
import subprocess
import sys
from pathlib import Path

import zckpt

command = [sys.executable, "-m", "zckpt", "train", "ds_config.json", "--data", "text.txt", "--out", "run"]
Path("text.txt").write_text("It was the best of times, it was the worst of times.\n" * 200)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
Path("ds_config.json").write_text(json.dumps(config))
subprocess.run([*command, "--steps", "2", "--nproc", "2"], check=True)

zckpt.reshard("run", "for-one-rank", world_size=1, stage=2, progress=False)
assert zckpt.verify("run", "for-one-rank", progress=False).ok
print("for-one-rank/ is a ZeRO-2 checkpoint of one rank, equal to the run bit for bit")

subprocess.run([*command, "--steps", "4", "--resume"], check=True)  # one process now
print(f"the run went on: {zckpt.inspect_checkpoint('run').catalog.source.global_steps} steps")
