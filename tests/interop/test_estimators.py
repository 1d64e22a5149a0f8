"""DeepSpeed's estimators under their own names: the same numbers and the same print as DeepSpeed's own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from zckpt.runtime.runtime.zero import stage3, stage_1_and_2

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.filterwarnings("ignore")]

OURS = {"stage3": stage3, "stage_1_and_2": stage_1_and_2}


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    import deepspeed_on_cpu  # noqa: F401
    from deepspeed.runtime.zero import stage3 as three
    from deepspeed.runtime.zero import stage_1_and_2 as two

    return {"stage3": three, "stage_1_and_2": two}


def printed(capsys: pytest.CaptureFixture[str], function: Callable[..., None], *args: Any) -> str:
    capsys.readouterr()
    function(*args)
    # From Python 3.11 on, DeepSpeed's print has the name of its enum's member instead of the value.
    return capsys.readouterr().out.replace("OffloadDeviceEnum.cpu", "cpu ")


def shapes(number: int) -> list[tuple[int, int, int, int, float]]:
    draw = random.Random(5)
    found = []
    for _ in range(number):
        total = draw.randrange(1, 10 ** draw.randrange(2, 13))
        found.append(
            (
                total,
                draw.randrange(1, total + 1),
                draw.randrange(1, 17),
                draw.randrange(1, 9),
                draw.choice([1.5, 2, 1.1]),
            )
        )
    return found


def test_the_same_print_for_any_size(theirs: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    two = "estimate_zero2_model_states_mem_needs_all_cold"
    three = "estimate_zero3_model_states_mem_needs_all_cold"
    for total, largest, gpus, nodes, factor in [(2_783_959_040, 65_798_144, 1, 1, 1.5), *shapes(200)]:
        args = (total, largest, gpus, nodes, factor)
        print3 = printed(capsys, getattr(stage3, three), *args)
        assert print3 == printed(capsys, getattr(theirs["stage3"], three), *args)
        args2 = (total, gpus, nodes, factor)
        print2 = printed(capsys, getattr(stage_1_and_2, two), *args2)
        assert print2 == printed(capsys, getattr(theirs["stage_1_and_2"], two), *args2)


def test_the_figures_that_people_know(capsys: pytest.CaptureFixture[str]) -> None:
    stage3.estimate_zero3_model_states_mem_needs_all_cold(2_783_959_040, 65_798_144)
    rows = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()[4:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["70.00GB", "0.25GB"], ["70.00GB", "0.25GB"], ["62.23GB", "5.43GB"], ["62.23GB", "5.43GB"],
        ["0.37GB", "46.91GB"], ["15.56GB", "46.91GB"],
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["stage3", "stage_1_and_2"])
def test_a_live_model(theirs: dict[str, Any], capsys: pytest.CaptureFixture[str], name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3000, 1000), torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1000))
    model[2].weight = model[1].weight
    number = "3" if name == "stage3" else "2"
    function = f"estimate_zero{number}_model_states_mem_needs_all_live"
    ours, real = OURS[name], theirs[name]
    assert ours.model_to_params(model) == real.model_to_params(model)
    assert printed(capsys, getattr(ours, function), model, 8, 2) == printed(
        capsys, getattr(real, function), model, 8, 2
    )
