"""Files put to addresses, and what is there, for the tests of checkpoints behind them."""

from __future__ import annotations

from pathlib import Path

import fsspec
import torch

FIXTURES = Path(__file__).parent.parent / "fixtures"
SMALL = "zero3/bf16_w2"
ROOTS = ("s3://bkt", "memory://m")
RECORD = "zckpt-job.json"


def put(source: Path, address: str) -> str:
    """A directory's files, or a file."""
    fs, path = fsspec.core.url_to_fs(address)
    for file in source.rglob("*") if source.is_dir() else ():
        if file.is_file():
            fs.pipe_file(f"{path}/{file.relative_to(source)}", file.read_bytes())
    if source.is_file():
        fs.pipe_file(path, source.read_bytes())
    return address


def tree(place: str | Path) -> dict[str, bytes]:
    """Name -> bytes of all files there but zckpt's own note of what it did; of a single file, under the name ''."""
    fs, path = fsspec.core.url_to_fs(str(place))
    fs.invalidate_cache()
    return {name[len(path) :].strip("/"): fs.cat_file(name) for name in fs.find(path) if not name.endswith(RECORD)}


def local_tree(place: Path) -> dict[str, bytes]:
    return {str(f.relative_to(place)): f.read_bytes() for f in place.rglob("*") if f.is_file()}


def model(numel: int = 900_000) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{f"layer{i}.weight": torch.randn(7, numel // 7, generator=generator) for i in range(3)}]
