"""What `make gpu-check` does, on CPUs: that all of it runs to its end, which `make old-torch` shows too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import proofs

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, SCRIPT, *options], env=environment, capture_output=True, text=True, check=False
    )


@proofs.only
def test_every_check_runs_on_a_cpu(tmp_path: Path) -> None:
    done = run(
        "--cpu", "--ranks", "1", "--size", "4194304", "--dir", str(tmp_path), "--json", str(tmp_path / "rows.json")
    )
    rows = json.loads((tmp_path / "rows.json").read_text())
    found = {name: result for name, result, _ in rows}
    assert done.returncode == 0, done.stdout + done.stderr
    assert {f"stage {stage}, {precision}" for stage in range(4) for precision in ("fp32", "bf16", "fp16")} <= {*found}
    assert len(found) > 30 and list(found.values()).count("right") > 25 and "WRONG" not in found.values()
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    for _, result, figures in rows[2:]:
        assert f"| {result} | {figures} |" in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "torch sees no GPU" in done.stderr and "--cpu" in done.stderr
