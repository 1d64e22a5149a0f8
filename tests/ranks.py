"""Starts a script on several ranks of real torch.distributed, as `torchrun` does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def run_ranks(world_size: int, path: Path, worker: Path, **environment: str) -> None:
    """Starts a worker's ranks, with the path of their jobs, and waits until all have ended well."""
    own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    done = subprocess.run(
        [*command, str(worker), str(path)], env={**os.environ, **own}, capture_output=True, text=True, check=False,
        timeout=280,
    )  # fmt: skip
    told = [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if re.search(r"rank|exitcode|terminate called|what\(\)", line)
    ]
    assert done.returncode == 0, "\n".join(told[-60:])
