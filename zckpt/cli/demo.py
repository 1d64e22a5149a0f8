"""`zckpt demo`: a real checkpoint, converted before your eyes, and proved equal to what was saved."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from zckpt.cli.output import Sink

if TYPE_CHECKING:
    from zckpt.containers import TensorRef

_PREFERRED = "bf16_w2"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "demo",
        help="Convert a small stored checkpoint and prove every number equal to the truth stored with it.",
        epilog="Example: zckpt demo (exit status 1 when a number differs)",
    )(demo)


def demo() -> None:
    """Inspects and converts a stored ZeRO-3 checkpoint in a temporary directory, and compares the results."""
    from zckpt.convert import convert
    from zckpt.errors import some
    from zckpt.report import describe, inspect_checkpoint

    sink = Sink()
    home = _fixture()
    checkpoint, truth = os.path.join(home, "checkpoint"), os.path.join(home, "truth.safetensors")
    _say(sink, f"$ zckpt inspect {os.path.relpath(checkpoint)}", *describe(inspect_checkpoint(checkpoint)))
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="zckpt-demo-") as directory:
        for dtype, name in (("fp32", "model.safetensors"), ("fp32", "model.bin"), ("bf16", "model-bf16.safetensors")):
            out = os.path.join(directory, name)
            report = convert(checkpoint, out, dtype=dtype)
            differing, tensors, numel = _compare(out, truth)
            wrong += differing
            truly = "the stored truth" if dtype == "fp32" else f"the stored truth rounded to {dtype}"
            verdict = f"{tensors:,} tensors, {numel:,} elements: equal to {truly}, bit for bit"
            if differing:
                verdict = f"{len(differing):,} of {tensors:,} tensors differ from {truly}: {some(differing)}"
            _say(
                sink,
                "",
                f"$ zckpt to-{dtype} {os.path.relpath(checkpoint)} {name}",
                *(f"  {nbytes:>12,} bytes  {path}" for path, nbytes in report.files),
                f"  {verdict}",
            )
    if wrong:
        raise typer.Exit(1)


def _say(sink: Sink, *lines: str) -> None:
    sink.result(dict, lambda: lines)


def _fixture() -> str:
    """The stored checkpoint to show."""
    import zckpt
    from zckpt.errors import NotACheckpointError

    root = Path(zckpt.__file__).resolve().parent.parent / "fixtures" / "zero3"
    homes = [path.parent for path in root.glob("*/truth.safetensors")]
    if homes:
        return str(min(homes, key=lambda home: (home.name != _PREFERRED, home.name)))
    raise NotACheckpointError(
        "no stored checkpoint to show", file=root, remedy="Run the demo in a clone of the repository, which holds them."
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
    """Whether every element is the truth's, rounded to the dtype that was written."""
    from zckpt.dtypes import BF16, F32
    from zckpt.replicas import rounded

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
