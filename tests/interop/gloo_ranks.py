"""A rank of real DeepSpeed on a CPU: how the workers beside this begin and end."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def gloo_ranks() -> Iterator[None]:
    """Inside, DeepSpeed talks over gloo. All ranks leave together: gloo aborts a rank whose peer has ended before it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    import deepspeed

    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda *args, **kwargs: None  # its all-reduce aborts on some sizes
    deepspeed.init_distributed("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()
