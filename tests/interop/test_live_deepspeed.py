"""Weights taken from a live DeepSpeed engine are those that its checkpoint of the same moment converts to, file for file."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

import zckpt

pytest.importorskip("deepspeed")

WORKER = Path(__file__).with_name("live_worker.py")
CPU = {"offload_optimizer": {"device": "cpu"}}
JOBS: list[dict[str, Any]] = [
    {"stage": 1, "precision": "fp32"},
    {"stage": 1, "precision": "bf16"},
    {"stage": 2, "precision": "fp16"},
    {"stage": 3, "precision": "fp32"},
    {"stage": 3, "precision": "fp16", "undisturbed": True},
    {"stage": 2, "precision": "bf16", "zero": CPU, "undisturbed": True},
    {"stage": 3, "precision": "bf16", "zero": {**CPU, "offload_param": {"device": "cpu"}}},
    {"stage": 3, "precision": "bf16", "zero": {"sub_group_size": 40}},
    {"stage": 2, "precision": "bf16", "zero": {"round_robin_gradients": True}},
]


def words(job: dict[str, Any]) -> str:
    return " ".join([str(job["stage"]), job["precision"], *job.get("zero", {})])


@pytest.fixture(scope="module", params=[2, 3])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp(f"live{request.param}")
    jobs = [{**job, "save": str(home / words(job))} for job in (JOBS if request.param == 2 else JOBS[-2:])]
    (home / "jobs.json").write_text(json.dumps(jobs))
    run_ranks(request.param, home / "jobs.json", WORKER)
    return home


def test_live_is_offline(saved: Path, tmp_path: Path) -> None:
    jobs = json.loads((saved / "jobs.json").read_text())
    for number, job in enumerate(jobs):
        home = Path(job["save"])
        for dtype in ("fp32", "bf16"):
            out = tmp_path / f"{number}-{dtype}"
            options = zckpt.Options(max_shard_size=600)
            zckpt.convert(home / "checkpoint", out, dtype=dtype, options=options)
            names = sorted(path.name for path in (home / dtype).iterdir())
            assert len(names) >= 3 and {path.name for path in out.iterdir()} == set(names), job
            names.remove("zckpt.json")
            assert filecmp.cmpfiles(out, home / dtype, names, shallow=False) == (names, [], []), job
        state = torch.load(home / "state.pt")
        truth = zckpt.get_fp32_state_dict_from_zero_checkpoint(home / "checkpoint")
        assert state.keys() == truth.keys()
        for name, tensor in truth.items():
            assert torch.equal(state[name].float(), tensor), (job, name)
            assert state[name].dtype == torch.float32 or name in ("frozen.weight", "frozen.bias", "scale"), (job, name)
