"""A rank of real DeepSpeed on a CPU: how the workers beside this begin, tell what they found, and end."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed_on_cpu
import gloo


@contextlib.contextmanager
def gloo_ranks() -> Iterator[None]:
    """Inside, DeepSpeed talks over gloo. All ranks leave together: gloo aborts a rank whose peer has ended before it."""
    torch.set_num_threads(1)
    deepspeed_on_cpu.initialize()
    yield
    gloo.end()


def tell(run: Callable[[Any], object]) -> None:
    """Does all jobs of the file that this rank was given, one after another; rank 0 writes beside it what each rank found."""
    told = [run(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, told)
    if dist.get_rank() == 0:
        Path(sys.argv[1] + ".told").write_text(json.dumps(everyone))


def tell_over_gloo(run: Callable[[Any], object]) -> None:
    """As `tell`, of ranks without DeepSpeed, which begin and end here."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tell(run)
    dist.barrier()
    dist.destroy_process_group()
