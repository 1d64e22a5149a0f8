"""Outputs that share blocks with their sources, on XFS and Btrfs: file systems in files, mounted for the test."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from synth import zero3
from torch import nn

import zckpt
from zckpt import runtime
from zckpt._core import inject
from zckpt.containers import torch_zip
from zckpt.core.catalog import TensorEntry
from zckpt.core.dtypes import BF16, F32, DType
from zckpt.core.fragments import Fragment
from zckpt.core.plan import OutputFile, Plan
from zckpt.core.stores import FileStore
from zckpt.engine.move import run
from zckpt.storage.location import locate

PAGE = 4096
KILL = -3


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system that lets files share blocks."""
    kind = request.param
    if os.geteuid() or not shutil.which(f"mkfs.{kind}"):
        pytest.skip(f"mounting {kind} takes root and mkfs.{kind} (Debian: xfsprogs, btrfs-progs)")
    root = tmp_path_factory.mktemp(kind)
    image, place = root / "image", root / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)
    for command in ([f"mkfs.{kind}", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"this machine does not mount {kind}: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)
    image.unlink()


@pytest.fixture
def place(disk: Path) -> Iterator[Path]:
    """An empty directory there."""
    path = disk / "here"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def shared_bytes(path: Path) -> int:
    """Bytes of the blocks of a file, or of the files below a directory, that others have too; asked of the file system."""
    if path.is_dir():
        return sum(shared_bytes(file) for file in path.rglob("*") if file.is_file())
    extents = 4096
    asked = bytearray(struct.pack("=QQIIII", 0, 1 << 62, 1, 0, extents, 0) + bytes(56 * extents))
    with path.open("rb") as file:
        fcntl.ioctl(file, 0xC020660B, asked)  # FS_IOC_FIEMAP, after a sync
    count = struct.unpack_from("=I", asked, 20)[0]
    found = [struct.unpack_from("=QQQQQI", asked, 32 + 56 * number) for number in range(count)]
    return sum(extent[2] for extent in found if extent[5] & 0x2000)


@pytest.mark.parametrize(("threads", "fails_at"), [(1, 0), (3, 0), (1, 2)])
def test_whole_blocks_are_cloned_and_all_else_is_written(threads: int, fails_at: int, place: Path) -> None:
    """Runs that lie in their blocks as in the source, and others: casts, short ones, those that lie otherwise."""
    source = place / "source"
    numbers = np.random.default_rng(0).standard_normal(1 << 19).astype("<f4")
    source.write_bytes(b"h" * 100 + numbers.tobytes())
    store = locate(source).store("little")
    # (first element, elements, where they go, dtype there): the window is 256 KiB
    moves: list[tuple[int, int, int, DType]] = [
        (0, 200_000, 100 + PAGE, F32),
        (200_000, 10_000, 900_004, F32),
        (210_000, 100_000, 100 + 840_000 + 100 * PAGE, F32),
        (310_000, 40_000, 2_000_000, BF16),
        (350_000, 100_000, 100 + 1_400_000 + 200 * PAGE, F32),
    ]
    size = 3_000_000
    wanted = bytearray(size)
    wanted[:60] = b"l" * 60
    out, pairs, cloned = FileStore("out", size), [], 0
    for number, (first, count, at, dtype) in enumerate(moves):
        entry = TensorEntry(str(number), (count,), F32, "parameter", (Fragment(store, 100 + 4 * first, 0, count),))
        target = TensorEntry(str(number), (count,), dtype, "parameter", (Fragment(out, at, 0, count),))
        pairs.append((entry, target))
        values = torch.from_numpy(numbers[first : first + count].copy())
        data = values.numpy().tobytes() if dtype == F32 else values.bfloat16().view(torch.int16).numpy().tobytes()
        wanted[at : at + len(data)] = data
        for window in range(0, size, 1 << 18):  # blocks that are whole in a window
            low, high = max(at, window), min(at + len(data), window + (1 << 18))
            blocks = high // PAGE * PAGE - -(-low // PAGE) * PAGE
            if dtype == F32 and (100 + 4 * first - at) % PAGE == 0 and blocks >= 1 << 16:
                cloned += blocks
    inject(True, fails_at, errno.EIO)  # the second call is a clone: what cannot be cloned is written
    try:
        report = run(
            Plan(((OutputFile("out", size, ((0, b"l" * 60),)), out),), pairs),
            str(place),
            threads=threads,
            window=1 << 18,
        )
    finally:
        inject(True, 0, 0)
    assert (place / "out").read_bytes() == wanted
    assert report.files[0].crc32 == zlib.crc32(wanted)
    assert report.bytes_cloned == cloned > 1_000_000 if not fails_at else report.bytes_cloned < cloned
    assert shared_bytes(place / "out") == report.bytes_cloned
    with source.open("r+b") as file:  # what is written to one of them later is not written to the other
        file.write(bytes(3_000_000))
        os.fsync(file.fileno())
    assert (place / "out").read_bytes() == wanted


@pytest.fixture
def checkpoint(place: Path) -> Path:
    """Of ZeRO-3, by torch.save, which knows nothing of pages; between matrices are vectors that no page divides."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{i}.{name}": torch.randn(*shape, generator=generator)
        for i in range(2)
        for name, shape in {"w": (512, 1024), "norm": (96,), "v": (1024, 256)}.items()
    }
    return zero3(place / "checkpoint", [tensors], 2)


def contents(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("disk", ["xfs"], indirect=True)
def test_a_universal_checkpoint_shares_its_blocks(checkpoint: Path, place: Path, tmp_path: Path) -> None:
    """All of the matrices, whose pieces lie anywhere in the ranks' files; also after a run that was killed."""
    out = place / "out"
    child = os.fork()
    if not child:
        inject(True, 9, KILL)  # of writes and clones
        zckpt.to_universal(checkpoint, out, progress=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9 and not out.exists()
    zckpt.to_universal(checkpoint, out, progress=False)
    zckpt.to_universal(checkpoint, tmp_path / "elsewhere", progress=False)
    assert contents(out) == contents(tmp_path / "elsewhere")
    matrices = 2 * 2 * 4 * (512 * 1024 + 1024 * 256)  # masters and one moment
    assert shared_bytes(out) >= matrices - 2 * 4 * 2 * 2 * PAGE  # but for the ends of pieces
    assert zckpt.verify(out, deep=True).ok


@pytest.mark.parametrize("disk", ["xfs"], indirect=True)
def test_a_resharded_checkpoint_shares_its_blocks(checkpoint: Path, place: Path, tmp_path: Path) -> None:
    first, again = place / "first", place / "again"
    zckpt.reshard(checkpoint, first, world_size=1, stage=3, progress=False)
    zckpt.reshard(checkpoint, tmp_path / "first", world_size=1, stage=3, progress=False)
    assert contents(first) == contents(tmp_path / "first") and shared_bytes(first)
    zckpt.reshard(first, again, world_size=1, stage=2, progress=False)
    assert zckpt.diff(again, checkpoint).same and shared_bytes(again) > 0.9 * 4 * 2 * (512 * 1024 + 1024 * 256)


@pytest.mark.parametrize("disk", ["xfs"], indirect=True)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_the_trainer_saves_is_shared(stage: int, place: Path) -> None:
    """Long records begin with a page; a universal checkpoint and other stages take most of their blocks from there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512))
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    try:
        engine = runtime.initialize(model=model, config=settings)[0]
        engine.backward(engine(torch.randn(2, 512)).square().mean())
        engine.step()
        engine.save_checkpoint(str(place / "run"))
    finally:
        dist.destroy_process_group()
    starts = [
        start
        for file in (place / "run").rglob("*_states.pt")
        for _, start, nbytes, _ in torch_zip.records(file)
        if nbytes >= torch_zip.LONG
    ]
    assert len(starts) >= 3 and not any(start % PAGE for start in starts)
    masters_and_moments = 3 * 2 * 4 * 512 * 1024
    zckpt.to_universal(place / "run", place / "universal", progress=False)
    assert shared_bytes(place / "universal") > 0.95 * masters_and_moments
    zckpt.reshard(place / "run", place / "other", world_size=1, stage=5 - max(stage, 2), progress=False)
    assert zckpt.diff(place / "run", place / "other").same
    assert shared_bytes(place / "other") > 0.95 * masters_and_moments
