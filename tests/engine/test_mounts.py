"""A mount of another machine, as FUSE shows one: read by more threads, to the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import slow_mount
import torch
from safetensors.torch import save_file

import zckpt
from zckpt.base.pace import DISTANT_THREADS, THREADS
from zckpt.engine.choice import threads_for
from zckpt.storage.identity import is_distant


def test_a_mount_that_limits_each_request(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "mount"
    source.mkdir()
    place.mkdir()
    save_file({f"w{n}": torch.randn(512, 1024) for n in range(8)}, source / "model.safetensors")  # 2 MiB each
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or os.geteuid():
        pytest.skip("only root mounts FUSE without a helper")
    command = [sys.executable, slow_mount.__file__, str(source), str(place), "--rate", "50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        read_there(server, source, place, tmp_path)


def read_there(server: subprocess.Popen[str], source: Path, place: Path, tmp_path: Path) -> None:
    """What both give is compared."""
    assert server.stdout is not None and server.stderr is not None
    try:
        if server.stdout.readline() != "mounted\n":
            pytest.skip(f"mounts are not allowed: {server.stderr.read()[-200:]}")
        there = zckpt.open_checkpoint(place).catalog.tensors.values()
        here = zckpt.open_checkpoint(source).catalog.tensors.values()
        assert is_distant(str(place)) and not is_distant(str(source))
        assert (threads_for(None, there), threads_for(3, there)) == (DISTANT_THREADS, 3)
        assert (threads_for(None, here), threads_for(None, here, str(place))) == (THREADS, DISTANT_THREADS)
        zckpt.convert(place, tmp_path / "out.safetensors", dtype="bf16")
        zckpt.convert(source, tmp_path / "want.safetensors", dtype="bf16")
        assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "want.safetensors").read_bytes()
        assert zckpt.verify(place, tmp_path / "out.safetensors").ok
    finally:
        server.terminate()
        server.wait(60)
