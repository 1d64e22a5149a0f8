"""Real DeepSpeed loads what `slim` made of its own saves, as the page says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

pytest.importorskip("deepspeed")

WORKER = Path(__file__).with_name("slim_worker.py")
LENIENT = {"load_module_strict": False}
JOBS: list[tuple[int, list[str], dict[str, bool], str, str]] = [
    (1, ["module-weights"], LENIENT, "update_lp_params", "exact"),
    (2, ["optimizer"], {"load_optimizer_states": False}, "", "rounded"),
    (2, ["optimizer", "module-weights"], LENIENT, "update_lp_params", "exact"),
    (2, ["frozen"], LENIENT, "", "exact"),
    (3, ["optimizer"], {"load_optimizer_states": False}, "", "rounded"),
    (3, ["optimizer"], {}, "", "exact"),
]
MORE: list[tuple[int, list[str], dict[str, bool], str, str]] = [
    (2, ["optimizer"], {}, "", "exact"),
    (3, ["frozen"], LENIENT, "", "exact"),
    (0, ["optimizer"], {"load_optimizer_states": False}, "", "exact"),
]
"""Stage, what is left out, how DeepSpeed loads it, what is called then, and what the fp32 weights are."""


@pytest.mark.xdist_group("resume")
def test_deepspeed_loads_what_remains(tmp_path: Path) -> None:
    cases = [*JOBS, *(MORE if os.environ.get("ZCKPT_PROOFS") else ())]
    jobs: list[dict[str, Any]] = [
        {"stage": stage, "drop": drop, "load": load, "then": then} for stage, drop, load, then, _ in cases
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"place": str(tmp_path), "jobs": jobs}))
    run_ranks(2, path, WORKER)
    for job, told in zip(cases, json.loads(Path(f"{path}.told").read_text()), strict=True):
        stage, drop, _, _, masters = job
        assert told["found"][0] == told["wanted"][0], job  # the very weights
        if "optimizer" not in drop:  # the run goes on as if nothing had happened
            assert told["found"] == told["wanted"], job
        assert bool(told["masters"]) == (stage > 0) and told[masters] == 0, (job, told)
