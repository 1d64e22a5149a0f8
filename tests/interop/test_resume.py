"""Real DeepSpeed goes on from what zckpt wrote, as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import proofs
import pytest
from ranks import run_ranks
from safetensors.torch import save_file

from zckpt import layouts
from zckpt.core.dtypes import BF16
from zckpt.jobs.open import open_catalog, read_tensor
from zckpt.jobs.reshard import reshard
from zckpt.jobs.to_dcp import to_dcp
from zckpt.jobs.to_universal import to_universal

pytest.importorskip("deepspeed")

FIXTURES = Path(__file__).parents[2] / "fixtures"
WORKER = Path(__file__).with_name("deepspeed_worker.py")
FSDP_WORKER = Path(__file__).with_name("fsdp_worker.py")
SIZES = (1, 2, 3, *[4] * proofs.IS_WHOLE)
STAGES = (1, 2, 3)
SAVED_AT = 3
STEPS = 3


def launch(world_size: int, jobs: list[dict[str, Any]], path: Path, worker: Path = WORKER) -> list[list[float]]:
    """The losses of each job, run one after another by one set of processes."""
    path.write_text(json.dumps(jobs))
    run_ranks(world_size, path, worker)
    return json.loads(Path(f"{path}.losses").read_text())


def worst(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[int, int], list[float]]]:
    """Runs that never stopped, of every world size and stage, each with a save on the way."""
    root = tmp_path_factory.mktemp("straight")
    losses: dict[tuple[int, int], list[float]] = {}
    for size in SIZES:
        jobs = [
            {"stage": s, "steps": SAVED_AT + STEPS, "save_at": SAVED_AT, "save": f"{root}/{size}.{s}"} for s in STAGES
        ]
        for stage, found in zip(STAGES, launch(size, jobs, root / f"{size}.json"), strict=True):
            losses[size, stage] = found[SAVED_AT:]
    return root, losses


@proofs.MORE
@pytest.mark.xdist_group("resume")
@pytest.mark.parametrize("size", SIZES)
def test_every_world_size_and_stage_goes_on_at_every_other(
    size: int, straight: tuple[Path, dict[tuple[int, int], list[float]]], tmp_path: Path
) -> None:
    """Each pair of world sizes, each pair of stages, and each stage from and to each world size."""
    root, losses = straight
    jobs, wanted = [], []
    for home, _, stage, target in (row for row in proofs.covering(SIZES, SIZES, STAGES, STAGES) if row[1] == size):
        out = tmp_path / f"{home}.{stage}.{target}"
        reshard(root / f"{home}.{stage}", out, world_size=size, stage=target)
        jobs.append({"stage": target, "load": str(out), "steps": STEPS, "client": {"seen": SAVED_AT}})
        wanted.append(losses[home, stage])
    for job, found, reference in zip(jobs, launch(size, jobs, tmp_path / "jobs.json"), wanted, strict=True):
        assert worst(found, reference) < 1e-6, job


VARIANTS: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    ({"stage": 2, "precision": "bf16"}, {"stage": 3, "precision": "bf16"}, 1e-2),
    ({"stage": 3, "precision": "fp16"}, {"stage": 1, "precision": "fp16"}, 1e-2),
    ({"stage": 1, "precision": "fp16"}, {"stage": 3, "precision": "fp16"}, 1e-2),
    ({"stage": 2, "optimizer": "Adagrad"}, {"stage": 1, "optimizer": "Adagrad"}, 1e-6),
    ({"stage": 3, "optimizer": "SGD"}, {"stage": 2, "optimizer": "SGD"}, 1e-6),
    (
        {"stage": 2, "zero": {"round_robin_gradients": True}},
        {"stage": 2, "zero": {"round_robin_gradients": True}},
        1e-6,
    ),
    ({"stage": 1, "zero": {"parameter_alignment": True}}, {"stage": 2, "zero": {"parameter_alignment": True}}, 1e-6),
    ({"stage": 3, "zero": {"sub_group_size": 40}}, {"stage": 3, "zero": {"sub_group_size": 40}}, 1e-6),
]


@pytest.mark.xdist_group("resume")
def test_precisions_optimizers_and_orders_go_on(tmp_path: Path) -> None:
    jobs = [
        {**job, "steps": SAVED_AT + STEPS, "save_at": SAVED_AT, "save": f"{tmp_path}/{n}"}
        for n, (job, _, _) in enumerate(VARIANTS)
    ]
    references = launch(2, jobs, tmp_path / "straight.json")
    resumed = []
    for number, (_, job, _) in enumerate(VARIANTS):
        reshard(tmp_path / str(number), tmp_path / f"{number}out", world_size=3, stage=job["stage"])
        resumed.append({**job, "load": f"{tmp_path}/{number}out", "steps": STEPS})
    for variant, reference, found in zip(
        VARIANTS, references, launch(3, resumed, tmp_path / "resumed.json"), strict=True
    ):
        assert worst(found, reference[SAVED_AT:]) < variant[2], variant


FORMS: list[dict[str, Any]] = [
    {"stage": 0, "then": 2, "precision": "bf16"},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3, "groups": 1},
    {"stage": 2, "precision": "bf16"},
    {"stage": 1, "precision": "fp16"},
]


@pytest.mark.xdist_group("resume")
@pytest.mark.parametrize(
    ("home", "size", "forms"), [(2, 3, FORMS), (3, 1, FORMS[::2]), (1, 2, FORMS[1::2])], ids=["2-3", "3-1", "1-2"]
)
def test_universal_checkpoints_go_on_at_every_world_size(
    home: int, size: int, forms: list[dict[str, Any]], tmp_path: Path
) -> None:
    """At every stage; of stage 3 with one group of parameters, since DeepSpeed gives all groups the first one's settings."""
    straight = [
        {**form, "steps": SAVED_AT + STEPS, "save_at": SAVED_AT, "save": f"{tmp_path}/{n}"}
        for n, form in enumerate(forms)
    ]
    references = launch(home, straight, tmp_path / "straight.json")
    resumed = []
    for number, form in enumerate(forms):
        to_universal(tmp_path / str(number), tmp_path / f"{number}out")
        stage = form.get("then", form["stage"])
        resumed.append({**form, "stage": stage, "load": f"{tmp_path}/{number}out", "steps": STEPS, "universal": True})
    for form, found, reference in zip(forms, launch(size, resumed, tmp_path / "jobs.json"), references, strict=True):
        assert worst(found, reference[SAVED_AT:]) < (1e-2 if "precision" in form else 1e-6), form


