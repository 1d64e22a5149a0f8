"""Each room's own tests find a fault in it: planted ones, of which there is one for each room and each family of layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import proofs
from planted import FAULTS, ROOT

ALONE = {"csrc", "integrations"}
"""Rooms whose tests start processes for everything that they do: C++, and callbacks in other libraries' trainers."""


def test_every_room_has_a_fault_that_can_be_planted() -> None:
    package = ROOT / "zckpt"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")} - {"layouts"} - ALONE
    families = {f"layouts/{path.parent.name}" for path in package.glob("layouts/*/__init__.py")}
    assert {fault.room for fault in FAULTS} == rooms | families
    assert [fault.room for fault in FAULTS if fault.path.read_text().count(fault.right) != 1] == []
    assert [
        fault.room
        for fault in FAULTS
        for test in fault.tests.split()
        if not (ROOT / "tests" / test.partition("::")[0]).exists()
    ] == []


@proofs.only
def test_the_tests_of_a_room_find_a_fault_in_it() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("planted.py"))], capture_output=True, text=True, check=True
    )
    ended = json.loads(done.stdout)
    assert ended.pop("none") == 0, done.stderr
    assert {room: status for room, status in ended.items() if status != 1} == {}, done.stderr
