"""The trainer's engine beside DeepSpeed's: what it says of itself, what its loads return, copies of its module."""

from __future__ import annotations

import json
from pathlib import Path

import proofs
import pytest
from ranks import run_ranks

pytest.importorskip("deepspeed")
WORKER = Path(__file__).with_name("engine_worker.py")
MORE = ["0 bf16", "1 fp32", "1 bf16", "2 fp32", "2 bf16", "3 fp32", "3 fp16"]
JOBS = ["0 fp32", "2 fp16", "3 bf16", *(MORE if proofs.IS_WHOLE else ())]


@proofs.MORE
def test_it_says_returns_and_copies_what_deepspeed_does(tmp_path: Path) -> None:
    """Of one checkpoint, with each choice of what is loaded: the path, the client state and the counters, of each rank."""
    jobs = [
        {"stage": int(stage), "precision": precision, "home": str(tmp_path / f"{stage}{precision}")}
        for stage, precision in (job.split() for job in JOBS)
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    run_ranks(2, path, WORKER)
    for told in json.loads(Path(f"{path}.told").read_text()):
        for job, found in zip(jobs, told, strict=True):
            refused = found.pop("refused", "")
            assert found == {"answers": [], "loads": [], "copies": []}, job
            assert ("GatheredParameters" in refused) == (job["stage"] == 3)
