"""`zckpt demo`: trains a model, resumes in another form, and compares two exports of its weights.

Without torch, a small save of two ranks that comes with zckpt, written by DeepSpeed with ZeRO-3, is converted.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer

from zckpt.cli.declare import command
from zckpt.cli.output import Console

_CONFIG: dict[str, Any] = {
    "train_batch_size": 12,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}


@command(
    "demo",
    about="Train a small model with ZeRO-3, resume with ZeRO-2 on another number of ranks, and show that its weights are "
    "exported bit for bit.",
    example="zckpt demo",
    status="0 equal, 1 a number differs, 2 error",
)
def demo() -> None:
    """Runs other commands in a temporary directory; one that fails ends the demo."""
    with tempfile.TemporaryDirectory(prefix="zckpt-demo-") as directory:
        home = Path(directory)
        if all(importlib.util.find_spec(name) for name in ("torch", "pydantic")):
            _train(home)
        else:
            Console().notes(
                [
                    "torch is not installed: a save that comes with zckpt is converted; pip install 'zckpt[train]' adds training"
                ]
            )
            _convert(home)


def _train(home: Path) -> None:
    """Trains two processes with ZeRO-3, then three with ZeRO-2, and compares two exports of the weights."""
    sources = sorted(Path(__file__).parents[1].glob("[c-j]*/*.py"))
    home.joinpath("text.txt").write_text("".join(path.read_text(encoding="utf-8") for path in sources))
    for stage in (3, 2):
        config = {**_CONFIG, "zero_optimization": {"stage": stage}}
        home.joinpath(f"zero{stage}.json").write_text(json.dumps(config))
    common = ("--data", "text.txt", "--out", "run", "--log-every", "1")
    _run(home, "train", "zero3.json", *common, "--steps", "8", "--nproc", "2")
    _run(home, "train", "zero2.json", *common, "--steps", "16", "--nproc", "3", "--resume", "--save-pretrained", "live")
    _run(home, "inspect", "run")
    _run(home, "to-bf16", "run", "offline")
    _say("", "Three processes wrote live/ from their memory; offline/ was converted from the checkpoint.")
    _run(home, "diff", "offline", "live")


def _convert(home: Path) -> None:
    """Converts a save that comes with zckpt, and compares the output with the weights that its trainer gathered."""
    stored = Path(__file__).with_name("demo_save")
    for name in ("checkpoint", "truth.safetensors"):
        home.joinpath(name).symlink_to(stored / name)
    _run(home, "inspect", "checkpoint")
    _run(home, "map", "checkpoint")
    _run(home, "to-fp32", "checkpoint", "model.safetensors")
    _say("", "truth.safetensors has the weights that the training run gathered in memory, by DeepSpeed's own code.")
    _run(home, "diff", "model.safetensors", "truth.safetensors")
    _run(home, "to-bf16", "checkpoint", "weights")
    _run(home, "verify", "checkpoint", "weights")


def _run(home: Path, *words: str) -> None:
    """Runs a command as a person would; if it fails, so does the demo."""
    _say("", f"$ zckpt {' '.join(words)}")
    done = subprocess.run([sys.executable, "-m", "zckpt", *words], cwd=home, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)


def _say(*lines: str) -> None:
    Console().result(dict, lambda: lines)
