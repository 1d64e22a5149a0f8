"""Every way to write a training loop gives real DeepSpeed's losses, where DeepSpeed can; elsewhere those of the engine's own way.

`docs/training.md` says where DeepSpeed trains otherwise; here it is measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import proofs
import pytest
from ranks import run_ranks

pytest.importorskip("deepspeed")

WORKER = Path(__file__).with_name("styles_worker.py")
BOUNDS = {"fp32": 4e-7, "fp16": 2e-4, "bf16": 3e-3}
NO_CLIPPING = {"gradient_clipping": 0.0}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}}


def job(style: str, stage: int, precision: str = "fp32", accumulation: int = 1, **config: Any) -> dict[str, Any]:
    return {"style": style, "stage": stage, "precision": precision, "accumulation": accumulation, "config": config}


EQUAL = [
    job("direct", 1, "fp32", 2), job("direct", 2, "bf16", 2), job("direct", 3, "fp16", 2), job("not_scalar", 2, "fp32", 2),
    job("optimizer_steps", 0, **NO_CLIPPING), job("optimizer_steps", 1, "fp16"), job("optimizer_steps", 2, "bf16"),
    job("optimizer_steps", 3, "fp32", 2), job("two_losses", 0, "fp32", 2), job("gan", 1),
    job("by_engine", 2, "fp16", 2),
]  # fmt: skip
"""DeepSpeed gives the same losses."""

OURS = [
    (job("direct", 0, "fp32", 2), job("by_engine", 0, "fp32", 2)),
    (job("optimizer_steps", 1, "fp32", 2), job("by_engine", 1, "fp32", 2)),
    (job("optimizer_steps", 0, "fp32", 2), job("by_engine", 0, "fp32", 2)),
    (job("two_losses", 2, "fp32", 2), job("two_losses", 0, "fp32", 2)),
    (job("two_losses", 3), job("two_losses", 0)),
    (job("two_forwards", 1, "fp32", 2), job("two_forwards", 3, "fp32", 2)),
    (job("gan", 3), job("gan", 1)),
]
"""DeepSpeed raises an error or loses gradients; here the first gives the losses of the second."""

UNSCALED = [job("unscaled", 1, "fp16"), job("unscaled", 3, "fp16"), job("unscaled", 0, "fp16")]

STAGE_0 = [
    job("by_engine", 0, "bf16"), job("zero_step", 0, "bf16"), job("by_engine", 0, "fp16"), job("zero_step", 0, "fp16"),
    job("by_engine", 0, "fp16", **SGD), job("by_engine", 1, "fp16", **SGD),
]  # fmt: skip

FP32_SUMS: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}}
FP32_WAYS: dict[str, Any] = {**FP32_SUMS, "communication_data_type": "fp32"}


def scales(stage: int, accumulation: int, hysteresis: int = 2, **config: Any) -> dict[str, Any]:
    fp16 = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": hysteresis}
    return job("scales", stage, "fp16", accumulation, fp16=fp16, **config)


SAME_SCALES = [
    *(scales(stage, 1, hysteresis) for stage in (1, 2, 3) for hysteresis in (1, 2)),
    scales(1, 4), scales(1, 4, **FP32_WAYS), scales(2, 4, **FP32_SUMS), scales(3, 4, **FP32_SUMS),
]  # fmt: skip
FEWER_SKIPPED = [scales(2, 4), scales(3, 4)]
"""DeepSpeed adds the gradients of micro batches up in fp16, where a sum overflows; here they are added up in fp32."""

MORE = [
    job(style, stage, precision, accumulation)
    for style in ("by_engine", "direct", "optimizer_steps")
    for stage in (1, 2, 3)
    for precision in BOUNDS
    for accumulation in (1, 2)
    if proofs.IS_WHOLE and ((style, accumulation) != ("optimizer_steps", 2) or stage == 3)
]

pytestmark = pytest.mark.xdist_group("styles")  # one process, or what they share is made twice

Told = dict[str, list[Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What DeepSpeed and this engine found on rank 0, by job."""
    pairs = [one for pair in OURS for one in pair]
    wanted = [*EQUAL, *MORE, *pairs, *UNSCALED, *STAGE_0, *SAME_SCALES, *FEWER_SKIPPED, scales(0, 1)]
    jobs = list({json.dumps(one): one for one in wanted}.values())
    path = tmp_path_factory.mktemp("styles") / "jobs.json"
    path.write_text(json.dumps(jobs))
    run_ranks(2, path, WORKER)
    everyone = json.loads(path.with_name("jobs.json.told").read_text())
    return {json.dumps(one): found for one, found in zip(jobs, everyone[0], strict=True)}


def distance(a: list[float], b: list[float]) -> float:
    assert isinstance(a, list) and isinstance(b, list) and len(a) == len(b) > 0, (a, b)
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "wanted", [*EQUAL, *proofs.cases([one] for one in MORE)], ids=lambda one: " ".join(map(str, one.values()))
)
def test_losses_are_deepspeeds(told: Told, wanted: dict[str, Any]) -> None:
    theirs, ours = told[json.dumps(wanted)]
    assert distance(theirs, ours) <= BOUNDS[wanted["precision"]]


@pytest.mark.parametrize("pair", OURS, ids=lambda pair: " ".join(map(str, pair[0].values())))
def test_losses_are_right_where_deepspeeds_are_not(told: Told, pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    theirs, ours = told[json.dumps(pair[0])]
    assert distance(told[json.dumps(pair[1])][1], ours) <= BOUNDS["fp32"]
    assert isinstance(theirs, str) or distance(theirs, ours) > 1e-3, (
        "DeepSpeed gives these losses too: say so in docs/training.md"
    )


@pytest.mark.parametrize("wanted", UNSCALED, ids=lambda one: str(one["stage"]))
def test_fp16_without_the_loss_scale_is_refused(told: Told, wanted: dict[str, Any]) -> None:
    theirs, ours = told[json.dumps(wanted)]
    assert theirs.startswith("RuntimeError") and ours.startswith("UsageError: loss.backward() without the loss scale")


def test_how_far_stage_0_differs_in_half_precision(told: Told) -> None:
    bf16, bf16_after_zeros, fp16, fp16_after_zeros, sgd, sgd_at_stage_1 = (told[json.dumps(one)] for one in STAGE_0)
    assert 1e-2 < distance(*bf16) < 4e-2 and 1e-2 < distance(*fp16) < 4e-2
    assert distance(*bf16_after_zeros) <= 3e-3 and distance(*fp16_after_zeros) <= 5e-4
    assert distance(*sgd) > 0.1 and distance(*sgd_at_stage_1) <= BOUNDS["fp16"]
    assert distance(sgd[1], sgd_at_stage_1[1]) <= BOUNDS["fp16"]


@pytest.mark.parametrize("wanted", SAME_SCALES, ids=lambda one: f"{one['stage']} {one['accumulation']}")
def test_the_loss_scale_is_deepspeeds_after_every_step(told: Told, wanted: dict[str, Any]) -> None:
    theirs, ours = told[json.dumps(wanted)]
    assert theirs == ours and ours[-1] > 1, "no step was skipped"


def test_where_the_loss_scale_differs(told: Told) -> None:
    for one in FEWER_SKIPPED:
        theirs, ours = told[json.dumps(one)]
        assert theirs[-1] > ours[-1] > 0
        assert ours == told[json.dumps(scales(one["stage"], 4, **FP32_SUMS))][0]
    theirs, ours = told[json.dumps(scales(0, 1))]
    assert theirs[-1] == 0 < ours[-1], "DeepSpeed does not multiply the loss at stage 0"
