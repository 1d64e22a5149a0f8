"""Real DeepSpeed loads what `slim` made of its own saves, as the page says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import proofs
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
UNIVERSAL: list[tuple[int, list[str], dict[str, bool], str, str]] = [
    (1, ["optimizer"], {}, "", "exact"),
    (2, ["optimizer"], {}, "", "exact"),
    (2, ["optimizer"], {"load_optimizer_states": False}, "", "exact"),
]
"""Stage, what is left out, how DeepSpeed loads it, what is called then, and what the fp32 weights are."""


@proofs.MORE
@pytest.mark.xdist_group("resume")
def test_deepspeed_loads_what_remains(tmp_path: Path) -> None:
    cases = [(job, False) for job in JOBS]
    if proofs.IS_WHOLE:
        cases += [*((job, False) for job in MORE), *((job, True) for job in UNIVERSAL)]
    # after stage 3, DeepSpeed computes linear layers in its own way everywhere
    cases.sort(key=lambda case: case[0][0] == 3)
    jobs: list[dict[str, Any]] = [
        {"stage": stage, "drop": drop, "load": load, "then": then, "universal": universal}
        for (stage, drop, load, then, _), universal in cases
    ]
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({"place": str(tmp_path), "jobs": jobs}))
    run_ranks(2, path, WORKER)
    for (job, _), told in zip(cases, json.loads(Path(f"{path}.told").read_text()), strict=True):
        stage, drop, _, _, masters = job
        assert told["found"][0] == told["wanted"][0], job  # the very weights
        if "optimizer" not in drop:  # the run goes on as if nothing had happened
            assert told["found"] == told["wanted"], job
        assert bool(told["masters"]) == (stage > 0) and told[masters] == 0, (job, told)


MEGATRON = """
import os, sys, torch
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
from megatron.core import dist_checkpointing
before, after = map(dist_checkpointing.load_plain_tensors, sys.argv[1:])
gone = before.keys() - after.keys()
assert gone and all("optimizer." in name and "param." not in name for name in gone), gone
assert after and after.keys() < before.keys() and any("param." in name for name in after)
tensors = [name for name, value in after.items() if isinstance(value, torch.Tensor)]
assert all(after[name].equal(before[name]) for name in tensors) and any("linear_qkv" in name for name in tensors)
common = [dist_checkpointing.load_common_state_dict(place) for place in sys.argv[1:]]
assert common[0].keys() == common[1].keys() and common[0]
print("equal", flush=True)
os._exit(0)
"""


@proofs.only
@pytest.mark.parametrize("name", ["moe_ep2", "model_space_tp2_dp2_0_12"])
def test_megatron_core_loads_what_remains(name: str, tmp_path: Path) -> None:
    """By its own loader: every item but moments and what an optimizer has beside them."""
    from zckpt.jobs.declarations import SLIM
    from zckpt.jobs.slim import execute, prepare

    source = Path(__file__).parents[2] / "fixtures" / "mcore" / name / "checkpoint"
    execute(prepare(source, tmp_path / "out", SLIM.ask(drop=("optimizer",))))
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "2"
    homes = [str(home / "iter_0000002") for home in (source, tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", MEGATRON, *homes], capture_output=True, text=True, check=False)
    assert "equal" in done.stdout, done.stderr[-2000:]
