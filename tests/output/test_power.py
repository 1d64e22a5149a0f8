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
import proofs
import pytest
import synth
import torch
from durable import Numbers, record, trees
from power_scenarios import MORE, TRIALS, Power
from sync_sites import Site, sites, sites_of

from zckpt.engine import batches
from zckpt.output import files
from zckpt.storage import output_places

ELSEWHERE = {
    "hub/scratch.py": "the journal of a push: what it loses is made again",
    "live/carry.py": "what one node has written of a file; it is for the others too, and the first node syncs the file again",
}
"""Modules with syncs that no trial has."""
WITHOUT = [site for site in sites() if site.module not in ELSEWHERE]


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
    shutil.rmtree(place, ignore_errors=True)


_KNOWN: dict[tuple[str, str], Power] = {}


def power(name: str, checkpoint: str) -> Power:
    """The power failures of a trial; recorded once for each checkpoint, which goes where other modules' tests run between."""
    if (checkpoint, name) not in _KNOWN:
        work, numbers = Path(checkpoint).with_name(name), Numbers()
        work.mkdir(exist_ok=True)
        _KNOWN[checkpoint, name] = Power({**TRIALS, **MORE}[name](checkpoint, work, numbers), numbers, sites_of)
    return _KNOWN[checkpoint, name]


@pytest.mark.parametrize("name", [*TRIALS, *proofs.cases((name,) for name in MORE)])
def test_the_power_fails_at_any_moment(name: str, checkpoint: str) -> None:
    """What is there is the old or the new or what the next run makes whole; what was said to be done is done."""
    assert power(name, checkpoint).look(both=proofs.IS_WHOLE) >= 5


@pytest.mark.xdist_group("power")
@pytest.mark.parametrize("site", WITHOUT, ids=map(str, WITHOUT))
def test_without_a_sync_something_is_lost(site: Site, checkpoint: str) -> None:
    """Every place that syncs is needed: without it one of the trials above fails."""
    having = [name for name in TRIALS if site in power(name, checkpoint).sites]
    assert having, "no trial comes here"
    assert any(power(name, checkpoint).misses(site) for name in having), ("a sync that nothing needs", having)


def test_the_modules_without_a_trial_have_syncs() -> None:
    assert ELSEWHERE.keys() <= {site.module for site in sites()}


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


def test_a_file_that_nobody_syncs(quick_path: Path) -> None:
    def run() -> None:
        with open(quick_path / "a", "wb") as file:
            file.write(b"12345678")

    assert left(quick_path, run) == {(), (("a", b""),), (("a", b"12345678"),)}


def test_a_file_that_is_synced_but_not_its_name(quick_path: Path) -> None:
    def run() -> None:
        with open(quick_path / "a", "wb") as file:
            file.write(b"12345678")
            file.flush()
            os.fsync(file.fileno())

    assert left(quick_path, run) == {(), (("a", b"12345678"),)}


def test_a_name_that_is_synced_but_not_the_data(quick_path: Path) -> None:
    """The data may also be there in part."""

    def run() -> None:
        with open(quick_path / "a", "wb") as file:
            file.write(b"12345678")
        fd = os.open(quick_path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    assert left(quick_path, run) == {(("a", data),) for data in (b"", b"1234", b"12345678")}


@pytest.mark.parametrize(
    ("synced", "names"), [("", {"in a", "in b"}), ("b", {"in b", "both"}), ("a", {"none", "in b"})]
)
def test_a_file_that_moves(quick_path: Path, synced: str, names: set[str]) -> None:
    """It has the old name or the new one; after a sync of one directory also both, or none."""
    for name in ("a", "b"):
        (quick_path / name).mkdir()
    (quick_path / "a" / "f").write_bytes(b"x")

    def run() -> None:
        os.rename(quick_path / "a" / "f", quick_path / "b" / "f")
        if synced:
            fd = os.open(quick_path / synced, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    file = (("f", b"x"),)
    trees_of = {"in a": (file, ()), "in b": ((), file), "both": (file, file), "none": ((), ())}
    assert left(quick_path, run) == {(("a", trees_of[name][0]), ("b", trees_of[name][1])) for name in names}
