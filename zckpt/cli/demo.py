"""`zckpt demo`: trains a model, stops, resumes in another form, and exports its weights live and from the checkpoint.

Without torch, a stored checkpoint is converted and compared with the weights stored beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from zckpt.base.words import count, examples, size
from zckpt.cli.declared import command
from zckpt.cli.output import Console

if TYPE_CHECKING:
    from zckpt.containers import TensorRef

_PREFERRED = "bf16_w2"

_CONFIG: dict[str, Any] = {
    "train_batch_size": 12,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    command(
        app,
        "demo",
        summary="Train, resume, export and compare, in a minute.",
        about="Train a small model with ZeRO-3, resume with ZeRO-2 on another number of ranks, and show that its weights are "
        "exported bit for bit.",
        example="zckpt demo",
        status="0 equal, 1 a number differs, 2 error",
    )(demo)


def demo() -> None:
    """Trains and exports in a temporary directory; without torch, converts a stored checkpoint."""
    sink = Console()
    if all(importlib.util.find_spec(name) for name in ("torch", "pydantic")):
        wrong = _train(sink)
    else:
        sink.notes(
            ["torch is not installed, so a stored checkpoint is converted; pip install 'zckpt[train]' adds training"]
        )
        wrong = _convert(sink)
    if wrong:
        raise typer.Exit(1)


def _train(sink: Console) -> list[str]:
    """Trains two processes with ZeRO-3, then three with ZeRO-2; returns the names of weights that the two exports differ in."""
    with tempfile.TemporaryDirectory(prefix="zckpt-demo-") as directory:
        home = Path(directory)
        sources = sorted(Path(__file__).parents[1].glob("[c-j]*/*.py"))
        home.joinpath("text.txt").write_text("".join(path.read_text(encoding="utf-8") for path in sources))
        for stage in (3, 2):
            config = {**_CONFIG, "zero_optimization": {"stage": stage}}
            home.joinpath(f"zero{stage}.json").write_text(json.dumps(config))
        common = ("--data", "text.txt", "--out", "run")
        _run(sink, home, "train", "zero3.json", *common, "--steps", "8", "--nproc", "2")
        more = ("--resume", "--save-pretrained", "live")
        _run(sink, home, "train", "zero2.json", *common, "--steps", "16", "--nproc", "3", *more)
        _run(sink, home, "inspect", "run")
        _run(sink, home, "to-bf16", "run", "offline")
        differing, tensors, numel = _compare(*(str(home / way / "model.safetensors") for way in ("offline", "live")))
        verdict = f"{len(differing):,} differ: {examples(differing)}" if differing else "equal, bit for bit"
        _say(
            sink,
            "",
            "Three processes wrote live/ from their memory; offline/ was converted from the checkpoint:",
            f"  {count(tensors, 'tensor')}, {count(numel, 'element')}: {verdict}",
        )
        return differing


def _run(sink: Console, home: Path, *words: str) -> None:
    """Runs a command as a person would; if it fails, the demo ends."""
    _say(sink, "", f"$ zckpt {' '.join(words)}")
    done = subprocess.run([sys.executable, "-m", "zckpt", *words], cwd=home, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)


def _convert(sink: Console) -> list[str]:
    """Inspects and converts a stored ZeRO-3 checkpoint; returns the tensors that differ from the weights stored beside it."""
    from zckpt.jobs.convert import convert
    from zckpt.jobs.inspection import inspect_checkpoint

    home = _fixture()
    checkpoint, truth = os.path.join(home, "checkpoint"), os.path.join(home, "truth.safetensors")
    _say(
        sink, f"$ zckpt inspect {os.path.relpath(checkpoint)}", *inspect_checkpoint(checkpoint).lines(width=sink.width)
    )
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="zckpt-demo-") as directory:
        for dtype, name in (("fp32", "model.safetensors"), ("fp32", "model.bin"), ("bf16", "model-bf16.safetensors")):
            out = os.path.join(directory, name)
            report = convert(checkpoint, out, dtype=dtype)
            differing, tensors, numel = _compare(out, truth)
            wrong += differing
            truly = "the stored weights" if dtype == "fp32" else f"the stored weights rounded to {dtype}"
            verdict = f"{count(tensors, 'tensor')}, {count(numel, 'element')}: equal to {truly}, bit for bit"
            if differing:
                verdict = f"{len(differing):,} of {tensors:,} tensors differ from {truly}: {examples(differing)}"
            _say(
                sink,
                "",
                f"$ zckpt to-{dtype} {os.path.relpath(checkpoint)} {name}",
                *(f"  {size(nbytes):>9}  {path}" for path, nbytes in report.files),
                f"  {verdict}",
            )
    return wrong


def _say(sink: Console, *lines: str) -> None:
    sink.result(dict, lambda: lines)


def _fixture() -> str:
    """The stored checkpoint to show."""
    import zckpt
    from zckpt.base.errors import NotACheckpointError

    root = Path(zckpt.__file__).resolve().parent.parent / "fixtures" / "zero3"
    homes = [path.parent for path in root.glob("*/truth.safetensors")]
    if homes:
        return str(min(homes, key=lambda home: (home.name != _PREFERRED, home.name)))
    raise NotACheckpointError(
        "holds no stored checkpoint", file=root, remedy="Run the demo in a clone of the repository."
    )


def _compare(path: str, truth_path: str) -> tuple[list[str], int, int]:
    """The tensors that differ, how many there are, and their elements."""
    found, truth = _tensors(path), _tensors(truth_path)
    differing = sorted(found.keys() ^ truth.keys())
    differing += [name for name in sorted(found.keys() & truth.keys()) if not _equal(found[name], truth[name])]
    return differing, len(truth), sum(ref.numel for ref in truth.values())


def _tensors(path: str) -> dict[str, TensorRef]:
    """A file's tensors by name, tied names included."""
    from collections.abc import Mapping

    from zckpt.containers import TensorRef, open_container

    container = open_container(path)
    root = container.root if isinstance(container.root, Mapping) else {}
    tensors = {str(name): ref for name, ref in root.items() if isinstance(ref, TensorRef)}
    tied = {name: tensors[kept] for name, kept in container.metadata.items() if kept in tensors}
    return {**tensors, **tied}


def _equal(found: TensorRef, truth: TensorRef) -> bool:
    """Whether every element equals the stored one, rounded to the dtype that was written."""
    from zckpt.core.dtypes import BF16, F32
    from zckpt.engine.rounding import rounded

    if found.shape != truth.shape:
        return False
    if found.dtype == truth.dtype:
        return _bytes(found) == _bytes(truth)
    if (found.dtype, truth.dtype) != (BF16, F32):
        return False
    expected = (rounded(value, BF16) for (value,) in struct.iter_unpack("<f", _bytes(truth)))
    return _bytes(found) == b"".join(struct.pack("<f", value)[2:] for value in expected)


def _bytes(ref: TensorRef) -> bytes:
    fd = os.open(ref.store.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(fd, ref.nbytes, ref.byte_offset)
    finally:
        os.close(fd)
    return data