@pytest.mark.xdist_group("resume")
def test_a_zero_run_goes_on_under_fsdp_and_back(
    straight: tuple[Path, dict[tuple[int, int], list[float]]], tmp_path: Path
) -> None:
    """ZeRO of each stage to fully_shard, of two ranks to one and two; and a run of fully_shard to ZeRO of each stage."""
    root, losses = straight
    references = [losses[2, stage] for stage in STAGES]
    jobs = []
    for stage in STAGES:
        to_dcp(root / f"2.{stage}", tmp_path / f"fsdp{stage}", optimizer="optim")
        jobs.append({"load": f"{tmp_path}/fsdp{stage}", "at": SAVED_AT, "steps": STEPS})
    jobs.append({"steps": SAVED_AT + STEPS, "save_at": SAVED_AT, "save": f"{tmp_path}/fsdp"})
    *resumed, reference = launch(2, jobs, tmp_path / "on2.json", FSDP_WORKER)
    resumed += launch(1, jobs[:1], tmp_path / "on1.json", FSDP_WORKER)
    for found, wanted in zip(resumed, [*references, references[0]], strict=True):
        assert worst(found, wanted) < 1e-6
    assert worst(reference[SAVED_AT:], references[0]) < 1e-6
    jobs = []
    for stage in STAGES:
        reshard(tmp_path / "fsdp", tmp_path / f"back{stage}", world_size=3, stage=stage)
        jobs.append({"stage": stage, "load": f"{tmp_path}/back{stage}", "steps": STEPS})
    for found in launch(3, jobs, tmp_path / "back.json"):
        assert worst(found, reference[SAVED_AT:]) < 1e-6


SHAPES = [
    ("tensor/zero0_tp2", 2),
    ("tensor/zero1_tp2_dp2", 3),
    ("pipeline/zero1_pp2_tp2_dp2", 1),
    ("moe/zero0_w2", 3),
    ("moe/zero0_pyramid_w4", 1),
    ("moe/tensor_w4", 2),
    ("moe/tensor_zero0_wide_w4", 2),
    ("moe/tensor_sliced_zero0_w4", 1),
    ("moe/tensor_unwritten", 1),
    ("moe/zero2_pyramid_w4", 3),
    ("moe/bf16_optimizer_w4", 1),
    ("moe/pipeline_pp2_tp2", 2),
    ("moe/pipeline_some", 3),
    ("moe/pipeline_bf16_pp2_dp2", 2),
    ("autoep/zero2_w4", 2),
    ("autoep/zero3_w4", 3),
    ("nvme/bf16_w2", 3),
    ("nvme/pipelined_w2", 2),
]
"""Fixtures of other shapes, and the stage they come down to; of the last two, the optimizer was on NVMe."""


@pytest.mark.xdist_group("resume")
def test_other_shapes_load_as_plain_data_parallelism(tmp_path: Path) -> None:
    """Masters and states of each are the source's, to the bit; experts are parameters like all others. A step can be taken."""
    jobs = []
    for name, stage in SHAPES:
        source, own = FIXTURES / name / "checkpoint", tmp_path / name.replace("/", "-")
        reshard(source, own, world_size=2, stage=stage)
        opened = open_catalog(str(source))
        training = layouts.read_training(opened.place.listing)
        held = {f"{entry.role}/{key}": read_tensor(entry, "pt") for key, entry in opened.catalog.tensors.items()}
        for key, states in training.states.items():
            held |= {f"{state}/{key}": read_tensor(entry, "pt") for state, entry in states.items()}
        save_file({key: tensor.contiguous() for key, tensor in held.items()}, f"{own}.safetensors")
        jobs.append(
            {
                "load": str(own),
                "stage": stage,
                "state": f"{own}.safetensors",
                "aliases": dict(opened.catalog.aliases),
                "precision": "bf16" if training.precision == BF16 else "fp32",
                "groups": [list(group.names) for group in training.groups],
                "zero": {"sub_group_size": 200} if name == "nvme/bf16_w2" else {},  # as its run's config has it
            }
        )
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs))
    run_ranks(2, path, WORKER.with_name("states_worker.py"))
    for told in json.loads(Path(f"{path}.told").read_text()):
        assert [differ for differ, _ in told] == [[] for _ in SHAPES]
        assert all(compared > 20 for _, compared in told)
