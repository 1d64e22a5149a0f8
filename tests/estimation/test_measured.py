"""The estimate, against the bytes that two ranks of the trainer allocate, counted before glibc's own allocator."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import BARE, run_ranks

HERE = Path(__file__).parent
PLAIN = {"offload": False, "accumulation": 1, "frozen": False, "optimizer": "Adam"}
CASES: list[dict[str, Any]] = [
    *({**PLAIN, "stage": stage, "precision": precision} for stage in range(4) for precision in ("fp32", "bf16")),
    *({**PLAIN, "stage": stage, "precision": "bf16", "offload": True} for stage in (2, 3)),
    *({**PLAIN, "stage": stage, "precision": "fp32", "accumulation": 2} for stage in (0, 2)),
    {**PLAIN, "stage": 3, "precision": "bf16", "frozen": True},
    {**PLAIN, "stage": 1, "precision": "fp32", "optimizer": "SGD"},
]


pytestmark = pytest.mark.xdist_group("estimate")  # one process, or what they share is made twice


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, int]]]:
    """By rank and case, what was allocated and what was estimated."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("counting allocations needs a C compiler and glibc")
    home = tmp_path_factory.mktemp("measured")
    library = home / "allocated.so"
    source = str(HERE / "allocated.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), source], check=True)
    job = home / "job.json"
    job.write_text(json.dumps({"counter": str(library), "cases": CASES}))
    run_ranks(2, job, HERE / "worker.py", BARE, preload=str(library))
    return [json.loads(Path(f"{job}.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: "-".join(map(str, CASES[number].values())))
def test_a_step_needs_what_was_estimated(measured: list[list[dict[str, int]]], number: int) -> None:
    for rank in measured:
        found = rank[number]
        assert found["estimated"] == pytest.approx(found["most"], rel=0.1), found
        assert found["states"] == pytest.approx(found["held"], rel=0.1), found
