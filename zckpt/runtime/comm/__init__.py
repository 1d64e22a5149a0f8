"""Calls between ranks: what DeepSpeed scripts find under `deepspeed.comm`, over torch.distributed."""

from zckpt.runtime.comm.comm import *  # noqa: F403
