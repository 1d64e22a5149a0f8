"""Real DeepSpeed on any CPU, over gloo; for the ranks that tests start."""

from __future__ import annotations

import importlib
import os


def initialize() -> None:
    """Makes DeepSpeed ready, and its process group.

    It refuses fp16 where oneDNN has no fast kernels for it; torch computes in fp16 on every CPU.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True
    backend = importlib.import_module("deepspeed.comm.torch")  # as an attribute it may be torch itself
    backend.build_shm_op = lambda *args, **kwargs: None  # its all-reduce aborts on some sizes
    deepspeed.init_distributed("gloo")
