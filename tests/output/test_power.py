"""After a power failure at any moment an output is the old or the new one, or the next run ends well; and no sync is needless.

`durable` says what a power failure may leave, `power_scenarios` what writes, and `sync_sites` finds what syncs in zckpt's source.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill_points
import power_of_more
import proofs
import pytest
import synth
import torch
from durable import Numbers, record, trees
from power_scenarios import MORE, TRIALS, Power
from sync_sites import Site, sites, sites_of, writers

from zckpt.engine import batches
from zckpt.output import files
from zckpt.output.durable import exchange
from zckpt.storage import output_places

SITES = sites()
UNSYNCED = {
    "cli/train.py": "a demonstration in a temporary directory",
    "deltas/write.py": "`output.files` syncs what is made",
    "engine/output_files.py": "`engine.move` syncs files that are complete",
    "naming/gguf_metadata.py": "a temporary directory",
    "output/address_destination.py": "a temporary directory, from which files are sent",
    "output/locks.py": "a lock holds nothing",
    "output/manifest.py": "`output.local_destination` syncs it before the seal",
    "runtime/deepspeed_api/accelerator.py": "the kernel's own file, by which its peak of memory begins anew",
    "runtime/observe/flops_profiler.py": "a report, which the next profile replaces",
    "runtime/observe/observer.py": "a log",
    "runtime/saves/nodes.py": "a temporary directory",
    "runtime/swapping/files.py": "states of a running process; a checkpoint has them too",
    "runtime/observe/lookout.py": "for the launcher of the same run",
    "storage/uploads.py": "the service makes it durable",
    "team/rendezvous.py": "notes between processes that run; their output is synced",
}
"""Modules that write files and sync none, and why nothing is lost."""


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[str]:
    """A small one, in a place that is in memory, with another beside it that no cast to fp16 can hold."""
    place = Path(tempfile.mkdtemp(prefix="zckpt-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    generator = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "LEAST_BYTES", 0)
        patch.setitem(kill_points.SMALL, "max_shard_size", 1500)
        for module, name in ((output_places, "is_mount"), (files, "run")):  # scenarios set them
            patch.setattr(module, name, getattr(module, name))
        made = synth.zero12(place / "c", [{f"w{i}": torch.randn(600 + i, generator=generator) for i in range(3)}], 2)
        large = {"w0": torch.full((600,), 1e30), "w1": torch.ones(601), "w2": torch.ones(602)}
        synth.zero12(place / "c-overflowing", [large], 2)
        yield str(made)
    power_of_more.end()
    shutil.rmtree(place, ignore_errors=True)


_KNOWN: dict[tuple[str, str], Power] = {}


def power(name: str, checkpoint: str) -> Power:
    """The power failures of a trial; recorded once for each checkpoint, which goes where other modules' tests run between."""
    if (checkpoint, name) not in _KNOWN:
        work, numbers = Path(checkpoint).with_name(name), Numbers()
        work.mkdir(exist_ok=True)
        _KNOWN[checkpoint, name] = Power({**TRIALS, **MORE}[name](checkpoint, work, numbers), numbers, sites_of)
    return _KNOWN[checkpoint, name]


@proofs.MORE
@pytest.mark.parametrize("name", [*TRIALS, *proofs.cases((name,) for name in MORE)])
def test_the_power_fails_at_any_moment(name: str, checkpoint: str) -> None:
    """What is there is the old or the new or what the next run makes whole; what was said to be done is done."""
    assert power(name, checkpoint).look(both=proofs.IS_WHOLE, pairs=proofs.IS_WHOLE) >= 4


@pytest.mark.xdist_group("power")
@pytest.mark.parametrize("site", SITES, ids=map(str, SITES))
def test_without_a_sync_something_is_lost(site: Site, checkpoint: str) -> None:
    """Every place that syncs is needed: without it one of the trials above fails."""
    having = [name for name in TRIALS if site in power(name, checkpoint).sites]
    assert having, "no trial comes here"
    assert any(power(name, checkpoint).misses(site) for name in having), ("a sync that nothing needs", having)


def test_what_writes_without_a_sync() -> None:
    """Every other module that writes a file syncs it."""
    assert writers() == sorted(UNSYNCED)


# ---- the model itself ------------------------------------------------------------------------------------------------


def left(place: Path, run: Any) -> set[Any]:
    """What may be there before the end of a run, as nested tuples without numbers."""

    def plain(tree: Any) -> Any:
        return tuple(
            (name, below[1].data if isinstance(below[1:2], tuple) and _is_file(below) else plain(below))
            for name, below in tree[1:]
        )

    def _is_file(below: Any) -> bool:
        return len(below) == 2 and hasattr(below[1], "data")

    moments = record(place, run)
    return {plain(tree) for number, _, tree in trees(moments) if number == len(moments) - 1}


def test_a_file_that_nobody_syncs(tmp_path: Path) -> None:
    def run() -> None:
        with open(tmp_path / "a", "wb") as file:
            file.write(b"12345678")

    assert left(tmp_path, run) == {(), (("a", b""),), (("a", b"12345678"),)}


def test_a_file_that_is_synced_but_not_its_name(tmp_path: Path) -> None:
    def run() -> None:
        with open(tmp_path / "a", "wb") as file:
            file.write(b"12345678")
            file.flush()
            os.fsync(file.fileno())

    assert left(tmp_path, run) == {(), (("a", b"12345678"),)}


def test_a_name_that_is_synced_but_not_the_data(tmp_path: Path) -> None:
    """The data may also be there in part."""

    def run() -> None:
        with open(tmp_path / "a", "wb") as file:
            file.write(b"12345678")
        fd = os.open(tmp_path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    assert left(tmp_path, run) == {(("a", data),) for data in (b"", b"1234", b"12345678")}


@pytest.mark.parametrize(
    ("synced", "names"), [("", {"in a", "in b"}), ("b", {"in b", "both"}), ("a", {"none", "in b"})]
)
def test_a_file_that_moves(tmp_path: Path, synced: str, names: set[str]) -> None:
    """It has the old name or the new one; after a sync of one directory also both, or none."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "f").write_bytes(b"x")

    def run() -> None:
        os.rename(tmp_path / "a" / "f", tmp_path / "b" / "f")
        if synced:
            fd = os.open(tmp_path / synced, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    file = (("f", b"x"),)
    trees_of = {"in a": (file, ()), "in b": ((), file), "both": (file, file), "none": ((), ())}
    assert left(tmp_path, run) == {(("a", trees_of[name][0]), ("b", trees_of[name][1])) for name in names}


@pytest.mark.parametrize(("synced", "names"), [("", {"before", "after"}), ("a", {"after"}), ("b", {"after"})])
def test_an_exchange_between_two_directories(tmp_path: Path, synced: str, names: set[str]) -> None:
    """It is whole or not there, and a sync of either directory makes it durable."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(name.encode())

    def run() -> None:
        assert exchange(str(tmp_path / "a" / "f"), str(tmp_path / "b" / "f"))
        if synced:
            fd = os.open(tmp_path / synced, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    a, b = (("f", b"a"),), (("f", b"b"),)
    trees_of = {"before": (a, b), "after": (b, a)}
    assert left(tmp_path, run) == {(("a", trees_of[name][0]), ("b", trees_of[name][1])) for name in names}


def test_two_changes_out_of_order(tmp_path: Path) -> None:
    def run() -> None:
        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir()

    moments = record(tmp_path, run)
    kept = {frozenset(name for name, _ in tree[1:]) for _, _, tree in trees(moments, pairs=True)}
    assert {frozenset("ac"), frozenset("bc"), frozenset("ab")} <= kept
