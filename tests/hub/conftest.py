"""A hub for each test, and the command line as a person at it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import synth
import torch
from hub_server import SHARD_BYTES, TOKEN, HubServer

from zckpt.hub import PushReport, push_to_hub
from zckpt.hub.pipeline import SENDER
from zckpt.jobs.options import Options

Pusher = Callable[..., PushReport]
Shell = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    """Goes when the last of the test's senders has: a push that failed does not wait for them."""
    with HubServer(tmp_path / "hub") as running:
        yield running
        for thread in threading.enumerate():
            if thread.name == SENDER:
                thread.join(60)
                assert not thread.is_alive()


@pytest.fixture
def model() -> list[dict[str, torch.Tensor]]:
    """Three tensors of 200 kB in bf16, and a small one."""
    generator = torch.Generator().manual_seed(0)
    large = {f"layer{i}.weight": torch.randn(100, 1000, generator=generator) for i in range(3)}
    return [{**large, "norm.bias": torch.randn(7, generator=generator)}]


@pytest.fixture
def checkpoint(tmp_path: Path, model: list[dict[str, torch.Tensor]]) -> Path:
    """Three shards of bf16 weights, once it is split by `SHARD_BYTES`."""
    synth.zero3(tmp_path / "run" / "checkpoint-5", model, 2)
    home = tmp_path / "run" / "checkpoint-5"
    (home / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}'
    )
    (home / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    return home


@pytest.fixture
def push(server: HubServer, tmp_path: Path) -> Pusher:
    """`push_to_hub` to the test's hub."""

    def pushed(source: Path | str, repo_id: str = "alice/m", **more: object) -> PushReport:
        more = {
            "token": TOKEN,
            "options": Options(max_shard_size=SHARD_BYTES),
            "scratch": str(tmp_path / "scratch"),
            **more,
        }
        return push_to_hub(source, repo_id, endpoint=server.url, **more)

    return pushed


@pytest.fixture
def environment(server: HubServer, tmp_path: Path) -> dict[str, str]:
    """Of a person who is logged in by HF_TOKEN, on a machine without Xet."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    return {**mine, **own, "NO_COLOR": "1", "COLUMNS": "120"}


@pytest.fixture
def shell(environment: dict[str, str]) -> Iterator[Shell]:
    """Starts `zckpt`."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: object, **more: str | None) -> subprocess.Popen[str]:
        chosen = {name: value for name, value in {**environment, **more}.items() if value is not None}
        command = [sys.executable, "-m", "zckpt", *map(str, args)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=chosen, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
