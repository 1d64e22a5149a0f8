"""The C++ step of an optimizer against torch's own fused one, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zckpt import _core
from zckpt.runtime.optimizers.lion_lamb import Lion
from zckpt.runtime.swapping import stepping
from zckpt.runtime.swapping.stepping import kernel_of, rates, step

OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
KINDS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "Adagrad": torch.optim.Adagrad, "Lion": Lion}


@pytest.fixture(params=["vector", "portable"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    _core.use_vector_paths(request.param == "vector")
    yield request.param
    _core.use_vector_paths(True)


def numbers(size: int, seed: int, scale: float) -> torch.Tensor:
    """Normal numbers, denormal ones, zeros of both signs, huge ones, and now and then one that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(size, generator=generator) * scale
    kinds = torch.randint(0, 40, (size,), generator=generator)
    made[kinds == 0] *= 1e-41
    made[kinds == 1] = 0.0
    made[kinds == 2] = -0.0
    made[kinds == 3] *= 1e18
    if seed % 5 == 0:
        made[kinds == 4] = float("inf")
        made[kinds == 5] = float("nan")
    return made


def options(kind: str, choose: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {
        "lr": choose.choice([0.0, 1e-3, 3e-5, 0.7]),
        "weight_decay": choose.choice([0.0, 0.01, 0.3]),
    }
    if kind != "Adagrad":
        found["betas"] = choose.choice([(0.9, 0.999), (0.8, 0.95), (0.3, 0.4), (0.0, 0.0), (0.5, 0.5), (0.95, 0.98)])
    if kind != "Lion":
        found["eps"] = choose.choice([1e-8, 1e-10, 1e-3, 0.0])
    if kind == "Adagrad":
        found |= {"lr_decay": choose.choice([0.0, 0.01]), "initial_accumulator_value": choose.choice([0.0, 0.1])}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_torchs(kind: str, path: str) -> None:
    choose = random.Random(kind)
    for number, size in enumerate((1, 3, 7, 8, 16, 31, 1023, 150_001, *[67] * 12)):
        asked = options(kind, choose)
        own = {} if kind == "Lion" else {"fused": True}
        weight = torch.nn.Parameter(numbers(size, number, 1.0))
        theirs = KINDS[kind]([weight], **asked, **own)  # type: ignore[arg-type]
        group = theirs.param_groups[0]
        kernel = kernel_of(theirs, group)
        if kernel is None and OLD:
            pytest.skip("this torch rounds otherwise: its own step runs")
        assert kernel is not None
        mine = weight.detach().clone()
        states = [torch.full_like(mine, asked.get("initial_accumulator_value", 0.0)) for _ in kernel.states]
        for count in range(1, choose.choice([2, 3, 20 if size < 100 else 3])):
            weight.grad = numbers(size, 1000 * number + count, choose.choice([1.0, 1e-6, 1e6]))
            before = weight.grad.clone()
            theirs.step()
            step(kernel, rates(theirs, group, count), mine, weight.grad, states, threads=2)
            assert torch.equal(weight.grad.view(torch.int32), before.view(torch.int32))
            wanted = [weight.detach(), *(theirs.state[weight][name] for name in kernel.states)]
            for name, one, other in zip(("weight", *kernel.states), wanted, (mine, *states), strict=True):
                assert same(one, other), (kind, asked, size, count, name, *difference(one, other))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are equal; what is not a number may have any bits."""
    numbers = ~one.isnan()
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one[numbers].view(torch.int32), other[numbers].view(torch.int32)
    )


def difference(one: torch.Tensor, other: torch.Tensor) -> tuple[int, Any, Any]:
    where = (one != other) & ~(one.isnan() & other.isnan())
    return int(where.sum()), one[where][:3].tolist(), other[where][:3].tolist()


def test_what_the_kernel_does_not_know_is_left_to_torch() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    for optimizer in (
        torch.optim.SGD([weight], lr=0.1, fused=True),
        torch.optim.AdamW([weight], amsgrad=True, fused=True),
        torch.optim.Adam([weight], maximize=True, fused=True),
        torch.optim.Adam([weight], lr=torch.tensor(0.1), fused=True),
        torch.optim.AdamW([weight], foreach=True),
        torch.optim.AdamW([weight]),
    ):
        assert kernel_of(optimizer, optimizer.param_groups[0]) is None
    for decoupled in () if OLD else (False, True):
        optimizer = torch.optim.Adam([weight], weight_decay=0.1, decoupled_weight_decay=decoupled, fused=True)
        assert kernel_of(optimizer, optimizer.param_groups[0]) is not None


def test_a_kernel_that_rounds_elsewhere_than_torch_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], fused=True)
    stepping._equals_torch.cache_clear()
    monkeypatch.setattr(
        stepping, "rates", lambda optimizer, group, step: rates(optimizer, {**group, "eps": 2e-8}, step)
    )
    assert kernel_of(optimizer, optimizer.param_groups[0]) is None
    stepping._equals_torch.cache_clear()
